"""Files that appear as a whole or not at all."""

import errno
import os
import pwd
from pathlib import Path

import pytest

from ptdmpi.base.disk import (
    home_folder,
    open_file,
    put_in_place,
    read_file,
    replacing,
    user_cache,
    write_whole,
)
from tests._alarm import at_most


def _full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_user_without_a_home(monkeypatch):
    """The id of the user is not in the system's user database, and HOME is not set."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # raises KeyError
    assert home_folder() == Path("/") and user_cache() == Path("/.cache/ptdmpi")
    monkeypatch.setenv("HOME", "/home/x")
    assert user_cache() == Path("/home/x/.cache/ptdmpi")


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


def test_a_pipe_or_a_folder_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(OSError, match="is a pipe or a device, not a file"):
            write_whole(path, "x")
    for path in (tmp_path, Path(), Path("/")):
        with pytest.raises(IsADirectoryError):
            write_whole(path, "x")
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/a")
    (tmp_path / "loop").symlink_to("loop")
    for content in ("new", "newer"):
        write_whole(tmp_path / "link", content)
        assert (tmp_path / "folder" / "a").read_text() == content
    with pytest.raises(OSError, match="symbolic links"):
        write_whole(tmp_path / "loop", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "loop").is_symlink()
    assert os.listdir(tmp_path / "folder") == ["a"]


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


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_no_file(tmp_path, kind):
    """Opening the pipe would wait for ever, and reading the device would never end."""
    path = tmp_path / "a"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="is a pipe or a device"):
        read_file(path)
    with pytest.raises(OSError, match="is a pipe or a device"):
        open_file(path, "ab")


@pytest.mark.parametrize("mode", ["rb", "ab"])
def test_a_pipe_that_appears_after_the_check(tmp_path, monkeypatch, mode):
    """Another program replaces the file by a pipe just before it is opened."""
    path = tmp_path / "a"
    status = Path.stat

    def absent_at_first(self, **options):
        monkeypatch.setattr(Path, "stat", status)
        os.mkfifo(path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    monkeypatch.setattr(Path, "stat", absent_at_first)
    with at_most(5), pytest.raises(OSError, match="is a pipe or a device"):
        open_file(path, mode)


def test_a_file_is_read_and_appended_to(tmp_path):
    path = tmp_path / "a"
    for _ in range(2):
        with open_file(path, "ab") as file:
            file.write(b"line\n")
    assert read_file(path) == b"line\n" * 2
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
