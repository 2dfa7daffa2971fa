"""A training run as an object that yields its steps, so that a program can write the loop."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from ptdmpi.base.plugins import name_of
from ptdmpi.comm import ulfm
from ptdmpi.comm.world import Axes, World, end_together
from ptdmpi.config import Config, load, with_values
from ptdmpi.model.output.own import LossInput
from ptdmpi.model.state import State
from ptdmpi.train.checks import checked
from ptdmpi.train.hooks import Hook, Hooks
from ptdmpi.train.live import Completed
from ptdmpi.train.loop import Loop
from ptdmpi.train.recover import Survivors
from ptdmpi.watch.requests import SIGNALS, Save, StopRequest


@dataclass(frozen=True)
class Launch:
    """The ranks of a run, and the signals that ask it to stop."""

    world: World
    signals: StopRequest


class Run:
    """A training run of all ranks that a launcher started; every rank makes it and iterates.

        run = ptdmpi.Run("config.toml", {"run.steps": 100})
        for step in run:
            if step.step % 50 == 0:
                run.validate()
                run.save()

    Each item is a `Completed` step: its number (from 1), its `result` (loss, gradient norm, ...)
    and its seconds. It is yielded after the step's record, and after the validation and the
    checkpoint that the configuration asks for. A program may leave the loop early, if all ranks do
    so after the same step; the progress since the last checkpoint is then lost. The run directory
    is that of `ptdmpi train`: each of the two can continue a run of the other.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        *,
        loss: Callable[[LossInput], tuple[Tensor, Tensor | float]] | None = None,
        data: type | None = None,
        optimizer: type | None = None,
        hooks: Sequence[Hook] = (),
        launch: Launch | None = None,
    ) -> None:
        """Prepare the run, and load its state.

        `config` is a TOML file, or its sections. `settings` replace values by their names, such as
        "run.steps". `loss`, `data` and `optimizer` are the user's own, defined at the top of a
        module; they set the keys `run.loss`, `data.train` and `optimizer.own` to their names.
        `hooks` are called at each step, validation, save and stop. `launch` has the
        ranks and the signals of a caller who already has them. Otherwise the run takes all ranks,
        and handles signals while it lasts. Raises InputError, on all ranks, if the run cannot
        begin. If one rank does not catch an exception, all ranks end.
        """
        self._owns_launch = launch is None
        self._before = [signal.getsignal(number) for number in SIGNALS]
        self._launch = _all_ranks() if launch is None else launch
        try:
            world = self._launch.world
            named = _named(loss, data, optimizer)
            tree = world.on_root(lambda: with_values(_tree(config), {**named, **(settings or {})}))
            self.config: Config = world.on_root(lambda: checked(tree, world.size, world.local_size))
            self._hooks = Hooks(hooks)
            self._survivors: Survivors | None = None
            self._loop: Loop | None = None
            signals = self._launch.signals
            if self.config.run.on_failure == "abort":
                self._loop = Loop(self.config, world, signals, hooks=self._hooks)
            else:
                world.on_root(ulfm.require)
                self._survivors = Survivors(self.config, world, signals, hooks=self._hooks)
        except BaseException:
            self._release()
            raise

    def __iter__(self) -> Iterator[Completed]:
        """Train, and yield each step. Raises SystemExit (75) after a save if the run was asked to
        stop, for example by a signal. For other ends it raises the same exits as `ptdmpi train`."""
        source = self._survivors or self._loop
        assert source is not None
        try:
            yield from source.steps()  # this generator closes `source`, wherever it is left
        except (SystemExit, GeneratorExit):
            self._end()
            raise
        # not after a failure, because a failing rank needs the threads to report on the others
        self._end()

    def _end(self) -> None:
        """Report the end to the hooks, and close the run."""
        if self._now is not None:
            attempt = self._now.attempt
            self._hooks.stopped(self._now.concluded, attempt.why or "done")
        self.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the run's threads, release its directory, and handle signals as before.

        A run that was iterated to its end, or left by `break`, is closed already; a second call
        does nothing. The model stays.
        """
        if self._now is not None:
            self._now.close()
        self._release()

    def train(self) -> None:
        """Train to the end, as a loop with an empty body would."""
        for _ in self:
            pass

    @property
    def _now(self) -> Loop | None:
        """Return the present loop, which changes after the loss of a rank; None on a spare rank."""
        return self._loop if self._survivors is None else self._survivors.loop

    @property
    def _active(self) -> Loop:
        loop = self._now
        if loop is None:
            raise RuntimeError("this rank has no part of the run yet: iterate over it first")
        return loop

    @property
    def step(self) -> int:
        """The number of steps that the state was trained for."""
        return self._active.concluded

    @property
    def axes(self) -> Axes:
        """The communicators: `axes["tensor"]`, `axes["data"]`, `axes["pipeline"]` and others."""
        return self._active.axes

    @property
    def model(self) -> nn.ModuleDict:
        """This rank's stages of the model, by number; a parameter is this rank's slice."""
        stages = self._active.engine.stages
        return nn.ModuleDict({str(number): stage for number, stage in stages.items()})

    @property
    def state(self) -> State:
        """Masters, moments and counters, by logical name, as this rank holds them."""
        return self._active.engine.state

    def validate(self) -> dict[str, Any]:
        """Return the losses on the validation data after the present step; every rank calls it.

        They are recorded, too. Return {} if the run has no validation data, or if a stop interrupts
        it.
        """
        loop = self._active
        return loop.validation.measured(loop.concluded)

    def save(self) -> Path:
        """Save a checkpoint after the present step, unless it is saved already; return its path.

        Every rank calls it. Raises SaveFailed on every rank if it cannot be written.
        """
        loop = self._active
        newest = loop.saving.newest
        if newest is None or newest[0] != loop.concluded:
            loop.saving.after_step(loop.concluded, Save.NOW)
            newest = loop.saving.newest
        assert newest is not None
        return Path(newest[1])

    def _release(self) -> None:
        """Restore the signal handlers from before the run, if the run has replaced them."""
        if self._owns_launch:
            self._owns_launch = False
            self._launch.signals.__exit__(None, None, None)
            for number, handler in zip(SIGNALS, self._before, strict=True):
                signal.signal(number, handler)


def _all_ranks() -> Launch:
    """Return a job of all ranks. An exception that one rank does not catch ends all ranks."""
    signals = StopRequest()
    signals.__enter__()
    world = World()
    end_together(world)
    return Launch(world, signals)


def _named(loss: Any, data: Any, optimizer: Any) -> dict[str, Any]:
    """Return the keys that name the user's own loss, data and optimizer, as far as they are given.
    Raises InputError for an object that cannot be imported by its name."""
    named: dict[str, Any] = {}
    if loss is not None:
        named["run.loss"] = name_of(loss)
    if data is not None:
        named["data.train"] = [{"path": name_of(data)}]
    if optimizer is not None:
        named["optimizer.kind"] = "own"
        named["optimizer.own"] = name_of(optimizer)
    return named


def _tree(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else load(config)
