"""The positions of a rank: every position once over the ranks that cut the sequence, and whatever
asks for positions computes at these what it computes of the whole sequence."""

import itertools

import pytest
import torch

from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import blocks
from ptdmpi.model.kernels.attention import AttentionCore, hidden_keys
from ptdmpi.model.kernels.blocks import Scores, Sight
from ptdmpi.model.operators import Context
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.positions import ALL, Positions
from ptdmpi.model.transformer import Embedding
from tests._configs import small
from tests._layers import CPU, Placed, tensor_axis

KINDS = {
    "causal": Scores(0.3),
    "both sides": Scores(0.3, causal=False),
    "window": Scores(0.3, window=40),
    "capped": Scores(0.3, softcap=2.0),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shares", [1, 2, 3])
def test_every_position_is_on_one_rank(size, shares):
    length = 2 * size * shares * 5
    found = []
    for rank, share in itertools.product(range(size), range(shares)):
        here = Positions(rank, size).shared(share, shares)
        runs = list(itertools.chain(*here.runs(length)))
        numbers = here.numbers(length // here.parts, CPU)
        assert numbers.tolist() == runs == sorted(numbers.tolist())
        assert torch.equal(here.of(torch.arange(length)), numbers)
        found += numbers.tolist()
    assert sorted(found) == list(range(length))


def test_zigzag_gives_every_rank_the_same_causal_work():
    size = 4
    work = [int((Positions(r, size).numbers(24, CPU) + 1).sum()) for r in range(size)]
    assert len(set(work)) == 1
    assert list(Positions(1, 4).runs(16)) == [range(2, 4), range(12, 14)]
    assert list(Positions(1, 4).shared(1, 2).runs(16)) == [range(12, 14)]
    assert ALL.are_all and ALL.of(torch.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("length", [10, 4, 18])
def test_a_length_without_equal_chunks_is_an_error(length):
    with pytest.raises(ValueError, match="cannot be cut"):
        list(Positions(0, 4).runs(length))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize(("length", "whole_run"), [(48, 768), (1200, 768), (1200, 200)])
def test_attention_at_some_positions(kind, in_documents, length, whole_run, monkeypatch):
    """Queries of three dummy ranks, with all keys: rows of the whole, and their gradients."""
    # a rank's runs have length / 6 queries
    monkeypatch.setattr(blocks, "WHOLE_RUN", whole_run)
    generator = torch.Generator().manual_seed(1)
    shape = (2, 2, length, 8)
    q, k, v, dout = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    documents = None
    if in_documents:
        begins = torch.rand(2, length, generator=generator) < 8 / length
        documents = Documents.of(begins.cumsum(1))
    core = AttentionCore(KINDS[kind])
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = core(*inputs, documents)
    whole.backward(dout)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rank in range(3):
        here = Positions(rank, 3)
        own = [x.clone().requires_grad_() for x in (here.of(q, 2), k, v)]
        out = core(*own, documents, positions=here)
        torch.testing.assert_close(out, here.of(whole, 2), rtol=0, atol=1e-13)
        out.backward(here.of(dout, 2))
        torch.testing.assert_close(own[0].grad, here.of(inputs[0].grad, 2), rtol=0, atol=1e-12)
        dk += own[1].grad
        dv += own[2].grad
        hidden = hidden_keys(k, Sight(KINDS[kind], documents, here))
        every = hidden_keys(k, Sight(KINDS[kind], documents))
        assert (hidden is None) == (every is None)
        assert hidden is None or torch.equal(hidden, here.of(every, -2))
    torch.testing.assert_close(dk, inputs[1].grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(dv, inputs[2].grad, rtol=0, atol=1e-12)


def test_dropout_and_learned_positions():
    """A dummy rank's masks and rows of the table are those of its positions."""
    from mpi4py import MPI

    config = small({"model.seq_length": 16, "model.dropout": 0.3})
    axis = tensor_axis(MPI.COMM_SELF, False)
    stream = RandomStream.of(1, 2, torch.arange(2))
    embedding = Placed(Embedding(config.model, axis, 101), axis, "fp32").layer
    ids = torch.arange(32).view(16, 2)
    whole = embedding(ids, Context(stream))
    for rank in range(2):
        here = Positions(rank, 2)
        context = Context(RandomStream.of(1, 2, torch.arange(2), here), positions=here)
        assert torch.equal(embedding(here.of(ids), context), here.of(whole))
        mask = stream.at(4).attention_mask((2, 3, 16, 16), 0.5)
        own = context.stream.at(4).attention_mask((2, 3, 8, 16), 0.5)
        assert torch.equal(own, here.of(mask, 2))
