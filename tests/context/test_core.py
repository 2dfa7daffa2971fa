"""The core of attention on a context axis against that of one rank: "ulysses" has its bits, "ring"
its values, both have its gradients."""

from collections.abc import Callable, Iterator

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels.blocks import Scores, Sight
from ptdmpi.model.kernels.host import HALF_TYPES
from ptdmpi.model.operators import Build, Context, SelfAttention
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sequence.heads import all_heads, part_of_heads
from ptdmpi.model.sequence.ring import RingWork, ring_attention
from ptdmpi.model.tensor_parallel import TensorAxis
from tests._configs import small
from tests._layers import TOLERANCES, difference, random_tensor
from tests.comm._wires import FastCommunicator
from tests.parallel import parallel

B, HEADS, S, D = 2, 4, 24, 8
SHAPES = {
    "causal": {},
    "grouped": {"model.kv_heads": 2},
    "one key head": {"model.kv_heads": 1},
    "window": {"model.kv_heads": 2, "model.sliding_window": 5},
    "softcap": {"model.kv_heads": 2, "model.attention_softcap": 3.0},
    "documents": {"model.kv_heads": 2},
    "dropout": {"model.attention_dropout": 0.2, "model.kv_heads": 2},
    "bert": {"model.kind": "bert", "model.attention_dropout": 0.2},
}
NUMBERS = torch.tensor([[0] * 7 + [1] * 17, [0] * 20 + [1] * 4])


class Multiplying(Kernels):
    """Kernels that multiply half types in one way on every processor: in their own type, or, if
    `in_float32`, in float32."""

    def __init__(self, in_float32: bool) -> None:
        super().__init__()
        self.in_float32 = in_float32

    def widens(self, device_type: str, dtype: torch.dtype) -> bool:
        """Return True if products of this type are computed in float32."""
        return self.in_float32 and dtype in HALF_TYPES


class Core:
    """The core of attention of a context axis, on inputs that are the same on every rank.
    `precision` may end in "widened"."""

    def __init__(self, name: str, axis: ContextAxis, precision: str) -> None:
        precision, _, widened = precision.partition(" ")
        changes = {"model.seq_length": S, "model.sliding_window": 0, **SHAPES[name]}
        if name != "bert":
            changes = {"model.kind": "mistral", "model.ffn_hidden": 48, **changes}
        model = small(changes).model
        self.axis = axis
        self.attention = SelfAttention(Build(model, TensorAxis(OneRank()), 0, False, axis))
        self.attention.take(Multiplying(bool(widened)))
        here = axis.positions
        stream = RandomStream.of(1, 2, torch.arange(B), here)
        documents = Documents.of(NUMBERS) if name == "documents" else None
        self.context = Context(stream, documents, positions=here)
        shapes = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
        self.inputs = [
            here.of(random_tensor(name, (B, heads, S, D), precision), 2).requires_grad_()
            for name, heads in shapes.items()
        ]

    def __call__(self) -> Tensor:
        if self.axis.exchange != "ulysses":
            return self.attention(*self.inputs, self.context)
        dealt = part_of_heads(*self.inputs, self.axis)
        return all_heads(self.attention(*dealt, self.context), self.axis, kept=True)


def whole(core: Core, part: Tensor, dim: int) -> Tensor:
    """The tensor at all positions, from each rank's part of it."""
    gathered = core.axis.comm.all_gather(part.movedim(dim, 0).contiguous())
    return core.axis.in_order(gathered).movedim(0, dim)


def results(core: Core, gather: Callable[[Core, Tensor, int], Tensor]) -> list[Tensor]:
    """The output and the gradients of queries, keys and values, at all positions."""
    y = core()
    dy = random_tensor("dy", (S, B, HEADS * D), "fp64").to(y.dtype)
    y.backward(core.axis.positions.of(dy))
    gradients = [gather(core, x.grad, 2) for x in core.inputs]
    return [gather(core, y.detach(), 0), *gradients]


HALVES = {"bf16": 1e-2, "bf16 widened": 1e-2, "fp16": 1e-3, "fp16 widened": 1e-3}
# bars of the gradients, which are summed over the copies of key heads
SUMMED = {**TOLERANCES, **HALVES}


@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("precision", SUMMED)
@pytest.mark.parametrize("name", SHAPES)
def test_dealt_heads_have_the_bits_of_one_rank(comm, name, precision):
    alone = Core(name, ContextAxis(MpiCommunicator(MPI.COMM_SELF)), precision)
    dealt = Core(name, ContextAxis(MpiCommunicator(comm), "ulysses"), precision)
    expected = results(alone, lambda core, part, dim: part)
    found = results(dealt, whole)
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert difference(one, other) < SUMMED[precision]


# Of half types the ring multiplies weights before they are divided by their sum, so their rounding
# differs.
MERGED = {"fp64": 1e-14, "fp32": 2e-6, **{half: 2 * bar for half, bar in HALVES.items()}}


@pytest.mark.cases(30)
@parallel(ranks=[2, 3, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("precision", MERGED)
@pytest.mark.parametrize("name", SHAPES)
def test_a_ring_has_the_values_of_one_rank(comm, name, precision):
    alone = Core(name, ContextAxis(MpiCommunicator(MPI.COMM_SELF)), precision)
    ring = Core(name, ContextAxis(MpiCommunicator(comm), "ring"), precision)
    expected = results(alone, lambda core, part, dim: part)
    for one, other in zip(results(ring, whole), expected, strict=True):
        assert difference(one, other) < MERGED[precision]


@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SHAPES)
def test_keys_that_travel_while_a_rank_computes_give_the_same_bits(comm, name):
    """On a wire whose messages are complete only when they have been waited for."""
    usual = Core(name, ContextAxis(MpiCommunicator(comm), "ring"), "fp32")
    later = Core(name, ContextAxis(FastCommunicator(comm), "ring"), "fp32")
    for one, other in zip(results(usual, whole), results(later, whole), strict=True):
        assert torch.equal(one, other)
    assert not later.axis.comm.under_way


def large(length: int, heads: int, key_heads: int) -> Iterator[Tensor]:
    """Queries, keys and values [1, heads, s, d] with scores of up to a hundred."""
    for name, count in {"q": heads, "k": key_heads, "v": key_heads}.items():
        yield 3.0 * random_tensor(name, (1, count, length, D), "fp64")


@parallel(ranks=[4])
@pytest.mark.parametrize("window", [0, 70])
def test_large_scores_and_several_blocks_of_queries(comm, window):
    """Exponentials neither overflow nor vanish, and blocks of 128 queries meet chunks of 160."""
    axis = ContextAxis(MpiCommunicator(comm), "ring")
    q, k, v = large(1280, 2, 1)
    sight = Sight(Scores(1.0, True, window, 0.0), None, axis.positions)
    here = [axis.positions.of(x, 2).contiguous() for x in (q, k, v)]
    found = ring_attention(*here, RingWork(axis, sight, Kernels()))
    place = torch.arange(1280)
    hidden = place > place[:, None]
    if window:
        hidden |= place <= place[:, None] - window
    scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
    assert scores.max() > 100
    assert difference(found, axis.positions.of(scores.softmax(-1) @ v, 2)) < 1e-12
