"""What a run says and records: a record and a line of each step, and its timeline at the end."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptdmpi.comm.world import Axes
from ptdmpi.config import Config
from ptdmpi.terminal.say import quiet
from ptdmpi.train.live import Completed
from ptdmpi.train.meter import Rates, RecentSteps, RunDirectory, duration


class Journal:
    """The lines and records of one run. Every rank has one; rank 0's prints and keeps.

    `directory` is rank 0's, from where the run is sure to begin. Before that a line goes to the
    terminal alone: a run that cannot begin leaves no log.
    """

    def __init__(self, config: Config, axes: Axes, show: Callable[[str], None]) -> None:
        """`show` prints a line."""
        self.config, self.show = config, show
        self.recent = RecentSteps(axes)
        self._first_rank = axes.world.rank == 0
        self.directory: RunDirectory | None = None
        self.rates: Rates | None = None  # what steps are measured by; known before the first one

    def say(self, line: str) -> None:
        """Print a line and keep it in the log."""
        if self.directory is not None:
            self.directory.say(line)
        elif self._first_rank:
            self.show(line)

    def keep(self, **values: Any) -> None:
        """One record of metrics.jsonl."""
        if self.directory is not None:
            self.directory.record(**values)

    def step(self, done: Completed, usual_s: float, **values: Any) -> None:
        """The record of a step, with `values`; and its line, where one is due.

        `wire_bytes` and `wire_messages` are what rank 0 has sent in this step, by group of ranks
        and kind; `done.result` may be of a rank that sits elsewhere after a loss.
        `usual_s`: how long a step takes, for the time that is left.
        """
        if self.directory is None or self.rates is None:
            return
        config, result = self.config, done.result
        rates = self.rates.of(done.elapsed_s)
        order = {} if result.order_loss is None else {"sentence_order_loss": result.order_loss}
        apart = {} if result.consensus is None else {"consensus_distance": result.consensus}
        bits = result.bits_per_element
        coded = {} if bits is None else {"bits_per_element": bits}
        noise = {} if result.noise is None else {"gradient_noise": asdict(result.noise)}
        self.keep(
            step=done.step,
            loss=result.loss,
            **order,
            grad_norm=result.grad_norm,
            **apart,
            **coded,
            **noise,
            learning_rate=result.learning_rate,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            **rates,
            rank_count=self.rates.ranks,
            layout=str(config.layout),
            wire_bytes=result.traffic.sent_bytes,
            wire_messages=result.traffic.messages,
            **values,
        )
        steps = config.run.steps
        if done.step % config.log.every_steps == 0 or done.step == steps:
            left = duration((steps - done.step) * usual_s)
            distance = "".join(f"apart {one:.3g}  " for one in apart.values())
            mfu = "" if rates["mfu"] is None else f"mfu {rates['mfu']:.1%}  "
            # the last one is a result, also under --quiet
            shown = done.step == steps or not quiet()
            self.directory.say(
                f"step {done.step:>{len(str(steps))}}/{steps}  "
                f"loss {result.loss:7.4f}  grad norm {result.grad_norm:6.3f}  {distance}"
                f"{f'{bits:.3g} bits an element  ' if bits is not None else ''}"
                f"lr {result.learning_rate:.2e}  {rates['tokens_per_s']:,.0f} tokens/s  "
                f"{rates['model_tflops_per_rank']:.3f} TFLOP/s/rank  {mfu}"
                f"left {left}{'  skipped: overflow' if result.overflow else ''}",
                shown,
            )

    def keep_timeline(self, step: int) -> None:
        """Keep what the last steps, up to `step`, did when; every rank calls it."""
        self.recent.keep(Path(self.config.run.dir) / "timeline", step, self.say)

    def close(self) -> None:
        """Close what records go to besides the run directory."""
        if self.directory is not None:
            self.directory.close()
