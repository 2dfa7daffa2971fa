"""Folders that cannot be read or written: each command prints one line, a report still its table.

Root may read and write everything, so as root the tests give up its rights for a while.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ptdmpi.commands.checkpoint import command as checkpoint
from ptdmpi.commands.report import command as report
from ptdmpi.commands.watch import command as watch
from ptdmpi.config import InputError
from ptdmpi.inference.stored import open_model
from tests import _stored
from tests.report._made import made, record

NOBODY = 65534


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def runs(tmp_path) -> Iterator[tuple[Path, Path]]:
    """Return a read-only run, and a run in a folder that nobody may enter."""
    own = [one for one in tmp_path.parents if one.name.startswith(("pytest-", "popen-"))]
    for folder in (tmp_path, *own):
        folder.chmod(0o755)
    run = made(tmp_path / "run", 3, record(1, 4.0), record(2, 3.0))
    stored = _stored.stored(tmp_path / "stored", 50, **_stored.LLAMA)
    shutil.copytree(stored / "checkpoints", run / "checkpoints")
    shut = tmp_path / "shut"
    shutil.copytree(run, shut)
    for folder, _, _ in os.walk(run):
        os.chmod(folder, 0o555)
    shut.chmod(0)
    yield run, shut
    for folder in (run, run / "checkpoints", shut):
        folder.chmod(0o755)


def asked(command, *words: object):
    """Run the command without the rights of root."""
    with nobody():
        return CliRunner().invoke(command, [str(word) for word in words])


COMMANDS = {
    "report": (report, []),
    "watch": (watch, ["--once"]),
    "inspect": (checkpoint, ["inspect"]),
    "verify": (checkpoint, ["verify"]),
    "prune": (checkpoint, ["prune", "--keep", "1"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_is_shut_is_one_line(runs, name):
    _, shut = runs
    command, words = COMMANDS[name]
    done = asked(command, *words, shut)
    # which both programs tell in a line, with exit code 2
    assert isinstance(done.exception, InputError), (done.output, done.exception)
    assert "Permission denied" in str(done.exception) and not done.stdout


def test_a_model_that_is_shut_is_one_line(runs):
    """Open it as generate, evaluate and convert do."""
    with nobody():
        for path in (runs[1], runs[1] / "best", runs[1] / "checkpoints/step-00000007"):
            with pytest.raises(InputError, match="Permission denied"):
                open_model(path)


def test_a_report_of_a_run_that_may_only_be_read_has_its_table(runs):
    CliRunner().invoke(report, [str(runs[1])])  # what is imported late may be root's own
    done = asked(report, runs[0])
    assert done.exit_code == 0 and "last loss" in done.stdout
    assert "no pictures" in done.stderr and "--output DIR" in done.stderr
    assert asked(checkpoint, "inspect", runs[0]).exit_code == 0


@pytest.mark.parametrize(
    "name", ["config.toml", "metrics.jsonl", "history.jsonl", "log.txt", "checkpoints/latest"]
)
def test_a_pipe_in_place_of_a_file_blocks_no_command(tmp_path, name):
    run = made(tmp_path / "run", 3, record(1, 4.0), record(2, 3.0))
    (run / "checkpoints").mkdir()
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for command, words in ((watch, ["--once"]), (report, [])):
        result = CliRunner().invoke(command, [str(run), *words])
        if result.exit_code:
            assert isinstance(result.exception, InputError | OSError), result.exception
            assert "is a pipe or a device" in str(result.exception)
