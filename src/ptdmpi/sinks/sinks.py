"""The object that passes records to all sinks that the section [log] of the configuration enables.
An error in a sink never stops the run."""

import atexit
import importlib.util
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from ptdmpi.base.launched import is_supervised
from ptdmpi.config import Config, InputError, LogConfig
from ptdmpi.sinks.background import Background
from ptdmpi.sinks.contract import Past, Sink
from ptdmpi.sinks.notices import require_receivers


def require(log: LogConfig) -> None:
    """Raise InputError if the package of an enabled sink is not installed, or if an environment
    variable with the address of a message receiver is not set. The error message says what to
    install or to set."""
    if log.tensorboard:
        _require_package("tensorboardX", "tensorboard", "true")
    if log.wandb:
        _require_package("wandb", "wandb", f'"{log.wandb}"')
    if log.mlflow:
        _require_package("mlflow", "mlflow", "true")
    if not is_supervised():  # `ptdmpi run` sends the messages itself
        require_receivers(log)


def _require_package(package: str, key: str, text: str) -> None:
    """Raise InputError if `package` is not installed. The error message says that the setting
    log.`key` = `text` needs this package."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"log.{key} = {text} needs {package}: pip install 'ptdmpi[{key}]', or leave it out"
        )


class Sinks:
    """The open sinks of a run; only rank 0 has sinks. A sink that raises an exception gets no more
    records, and `say` prints a line about the failure."""

    def __init__(self, config: Config, past: Past, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[str, Sink] = {}
        for name, make in _wanted(config.log):
            try:
                self._open[name] = make(config, past)
            except Exception as error:  # the other package may raise any exception
                self._failed(name, error)
        atexit.register(self.close)

    def record(self, values: dict[str, Any]) -> None:
        """Pass a record to every open sink."""
        for name, sink in list(self._open.items()):
            try:
                sink.record(values)
            except Exception as error:  # the other package may raise any exception
                del self._open[name]
                self._failed(name, error)

    def close(self) -> None:
        """Close all sinks. Python also calls this method when the process exits."""
        atexit.unregister(self.close)
        while self._open:
            name, sink = self._open.popitem()
            try:
                sink.close()
            except Exception as error:  # the other package may raise any exception
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        # an error message may quote the address of a server: remove the user name and the password
        text = re.sub(r"//[^/@\s]*@", "//", str(error).partition("\n")[0])
        self._say(f"warning: log.{name} is given up: {type(error).__name__}: {text}")


def _wanted(log: LogConfig) -> list[tuple[str, Callable[[Config, Past], Sink]]]:
    """Return the name of each enabled sink, and a function (such as its class) that creates the
    sink. Only the classes of enabled sinks are imported, because the classes need optional
    packages."""
    wanted: list[tuple[str, Callable[[Config, Past], Sink]]] = []
    if log.tensorboard:
        from ptdmpi.sinks.tensorboard import TensorBoard

        wanted.append(("tensorboard", TensorBoard))
    if log.wandb:
        from ptdmpi.sinks.wandb import WeightsAndBiases

        wanted.append(("wandb", WeightsAndBiases))
    if log.mlflow:
        from ptdmpi.sinks.mlflow import MlFlow

        def in_background(config: Config, past: Past) -> Sink:
            return Background("mlflow", partial(MlFlow, config, past))

        wanted.append(("mlflow", in_background))
    return wanted
