"""The files of a checkpoint: the format, any box from any boxes, only the bytes that are needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ptdmpi.base.box import Box
from ptdmpi.checkpoint import boxes as module
from ptdmpi.checkpoint.boxes import GAP_BYTES, Damaged, Reader, write
from ptdmpi.checkpoint.manifest import sound_manifest
from ptdmpi.config import InputError
from tests import _checkpoints as made
from tests._checkpoints import SHAPE, boxes, outgoing, save, values


def _reader(checkpoint):
    return Reader(checkpoint, sound_manifest(checkpoint))


def test_the_library_reads_what_is_written(tmp_path):
    tensors = values()
    parts = [outgoing(name, one, Box.whole(one.shape)) for name, one in tensors.items()]
    report = write(tmp_path / "a.safetensors", parts)
    assert report.bytes == (tmp_path / "a.safetensors").stat().st_size
    found = load_file(tmp_path / "a.safetensors")
    for number, (name, tensor) in enumerate(tensors.items()):
        np.testing.assert_array_equal(found[f"{name}#{number}"], tensor)


@pytest.mark.parametrize("gap_bytes", [GAP_BYTES, 0])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_box_from_any_boxes(tmp_path_factory, gap_bytes, data):
    cut = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2), (4, 5)]))
    box = Box.whole(SHAPE)
    for dim, size in enumerate(SHAPE):
        start = data.draw(st.integers(0, size - 1))
        box = box.along(dim, start, data.draw(st.integers(start + 1, size)))
    checkpoint = save(tmp_path_factory.mktemp("any"), cut=cut)
    with pytest.MonkeyPatch.context() as patch, _reader(checkpoint) as reader:
        patch.setattr(module, "GAP_BYTES", gap_bytes)
        table = values()["weights/table"]
        # into a part of a larger array, which must not be touched elsewhere, in another type
        whole = np.full(SHAPE, 7.0, dtype=data.draw(st.sampled_from(["float32", "float64"])))
        expected = whole.copy()
        expected[box.index] = table[box.index]
        reader.read("weights/table", box, whole[box.index])
        np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize(
    ("cut", "box", "read"),
    [
        ((1, 1), Box((3, 0), (5, 2000)), 2 * 2000),  # rows
        ((1, 1), Box((0, 0), (12, 500)), 12 * 500),  # columns, far apart
        ((2, 2), Box((0, 1000), (6, 2000)), 6 * 1000),  # one of four boxes
        ((4, 1), Box((2, 0), (4, 10)), 2 * 10),  # a corner in two of four boxes
    ],
)
def test_only_the_bytes_of_the_box_are_read(tmp_path, monkeypatch, cut, box, read):
    monkeypatch.setattr(made, "SHAPE", (12, 2000))
    table = np.arange(24000, dtype="float32").reshape(12, 2000)
    checkpoint = save(tmp_path, tensors={"weights/table": table}, cut=cut)
    with _reader(checkpoint) as reader:
        target = np.zeros(box.size, "float32")
        reader.read("weights/table", box, target)
    np.testing.assert_array_equal(target, table[box.index])
    assert reader.read_bytes == 4 * read


def test_a_whole_piece_is_checked_while_it_is_read(tmp_path):
    checkpoint = save(tmp_path, cut=(2, 1))
    path = checkpoint / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with _reader(checkpoint) as reader:
        upper, lower = boxes(2, 1)
        target = np.zeros((6, 10), "float32")
        reader.read("weights/table", upper, target)
        with pytest.raises(Damaged, match=r"rank-00001.*weights/table#0 is damaged"):
            reader.read("weights/table", lower, target)
        # a part of a piece cannot be checked, and is not called so
        reader.read("weights/table", Box((6, 0), (7, 10)), target[:1])
        names = [name for name, _ in reader.pieces]
        assert reader.checked.tolist() == [int(n == 1) for n in range(len(names))]
        with pytest.raises(Damaged):
            reader.check(2)


def test_a_file_that_is_too_short_or_missing(tmp_path):
    checkpoint = save(tmp_path, cut=(2, 1))
    manifest = sound_manifest(checkpoint)
    path = checkpoint / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    whole = Box.whole(SHAPE)
    with Reader(checkpoint, manifest) as reader, pytest.raises(Damaged, match="too short"):
        reader.read("weights/table", whole, np.zeros(SHAPE, "float32"))
    path.unlink()
    with Reader(checkpoint, manifest) as reader, pytest.raises(Damaged, match="No such file"):
        reader.read("weights/table", whole, np.zeros(SHAPE, "float32"))


def test_tensors_of_another_model_are_refused(tmp_path):
    with _reader(save(tmp_path)) as reader:
        with pytest.raises(InputError, match="weights/other is missing"):
            reader.require("weights/other", (1,))
        with pytest.raises(InputError, match=r"has shape \[7\], this model needs \[8\]"):
            reader.require("weights/bias", (8,))
