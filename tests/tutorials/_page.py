"""Run a tutorial: write its files and run its commands, block by block, as a reader would.

Blocks of a page: "```bash" is run, "```python" too; a block with `title="NAME"` is written to the
file NAME instead. A block after the line "<!-- not run: REASON -->" is left out.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.parallel import ROOT, mpi_environment

TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\n)?^```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# The folders of the project that a reader has.
FOLDERS = ("docs", "jobs", "src", "data_prep")
PROGRAMS = {"ptdmpi": "ptdmpi", "ptdmpi-data": "data_prep.cli"}


class Block(NamedTuple):
    """A block of a page: its language, the file that it is written to or "", and its text."""

    kind: str
    title: str
    body: str


def blocks(name: str) -> list[Block]:
    """Return the blocks of the tutorial that are written or run, in order."""
    text = (TUTORIALS / name).read_text(encoding="utf-8")
    return [
        Block(match["kind"], match["title"] or "", match["body"])
        for match in BLOCK.finditer(text)
        if not match["skip"] and (match["title"] or match["kind"] in ("bash", "python"))
    ]


def run(name: str, folder: Path, *, first: Path | None = None, limit_s: float = 600.0) -> str:
    """Run the tutorial in `folder`, and return all that its commands printed.

    Programs in the folder `first` come before all others on PATH. Raises AssertionError, with the
    output, when a command fails.
    """
    environment = prepare(folder)
    if first is not None:
        environment["PATH"] = os.pathsep.join([str(first), environment["PATH"]])
    printed = []
    for block in blocks(name):
        if block.title:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
            continue
        printed.append(run_block(block, folder, environment, limit_s))
    return "\n".join(printed)


def run_block(
    block: Block, folder: Path, environment: Mapping[str, str], limit_s: float = 600.0
) -> str:
    """Run one block of bash or Python, and return what it printed."""
    command = ["bash", "-euo", "pipefail", "-c", block.body]
    if block.kind == "python":
        command = [sys.executable, "-c", block.body]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, f"{block.body}\nexit code {done.returncode}\n{done.stdout}"
    return done.stdout


def prepare(folder: Path) -> dict[str, str]:
    """Make `folder` look like the project's, with both programs on PATH; return the environment."""
    for name in FOLDERS:
        (folder / name).symlink_to(ROOT / name)
    programs = folder / ".programs"
    programs.mkdir()
    for name, module in PROGRAMS.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        program.chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    environment = dict(mpi_environment())
    environment["PATH"] = os.pathsep.join([str(programs), environment["PATH"]])
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment["HF_HUB_OFFLINE"] = "1"
    return environment
