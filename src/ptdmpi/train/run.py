"""A training run as a Python object. A user's program iterates over this object, and each item is a
training step."""

import contextlib
import hashlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import name_of
from ptdmpi.comm import ulfm
from ptdmpi.comm.world import Axes, World, end_together
from ptdmpi.config import Config, SharedInputError, load, with_values
from ptdmpi.model.state import State
from ptdmpi.train.checks import checked
from ptdmpi.train.hooks import Hook, Hooks
from ptdmpi.train.live import Completed
from ptdmpi.train.loop import Loop
from ptdmpi.train.recover import Survivors
from ptdmpi.watch.requests import SIGNALS, Save, StopRequest

if TYPE_CHECKING:
    from ptdmpi.model.output.own import LossInput


@dataclass(frozen=True)
class Launch:
    """The ranks of a run, and the object that receives signals to stop."""

    world: World
    signals: StopRequest


class Run:
    """A training run on all ranks that a launcher started. Every rank creates a `Run` object and
    iterates over it.

        run = ptdmpi.Run("config.toml", {"run.steps": 100})
        for step in run:
            if step.number % 50 == 0:
                run.validate()
                run.save()

    Each item is a `Completed` step with its `number` (from 1), its `result` (loss, gradient norm,
    ...) and its duration in seconds. A step is yielded after its record is written, and after the
    validation and the save that the configuration asks for. A program may leave the loop early, but
    all ranks must leave it after the same step. The progress since the last checkpoint is then
    lost. The run directory has the same contents as with `ptdmpi train`, so `ptdmpi train` and this
    class can continue each other's runs.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        *,
        loss: "Callable[[LossInput], tuple[Tensor, Tensor | float]] | None" = None,
        data: type | None = None,
        optimizer: type | None = None,
        hooks: Sequence[Hook] = (),
        launch: Launch | None = None,
    ) -> None:
        """Prepare the run, and load its state.

        `config` is the path of a TOML file, or a dictionary of its sections. `settings` maps names
        of configuration keys, such as "run.steps", to values that replace the values of `config`.
        `loss`, `data` and `optimizer` are the user's own loss function, dataset class and optimizer
        class. They must be defined at the top level of a module. Their names are stored in the keys
        `run.loss`, `data.train` and `optimizer.own`. `hooks` are called after each step, validation
        and save, and when the training stops. `launch` is for a caller that has already initialized
        the ranks and handles signals. Without `launch`, the run uses all ranks, and handles signals
        until its end. Raises InputError, on all ranks, if the run cannot begin, and outside the
        main thread, where Python cannot handle signals. All ranks must pass the same arguments, and
        hooks of the same classes; other arguments are refused. If a rank does not catch an
        exception, all ranks are ended.
        """
        self._closed = self._iterated = False
        self._owns_launch = launch is None
        if launch is None:
            _require_main_thread()
        elif not isinstance(launch, Launch):
            raise InputError(f"launch is of the type {type(launch).__name__}; legal: a Launch")
        self._before = [signal.getsignal(number) for number in SIGNALS]
        self._launch = _all_ranks() if launch is None else launch
        try:
            world = self._launch.world
            named = _named(loss, data, optimizer)
            _require_same(world, config, settings, named, hooks=hooks)
            tree = world.on_root(
                lambda: with_values(_tree(config), {**named, **_of_settings(settings)})
            )
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
        """Train the model, and yield each step. If the run is asked to stop, for example by a
        signal, it saves a checkpoint and raises SystemExit (75). If the run fails, SystemExit has
        the same exit code as `ptdmpi train`. Raises InputError if the run is closed, if there is
        already a loop over the run, and outside the main thread.
        """
        if self._owns_launch:
            _require_main_thread()
        if self._closed:
            raise SharedInputError("this run has ended; legal: a new ptdmpi.Run, which resumes it")
        if self._iterated:
            raise SharedInputError(
                "this run is already iterated over; legal: one loop over a run, and run.train() "
                "outside of it"
            )
        self._iterated = True
        source = self._survivors or self._loop
        assert source is not None
        try:
            # if the caller closes this generator, `steps` is closed, too
            with contextlib.closing(source.steps()) as steps:
                for step in steps:
                    yield step
                    if self._closed:
                        raise SharedInputError(
                            "run.close() was called in the loop over the run; legal: break, which "
                            "closes the run"
                        )
        except (SystemExit, GeneratorExit):
            self._end()
            raise
        # after any other exception the run is not closed, because its threads must report the state
        # of all ranks
        self._end()

    def _end(self) -> None:
        """Report the end of the run to the hooks, and close the run."""
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
        """End the run's threads, release its directory, and restore the signal handlers.

        After the end of the iteration, or after a `break`, the run is already closed, and this
        method does nothing. The model stays in memory.
        """
        self._closed = True
        if self._now is not None:
            self._now.close()
        self._release()

    def train(self) -> None:
        """Train to the end of the run, without any code between the steps."""
        for _ in self:
            pass

    @property
    def _now(self) -> Loop | None:
        """Return the present training loop, or None on a spare rank, which waits for a loss of
        ranks. After a loss of ranks, the run has a new training loop."""
        return self._loop if self._survivors is None else self._survivors.loop

    @property
    def _active(self) -> Loop:
        loop = self._now
        if loop is None:
            raise RuntimeError("this rank has no part of the run yet: iterate over it first")
        return loop

    @property
    def step(self) -> int:
        """The number of steps for which the model has been trained so far."""
        return self._active.concluded

    @property
    def axes(self) -> Axes:
        """The communicators of this rank: `axes["tensor"]`, `axes["data"]`, `axes["pipeline"]` and
        others."""
        return self._active.axes

    @property
    def model(self) -> nn.ModuleDict:
        """The pipeline stages that are on this rank. The keys are the numbers of the stages. Each
        parameter in a stage is this rank's slice of the full parameter.
        """
        stages = self._active.engine.stages
        return nn.ModuleDict({str(number): stage for number, stage in stages.items()})

    @property
    def state(self) -> State:
        """This rank's training state: its shards of the master weights and of the optimizer
        moments, and the counters of the run. The shards have the logical names of their parameters,
        which are the same in every layout.
        """
        return self._active.engine.state

    def validate(self) -> dict[str, Any]:
        """Measure the losses on the validation data after the present step, and return them. Every
        rank must call this method. The losses are also written to `metrics.jsonl`. Return {} if the
        run has no validation data, or if a stop interrupts the validation.
        """
        loop = self._active
        return loop.validation.measured(loop.concluded)

    def save(self) -> Path:
        """Save a checkpoint of the present step, unless this step is already saved. Return the path
        of the checkpoint. Every rank must call this method. Raises SaveFailed on every rank if the
        checkpoint cannot be written.
        """
        loop = self._active
        newest = loop.saving.newest
        if newest is None or newest[0] != loop.concluded:
            loop.saving.after_step(loop.concluded, Save.LAST)
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
    """Return a `Launch` object with all ranks. After this call, all ranks are ended if one rank
    does not catch an exception.
    """
    signals = StopRequest()
    signals.__enter__()
    world = World()
    end_together(world)
    return Launch(world, signals)


def _require_same(
    world: World, config: object, settings: object, named: object, *, hooks: object
) -> None:
    """Raise InputError, on every rank, if a rank has other arguments of `Run` than rank 0, because
    the run would use those of rank 0. `named` has the names of the user's own objects."""
    arguments = {
        "configuration": config,
        "settings": settings,
        "loss, data or optimizer": named,
        "hooks": [str(type(hook)) for hook in hooks] if isinstance(hooks, list | tuple) else "",
    }
    if world.size == 1:
        return
    own = [hashlib.sha256(_text_of(value).encode()).digest() for value in arguments.values()]
    everyone = world.control.allgather(own)
    for rank, other in enumerate(everyone):
        for name, first, mine in zip(arguments, everyone[0], other, strict=True):
            if first != mine:
                word = "other" if name.endswith("s") else "another"
                raise SharedInputError(
                    f"ptdmpi.Run has {word} {name} on rank {rank} than on rank 0; legal: the same "
                    "arguments on all ranks, and hooks of the same classes in the same order"
                )


def _text_of(value: object) -> str:
    """Return a text that is the same for equal values, also if the keys of dictionaries have
    another order."""
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):  # such arguments are refused later
        return str(type(value))


def _named(loss: Any, data: Any, optimizer: Any) -> dict[str, Any]:
    """Return a dict with the configuration keys for the user's own loss, data and optimizer, and
    with the names of these objects as values. An object that is None is left out. Raises InputError
    if an object cannot be imported by its name.
    """
    named: dict[str, Any] = {}
    if loss is not None:
        named["run.loss"] = name_of(loss)
    if data is not None:
        named["data.train"] = [{"path": name_of(data)}]
    if optimizer is not None:
        named["optimizer.kind"] = "own"
        named["optimizer.own"] = name_of(optimizer)
    return named


def _tree(config: object) -> dict[str, Any]:
    """Return the sections of a configuration. Raises InputError unless `config` is a path or a
    dictionary of sections."""
    if isinstance(config, Mapping) and all(isinstance(name, str) for name in config):
        return dict(config)
    if isinstance(config, str | Path) and str(config):
        return load(config)
    raise InputError(
        f"the configuration is {_short(config)}; legal: the path of a TOML file, or a dictionary "
        "of sections"
    )


def _of_settings(settings: object) -> dict[str, Any]:
    """Return the settings of a run. Raises InputError unless they are None, or a dictionary whose
    keys are texts."""
    if settings is None:
        return {}
    if isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings):
        return dict(settings)
    raise InputError(
        f'the settings are {_short(settings)}; legal: a dictionary such as {{"run.steps": 100}}'
    )


def _short(value: object) -> str:
    return f"{value!r:.60} of the type {type(value).__name__}"


def _require_main_thread() -> None:
    """Raises InputError outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            "a run trains outside the main thread, where Python can neither handle signals nor end "
            "all ranks after an error; legal: the main thread, and other threads for other work"
        )
