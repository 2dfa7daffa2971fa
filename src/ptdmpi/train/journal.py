"""What a run says and records: its greeting, a record and a line of each step, its timeline."""

from pathlib import Path
from typing import Any, NamedTuple

from ptdmpi.comm.world import Axes, World
from ptdmpi.config import Config, to_toml
from ptdmpi.plan.cost.counts import parameter_count
from ptdmpi.train.live import Completed
from ptdmpi.train.meter import Rates, RecentSteps, RunDirectory, duration


class Beginning(NamedTuple):
    """Where a run begins: `step` steps are done. `skipped`: checkpoints that were stepped over, and
    why; `weights`: where the first weights are from, if not from the seed; `followed`: the
    checkpoint.resume that an earlier start of this run has followed already."""

    step: int
    skipped: list[str]
    weights: str | None = None
    followed: str | None = None


class Journal:
    """The lines and records of one run. Every rank has one; rank 0's prints and keeps.

    Before `open` a line goes to the terminal alone: a run that cannot begin leaves no log.
    """

    def __init__(self, config: Config, axes: Axes) -> None:
        self.config = config
        self.recent = RecentSteps(axes)
        self._first_rank = axes.world.rank == 0
        self._directory: RunDirectory | None = None
        self.rates: Rates | None = None  # what steps are measured by; known before the first one

    def open(self, concluded: int, trains: bool) -> None:
        """From now on into the run directory, behind the records of `concluded` steps.

        `trains`: there is a step to come, so that the tools which `[log]` names hear of it too.
        Raises InputError if the directory cannot be written.
        """
        if self._first_rank:
            path = Path(self.config.run.dir)
            self._directory = RunDirectory(path, to_toml(self.config), concluded)
            if trains:
                self._directory.open_sinks(self.config)

    def say(self, line: str) -> None:
        """Print a line and keep it in the log."""
        if self._directory is not None:
            self._directory.say(line)
        elif self._first_rank:
            print(line, flush=True)

    def keep(self, **values: Any) -> None:
        """One record of metrics.jsonl."""
        if self._directory is not None:
            self._directory.record(**values)

    def greet(self, world: World, vocab_size: int, begin: Beginning) -> None:
        """Who trains what, and from where."""
        config = self.config
        parameters = parameter_count(config.model, vocab_size)
        self.say(
            f"{world.size} ranks on {world.nodes} node{'s' * (world.nodes > 1)}, "
            f"{layout_name(config)}, {config.parallel.schedule}, {config.precision.compute}; "
            f"{parameters / 1e6:,.1f}M parameters, vocabulary {vocab_size}; "
            f"{config.run.steps} steps of {config.batch.global_size} x {config.model.seq_length} "
            "tokens"
        )
        if begin.step > config.run.steps:
            self.say(f"step {begin.step} was trained before; run.steps = {config.run.steps}")
        elif begin.step:
            named = f", for checkpoint.resume = {begin.followed} was followed before"
            self.say(f"resumed after step {begin.step}{named if begin.followed else ''}")
        elif begin.weights:
            self.say(f"begins from the weights of {begin.weights}")
        if world.tensor_axis_crosses_nodes(self.recent.axes.grid):
            self.say(
                "warning: the tensor axis crosses nodes; every layer waits for the network. "
                f"Ranks per node should be a multiple of parallel.tensor = {config.parallel.tensor}"
            )

    def step(self, done: Completed, usual_s: float, **values: Any) -> None:
        """The record of a step, with `values`; and its line, where one is due.

        `usual_s`: how long a step takes, for the time that is left.
        """
        if self._directory is None or self.rates is None:
            return
        config, result = self.config, done.result
        rates = self.rates.of(done.elapsed_s)
        order = {} if result.order_loss is None else {"sentence_order_loss": result.order_loss}
        self.keep(
            step=done.step,
            loss=result.loss,
            **order,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            tokens=done.step * self.rates.tokens,
            **rates,
            rank_count=self.rates.ranks,
            layout=layout_name(config),
            **values,
        )
        steps = config.run.steps
        if done.step % config.log.every_steps == 0 or done.step == steps:
            left = duration((steps - done.step) * usual_s)
            self.say(
                f"step {done.step:>{len(str(steps))}}/{steps}  "
                f"loss {result.loss:7.4f}  grad norm {result.grad_norm:6.3f}  "
                f"lr {result.learning_rate:.2e}  {rates['tokens_per_s']:,.0f} tokens/s  "
                f"{rates['model_tflops_per_rank']:.3f} TFLOP/s/rank  mfu {rates['mfu']:.1%}  "
                f"left {left}{'  skipped: overflow' if result.overflow else ''}"
            )

    def keep_timeline(self) -> None:
        """Keep what the last steps did when; every rank calls it."""
        self.recent.keep(Path(self.config.run.dir) / "timeline", self.config.run.steps, self.say)

    def finish(self) -> None:
        """Say in the file `done` that the whole run is complete. Rank 0 alone."""
        if self._directory is not None:
            self._directory.finish(self.config.run.steps)

    def close(self) -> None:
        """Close what records go to besides the run directory."""
        if self._directory is not None:
            self._directory.close()


def layout_name(config: Config) -> str:
    """Such as t=2,p=2,d=1,v=2,b=1."""
    parallel = config.parallel
    return (
        f"t={parallel.tensor},p={parallel.pipeline},d={config.data_size},"
        f"v={parallel.virtual},b={config.batch.micro_size}"
    )
