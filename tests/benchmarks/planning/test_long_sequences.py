"""The work of context ranks if sequences have several documents, counted by the benchmark."""

import pytest
import torch

from benchmarks.planning import long_sequences
from ptdmpi.model.sequence.positions import Positions

LENGTH = 96


def begins_of(lengths: list[int]) -> torch.Tensor:
    firsts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return firsts.repeat_interleave(torch.tensor(lengths))


@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_scores_are_those_of_the_mask(context):
    begins = begins_of([5, 40, 1, 50])
    places = torch.arange(LENGTH)
    seen = (places <= places[:, None]) & (places >= begins[:, None])
    own = [Positions(rank, context).of(places) for rank in range(context)]
    expected = [[int(seen[queries][:, keys].sum()) for keys in own] for queries in own]
    assert long_sequences.scores_by_rank(begins, context).tolist() == expected


@pytest.mark.parametrize("context", [2, 3, 8])
def test_sequences_of_a_document_are_the_same_work_on_every_rank(context):
    counts = long_sequences.scores_by_rank(begins_of([LENGTH]), context)
    assert set(long_sequences.busiest(counts).values()) == {1.0}
    several = long_sequences.busiest(long_sequences.scores_by_rank(begins_of([90, 6]), context))
    assert several["ring"] >= several["all_gather"] > several["ulysses"] == 1.0


def test_drawn_documents_have_the_mean_length():
    generator = torch.Generator().manual_seed(2)
    documents, draws = 0, 10
    for _ in range(draws):
        begins = long_sequences.drawn_begins(1024, generator)
        assert len(begins) == long_sequences.PACKED_LENGTH
        assert (begins <= torch.arange(len(begins))).all() and (begins.diff() >= 0).all()
        documents += len(begins.unique())
    assert 920 < draws * long_sequences.PACKED_LENGTH / documents < 1120
