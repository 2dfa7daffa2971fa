"""Checkpoints as directories: the manifest, retention, and what crashes at odd moments leave."""

import errno
import json
import os
import shutil

import pytest

from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.manifest import (
    Progress,
    Written,
    read_manifest,
    sound_manifest,
    write_manifest,
)
from ptdmpi.config import InputError
from tests._checkpoints import save


def _steps(directory) -> list[int]:
    return [files.step_of(path) for path in files.checkpoints_in(directory)]


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (2, 0, [5, 6]),
        (2, 2, [2, 4, 5, 6]),
        (1, 3, [3, 6]),
        (0, 0, [1, 2, 3, 4, 5, 6]),
        (9, 0, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_retention(tmp_path, keep, keep_every, left):
    for step in range(1, 7):
        save(tmp_path, step)
    for path in list(files.superfluous(tmp_path, keep, keep_every)):
        files.discard(path)
    assert _steps(tmp_path) == left
    assert not list(tmp_path.glob("*.tmp"))


def test_checkpoints_that_are_kept_in_any_case_are_not_read(tmp_path, monkeypatch):
    for step in range(1, 9):
        save(tmp_path, step)
    read = []
    sound = files.is_sound
    monkeypatch.setattr(files, "is_sound", lambda path: read.append(path) or sound(path))
    spared = [tmp_path / "step-00000005"]
    gone = list(files.superfluous(tmp_path, 1, 2, spared=spared))
    assert [files.step_of(path) for path in gone] == [7, 3, 1]
    assert [files.step_of(path) for path in read] == [8, 7, 3, 1]


def test_a_name_that_is_not_that_of_the_step_is_no_sound_checkpoint(tmp_path):
    save(tmp_path, 1).rename(tmp_path / "step-00000009")
    assert not files.is_sound(tmp_path / "step-00000009")
    save(tmp_path, 2).rename(tmp_path / "copy")
    assert files.is_sound(tmp_path / "copy")


def test_damaged_checkpoints_are_neither_counted_nor_removed(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / "step-00000005/rank-00001.safetensors").unlink()
    (tmp_path / "step-00000001/manifest.json").write_text("{")
    gone = list(files.superfluous(tmp_path, 1, 0, damaged=["step-00000004"]))
    assert [path.name for path in gone] == ["step-00000002"]


def test_latest_names_the_newest_even_where_it_was_a_link(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step-00000001")
    assert files.named(tmp_path / "latest").resolve() == tmp_path / "step-00000001"
    save(tmp_path, 2)
    assert not (tmp_path / "latest").is_symlink()
    assert files.named(tmp_path / "latest") == tmp_path / "step-00000002"
    assert (tmp_path / "step-00000001/manifest.json").exists()


def test_leftovers_go_with_the_next_save_and_complete_ones_stay(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002.tmp")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000007")
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000003",
        "step-00000007",
    ]


def test_a_leftover_that_cannot_be_removed_is_named_with_its_folder(tmp_path, monkeypatch):
    """shutil.rmtree gives the name of a file without its folder."""
    left = tmp_path / "step-00000004.tmp"
    left.mkdir()
    (left / "rank-00000.safetensors").touch()

    def refuse(path, *, dir_fd=None):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(OSError, match=f"Permission denied: '{left}/rank-00000.safetensors'"):
        files.remove_leftovers(tmp_path)


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_file_with_the_name_of_a_leftover_does_not_keep_a_run_from_saving(tmp_path, kind):
    path = tmp_path / "step-00000009.tmp"
    other = tmp_path / "step-00000001.replaced"
    save(tmp_path, 1)
    for one in (path, other):
        os.mkfifo(one) if kind == "pipe" else one.write_text("x")
    files.put_back(tmp_path)
    files.prepare(tmp_path, 2, 0)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001", "step-00000002.tmp"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_a_damaged_marker_of_a_branch_says_as_little_as_none(tmp_path, content):
    source = tmp_path / "other" / "step-00000001"
    source.mkdir(parents=True)
    here = tmp_path / "checkpoints"
    save(here / "step-00000002", 2)
    files.branch(here, source)
    (here / files.BRANCHED_FROM).write_bytes(content)
    assert not files.went_on_from(here, source)


def test_a_marker_whose_source_is_no_checkpoint_is_damaged(tmp_path):
    save(tmp_path, 1)
    (tmp_path / files.BRANCHED_FROM).write_text(f"{tmp_path / 'step-x'}\n{tmp_path}\n")
    assert files.went_on_from(tmp_path, tmp_path)


def test_the_same_step_again(tmp_path, monkeypatch):
    """A crash between the two renames leaves the old one to be put back."""
    old = save(tmp_path, 1)
    before = (old / "manifest.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", _stop)
        with pytest.raises(KeyboardInterrupt):
            files.publish(_copy(old, "step-00000001.tmp"), ())
    assert (old / "manifest.json").exists()
    old.rename(tmp_path / "step-00000001.tmp")  # as if it had come before the second rename
    assert _steps(tmp_path) == []
    files.put_back(tmp_path)
    assert (old / "manifest.json").read_bytes() == before
    files.publish(_copy(old, "step-00000001.tmp"), ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def _stop(path):
    raise KeyboardInterrupt


def _copy(path, name):
    target = path.with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(path, target)


def test_a_damaged_one_makes_room_without_being_removed(tmp_path):
    for _ in range(3):
        old = save(tmp_path, 1)
        files.publish(_copy(old, "step-00000001.tmp"), ["step-00000001"])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[:3] == ["latest", "step-00000001", "step-00000001.damaged"]
    assert "step-00000001.damaged2" in names and "step-00000001.damaged3" in names


MANIFESTS = {
    "missing": (None, "No such file"),
    "truncated": (lambda text: text[:-40], "not JSON"),
    "empty": (lambda text: "", "not JSON"),
    "binary": (lambda text: "\udcff", "not JSON"),
    "list": (lambda text: "[]", "format_version None"),
    "future": (lambda text: text.replace('_version": 2', '_version": 3'), "this program reads 2"),
    "flipped": (lambda text: text.replace('"step": 3', '"step": 2'), "checksum"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_bad_manifests_are_refused_by_name(tmp_path, kind):
    change, words = MANIFESTS[kind]
    path = save(tmp_path) / "manifest.json"
    text = path.read_text()
    path.unlink()
    if change:
        path.write_bytes(change(text).encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=words) as failure:
        read_manifest(path.parent)
    assert str(path) in str(failure.value)


def test_files_of_another_size_are_seen_without_reading_them(tmp_path):
    path = save(tmp_path) / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(InputError, match=r"bytes instead of"):
        sound_manifest(path.parent)


def test_a_file_that_rank_0_does_not_see(tmp_path):
    temporary = files.prepare(tmp_path, 1, 0)
    part = Written("rank-00001.safetensors", 10, {})
    with pytest.raises(InputError, match="all nodes share"):
        write_manifest(temporary, Progress(1, 8, updates=1, seed=1), {}, written=[part])


def test_too_little_space_is_said_before_anything_is_written(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(InputError, match=r"needs .* MB, .* free"):
        files.prepare(tmp_path, 2, 1 << 60)
    assert _steps(tmp_path) == [1] and not list(tmp_path.glob("*.tmp"))
    with pytest.raises(InputError, match="free"):
        files.require_space(tmp_path / "not/yet", 1 << 60)


def test_the_manifest_is_plain_json(tmp_path):
    manifest = json.loads((save(tmp_path) / "manifest.json").read_text())
    assert manifest["progress"]["samples"] == 24
    assert manifest["tensors"]["weights/table"]["shape"] == [12, 10]
