"""Cross-entropy some positions at a time has the bits of the whole, and takes less memory."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.planning.allocated import measured
from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels.choice import HostChoice
from ptdmpi.model.output import cross_entropy as losses
from ptdmpi.model.output.cross_entropy import cross_entropy, token_log_probabilities
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import chunks
from tests.parallel import parallel

S, B, V = 37, 3, 61


def whole(logits: Tensor, labels: Tensor, weights: Tensor | None, axis: TensorAxis) -> tuple:
    """Loss and gradient (of half of it) by operations on all logits, in float32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    columns = wide.shape[-1]
    local = labels - axis.rank * columns
    here = (local >= 0) & (local < columns)
    local = local.clamp(0, columns - 1)[..., None]
    top = axis.comm.all_reduce(wide.amax(-1), "max")
    target = wide.gather(-1, local).squeeze(-1).masked_fill(~here, 0.0)
    exponentials = (wide - top[..., None]).exp()
    totals = axis.comm.all_reduce(torch.stack((exponentials.sum(-1), target)))
    of_tokens = totals[0].log() + top - totals[1]
    factors = torch.full_like(of_tokens, 0.5)
    if weights is not None:
        weights = weights.to(of_tokens.dtype)
        of_tokens, factors = of_tokens * weights, factors * weights
    gradient = exponentials / totals[0][..., None] * factors[..., None]
    gradient.scatter_add_(-1, local, -(factors * here)[..., None])
    return of_tokens.sum(), gradient.to(logits.dtype)


def given(axis: TensorAxis, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's logits, labels of all, and weights."""
    generator = torch.Generator().manual_seed(3)
    logits = (5 * torch.randn(S, B, V * axis.size, generator=generator)).to(dtype)
    labels = torch.randint(V * axis.size, (S, B), generator=generator)
    weights = (torch.rand(S, B, generator=generator) < 0.7).float()
    return logits.chunk(axis.size, -1)[axis.rank].contiguous(), labels, weights


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_the_bits_of_the_whole(comm, dtype, masked):
    axis = TensorAxis(MpiCommunicator(comm))
    logits, labels, weights = given(axis, dtype)
    expected, gradient = whole(logits, labels, weights if masked else None, axis)
    known = token_log_probabilities(logits, labels, axis)
    for rows in (1, 7, S * B, 10 * S * B):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "loss_rows", lambda columns, logits, rows=rows: rows)
            mine = logits.clone().requires_grad_()
            found = cross_entropy(mine + 0.0, labels, weights if masked else None, axis)
            (0.5 * found).backward()
            asked = token_log_probabilities(logits, labels, axis)
        assert torch.equal(found, expected), rows
        assert torch.equal(mine.grad, gradient), rows
        assert all(map(torch.equal, asked, known))


@parallel(ranks=[1])
def test_wide_logits_are_few(comm):
    """Half types: the logits, once more what is widened at a time, and a few numbers a row."""
    axis, rows, columns = TensorAxis(MpiCommunicator(comm)), 256, 8192
    logits = torch.randn(rows, 1, columns).bfloat16().requires_grad_()
    labels = torch.zeros(rows, 1, dtype=torch.long)
    work = logits * 1.0
    widened = 4 * columns * chunks.loss_rows(columns, chunks.HOST_ELEMENTS)
    left, most = measured(lambda: cross_entropy(work, labels, None, axis))
    assert most < 1.1 * widened < 4 * rows * columns / 5 and left < 64 * rows
    loss = cross_entropy(work, labels, None, axis)
    _, most = measured(loss.backward)
    assert most < logits.nbytes + 1.1 * widened


def test_rows_at_a_time():
    assert chunks.loss_rows(50257, 2**18) == 5 and chunks.loss_rows(10**9, 2**18) == 1
    assert chunks.loss_rows(50257, chunks.DEVICE_ELEMENTS) == 333


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_run_s_choice_sets_the_rows_at_a_time(dtype):
    """In forward and backward, with equal bits: 64 positions are 1, 2 or 64 chunks."""
    axis, logits = TensorAxis(OneRank()), torch.randn(64, 1, 512).to(dtype)
    labels = torch.arange(64)[:, None]
    # the backward of float32 logits reads the exponentials that the forward has stored
    passes = 2 if dtype == torch.bfloat16 else 1
    results = []
    for size, expected in ((2**15, 1), (2**14, 2), (512, 64)):
        mine = logits.clone().requires_grad_()
        counted = mock.Mock(side_effect=losses._exponentials)
        with mock.patch.object(losses, "_exponentials", counted):
            kernels = Kernels(HostChoice(loss=size))
            cross_entropy(mine + 0.0, labels, None, axis, kernels=kernels).backward()
        rows = [len(call.args[0]) for call in counted.call_args_list]
        assert rows == [64 // expected] * expected * passes
        results.append(mine.grad)
    assert all(torch.equal(results[0], other) for other in results)
