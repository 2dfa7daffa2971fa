"""The run directory on a disk that fails."""

import errno
import os
import subprocess
import sys

import pytest

from ptdmpi.config import InputError
from ptdmpi.train.records import directory as files
from ptdmpi.train.records.directory import RunDirectory, mark_done


def test_lines_wait_for_a_disk_that_fails(tmp_path, monkeypatch, capsys):
    directory = RunDirectory(tmp_path / "run", "", 0)
    directory.record(step=1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "append_lines", _no_space)
        directory.record(step=2)
        directory.record(step=3)
    directory.record(step=4)
    steps = [1, 2, 3, 4]
    expected = "".join(f'{{"step": {step}}}\n' for step in steps)
    assert (tmp_path / "run/metrics.jsonl").read_text() == expected
    assert capsys.readouterr().err.count("No space left on device; its lines wait") == 1
    directory.warn_of_lost_lines()
    assert not capsys.readouterr().err


def test_a_deleted_file_of_records_is_reported_once(tmp_path, capsys):
    directory = RunDirectory(tmp_path / "run", "", 0)
    for step in range(1, 6):
        directory.record(step=step)
        if step in (2, 3):
            directory.metrics.rename(tmp_path / f"moved{step}")
    out = capsys.readouterr().out
    assert out.count("metrics.jsonl was deleted or moved during the run: its earlier lines") == 1
    assert directory.metrics.read_text().count("step") == 2


def test_lines_that_were_never_written_are_counted_at_the_end(tmp_path, monkeypatch, capsys):
    directory = RunDirectory(tmp_path / "run", "", 0)
    monkeypatch.setattr(files, "append_lines", _no_space)
    directory.record(step=1)
    directory.record(step=2)
    directory.warn_of_lost_lines()
    assert "metrics.jsonl lacks the last 2 lines, which could not" in capsys.readouterr().err


def test_live_state_goes_on_while_the_disk_is_full(tmp_path, monkeypatch):
    """The lines that waited come first, and a start without live state is refused."""
    path, shown = tmp_path / "run", []
    RunDirectory(path, "", 0).record(step=1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_whole", _no_space)
        with pytest.raises(InputError, match="No space left"):
            RunDirectory(path, "", 2, shown.append)
        lines = {"metrics.jsonl": '{"step": 2}\n'}
        later = {"metrics.jsonl": '{"step": 2}\n{"step": 3}\n'}  # step 3 is trained again
        directory = RunDirectory(path, "", 2, shown.append, handed_over=later)
        assert directory.unwritten == lines
    assert len(shown) == 1 and "continues with its state in memory" in shown[0]
    directory.record(step=3)
    assert (path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert directory.unwritten == {}


def _no_space(path, lines):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_line_that_fits_in_part_is_not_written(tmp_path, monkeypatch):
    """A disk with room for some of the bytes takes those alone."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("whole\n")
    real_open = files.open_file

    def small_disk(path, mode):
        return _Small(real_open(path, mode))

    monkeypatch.setattr(files, "open_file", small_disk)
    with pytest.raises(OSError, match="No space"):
        files.append_lines(path, "a line of some length\n")
    assert path.read_text() == "whole\n"


class _Small:
    """A file on a disk with three bytes left."""

    def __init__(self, file):
        self.file = file
        self.tell, self.truncate = file.tell, file.truncate

    def write(self, data: bytes) -> int:
        return self.file.write(data[:3])

    def __enter__(self):
        return self

    def __exit__(self, *words):
        self.file.close()


def test_a_run_directory_that_cannot_be_written_at_the_start(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(InputError, match=r"run.dir = "):
        RunDirectory(tmp_path / "run", "", 0)


def test_timelines_of_later_steps_are_dropped(tmp_path):
    folder = tmp_path / "timeline"
    folder.mkdir()
    for step in (3, 4):
        (folder / f"step-{step:08d}.json").touch()
    RunDirectory(tmp_path, "", 3)
    assert [path.name for path in folder.iterdir()] == ["step-00000003.json"]


def test_a_file_that_is_no_timeline_stays(tmp_path):
    (tmp_path / "timeline").mkdir()
    names = ["step-00000009.json", "step-x.json", "step-\u00b2.json"]
    for name in names:
        (tmp_path / "timeline" / name).touch()
    RunDirectory(tmp_path, "", 4)
    assert sorted(os.listdir(tmp_path / "timeline")) == sorted(names[1:])


def test_a_damaged_file_done_is_written_again(tmp_path):
    (tmp_path / "done").write_bytes(b"\xff\xfe")
    mark_done(tmp_path, 4)
    assert (tmp_path / "done").read_text() == '{"steps": 4}\n'


def test_damaged_records_are_said_and_kept(tmp_path, capsys):
    """A torn last line is no damage: a run that dies while it writes leaves one."""
    whole = b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st'
    (tmp_path / "metrics.jsonl").write_bytes(whole)
    RunDirectory(tmp_path, "", 2)
    assert "warning" not in capsys.readouterr().out
    assert not (tmp_path / "metrics.damaged.jsonl").exists()

    damaged = b'{"step": 1}\n\xff{"step": 2}\n{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    RunDirectory(tmp_path, "", 3)
    assert "1 damaged line is left out; metrics.damaged.jsonl has" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 3}\n'
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == damaged


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "history.jsonl"])
def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path, name):
    (tmp_path / name).symlink_to(name)
    with pytest.raises(InputError, match=r"Too many levels of symbolic links"):
        RunDirectory(tmp_path, "", 0)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("target", ["checkpoints", "nowhere", "file"])
def test_checkpoints_that_are_no_folder_are_refused_at_the_start(tmp_path, target):
    """Records of earlier steps stay."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    (tmp_path / "file").touch()
    (tmp_path / "checkpoints").symlink_to(target)
    with pytest.raises(InputError, match="checkpoints is not a folder"):
        RunDirectory(tmp_path, "", 0)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3}\n'


def test_a_limit_on_the_size_of_files_is_named(tmp_path):
    """All lines are written, or none; the error is that of the system."""
    code = (
        "import resource, sys; from pathlib import Path;"
        "from ptdmpi.train.records.directory import append_lines;"
        "path = Path(sys.argv[1]); append_lines(path, 'first\\n');"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, -1)); append_lines(path, 'second\\n')"
    )
    path = tmp_path / "log.txt"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
    )
    assert "OSError: [Errno 27] File too large" in ended.stderr
    assert path.read_text() == "first\n"
