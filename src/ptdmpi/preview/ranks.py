"""The number of ranks of a run that has not started yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ptdmpi.config import DataParallelConfig, InputError
from ptdmpi.plan.layout.topology import file_ranks


@dataclass(frozen=True)
class RankCount:
    """A number of ranks with its explanation.

    `count` is the number, and `source` says where the number comes from. `local` is the number of
    these ranks on this host, or 0 if it is unknown.
    """

    count: int
    source: str
    local: int


def needed_ranks(tree: Mapping[str, Any]) -> tuple[int, bool]:
    """Return two values: the number of ranks that the configuration `tree` needs, and True if no
    other number of ranks is legal.

    If parallel.data is "auto", the data axis is assumed to have 1 rank. But if
    data_parallel.topology names a file with the communication graph of the data ranks, the data
    axis is assumed to have as many ranks as this graph. The configuration tree may have mistakes.
    """
    tensor = _positive(tree, "parallel", "tensor") or 1
    context = _positive(tree, "parallel", "context") or 1
    pipeline = _positive(tree, "parallel", "pipeline") or 1
    data = _positive(tree, "parallel", "data")
    spare = _positive(tree, "run", "spare_ranks")
    return tensor * context * pipeline * (data or _graph_ranks(tree)) + spare, data > 0


def _positive(tree: Mapping[str, Any], section: str, key: str) -> int:
    """Return the value of a configuration key if the value is an integer above 0, else 0."""
    keys = tree.get(section)
    if not isinstance(keys, Mapping):
        return 0
    value = keys.get(key)
    return value if type(value) is int and value > 0 else 0


def _graph_ranks(tree: Mapping[str, Any]) -> int:
    """Return the number of ranks in the communication graph, if data_parallel.topology names a file
    with such a graph. Otherwise return 1.

    The result is also 1 if the section [data_parallel] or the file has mistakes. Other checks
    report these mistakes.
    """
    try:
        return file_ranks(DataParallelConfig.model_validate(tree.get("data_parallel", {}))) or 1
    except (InputError, ValueError):
        return 1
