"""The training loop: batch -> engine -> meter, validation, checkpoints, the run directory."""

import contextlib
import math
import statistics
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ptdmpi.comm.world import World
from ptdmpi.config import Config, InputError, resolve, to_toml
from ptdmpi.model.parameters import PRECISIONS
from ptdmpi.plan.costs import parameter_count
from ptdmpi.plan.grid import Grid
from ptdmpi.plan.simulate import Span, Timeline
from ptdmpi.train.checkpoint import Checkpoints
from ptdmpi.train.engine import Engine, StepResult
from ptdmpi.train.feed import Feed, open_datasets, sample_order
from ptdmpi.train.live import Completed, Handover
from ptdmpi.train.meter import Rates, RunDirectory, duration, peak_flops, peak_memory_bytes
from ptdmpi.train.stopwatch import Stopwatch
from ptdmpi.train.watch import STOPPED_EXIT_CODE, StopRequest

# The timeline that is kept is that of the step of median duration among the last ones.
TIMELINE_STEPS = 20


class Loop:
    """One rank of a training run, from configuration to the last checkpoint."""

    def __init__(self, config: Config, world: World, handover: Handover | None = None) -> None:
        """`handover`: what survivors of a lost rank bring; else as `checkpoint.resume` says."""
        self.world, self.config = world, config
        parallel = config.parallel
        torch.set_num_threads(config.run.threads)
        self.device = _device(world)
        self.axes = world.split(Grid(parallel.tensor, parallel.pipeline, config.data_size))
        self.feed = Feed(config, self.axes, self.device)
        self.engine = Engine(config, self.axes, self.feed.vocab_size, self.device)
        self.path = Path(config.run.dir)
        self.checkpoints = Checkpoints(
            self.path / "checkpoints", self.engine, config.checkpoint.keep
        )
        start = handover or Handover(config.checkpoint.resume)
        self.first, skipped = self._restore(start)
        # the last step that was trained, and the last one of which nothing is left to be done
        self.completed: Completed | None = start.unfinished
        self.concluded = self.first - (self.completed is not None)
        self.saved: str | None = None
        self.directory = None
        if world.rank == 0:
            self.directory = RunDirectory(self.path, to_toml(config), self.concluded)
        if handover is None:
            self._greet()
        for problem in skipped:
            self.say(f"stepped over checkpoint {problem}")
        self.rates = Rates(config, self.feed.vocab_size, world.size, self._peak())
        self.bigram_pending = config.log.bigram_baseline and self.feed.valid is not None
        self.recent: deque[tuple[float, list[Span]]] = deque(maxlen=TIMELINE_STEPS)
        self.durations: deque[float] = deque(maxlen=100)
        self.stop = StopRequest()
        self.stop.received = start.stopping
        self.closing = contextlib.ExitStack()

    def _restore(self, start: Handover) -> tuple[int, list[str]]:
        """Load the state; returns how many steps are done, and what was stepped over."""
        skipped: list[str] = []
        self.engine.steps_done = None
        if start.load is None:
            progress, skipped = self.checkpoints.resume(start.resume)
            step = progress.step if progress else 0
        else:
            step = start.load(self.engine)
        self.engine.steps_done = step
        return step, skipped

    def close(self) -> None:
        """Give back threads and handlers; communicates with nobody."""
        self.closing.close()

    def run(self) -> None:
        """Every step from where the run stands to the last one.

        Raises SystemExit (75) after saving, if a rank was asked to stop before the last step.
        """
        feed = self.feed.steps(self.first)
        self.closing.callback(feed.close)
        if self.completed is not None:  # a rank was lost between this step's update and its end
            self._conclude(self.completed)
        for step in range(self.first, self.config.run.steps):
            watch = Stopwatch(self.axes.pipeline.rank)
            begin = time.perf_counter()
            with watch.span("data"):
                batches = self.feed.place(next(feed))
            result = self.engine.step(step, batches)
            elapsed = time.perf_counter() - begin
            self.recent.append((elapsed, watch.spans + result.spans))
            self.completed = Completed(step + 1, replace(result, spans=[]), elapsed)
            self._conclude(self.completed)
        self._keep_timeline()
        self.close()

    def _conclude(self, done: Completed) -> None:
        """What follows a step: its record, and what is due of validation, saving, stopping."""
        config, step, steps = self.config, done.step, self.config.run.steps
        self._record(step, done.result, done.elapsed_s)
        if _due(step, config.log.validate_every_steps, steps) and self.feed.valid:
            self._validate(step)
        stopping = any(self.axes.world.all_gather_object(self.stop.received))
        if stopping or _due(step, config.checkpoint.every_steps, steps):
            path = self.checkpoints.save(step)
            self.saved = str(path)
            self.say(f"saved {path}")
        self.concluded = step
        if stopping and step < steps:
            self.close()
            self.say("stopped on request; the same command again goes on")
            raise SystemExit(STOPPED_EXIT_CODE)

    def _record(self, step: int, result: StepResult, elapsed: float) -> None:
        config = self.config
        memory = max(self.axes.world.all_gather_object(peak_memory_bytes(self.device)))
        if self.directory is None:
            return
        rates = self.rates.of(elapsed)
        self.durations.append(elapsed)
        self.directory.record(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            tokens=step * self.rates.tokens,
            **rates,
            peak_memory_bytes=memory,
            rank_count=self.world.size,
            layout=layout_name(config),
        )
        if step % config.log.every_steps == 0 or step == config.run.steps:
            left = (config.run.steps - step) * statistics.median(self.durations)
            self.say(
                f"step {step:>{len(str(config.run.steps))}}/{config.run.steps}  "
                f"loss {result.loss:7.4f}  grad norm {result.grad_norm:6.3f}  "
                f"lr {result.learning_rate:.2e}  {rates['tokens_per_s']:,.0f} tokens/s  "
                f"{rates['model_tflops_per_rank']:.3f} TFLOP/s/rank  mfu {rates['mfu']:.1%}  "
                f"left {duration(left)}{'  skipped: overflow' if result.skipped else ''}"
            )

    def _validate(self, step: int) -> None:
        loss = tokens = 0.0
        for group in self.feed.validation():
            more = self.engine.evaluate(self.feed.place(group))
            loss, tokens = loss + more[0], tokens + more[1]
        mean = loss / tokens
        perplexity = math.exp(mean) if mean < 700 else math.inf
        values = {"validation_loss": mean, "validation_perplexity": perplexity}
        text = f"validation loss {mean:.4f}  perplexity {perplexity:.2f}"
        if self.bigram_pending:
            values["bigram_validation_loss"] = self.feed.bigram_loss()
            text += f"  (bigram model: loss {values['bigram_validation_loss']:.4f})"
            self.bigram_pending = False
        if self.directory:
            self.directory.record(step=step, **values)
        self.say(f"step {step}  {text}")

    def _keep_timeline(self) -> None:
        """Write the measured timeline of one step, of all ranks of one pipeline."""
        if not self.recent:
            return
        times = [elapsed for elapsed, _ in self.recent]
        place = times.index(statistics.median_low(times))
        place = self.axes.world.broadcast_object(place)
        here = self.axes.coordinates
        parts = self.axes.pipeline.all_gather_object(self.recent[place][1])
        if here.tensor == 0 and here.data == 0 and here.pipeline == 0:
            step = self.config.run.steps - len(self.recent) + place + 1
            spans = tuple(span for part in parts for span in part)
            path = self.path / "timeline" / f"step-{step:08d}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(Timeline(spans, f"measured, step {step}").to_json(), encoding="utf-8")

    def _peak(self) -> float:
        precision = self.config.precision.compute
        mine = peak_flops(self.device, PRECISIONS[precision].compute, precision)
        return statistics.median(self.axes.world.all_gather_object(mine))

    def _greet(self) -> None:
        config, world = self.config, self.world
        parameters = parameter_count(config.model, self.feed.vocab_size)
        self.say(
            f"{world.size} ranks on {world.nodes} node{'s' * (world.nodes > 1)}, "
            f"{layout_name(config)}, {config.parallel.schedule}, {config.precision.compute}; "
            f"{parameters / 1e6:,.1f}M parameters, vocabulary {self.feed.vocab_size}; "
            f"{config.run.steps} steps of {config.batch.global_size} x {config.model.seq_length} "
            "tokens"
        )
        if self.first:
            self.say(f"resumed after step {self.first}")
        if world.tensor_axis_crosses_nodes(self.axes.grid):
            self.say(
                "warning: the tensor axis crosses nodes; every layer waits for the network. "
                f"Ranks per node should be a multiple of parallel.tensor = {config.parallel.tensor}"
            )

    def say(self, line: str) -> None:
        if self.directory:
            self.directory.say(line)


def checked(tree: dict[str, Any], ranks: int) -> Config:
    """All that can be wrong before memory is allocated, found by one rank for everyone."""
    config = resolve(tree, ranks)
    train, _ = open_datasets(config)
    sample_order(config, train)
    path = Path(config.run.dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.dir = {path}: {error.strerror}") from None
    return config


def _device(world: World) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def layout_name(config: Config) -> str:
    """Such as t=2,p=2,d=1,v=2,b=1."""
    parallel = config.parallel
    return (
        f"t={parallel.tensor},p={parallel.pipeline},d={config.data_size},"
        f"v={parallel.virtual},b={config.batch.micro_size}"
    )
