"""The divergence from a teacher: the formula with torch's functions, and the same maths in every
layout."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.config.sections import DistillationConfig
from ptdmpi.model.batch import Microbatch, TeacherOutputs
from ptdmpi.model.output.distillation import DistillationLoss, top_log_probabilities
from ptdmpi.model.output.losses import DISTILLATION, TASK
from ptdmpi.model.tensor_parallel import TensorAxis
from tests._configs import layout
from tests._engines import VOCAB_SIZE, build, tokens
from tests.parallel import parallel

S, B, V = 11, 3, 24
WEIGHT = 0.7
CHANGES = {"precision.compute": "fp64", "distillation.weight": WEIGHT, "model.layers": 4}
LAYOUTS = {
    1: [{"batch.micro_size": 4}],
    2: [
        layout(t=2) | {"parallel.sequence_parallel": True},
        layout(p=2),
        layout(d=2) | {"parallel.zero": 2},
        {"parallel.context": 2},
    ],
    4: [layout(t=2) | {"parallel.context": 2}, layout(p=2, d=2)],
}
# The largest error relative to float64; half types round the gradient of each logit.
ERRORS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}


def drawn(kept):
    """Return logits of a student [S, B, V], and a microbatch with a teacher's `kept` tokens."""
    draws = torch.Generator().manual_seed(kept)
    logits = 3 * torch.randn(S, B, V, generator=draws, dtype=torch.float64)
    teacher = F.log_softmax(2 * torch.randn(S, B, V, generator=draws, dtype=torch.float64), -1)
    logs, ids = teacher.topk(kept)
    batch = Microbatch(
        torch.zeros(S, B, dtype=torch.int64),
        torch.randint(V, (S, B), generator=draws),
        (torch.rand(S, B, generator=draws) < 0.7).float(),
        torch.arange(B),
        teacher=TeacherOutputs(ids, logs),
    )
    return logits, batch


def by_formula(logits, batch):
    """Return the sums of the cross-entropy and of the weighted divergence with torch's functions:
    `kl_div` over the stored tokens and the sum of all others."""
    student = F.log_softmax(logits, -1)
    labels = -student.gather(-1, batch.labels[..., None])[..., 0]
    stored = student.gather(-1, batch.teacher.ids)
    q = batch.teacher.logs.double().exp()
    target = torch.cat((q, (1 - q.sum(-1, keepdim=True)).clamp_min(0)), -1)
    others = student.exp().scatter(-1, batch.teacher.ids, 0).sum(-1, keepdim=True)
    outcomes = torch.cat((stored, others.clamp_min(1e-300).log()), -1)
    divergence = F.kl_div(outcomes, target, reduction="none").sum(-1)
    weights = 1.0 if batch.weights is None else batch.weights.double()
    return (labels * weights).sum(), WEIGHT * (divergence * weights).sum()


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("kept", [1, 5, V])
@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize("masked", [False, True])
def test_losses_and_gradients_are_those_of_torch(comm, kept, dtype, masked):
    axis = TensorAxis(MpiCommunicator(comm))
    logits, batch = drawn(kept)
    if not masked:
        batch = replace(batch, weights=None)
    logits = logits.to(dtype)
    exact = logits.double().requires_grad_()
    expected = by_formula(exact, batch)
    (0.5 * expected[0] + 0.25 * expected[1]).backward()
    mine = logits.detach().chunk(axis.size, -1)[axis.rank].clone().requires_grad_()
    loss = DistillationLoss(DistillationConfig(weight=WEIGHT), axis)
    sums = loss(mine + 0.0, batch)
    (0.5 * sums[TASK] + 0.25 * sums[DISTILLATION]).backward()
    error = ERRORS[dtype]
    for name, value in zip((TASK, DISTILLATION), expected, strict=True):
        assert sums[name].item() == pytest.approx(value.item(), rel=error, abs=error), name
    gradient = exact.grad.chunk(axis.size, -1)[axis.rank]
    assert (mine.grad.double() - gradient).abs().max() <= error * gradient.abs().max()


@parallel(ranks=[1, 2])
def test_the_whole_vocabulary_gives_the_plain_divergence(comm):
    axis = TensorAxis(MpiCommunicator(comm))
    logits, batch = drawn(V)
    ids, logs = top_log_probabilities(logits.chunk(axis.size, -1)[axis.rank], V, axis)
    plain = F.log_softmax(logits, -1)
    assert torch.equal(ids, plain.argsort(-1, descending=True))
    assert torch.allclose(logs, plain.gather(-1, ids), rtol=1e-12)
    # a student with the teacher's own logits has no divergence
    same = replace(batch, teacher=TeacherOutputs(ids, logs))
    loss = DistillationLoss(DistillationConfig(weight=1.0), axis)
    sums = loss(logits.chunk(axis.size, -1)[axis.rank].clone(), same)
    assert abs(sums[DISTILLATION].item()) < 1e-11


@parallel(ranks=[2])
def test_padded_columns_are_no_tokens(comm):
    """The last column of the last rank is padding."""
    axis = TensorAxis(MpiCommunicator(comm))
    logits, _ = drawn(5)
    short = logits[..., : V - 1]
    padded = torch.cat((short, torch.full((S, B, 1), -torch.inf, dtype=torch.float64)), -1)
    ids, logs = top_log_probabilities(padded.chunk(2, -1)[axis.rank], V - 1, axis)
    assert ids.max() == V - 2
    assert torch.allclose(logs, F.log_softmax(short, -1).gather(-1, ids), rtol=1e-12)


def batches(engine, step):
    """Return this data rank's microbatches of the global batch of `step`."""
    config = engine.config
    size = config.batch.micro_size
    share = config.microbatches * size
    ids, weights = tokens(config, step)
    draws = torch.Generator().manual_seed(step)
    shape = (config.batch.global_size, config.model.seq_length, VOCAB_SIZE)
    logs, best = F.log_softmax(torch.randn(shape, generator=draws), -1).topk(7)
    made = []
    first = engine.axes["data"].rank * share
    for start in range(first, first + share, size):
        rows = slice(start, start + size)
        batch = Microbatch(
            ids[rows, :-1].t().contiguous(),
            ids[rows, 1:].t().contiguous(),
            weights[rows].t().contiguous(),
            torch.arange(start, start + size),
            teacher=TeacherOutputs(*(part[rows].transpose(0, 1) for part in (best, logs))),
        )
        made.append(batch.at(engine.context.positions))
    return made


def trained(comm, changes):
    """Return the numbers of two steps: the total loss, the norm and the divergence."""
    engine = build(World(comm), CHANGES | changes)
    results = [engine.step(step, batches(engine, step)) for step in range(2)]
    return [(result.loss, result.grad_norm, result.losses[DISTILLATION].mean) for result in results]


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_a_teacher_teaches_the_same_in_every_layout(comm):
    alone = trained(MPI.COMM_SELF, {})
    plain = build(World(MPI.COMM_SELF), CHANGES | {"distillation.weight": 0.0})
    cross_entropy = plain.step(0, batches(plain, 0)).loss
    assert alone[0][0] == pytest.approx(cross_entropy + alone[0][2], rel=1e-12)
    for where in LAYOUTS[comm.size]:
        assert trained(comm, where) == [pytest.approx(step, rel=1e-9) for step in alone], where


@parallel(ranks=[1])
def test_validation_needs_no_teacher(comm):
    engine = build(World(comm), CHANGES)
    made = [replace(batch, teacher=None) for batch in batches(engine, 0)]
    losses = engine.evaluate(made)
    assert set(losses) == {TASK} and losses[TASK].mean > 0
