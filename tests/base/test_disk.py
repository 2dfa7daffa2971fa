"""Files that appear as a whole or not at all."""

import errno
import os

import pytest

from ptdmpi.base.disk import put_in_place, replacing, write_whole


def _full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("content", ["größer\n", b"\x00\xff", ""])
def test_a_file_is_written_and_replaced(tmp_path, content):
    path = tmp_path / "a.toml"
    path.write_text("before")
    write_whole(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["a.toml"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, fails):
    path = tmp_path / "a.toml"
    path.write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr(os, fails, _full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a.toml"]


def test_a_block_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    """The file's own sync, the rename, the directory's sync: in this order."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_replace(source, target):
        seen.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    (tmp_path / "draft").write_text("x")
    put_in_place(tmp_path / "draft", tmp_path / "a")
    assert seen == [str(tmp_path / "draft"), "rename", str(tmp_path)]
