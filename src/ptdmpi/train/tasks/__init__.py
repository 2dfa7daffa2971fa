"""The tasks on which a run is trained or evaluated. Each of these names is imported only when it is
first used, because most runs have no tasks."""

from typing import TYPE_CHECKING, Any

from ptdmpi.base.plugins import built_in

if TYPE_CHECKING:
    from ptdmpi.evaluate.labelled import items
    from ptdmpi.evaluate.tasks import read
    from ptdmpi.train.tasks.files import task_files
    from ptdmpi.train.tasks.measured import Tasks
    from ptdmpi.train.tasks.source import TaskSource

__all__ = ["TaskSource", "Tasks", "items", "read", "task_files"]

# maps each name to the module that defines it
_OWNERS = {
    "TaskSource": "ptdmpi.train.tasks.source",
    "Tasks": "ptdmpi.train.tasks.measured",
    "items": "ptdmpi.evaluate.labelled",
    "read": "ptdmpi.evaluate.tasks",
    "task_files": "ptdmpi.train.tasks.files",
}


def __getattr__(name: str) -> Any:
    """Return the object called `name` from the module that defines it."""
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return built_in(f"{_OWNERS[name]}:{name}")
