"""The log lines and records of a run: one record for each step, a log line for some steps, and a
timeline at the end."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptdmpi.base.say import quiet
from ptdmpi.comm.world import Axes
from ptdmpi.config import Config
from ptdmpi.engine.result import StepResult
from ptdmpi.model.output.losses import MARGIN, PREFERRED, recorded
from ptdmpi.train.live import Completed
from ptdmpi.train.records.directory import RunDirectory
from ptdmpi.train.records.rates import Rates, duration
from ptdmpi.train.records.timeline import RecentSteps

# A run has at most this number of records with the tokens of each expert, and one more of its last
# step. If every step had such a record, the largest published models would write gigabytes.
LOAD_RECORDS = 100


class Journal:
    """The log lines and records of one run. Every rank has a journal, but only the journal of rank
    0 prints and writes.

    `directory` is the run directory. It is set only on rank 0, and only when it is certain that the
    run begins. Until then, lines are only printed, so a run that cannot begin leaves no log file.
    `rates` is set before the first step.
    """

    def __init__(self, config: Config, axes: Axes, show: Callable[[str], None]) -> None:
        """Create the journal without a run directory. `show` is a function that prints a line."""
        self.config = config
        self.show = show
        self.recent = RecentSteps(axes)
        self._first_rank = axes.world.rank == 0
        self.directory: RunDirectory | None = None
        self.rates: Rates | None = None

    def say(self, line: str) -> None:
        """Print `line`, and write it to the log."""
        if self.directory is not None:
            self.directory.say(line)
        elif self._first_rank:
            self.show(line)

    def keep(self, **values: Any) -> None:
        """Write one record with `values` to `metrics.jsonl`."""
        if self.directory is not None:
            self.directory.record(**values)

    def step(self, done: Completed, usual_s: float, **values: Any) -> None:
        """Write the record of the step `done`. `values` are further entries of this record. Also
        write a log line if the step is the last step of the run or a multiple of `log.every_steps`.

        `wire_bytes` and `wire_messages` in the record are the bytes and messages that rank 0 has
        sent in this step, for each group of ranks and each kind of message. (After a loss of ranks,
        rank 0 may be a different process.) The remaining time is estimated from `usual_s`, the
        usual duration of a step in seconds.
        """
        if self.directory is None or self.rates is None:
            return
        result = done.result
        rates = self.rates.of(done.elapsed_s)
        self.keep(
            step=done.number,
            loss=result.loss,
            **recorded(result.losses),
            grad_norm=result.grad_norm,
            **_optional(
                consensus_distance=result.consensus,
                bits_per_element=result.bits_per_element,
                **_loads(result, every=self._keeps_loads(done.number)),
                gradient_noise=None if result.noise is None else asdict(result.noise),
            ),
            learning_rate=result.learning_rate,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            **rates,
            rank_count=self.rates.ranks,
            layout=str(self.config.layout),
            wire_bytes=result.traffic.sent_bytes,
            wire_messages=result.traffic.messages,
            **values,
        )
        steps = self.config.run.steps
        is_last = done.number == steps
        if is_last or done.number % self.config.log.every_steps == 0:
            left_s = (steps - done.number) * usual_s
            line = _step_line(done, steps, rates, left_s)
            # the last line is a result, so it is printed even with --quiet
            self.directory.say(line, shown=is_last or not quiet())

    def _keeps_loads(self, step: int) -> bool:
        """Return True if the record of `step` has the tokens of each expert."""
        steps = self.config.run.steps
        return step == steps or step % -(-steps // LOAD_RECORDS) == 0

    def keep_timeline(self, step: int) -> None:
        """Write one timeline to the run directory. The timeline shows the step with the median
        duration among the last steps. `step` is the newest of these steps. All ranks must call this
        method."""
        self.recent.keep(Path(self.config.run.dir) / "timeline", step, self.say)

    def close(self) -> None:
        """Close the sinks, which pass the records to other tools."""
        if self.directory is not None:
            self.directory.close()


def _optional(**values: Any) -> dict[str, Any]:
    """Return the arguments whose values are not None, as a dict."""
    return {name: value for name, value in values.items() if value is not None}


def _loads(result: StepResult, *, every: bool) -> dict[str, Any]:
    """Return the entries of a step's record about the load of the experts in each layer. If `every`
    is True, the entries include the number of tokens of each expert. Return {} if the model has no
    experts."""
    if result.loads is None:
        return {}
    entries = {"fullest_expert": result.loads.fullest, "dead_experts": result.loads.dead}
    return {**entries, "expert_tokens": result.loads.tokens.tolist()} if every else entries


def _step_line(done: Completed, steps: int, rates: dict[str, float | None], left_s: float) -> str:
    """Return the line about a step for the terminal and the log. `left_s` is the remaining time in
    seconds."""
    result = done.result
    parts = [
        f"step {done.number:>{len(str(steps))}}/{steps}",
        f"loss {result.loss:7.4f}",
        f"grad norm {result.grad_norm:6.3f}",
        *_method_parts(result),
        f"lr {result.learning_rate:.2e}",
        f"{rates['tokens_per_s']:,.0f} tokens/s",
        f"{rates['model_tflops_per_rank']:.3f} TFLOP/s/rank",
    ]
    if rates["mfu"] is not None:
        parts.append(f"mfu {rates['mfu']:.1%}")
    parts.append(f"left {duration(left_s)}")
    if result.overflow:
        parts.append("skipped: overflow")
    return "  ".join(parts)


def _method_parts(result: StepResult) -> list[str]:
    """Return the parts of the log line of a step that are needed only for some data-parallel
    methods or models."""
    parts = []
    if result.consensus is not None:
        parts.append(f"apart {result.consensus:.3g}")
    if result.bits_per_element is not None:
        parts.append(f"{result.bits_per_element:.3g} bits an element")
    if result.loads is not None:
        parts.append(f"fullest expert {max(result.loads.fullest):.1%}")
        if any(result.loads.dead):
            parts.append(f"{sum(result.loads.dead)} dead")
    if MARGIN in result.losses:
        parts.append(f"reward margin {result.losses[MARGIN].mean:.3f}")
        parts.append(f"accuracy {result.losses[PREFERRED].mean:.0%}")
    return parts
