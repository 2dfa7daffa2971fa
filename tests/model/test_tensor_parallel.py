"""Layers divided over the tensor axis give the values and gradients of plain PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.comm.communicator import Handle
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.model.output.cross_entropy import cross_entropy
from ptdmpi.model.output.vocabulary import VocabularyHead
from ptdmpi.model.tables import VocabularyEmbedding
from ptdmpi.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorAxis,
)
from tests._layers import (
    DTYPES,
    TOLERANCES,
    Placed,
    columns,
    difference,
    positions,
    random_tensor,
    tensor_axis,
)
from tests._reference import leaves
from tests.parallel import parallel

S, B = 8, 3
each_type = pytest.mark.parametrize("precision", ["fp32", "fp64"])
each_form = pytest.mark.parametrize("sequence_parallel", [False, True])


class CountingCommunicator(MpiCommunicator):
    """Keeps the bytes that this rank brings to each collective."""

    def __init__(self, control) -> None:
        super().__init__(control)
        self.calls: list[tuple[str, int]] = []

    def all_reduce_begin(self, tensor: Tensor, op: str = "sum") -> Handle:
        self.calls.append((f"all-reduce {op}", tensor.nbytes))
        return super().all_reduce_begin(tensor, op)

    def all_gather_begin(self, tensor: Tensor) -> tuple[Tensor, Handle]:
        self.calls.append(("all-gather", tensor.nbytes))
        return super().all_gather_begin(tensor)

    def reduce_scatter_begin(self, tensor: Tensor) -> tuple[Tensor, Handle]:
        self.calls.append(("reduce-scatter", tensor.nbytes))
        return super().reduce_scatter_begin(tensor)


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@each_type
@each_form
@pytest.mark.parametrize("bias", [False, True])
def test_column_linear_matches_serial(comm, precision, sequence_parallel, bias):
    axis = tensor_axis(comm, sequence_parallel)
    parts = (8, 4, 4)
    placed = Placed(ColumnParallelLinear(axis, 12, parts, bias=bias, init_std=0.1), axis, precision)
    x = random_tensor("x", (S, B, 12), precision).requires_grad_()
    dy = random_tensor("dy", (S, B, 16), precision)
    serial = leaves(placed.whole)
    y = F.linear(x, serial["weight"], serial.get("bias"))
    y.backward(dy)

    mine = positions(x.detach(), axis).clone().requires_grad_()
    found = placed.layer(mine)
    found.backward(columns(dy, parts, axis))

    assert difference(found, columns(y, parts, axis)) < TOLERANCES[precision]
    assert difference(mine.grad, positions(x.grad, axis)) < TOLERANCES[precision]
    placed.check_gradients(serial, precision)


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@each_type
@each_form
@pytest.mark.parametrize("bias", [False, True])
def test_row_linear_matches_serial(comm, precision, sequence_parallel, bias):
    axis = tensor_axis(comm, sequence_parallel)
    placed = Placed(RowParallelLinear(axis, 12, 10, bias=bias, init_std=0.1), axis, precision)
    x = random_tensor("x", (S, B, 12), precision).requires_grad_()
    dy = random_tensor("dy", (S, B, 10), precision)
    serial = leaves(placed.whole)
    y = F.linear(x, serial["weight"], serial.get("bias"))
    y.backward(dy)

    mine = columns(x.detach(), (12,), axis).requires_grad_()
    found = placed.layer(mine)
    found.backward(positions(dy, axis))

    assert difference(found, positions(y, axis)) < TOLERANCES[precision]
    assert difference(mine.grad, columns(x.grad, (12,), axis)) < TOLERANCES[precision]
    placed.check_gradients(serial, precision)


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@each_type
@each_form
@pytest.mark.parametrize("vocab_size", [11, 5])
def test_vocabulary_embedding_matches_serial(comm, precision, sequence_parallel, vocab_size):
    axis = tensor_axis(comm, sequence_parallel)
    placed = Placed(VocabularyEmbedding(axis, vocab_size, 6, 0.1), axis, precision)
    ids = torch.randint(vocab_size, (S, B), generator=torch.Generator().manual_seed(0))
    dy = random_tensor("dy", (S, B, 6), precision)
    serial = leaves(placed.whole)
    y = F.embedding(ids, serial["weight"])
    y.backward(dy)

    found = placed.layer(ids)
    found.backward(positions(dy, axis))

    assert difference(found, positions(y, axis)) < TOLERANCES[precision]
    placed.check_gradients(serial, precision)


def head_and_loss(placed: Placed, vocab_size: int, masked: bool, precision: str):
    """Loss and input gradient of the head on `placed`, and of F.cross_entropy."""
    axis = placed.axis
    x = random_tensor("x", (S, B, 6), precision).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(vocab_size, (S, B), generator=generator)
    mask = (torch.rand(S, B, generator=generator) < 0.7).float() if masked else None
    serial = leaves(placed.whole)
    rows = F.linear(x, serial["weight"]).flatten(0, 1)
    losses = F.cross_entropy(rows, labels.flatten(), reduction="none")
    loss = (losses * (1 if mask is None else mask.flatten())).sum()
    (loss / 7).backward()

    mine = positions(x.detach(), axis).clone().requires_grad_()
    found = cross_entropy(placed.layer(mine), labels, mask, axis)
    (found / 7).backward()
    assert difference(found, loss) < TOLERANCES[precision]
    assert difference(mine.grad, positions(x.grad, axis)) < TOLERANCES[precision]
    placed.check_gradients(serial, precision)
    return found.detach(), mine.grad


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@each_type
@each_form
@pytest.mark.parametrize("vocab_size", [11, 5, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_head_and_loss_matches_serial(comm, precision, sequence_parallel, vocab_size, masked):
    axis = tensor_axis(comm, sequence_parallel)
    placed = Placed(VocabularyHead(axis, vocab_size, 6, init_std=0.1), axis, precision)
    head_and_loss(placed, vocab_size, masked, precision)


@parallel(ranks=[2, 4])
@pytest.mark.parametrize("vocab_size", [11, 5])
def test_padding_never_reaches_the_loss(comm, vocab_size):
    axis = tensor_axis(comm, False)
    placed = Placed(VocabularyHead(axis, vocab_size, 6, init_std=0.1), axis, "fp64")
    loss, dx = head_and_loss(placed, vocab_size, True, "fp64")
    local = placed.buffer.entries["weight"].view(placed.buffer.gradients)
    valid = placed.layer.valid_columns
    assert axis.comm.all_reduce(torch.tensor([len(local) - valid])) > 0
    assert not local[valid:].any(), "padded rows have a gradient"

    placed.layer.weight.data[valid:] = 1e6
    placed.buffer.gradients.zero_()
    loss_again, dx_again = head_and_loss(placed, vocab_size, True, "fp64")
    assert torch.equal(loss, loss_again)
    assert torch.equal(dx, dx_again)
    assert not local[valid:].any()


@parallel(ranks=[1, 4])
def test_loss_survives_large_logits(comm):
    axis = tensor_axis(comm, False)
    logits = torch.tensor([[[1e4, 0.0, -1e4, 5e3]]])
    mine = columns(logits, (4,), axis)
    # the loss overwrites the logits that it is given
    found = [float(cross_entropy(mine.clone(), torch.tensor([[k]]), None, axis)) for k in range(4)]
    assert found == [0.0, 1e4, 2e4, 5e3]


@parallel(ranks=[4])
@each_type
def test_logits_are_never_gathered(comm, precision):
    counted = CountingCommunicator(comm)
    axis = TensorAxis(counted)
    vocab_size, tokens = 1001, S * B
    placed = Placed(VocabularyHead(axis, vocab_size, 6, init_std=0.1), axis, precision)
    x = random_tensor("x", (S, B, 6), precision).requires_grad_()
    labels = torch.arange(tokens).view(S, B)
    loss = cross_entropy(placed.layer(x), labels, None, axis)
    item = DTYPES[precision].itemsize
    forward = [("all-reduce max", tokens * item), ("all-reduce sum", 2 * tokens * item)]
    assert counted.calls == forward
    loss.backward()
    assert counted.calls == [*forward, ("all-reduce sum", tokens * 6 * item)]


@parallel(ranks=[4])
def test_sequence_parallel_moves_as_many_bytes_as_tensor_parallel(comm):
    """Korthikanti et al. 2022, section 4.2.2: an all-reduce is a reduce-scatter and an all-gather.

    Counted in what crosses the wire: an all-reduce brings the tensor and takes it back.
    """
    counted = CountingCommunicator(comm)
    whole = S * B * 8 * 8
    for sequence_parallel in (False, True):
        axis = TensorAxis(counted, sequence_parallel)
        column = Placed(
            ColumnParallelLinear(axis, 8, (16,), bias=False, init_std=0.1), axis, "fp64"
        )
        row = Placed(RowParallelLinear(axis, 16, 8, bias=False, init_std=0.1), axis, "fp64")
        x = positions(random_tensor("x", (S, B, 8), "fp64"), axis).clone().requires_grad_()
        counted.calls.clear()
        y = row.layer(column.layer(x))
        forward = list(counted.calls)
        y.backward(torch.ones_like(y))
        backward = counted.calls[len(forward) :]
        if sequence_parallel:
            part = whole // comm.size
            assert forward == [("all-gather", part), ("reduce-scatter", whole)]
            # the input is gathered once more for its weight gradient instead of being kept whole
            assert sorted(backward) == [
                ("all-gather", part),
                ("all-gather", part),
                ("reduce-scatter", whole),
            ]
        else:
            assert forward == backward == [("all-reduce sum", whole)]
