"""Objects that a configuration names, and that are imported when they are first used: losses,
datasets, optimizers and sublayers of other packages, and objects of this package.

The name of an object of another package is either "module:object", or a name that an installed
package has registered as an entry point in the group "ptdmpi.losses", "ptdmpi.datasets",
"ptdmpi.optimizers" or "ptdmpi.sublayers".
"""

import contextlib
import functools
import importlib
import inspect
import os
import re
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any

from ptdmpi.base.errors import InputError

IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@functools.cache
def plugin(group: str, name: str) -> Any:
    """Import and return the object called `name`, for example "my_package.losses:smoothed".

    `group` is the kind of object: "losses", "datasets", "optimizers" or "sublayers". Raises
    InputError if there is no function or class with this name, or if its import fails.
    """
    if IMPORTED.fullmatch(name):
        return _usable(group, name)
    registered = _registered(group)
    if name in registered:
        return _usable(group, registered[name])
    others = ", ".join(sorted(registered)) or "none is installed"
    raise InputError(
        f'{name}: no installed package registers it among the {group}; legal: "module:object", or '
        f"a registered name ({others})"
    )


def built_in(name: str) -> Any:
    """Import and return an object of this package. `name` is "module:object". Tables of optional
    features have such names, so that a feature is imported only when a run uses it."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def is_plugin(group: str, name: str) -> bool:
    """Return True if `name` has the form "module:object", or if an installed package has registered
    this name.
    """
    return IMPORTED.fullmatch(name) is not None or name in _registered(group)


class _Directory:
    """The working directory of the process while the user's code runs, in one or several threads.
    The first context that is entered opens the directory. The directory stays open until the last
    context is left, so that each context can restore it even if the user's code has removed it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0  # the number of contexts that have been entered and not left
        self._here = -1

    def enter(self) -> None:
        """Hold the working directory open, unless another context does so already."""
        with self._lock:
            if not self._inside:
                self._here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
            self._inside += 1

    def leave(self) -> None:
        """Restore the working directory."""
        with self._lock:
            self._inside -= 1
            try:
                os.fchdir(self._here)
            finally:
                if not self._inside:
                    os.close(self._here)


DIRECTORY = _Directory()


@contextlib.contextmanager
def users_code(name: str) -> Iterator[None]:
    """Return a context for a call of the user's own code. `name` is the name of the code in errors.

    If the code ends the program, for example by `sys.exit`, raise InputError: the other ranks would
    wait for this rank forever. At its end the context restores the working directory, because
    relative paths in the configuration must not change their meaning.
    """
    DIRECTORY.enter()
    try:
        yield
    except SystemExit:
        raise InputError(
            f"{name} ends the program; legal: to return, or to raise an error"
        ) from None
    finally:
        DIRECTORY.leave()


def call_mistake(function: Any, arguments: Sequence[str]) -> str:
    """Return the reason why a user's `function` cannot be called with these positional arguments,
    which are given by name; "" if it can be called. A function that is written in C may have no
    signature, and is not checked."""
    if not callable(function):
        return f"it is of the type {type(function).__name__}"
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # the function has no signature
        pass
    return ""


def _registered(group: str) -> dict[str, str]:
    """Return the registered objects of a group: name -> "module:object"."""
    return {entry.name: entry.value for entry in entry_points(group=f"ptdmpi.{group}")}


def _usable(group: str, name: str) -> Any:
    """Import the object with the name "module:object". Raise InputError if the import fails, or if
    the object is not a function or a class. Also raise InputError if a loss, a dataset or a
    sublayer (see `group`) cannot be called with one argument."""
    value = _imported(name)
    if not callable(value):
        kind = type(value).__name__
        raise InputError(f"{name} is of the type {kind}; legal: a function or a class")
    if group == "optimizers":  # only methods of an optimizer are called
        return value
    mistake = call_mistake(value, ("argument",))
    if mistake:
        raise InputError(
            f"{name} cannot be called with one argument ({mistake}); legal: a function or a class "
            "that takes one"
        )
    return value


def _imported(name: str) -> Any:
    """Import the object with the name "module:object". Raise InputError if the import fails."""
    module, _, path = name.partition(":")
    try:
        with users_code(f"{name} cannot be imported: its module"):
            value: Any = importlib.import_module(module)
        for attribute in path.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        hint = ""
        if module == "__main__":
            hint = "; it belongs to a program, and only this program can continue the run"
        raise InputError(f"{name} cannot be imported: {error}{hint}") from None
    return value


def name_of(value: Any) -> str:
    """Return the name "module:object" by which a function or class can be imported again. Raises
    InputError if the object cannot be imported by a name."""
    name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    try:
        imported = _imported(name) if IMPORTED.fullmatch(name) else None
    except InputError:
        imported = None
    if imported is None or imported is not value:
        raise InputError(
            f"{value!r} cannot be imported by its name; legal: a function or a class that is "
            "defined at the top of a module"
        )
    return name
