"""Hooks: objects that a program adds to a run, and whose methods the run calls."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdmpi.train.live import Completed


class Hook:
    """An object whose methods a run calls; a subclass overrides those that it needs.

    Every rank has its own hook, and all hooks are called at the same places, so a hook may
    communicate. The result of `state` is stored in each checkpoint, and `restore` gets it when the
    run resumes.
    """

    name = ""  # of its state in checkpoints; "": the name of the class

    def step_ended(self, step: Completed) -> None:
        """React to the end of a step, before it is validated and saved."""

    def validated(self, step: int, values: Mapping[str, Any]) -> None:
        """React to a validation; `values` are those of its record."""

    def saved(self, step: int, path: Path) -> None:
        """React to a checkpoint that is complete on the disk."""

    def stopped(self, step: int, why: str) -> None:
        """React to the last step of this start; `why` is "done", or another reason."""

    def state(self) -> Any:
        """Return the state that checkpoints store, as JSON; None: nothing. Rank 0's state is
        stored."""
        return None

    def restore(self, state: Any) -> None:
        """Take over the stored state, on all ranks."""


class Hooks:
    """The hooks of a run, called in the order in which they were given."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        """Store the hooks. Raises ValueError if two have the same name, and so would share a
        state."""
        self._hooks = {hook.name or type(hook).__name__: hook for hook in hooks}
        if len(self._hooks) < len(hooks):
            raise ValueError(f"hooks of the same name: give each a name of its own, {hooks}")

    def step_ended(self, step: Completed) -> None:
        """Call `step_ended` of each hook."""
        for hook in self._hooks.values():
            hook.step_ended(step)

    def validated(self, step: int, values: Mapping[str, Any]) -> None:
        """Call `validated` of each hook."""
        for hook in self._hooks.values():
            hook.validated(step, values)

    def saved(self, step: int, path: Path) -> None:
        """Call `saved` of each hook."""
        for hook in self._hooks.values():
            hook.saved(step, path)

    def stopped(self, step: int, why: str) -> None:
        """Call `stopped` of each hook."""
        for hook in self._hooks.values():
            hook.stopped(step, why)

    def states(self) -> dict[str, Any]:
        """Return the states of the hooks that have one, by name."""
        states = {name: hook.state() for name, hook in self._hooks.items()}
        return {name: state for name, state in states.items() if state is not None}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give each hook its stored state, if there is one."""
        for name, hook in self._hooks.items():
            if name in states:
                hook.restore(states[name])
