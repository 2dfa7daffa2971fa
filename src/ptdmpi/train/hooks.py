"""Hooks: objects that a user's program adds to a run. The run calls the methods of a hook at
certain points, for example after each step."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import call_mistake, users_code
from ptdmpi.train.live import Completed


class Hook:
    """The base class of all hooks. A subclass overrides the methods that it needs.

    Every rank has its own hook object. All ranks call the methods of their hooks at the same points
    of the run, so a hook may communicate between ranks. Each checkpoint stores the result of the
    method `state`. When the run resumes, the stored state is passed to `restore`.
    """

    # the name under which checkpoints store the hook's state; "" means the name of the class
    name = ""

    def step_ended(self, step: Completed) -> None:
        """React to the end of a training step. The run calls this method before the validation and
        the save of this step."""

    def validated(self, step: int, values: Mapping[str, Any]) -> None:
        """React to a validation. `values` is the record of the validation in `metrics.jsonl`,
        without its step."""

    def saved(self, step: int, path: Path) -> None:
        """React to a checkpoint, after it is completely written to the disk."""

    def stopped(self, step: int, why: str) -> None:
        """React to the end of the training. `why` is "done", or the reason why the run has stopped
        before its last step.
        """

    def state(self) -> Any:
        """Return the state of the hook for a checkpoint, as an object that can be converted to
        JSON. Return None to store nothing. Checkpoints store the state that rank 0 returns. In JSON
        the keys of a dict are texts: a key 5 is "5" when the state is restored.
        Two keys of a dict that are the same text, such as 5 and "5", are refused.
        """
        return None

    def restore(self, state: Any) -> None:
        """Continue from the state in a checkpoint. All ranks get the same state."""


# Method of a hook -> the names of its arguments after `self`.
ARGUMENTS = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Hook).items()
    if inspect.isfunction(method)
}


class Hooks:
    """The hooks of a run. Their methods are called in the order in which the hooks were given. If a
    hook ends the program, for example by `sys.exit`, the methods of this class raise InputError."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        """Store the hooks. Raises InputError if an object is not a `Hook`, if a method of a hook
        takes other arguments, or if two hooks have the same name, because a checkpoint stores one
        state for each name.
        """
        if not isinstance(hooks, list | tuple) or not all(isinstance(hook, Hook) for hook in hooks):
            raise InputError(f"hooks = {hooks!r}: legal is a list of objects of ptdmpi.Hook")
        self._hooks = {hook.name or type(hook).__name__: hook for hook in hooks}
        if len(self._hooks) < len(hooks):
            raise InputError(f"hooks of the same name: give each a name of its own, {hooks}")
        for name, hook in self._hooks.items():
            for method, arguments in ARGUMENTS.items():
                mistake = call_mistake(getattr(hook, method), arguments)
                if mistake:
                    raise InputError(
                        f"hook {name}: its {method} cannot be called ({mistake}); legal: a method "
                        f"{method}({', '.join(('self', *arguments))})"
                    )

    def step_ended(self, step: Completed) -> None:
        """Call the method `step_ended` of each hook."""
        for name, hook in self._hooks.items():
            with users_code(f"hook {name}"):
                hook.step_ended(step)

    def validated(self, step: int, values: Mapping[str, Any]) -> None:
        """Call the method `validated` of each hook."""
        for name, hook in self._hooks.items():
            with users_code(f"hook {name}"):
                hook.validated(step, values)

    def saved(self, step: int, path: Path) -> None:
        """Call the method `saved` of each hook."""
        for name, hook in self._hooks.items():
            with users_code(f"hook {name}"):
                hook.saved(step, path)

    def stopped(self, step: int, why: str) -> None:
        """Call the method `stopped` of each hook."""
        for name, hook in self._hooks.items():
            with users_code(f"hook {name}"):
                hook.stopped(step, why)

    def states(self) -> dict[str, Any]:
        """Return a dict: name of a hook -> a copy of the hook's state. Hooks without a state are
        left out. Raise InputError if a state cannot be converted to JSON."""
        states = {name: _copied(name, hook) for name, hook in self._hooks.items()}
        return {name: state for name, state in states.items() if state is not None}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Pass the states from a checkpoint to the hooks. A hook that has no state in the
        checkpoint is not called."""
        for name, hook in self._hooks.items():
            if name in states:
                with users_code(f"hook {name}"):
                    hook.restore(states[name])


def _copied(name: str, hook: Hook) -> Any:
    """Return a copy of the state of a hook, made by converting the state to JSON and back. A copy
    is needed, because the hook may change its state while a checkpoint is written in the
    background. Raise InputError if the state is not JSON."""
    with users_code(f"hook {name}"):
        state = hook.state()
    try:
        return json.loads(json.dumps(state), object_pairs_hook=_with_each_key_once)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the state of hook {name} cannot be converted to JSON: {error}") from None


def _with_each_key_once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these keys and values. Raise ValueError if two keys are equal."""
    whole = dict(items)
    if len(whole) < len(items):
        keys = [key for key, _ in items]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"two keys of a dict are the text {twice!r}; legal: different texts")
    return whole
