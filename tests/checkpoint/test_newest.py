"""The newest complete checkpoint: a warning says which newer checkpoints are damaged."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ptdmpi.base.say import QUIET
from ptdmpi.checkpoint.examine import newest
from ptdmpi.commands.checkpoint import command
from ptdmpi.config import InputError
from tests._checkpoints import save


@pytest.fixture
def run(tmp_path) -> Path:
    for step in (1, 2, 3):
        save(tmp_path / "run/checkpoints", step)
    return tmp_path / "run"


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"X")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _truncate(path: Path) -> None:
    os.truncate(path, 100)


DAMAGE = [
    ("manifest.json", _append, "is not JSON"),
    ("manifest.json", Path.unlink, "No such file"),
    ("manifest.json", _pipe, "is a pipe or a device"),
    ("rank-00001.safetensors", Path.unlink, "is missing"),
    ("rank-00001.safetensors", _truncate, "has 100 bytes instead of"),
]


@pytest.mark.parametrize(("name", "damage", "why"), DAMAGE)
def test_a_warning_says_which_step_is_damaged_and_which_is_used(run, capsys, name, damage, why):
    damage(run / "checkpoints/step-00000003" / name)
    assert newest(run).name == "step-00000002"
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"warning: {run}: step 3 is damaged (") and why in line
    assert line.endswith("; step 2 is used") and not printed.out


def test_a_warning_names_all_damaged_steps(run, capsys):
    for step in (2, 3):
        _append(run / f"checkpoints/step-0000000{step}/manifest.json")
    assert newest(run).name == "step-00000001"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.index("step 3 is damaged (") < line.index(", step 2 is damaged (")
    assert line.endswith("; step 1 is used")


def test_older_damage_and_a_named_checkpoint_give_no_warning(run, capsys):
    _append(run / "checkpoints/step-00000002/manifest.json")
    assert newest(run).name == "step-00000003"
    _append(run / "checkpoints/step-00000003/manifest.json")
    assert newest(run / "checkpoints/step-00000001").name == "step-00000001"
    assert not capsys.readouterr().err


def test_without_a_complete_checkpoint_the_error_is_about_the_newest(run, capsys):
    for step in (1, 2, 3):
        _append(run / f"checkpoints/step-0000000{step}/manifest.json")
    with pytest.raises(InputError, match=r"step-00000003/manifest\.json is not JSON"):
        newest(run)
    # a directory of another name may also be a checkpoint
    (run / "checkpoints/step-00000003").rename(run / "copy")
    with pytest.raises(InputError, match=r"copy/manifest\.json is not JSON"):
        newest(run / "copy")
    assert not capsys.readouterr().err


def test_a_command_prints_the_same_warning_once_and_its_json_stays_clean(run):
    _append(run / "checkpoints/step-00000003/manifest.json")
    for _ in range(2):  # each command prints its own warnings
        done = CliRunner().invoke(command, ["diff", str(run), str(run), "--json"])
        assert json.loads(done.stdout)["first"].endswith("step-00000002")
        assert done.stderr.count("step 3 is damaged") == 1 == done.stderr.count("\n")


def test_a_warning_is_printed_with_quiet_but_only_by_rank_0(run, capsys, monkeypatch):
    _append(run / "checkpoints/step-00000003/manifest.json")
    with command.make_context("checkpoint", ["verify"]) as context:
        context.meta[QUIET] = True
        newest(run)
    assert "step 3 is damaged" in capsys.readouterr().err
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    newest(run)
    assert not capsys.readouterr().err


def test_a_warning_has_no_control_characters(run, capsys):
    renamed = run.rename(run.with_name("a\x1b[31m\nb"))
    _append(renamed / "checkpoints/step-00000003/manifest.json")
    newest(renamed)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "\x1b" not in err
