"""Which token is of which document, across shards and at the edges of a window."""

import numpy as np
import pytest

from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.data.documents import Windows, with_documents
from tests._texts import byte_shards, tokens_of

LENGTH = 8
# documents end before, at and after the ends of windows
SHARDS = [["a" * 6, "b" * 30, "c", "", "d" * 9], ["e" * 40], ["f", "g" * 7, "h" * 7, "i" * 20]]


@pytest.fixture
def dataset(tmp_path):
    return byte_shards(tmp_path / "shards", SHARDS)


def by_hand(length: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Tokens of each window and the documents they are of."""
    windows = []
    owners = []
    for documents in SHARDS:
        ids = [tokens_of(document) for document in documents]
        stream = np.concatenate(ids)
        owner = np.repeat(np.arange(len(ids)), [len(number) for number in ids])
        for start in range(0, len(stream) - length, length):
            windows.append(stream[start : start + length + 1])
            owners.append(owner[start : start + length + 1])
    return windows, owners


def microbatch(dataset, ids: np.ndarray, mask: np.ndarray | None = None) -> MicrobatchRows:
    rows = dataset.read(ids, LENGTH)
    return MicrobatchRows(rows[:, :-1], rows[:, 1:], mask, ids)


def all_windows(dataset) -> tuple[Windows, np.ndarray]:
    ids = np.arange(dataset.samples(LENGTH))
    return Windows([dataset], lambda n: (np.zeros_like(n), n), LENGTH), ids


def test_every_window_knows_its_documents(dataset):
    windows, ids = all_windows(dataset)
    expected, owners = by_hand(LENGTH)
    assert (dataset.read(ids, LENGTH) == np.array(expected)).all()
    numbers = windows.documents(ids)
    owners = np.array(owners)
    assert ((numbers[:, 1:] != numbers[:, :-1]) == (owners[:, 1:] != owners[:, :-1])).all()
    assert (numbers[:, 0] == 0).all()
    assert (windows.documents(ids[[5, 2]]) == numbers[[5, 2]]).all()


def test_the_last_token_of_a_document_has_no_label(dataset):
    windows, ids = all_windows(dataset)
    formed = with_documents(windows, microbatch(dataset, ids))
    owners = np.array(by_hand(LENGTH)[1])
    assert (formed.weights == (owners[:, 1:] == owners[:, :-1])).all()
    ends = formed.weights == 0.0
    assert (formed.inputs[ends] == 256).all() and ends.any()
    assert (formed.documents == windows.documents(ids)[:, :-1]).all()


def test_windows_inside_a_document_stay_as_they_are(dataset):
    windows, _ = all_windows(dataset)
    inside = microbatch(dataset, np.array([1, 2]))
    assert with_documents(windows, inside) is inside
    padded = microbatch(dataset, np.array([0, 0]), np.array([[1.0] * 8, [0.0] * 8], np.float32))
    formed = with_documents(windows, padded)
    assert formed.weights[0].sum() == 7 and not formed.weights[1].any()
