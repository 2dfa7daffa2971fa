"""No file of the package imports itself through others, imports for types and inside functions
included."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests._syntax import nodes_of
from tests.parallel import ROOT


def imports(folder: Path) -> dict[str, set[str]]:
    """The modules below `folder`, and the modules of these that each of them imports anywhere."""
    modules = {}
    for file in folder.rglob("*.py"):
        parts = file.relative_to(folder).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = file
    graph = {}
    for name, file in modules.items():
        imported = set()
        for node in nodes_of(file.read_text(encoding="utf-8")):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    imported.add(inner if inner in modules else node.module)
        graph[name] = (imported & modules.keys()) - {name}
    return graph


def test_no_file_imports_itself_through_others():
    TopologicalSorter(imports(ROOT / "src")).prepare()  # raises CycleError, which names the files


def rooms(folder: Path) -> set[tuple[str, str]]:
    """Return the pairs of rooms (folders of the package, and its own files) of which the first
    imports the second."""
    pairs = {
        (".".join(name.split(".")[:2]), ".".join(other.split(".")[:2]))
        for name, others in imports(folder).items()
        for other in others
    }
    return {(room, other) for room, other in pairs if room != other}


def test_rooms_know_few_others():
    """There were 133 pairs before a layer had one description, with a third less code. The entry
    imports `base` before anything else, for signals during imports."""
    assert len(rooms(ROOT / "src")) <= 133


def test_a_circle_by_types_is_seen(tmp_path):
    (tmp_path / "a.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b\n"
    )
    (tmp_path / "b.py").write_text("def f():\n    from a import x\n")
    with pytest.raises(CycleError):
        TopologicalSorter(imports(tmp_path)).prepare()
