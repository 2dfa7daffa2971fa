"""The sinks of a run: made where `[log]` asks for them, fed with its records, never in its way."""

import atexit
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ptdmpi.config import Config, InputError, LogConfig


@dataclass(frozen=True)
class Past:
    """What a start finds: the run directory, whose metrics.jsonl holds the records that are kept;
    the step from which it goes on; whether records after that step were dropped just now."""

    path: Path
    step: int
    dropped: bool


class Sink(Protocol):
    """One tool. It may raise whatever it likes: then it is closed, and the run goes on."""

    def record(self, values: dict[str, Any]) -> None:
        """Take one record of `metrics.jsonl`; those of a run come in order of their steps."""

    def close(self) -> None:
        """Bring everything to its files."""


def require(log: LogConfig) -> None:
    """Raises InputError where a package of a wanted sink is missing, with the extra's name."""
    wanted = {"tensorboard": (log.tensorboard, "tensorboardX"), "wandb": (log.wandb, "wandb")}
    for key, (value, package) in wanted.items():
        if value and importlib.util.find_spec(package) is None:
            text = f'"{value}"' if isinstance(value, str) else "true"
            raise InputError(
                f"log.{key} = {text} needs {package}: pip install 'ptdmpi[{key}]', or leave it out"
            )


class Sinks:
    """All that `[log]` asks for, on rank 0. A sink that fails is closed and told of once."""

    def __init__(self, config: Config, past: Past, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[str, Sink] = {}
        for name, make in _wanted(config.log):
            try:
                self._open[name] = make(config, past)
            except Exception as error:  # whatever another's tool raises
                self._failed(name, error)
        atexit.register(self.close)

    def record(self, values: dict[str, Any]) -> None:
        for name, sink in list(self._open.items()):
            try:
                sink.record(values)
            except Exception as error:  # as above
                del self._open[name]
                self._failed(name, error)

    def close(self) -> None:
        """Close all; also called at the end of the process."""
        atexit.unregister(self.close)
        while self._open:
            name, sink = self._open.popitem()
            try:
                sink.close()
            except Exception as error:  # as above
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        text = str(error).partition("\n")[0]
        self._say(f"warning: log.{name} is given up: {type(error).__name__}: {text}")


def _wanted(log: LogConfig) -> list[tuple[str, Callable[[Config, Past], Sink]]]:
    """Each is imported when it is asked for: its package is an extra."""
    wanted: list[tuple[str, Callable[[Config, Past], Sink]]] = []
    if log.tensorboard:
        from ptdmpi.sinks.tensorboard import TensorBoard

        wanted.append(("tensorboard", TensorBoard))
    if log.wandb:
        from ptdmpi.sinks.wandb import WeightsAndBiases

        wanted.append(("wandb", WeightsAndBiases))
    return wanted
