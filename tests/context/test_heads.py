"""Attention whose heads are dealt over the context axis: the bits of one rank's core, with the
gradients of one rank, also of key heads that are repeated."""

from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.model.documents import Documents
from ptdmpi.model.operators import Build, Context, SelfAttention
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sequence.heads import all_heads, part_of_heads
from ptdmpi.model.tensor_parallel import TensorAxis
from tests._configs import small
from tests._layers import TOLERANCES, difference, random_tensor
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


class Core:
    """The core of attention of a context axis, on inputs that are the same on every rank."""

    def __init__(self, name: str, axis: ContextAxis, precision: str) -> None:
        changes = {"model.seq_length": S, "model.sliding_window": 0, **SHAPES[name]}
        if name != "bert":
            changes = {"model.kind": "mistral", "model.ffn_hidden": 48, **changes}
        model = small(changes).model
        self.axis = axis
        self.attention = SelfAttention(Build(model, TensorAxis(OneRank()), 0, False, axis))
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
        if self.axis.size == 1:
            return self.attention(*self.inputs, self.context)
        dealt = part_of_heads(*self.inputs, self.axis)
        return all_heads(self.attention(*dealt, self.context), self.axis)


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


@parallel(ranks=[2, 4])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_core_has_the_bits_of_one_rank(comm, name, precision):
    alone = Core(name, ContextAxis(MpiCommunicator(MPI.COMM_SELF)), precision)
    dealt = Core(name, ContextAxis(MpiCommunicator(comm), "ulysses"), precision)
    expected = results(alone, lambda core, part, dim: part)
    found = results(dealt, whole)
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert difference(one, other) < TOLERANCES.get(precision, 1e-2)
