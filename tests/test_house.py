"""Rules of the house that a program can check: sizes, names that may not occur, imports."""

import ast
import importlib.metadata
import io
import re
import runpy
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests._syntax import nodes_of
from tests.parallel import ROOT

MISSING = "ignore_missing_imports"

FOLDERS = ("src", "data_prep", "benchmarks", "manual", "tests")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
SOURCES = [file for file in FILES if file.relative_to(ROOT).parts[0] == "src"]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 7
MAX_POSITIONAL = 4  # arguments of functions in src/; those beyond are passed by keyword
MAX_LINE_LENGTH = 100
MAX_FOLDER_FILES = 16
MAX_TUPLE_ASSIGNMENTS = 5  # `a, b = c, d` per 1,000 lines of src/
MAX_CONDITIONALS = 12  # `a if b else c` per 1,000 lines of src/

SAYS_NOTHING = {"one", "found", "told"}  # names that could name anything

# What may exceed a budget, and why: "path" or "path::function" -> reason.
EXCEPTIONS: dict[str, str] = {
    "src/ptdmpi/comm/c10d/group.py::all_to_all_single": "PyTorch calls it by position",
}
# Folders that may have more files, and why.
FULL_FOLDERS = {
    "src/ptdmpi/commands": "one file for each command, which the command line finds by its name",
    "tests": (
        "a dozen helpers (`_*.py`, the harness of parallel tests) that several rooms import, "
        "beside the tests of what is in no room: docs, house, jobs, presets; a folder of helpers "
        "would make every import longer and no file easier to find"
    ),
}

# Classes that may share a name: the same thing told in two ways. All others are told apart.
SAME_NAMES = {
    "Block": "the trainer's and plain torch's",
    "Config": "a run's, and what torchtitan calls that of each module",
    "Embedding": "the trainer's and plain torch's",
    "Mlp": "plain torch's and torchtitan's",
    "Norm": "a module, and its row in the table of parameters",
    "Optimizer": "the trainer's and plain torch's",
    "Table": "a module, and its row in the table of parameters",
}

# Extras that `make setup-all` alone installs, with their own lock.
UNLOCKED = (
    "corpus",
    "eval",
    "mlflow",
    "nccl",
    "peft",
    "quantize",
    "shellcheck",
    "tensorboard",
    "triton",
    "trl",
    "wandb",
)
DOCS = "docs"  # the extra of `make docs`, with a lock of its own

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("h5py", "mpi4py", "torch"):
            raise ImportError(f"{name} is not for planning")

sys.meta_path.insert(0, Blocker())
import importlib, pkgutil
import ptdmpi.config, ptdmpi.plan
for module in pkgutil.walk_packages(ptdmpi.plan.__path__, "ptdmpi.plan."):
    importlib.import_module(module.name)
"""


def over_budget(name: str, source: str) -> list[str]:
    """Each excess over the budgets, as one line."""
    found = []
    lines = source.splitlines()
    if len(lines) > MAX_FILE_LINES and name not in EXCEPTIONS:
        found.append(f"{name}: {len(lines)} lines")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_LENGTH:
            found.append(f"{name}:{number}: {len(line)} columns")
    for node in nodes_of(source):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if f"{name}::{node.name}" in EXCEPTIONS:
            continue
        # Triton's kernels get pointers and sizes, and are launched with their names
        is_kernel = any(ast.unparse(mark) == "triton.jit" for mark in node.decorator_list)
        positional = [
            argument
            for argument in (*node.args.posonlyargs, *node.args.args)
            if argument.arg not in ("self", "cls", "ctx")  # PyTorch names self "ctx" in a Function
        ]
        arguments = len(positional) + len(node.args.kwonlyargs)
        length = node.end_lineno - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            found.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
        if arguments > MAX_ARGUMENTS and not is_kernel:
            found.append(f"{name}:{node.lineno}: {node.name} has {arguments} arguments")
        if name.startswith("src/") and len(positional) > MAX_POSITIONAL and not is_kernel:
            found.append(
                f"{name}:{node.lineno}: {node.name} takes {len(positional)} arguments by position"
            )
    return found


def unnamed_values(name: str, source: str) -> list[str]:
    """Constructor calls that pass more values by position than a reader can tell apart."""
    calls = (node for node in nodes_of(source) if isinstance(node, ast.Call))
    return [
        f"{name}:{call.lineno}: {call.func.id} gets {len(call.args)} values by position"
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id[0].isupper()
        and len(call.args) > MAX_POSITIONAL
        and not any(isinstance(value, ast.Starred) for value in call.args)
    ]


def forbidden(name: str, source: str) -> list[str]:
    """Statements and comments that no file may have, as one line each."""
    found = [
        f"{name}:{node.lineno}: global statement"
        for node in nodes_of(source)
        if isinstance(node, ast.Global)
    ]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and re.search(r"#\s*(noqa|type:\s*ignore)", token.string):
            found.append(f"{name}:{token.start[0]}: {token.string}")
    return found


def names_in(source: str) -> set[str]:
    """All names that the code (not its strings and comments) uses or imports."""
    names = set()
    for node in nodes_of(source):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                names.add(name)
    return names


def declared_requirements() -> dict[str, list[str]]:
    """What setup.py itself asks for, by extra; "" is always installed. The installed metadata
    would be of the last `make setup`."""
    asked: dict[str, Any] = {}
    with mock.patch("setuptools.setup", lambda **keys: asked.update(keys)):
        runpy.run_path(str(ROOT / "setup.py"))
    return {"": asked["install_requires"], **asked["extras_require"]}


def imported_packages(source: str) -> set[str]:
    packages = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return packages


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_file_keeps_the_rules(file):
    name, source = str(file.relative_to(ROOT)), file.read_text()
    assert [*over_budget(name, source), *forbidden(name, source)] == []


def compressed(sources: list[str]) -> tuple[float, float]:
    """Return the numbers of parallel tuple assignments and conditional expressions per 1,000
    lines."""
    nodes = [node for source in sources for node in nodes_of(source)]
    tuples = sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        for node in nodes
    )
    conditionals = sum(isinstance(node, ast.IfExp) for node in nodes)
    lines = sum(source.count("\n") for source in sources)
    return 1000 * tuples / lines, 1000 * conditionals / lines


def test_code_is_not_compressed():
    """Two things on a line save a line and cost a reader."""
    tuples, conditionals = compressed([file.read_text() for file in SOURCES])
    assert tuples <= MAX_TUPLE_ASSIGNMENTS and conditionals <= MAX_CONDITIONALS
    assert compressed(["a, b = 1, 2\nc = a if b else 0\n"]) == (500.0, 500.0)


def bound_names(source: str) -> set[str]:
    """Return all names that a file gives to values, functions, classes and arguments."""
    names = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def test_names_say_something():
    vague = {str(file.relative_to(ROOT)): bound_names(file.read_text()) for file in SOURCES}
    assert {
        file: names & SAYS_NOTHING for file, names in vague.items() if names & SAYS_NOTHING
    } == {}
    assert bound_names("def told(one):\n    found = 1\n") == SAYS_NOTHING


def test_every_class_says_what_it_is():
    silent = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in SOURCES
        for node in nodes_of(file.read_text())
        if isinstance(node, ast.ClassDef) and not ast.get_docstring(node)
    ]
    assert silent == []


def test_a_name_means_one_thing():
    """Whoever searches for a class finds one, or two that are the same thing."""
    places: dict[str, set[str]] = {}
    for file in FILES:
        if file.relative_to(ROOT).parts[0] != "tests":
            for node in nodes_of(file.read_text()):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, set()).add(str(file.relative_to(ROOT)))
    shared = {name: sorted(files) for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in SAME_NAMES} == {}
    assert SAME_NAMES.keys() <= shared.keys(), "a reason that has gone"


def continues_a_name(source: str) -> list[str]:
    """Docstrings that begin with "Of", and so can be read behind a name only."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in nodes_of(source) if isinstance(node, documented)]
    return [text for text in map(ast.get_docstring, nodes) if text and text.startswith("Of ")]


def test_docstrings_stand_alone():
    assert [text for file in FILES for text in continues_a_name(file.read_text())] == []
    assert continues_a_name('def size():\n    """Of a file, in bytes."""\n') != []


def test_values_have_names():
    kept = [f for f in FILES if f.relative_to(ROOT).parts[0] in ("src", "data_prep")]
    assert [line for f in kept for line in unnamed_values(str(f), f.read_text())] == []
    assert len(unnamed_values("f.py", "Size(1, 2, 3, 4, 5)\nSize(1, 2, 3, 4)\n")) == 1


def test_exceptions_name_what_exists():
    for name in EXCEPTIONS:
        path, _, inside = name.partition("::")
        assert re.search(rf"(def|class) {inside}\b", (ROOT / path).read_text())


def test_folders_are_small():
    counts = Counter(str(f.parent.relative_to(ROOT)) for f in FILES if f.name != "__init__.py")
    full = {folder for folder, count in counts.items() if count > MAX_FOLDER_FILES}
    assert full == FULL_FOLDERS.keys()


def test_rules_find_what_they_forbid():
    many = ", ".join(f"a{i}" for i in range(8))
    source = f"def f({many}):\n" + "    x = 1\n" * 500 + "    y = '" + "z" * 100 + "'\n"
    assert len(over_budget("f.py", source)) == 4
    assert len(over_budget("src/f.py", source)) == 5
    assert len(forbidden("f.py", "def f():\n    global x\n    x = 1  # noqa: F841\n")) == 2
    assert names_in("from a import COMM_WORLD as w") & names_in("m.COMM_WORLD") == {"COMM_WORLD"}


def test_one_file_knows_the_world_communicator():
    files = {f.relative_to(ROOT / "src") for f in FILES if "src" in f.relative_to(ROOT).parts}
    users = {f for f in files if "COMM_WORLD" in names_in((ROOT / "src" / f).read_text())}
    assert users <= {Path("ptdmpi/comm/world.py")}


def test_axes_are_asked_for_by_name():
    """`axes["tensor"]`, so that code that is for every axis has no list of them to keep."""
    wanted = re.compile(r"\baxes\.(tensor|data|pipeline|ends|coordinates\.\w+)\b")
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in FILES
        for match in wanted.finditer(file.read_text())
    ]
    assert found == []


def test_planning_imports_no_heavy_packages():
    subprocess.run([sys.executable, "-c", BLOCKER], check=True, cwd=ROOT, timeout=60)


# Package -> the distribution that setup.py names, where it is not installed
PROVIDED_BY = {"mlflow": ["mlflow-skinny"]}


def test_every_import_is_declared():
    """What src/ and data_prep/ import is named in setup.py, so that `pip install` brings it."""
    lines = [line for of_extra in declared_requirements().values() for line in of_extra]
    declared = {re.match(r"[\w.-]+", line)[0].lower() for line in lines}
    providers = importlib.metadata.packages_distributions()
    own = {"ptdmpi", "data_prep", *sys.stdlib_module_names}
    for file in FILES:
        if file.relative_to(ROOT).parts[0] in ("src", "data_prep"):
            for package in imported_packages(file.read_text()) - own:
                usual = PROVIDED_BY.get(package, [package])
                names = {name.lower() for name in providers.get(package, usual)}
                assert names & declared, f"{file.relative_to(ROOT)}: {package} is not in setup.py"


def _locked(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if not line.startswith("#"))


def test_types_are_checked_without_the_extras():
    """`make test` runs mypy where `make setup` alone has run: what stands only in the lock of the
    extras may be missing there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    allowed = next(rule["module"] for rule in settings["overrides"] if rule.get(MISSING))
    extras = {name.replace("_", "-") for name in _locked("requirements-extras.lock")}
    imported = {
        package
        for file in FILES
        if file.relative_to(ROOT).parts[0] == "src"
        for package in imported_packages(file.read_text())
        if package.lower().replace("_", "-") in extras
    }
    assert "wandb" in imported
    assert {f"{package}.*" for package in imported} <= set(allowed)


def test_locks_satisfy_setup():
    """Every requirement has one exact version in requirements.lock, inside its range; those of
    extras whose packages are many and few want, in requirements-extras.lock, which changes nothing
    that is in the other."""
    from packaging.requirements import Requirement

    light, extras = _locked("requirements.lock"), _locked("requirements-extras.lock")
    site = _locked("requirements-docs.lock")
    assert light["torch"] == "2.13.0" and not light.keys() & extras.keys()
    assert not light.keys() & site.keys()
    shared = extras.keys() & site.keys()
    assert {name: extras[name] for name in shared} == {name: site[name] for name in shared}
    for extra, lines in declared_requirements().items():
        locked = light | extras if extra in UNLOCKED else light
        locked = light | site if extra == DOCS else locked
        for line in lines:
            requirement = Requirement(line)
            assert requirement.specifier.contains(locked[requirement.name.lower()]), line
