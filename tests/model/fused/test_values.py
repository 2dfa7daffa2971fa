"""Each kernel in Triton gives the values and gradients of torch's operations, in every type and for
sizes that fill no block, and moves the bytes that its equation needs."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels.activation import gated
from ptdmpi.model.kernels.dropout import drop_hidden
from ptdmpi.model.kernels.fused import KINDS
from ptdmpi.model.kernels.norm import rms_norm
from ptdmpi.model.kernels.rope import rotate
from ptdmpi.model.output.cross_entropy import cross_entropy
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.positions import Positions
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import chunks
from tests._layers import DTYPES, difference
from tests.model.fused._interpreted import ENVIRONMENT, NEEDS_TRITON, PROCESS, counted
from tests.parallel import parallel

__all__ = ["ENVIRONMENT", "PROCESS"]  # of the ranks that run these tests
pytestmark = NEEDS_TRITON

# The largest difference over the largest magnitude. Results of 16-bit types are rounded once, those
# of torch's operations several times.
CLOSE = {"fp64": 1e-13, "fp32": 2e-6, "fp16": 2e-3, "bf16": 1.6e-2}
BY_TRITON = Kernels(triton=KINDS)
# fp8 computes all of these in bf16
TYPES = pytest.mark.parametrize("precision", [name for name in DTYPES if name != "fp8"])


def normal(seed: int, *shape: int, precision: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(DTYPES[precision])


def gradients(function, inputs: list[Tensor], upper: list[Tensor]) -> list[Tensor]:
    """Return the results of a function, and the gradients of its inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = function(*leaves)
    return [*results, *torch.autograd.grad(results, leaves, upper)]


def check_close(found: list[Tensor], expected: list[Tensor], precision: str) -> None:
    apart = [difference(a, b) for a, b in zip(found, expected, strict=True)]
    assert max(apart) < CLOSE[precision], apart


# -- the loss ------------------------------------------------------------------------------------

S, B, V = 3, 2, 61


def loss_and_gradient(axis: TensorAxis, logits: Tensor, weights: Tensor | None, kernels: Kernels):
    """Return the loss and the gradient of this rank's logits, of half of the loss."""
    labels = 16 + torch.arange(S * B).view(S, B) * 7 % (V * axis.size - 19)  # of no padded column
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf * 1.0, labels, weights, axis, kernels=kernels)
    (0.5 * loss).backward()
    return [loss, leaf.grad]


@parallel(ranks=[1, 2])
@TYPES
@pytest.mark.parametrize("chunk", [16, 4096])
def test_loss(comm, precision, chunk):
    """Also of columns that are padded, all of a chunk among them, and with weights."""
    from ptdmpi.model.kernels.fused import loss as fused

    axis = TensorAxis(MpiCommunicator(comm))
    logits = 5.0 * normal(1, S, B, V * axis.size, precision=precision)
    logits[..., -3:] = -torch.inf
    logits[..., :16] = -torch.inf
    logits = logits.chunk(axis.size, -1)[axis.rank].contiguous()
    weights = torch.linspace(0.0, 1.0, S * B).view(S, B)
    usual = Kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "CHUNK", chunk)
        for given in (None, weights):
            found = loss_and_gradient(axis, logits, given, BY_TRITON)
            expected = loss_and_gradient(axis, logits, given, usual)
            close = "fp32" if precision in ("bf16", "fp16") else precision
            check_close(found[:1], expected[:1], close)  # losses are wide
            check_close(found[1:], expected[1:], precision)


@parallel(ranks=[1])
def test_bytes_of_the_loss(comm):
    """It reads each logit once forward, and overwrites it once backward: 6 bytes in bf16."""
    axis = TensorAxis(MpiCommunicator(comm))
    for precision, size in (("bf16", 2), ("fp32", 4)):
        logits = normal(1, S, B, V, precision=precision)
        with counted() as moves:
            loss_and_gradient(axis, logits, None, BY_TRITON)
        assert moves.launches == 2
        # a row also has 8 bytes of its label twice, a logit, and six numbers in float32
        assert moves.bytes == S * B * (3 * V * size + 2 * 8 + size + 6 * 4)


# -- norms ---------------------------------------------------------------------------------------

ROWS, H = 5, 37
FEW_ROWS = mock.patch.object(chunks, "NORM_ROWS", 2)  # 3 programs, of which some have fewer rows


def sum_and_norm(adds: bool, shifts: bool, by_triton: bool):
    """Return the function (x, y, weight, shift) -> (x + y, its norm)."""
    from ptdmpi.model.kernels.fused.norm import add_and_normalize

    def compute(x, y, weight, shift=None):
        if by_triton:
            return add_and_normalize(x, y if adds else None, weight, shift, eps=1e-5)
        total = x + y if adds else x * 1.0
        if shift is None:
            return total, rms_norm(total, weight, 1e-5)
        return total, F.layer_norm(total, (H,), weight, shift, 1e-5)

    return compute


@parallel(ranks=[1])
@TYPES
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shifts", [False, True])
@FEW_ROWS
def test_norm(comm, precision, adds, shifts):
    """The sum has a gradient of its own, or none."""
    x, y, *upper = (normal(k, ROWS, 1, H, precision=precision) for k in range(4))
    vectors = [1.0 + 0.1 * normal(k, H, precision=precision) for k in range(4, 5 + shifts)]
    for reads_sum in (True, False):

        def first(compute, reads_sum=reads_sum):
            def call(x, y, *vectors):
                total, normed = compute(x, y, *vectors)
                return (total + 0.0 * y, normed) if reads_sum else (normed + 0.0 * y,)

            return call

        given = upper if reads_sum else upper[1:]
        found, expected = (
            gradients(first(sum_and_norm(adds, shifts, by_triton)), [x, y, *vectors], given)
            for by_triton in (True, False)
        )
        check_close(found, expected, precision)


@parallel(ranks=[1])
def test_the_norm_is_that_of_the_rounded_sum(comm):
    from ptdmpi.model.kernels.fused.norm import add_and_normalize

    x, y = (normal(k, ROWS, H, precision="bf16") for k in range(2))
    weight = torch.ones(H, dtype=torch.bfloat16)
    total, normed = add_and_normalize(x, y, weight, None, eps=1e-5)
    assert torch.equal(normed, add_and_normalize(total, None, weight, None, eps=1e-5)[1])


@parallel(ranks=[1])
def test_a_norm_without_a_gradient_of_its_own(comm):
    """Frozen weights, and a sum that is read alone."""
    from ptdmpi.model.kernels.fused.norm import add_and_normalize

    x, y, dy = (normal(k, ROWS, H, precision="fp64") for k in range(3))
    x.requires_grad_()
    weight = torch.ones(H, dtype=torch.float64)
    total, normed = add_and_normalize(x, y, weight, None, eps=1e-5)
    (alone,) = torch.autograd.grad(total, x, dy, retain_graph=True)
    assert torch.equal(alone, dy)
    (frozen,) = torch.autograd.grad(normed, x, dy)
    (expected,) = torch.autograd.grad(rms_norm(x + y, weight, 1e-5), x, dy)
    assert difference(frozen, expected) < CLOSE["fp64"]


@parallel(ranks=[1])
@pytest.mark.parametrize("shifts", [False, True])
@FEW_ROWS
def test_bytes_of_a_norm(comm, shifts):
    """8 numbers for each channel, forward and backward, with the sum and its gradient."""
    x, y, *upper = (normal(k, ROWS, H, precision="bf16") for k in range(4))
    vectors = [normal(k, H, precision="bf16") for k in range(1 + shifts)]
    with counted() as moves:
        gradients(sum_and_norm(True, shifts, True), [x, y, *vectors], upper)
    assert moves.launches == 2
    programs, kinds = chunks.norm_programs(ROWS), 1 + shifts
    assert programs == 3
    narrow = ROWS * kinds * 2 * H + programs * 2 * H  # the weights, which caches have
    narrow += ROWS * kinds * 4 * 2  # statistics
    assert moves.bytes == 8 * 2 * ROWS * H + programs * kinds * H * 4 + narrow


# -- gated units -----------------------------------------------------------------------------------


@parallel(ranks=[1])
@TYPES
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_gated(comm, precision, activation):
    """Also of large numbers, at which exponentials would overflow."""
    from ptdmpi.model.kernels.fused import gated as fused

    x, dy = normal(1, 3, 2, 74, precision=precision), normal(2, 3, 2, 37, precision=precision)
    x[0] *= 50.0
    with pytest.MonkeyPatch.context() as patch:
        for block in (16, 1024):
            patch.setattr(fused, "BLOCK", block)
            found = gradients(lambda x: [gated(x, activation, BY_TRITON)], [x], [dy])
            expected = gradients(lambda x: [gated(x, activation, Kernels())], [x], [dy])
            check_close(found, expected, precision)


@parallel(ranks=[1])
def test_bytes_of_a_gated_unit(comm):
    x, dy = normal(1, 6, 74, precision="bf16"), normal(2, 6, 37, precision="bf16")
    with counted() as moves:
        gradients(lambda x: [gated(x, "swiglu", BY_TRITON)], [x], [dy])
    assert (moves.launches, moves.bytes) == (2, (3 + 5) * 2 * dy.numel())


# -- dropout -------------------------------------------------------------------------------------

STREAM = RandomStream.of(7, 3, torch.tensor([5, 2**40]))


def dropped(stream: RandomStream, kernels: Kernels, x: Tensor) -> tuple[Tensor]:
    return (drop_hidden(x, stream, 0.3, kernels),)


@parallel(ranks=[1])
@TYPES
def test_dropout_has_the_bits_of_the_reference(comm, precision):
    """For part of the positions and channels, keys of both signs, and rows that fill no block."""
    from ptdmpi.model.kernels.fused import dropout as fused

    divided = Positions(rank=1, size=2).shared(1, 2)
    streams = [STREAM, STREAM.at(2, 1, positions=divided, first_channel=2**33)]
    streams += [STREAM.at(number) for number in range(3)]
    assert {stream.key > 0 for stream in streams} == {True, False}
    x, upper = (normal(k, 4, 2, H, precision=precision) for k in (1, 2))
    for block, stream in itertools.product((16, fused.BLOCK), streams):
        with mock.patch.object(fused, "BLOCK", block):
            found, expected = (
                gradients(partial(dropped, stream, kernels), [x], [upper])
                for kernels in (BY_TRITON, Kernels())
            )
        for mine, reference in zip(found, expected, strict=True):
            assert torch.equal(mine == 0.0, reference == 0.0)
            assert torch.equal(mine.signbit(), reference.signbit())
            # the interpreter truncates float32 to bfloat16, where devices round
            assert precision == "bf16" or torch.equal(mine, reference)
            assert 0.1 < (mine == 0.0).double().mean() < 0.5
        check_close(found, expected, precision)


@parallel(ranks=[1])
def test_dropout_of_inputs_in_other_orders(comm):
    x = normal(1, 2, 4, H, precision="fp32").transpose(0, 1)
    assert not x.is_contiguous()
    found = drop_hidden(x, STREAM, 0.3, BY_TRITON)
    assert torch.equal(found, drop_hidden(x, STREAM, 0.3, Kernels()))
    assert drop_hidden(x[:0], STREAM, 0.3, BY_TRITON).shape == (0, 2, H)


@parallel(ranks=[1])
def test_bytes_of_dropout(comm):
    """It reads and writes each element once, and keeps nothing for the backward."""
    for precision, size in (("bf16", 2), ("fp32", 4)):
        x = normal(1, S, B, H, precision=precision).requires_grad_()
        saved = []
        pack = torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor)
        with counted() as moves, pack:
            drop_hidden(x, STREAM, 0.3, BY_TRITON).backward(torch.ones_like(x))
        assert moves.launches == 2 and not saved
        # a row also reads 8 bytes of its sample and of its position
        assert moves.bytes == 2 * S * B * (2 * H * size + 16)


# -- RoPE ----------------------------------------------------------------------------------------

HEADS, SIZE = 3, 10


def angles(sequences: int, precision: str) -> tuple[Tensor, Tensor]:
    """Return cosines and sines; both halves of a head have the same angles."""
    half = normal(9, S, sequences, 1, SIZE // 2, precision="fp64")
    both = torch.cat((half, half), -1)
    return both.cos().to(DTYPES[precision]), both.sin().to(DTYPES[precision])


@parallel(ranks=[1])
@TYPES
@pytest.mark.parametrize("own", [False, True])
def test_rotation(comm, precision, own):
    """The input is some heads of a tensor; each sequence has angles of its own, or none has."""
    from ptdmpi.model.kernels.fused import rope as fused

    whole = normal(1, S, B, HEADS + 2, SIZE, precision=precision)
    upper = normal(2, S, B, HEADS, SIZE, precision=precision)
    given = angles(B if own else 1, precision)
    for block in (8, fused.BLOCK):
        with mock.patch.object(fused, "BLOCK", block):
            found, expected = (
                gradients(
                    lambda x, k=kernels: (rotate(x[:, :, 1:-1], *given, k),), [whole], [upper]
                )
                for kernels in (BY_TRITON, Kernels())
            )
        check_close(found, expected, precision)


@parallel(ranks=[1])
def test_bytes_of_a_rotation(comm):
    """It reads and writes each element once, and reads half of the angles for each pair."""
    for precision, size in (("bf16", 2), ("fp32", 4)):
        x = normal(1, S, B, HEADS, SIZE, precision=precision).requires_grad_()
        with counted() as moves:
            rotate(x, *angles(1, precision), BY_TRITON).backward(torch.ones_like(x))
        assert moves.launches == 2
        assert moves.bytes == 2 * 3 * x.numel() * size
