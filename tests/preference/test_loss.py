"""The loss of pairs of answers: TRL's formula, and the same maths in every layout."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.nn.functional import log_softmax, logsigmoid

from ptdmpi.comm.world import World
from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.inference.tensors import as_tensors
from ptdmpi.model.output.losses import MARGIN, PREFERRED, TASK
from tests import _reference
from tests._configs import layout
from tests._engines import VOCAB_SIZE, build, whole_weights
from tests.parallel import parallel

LENGTH = 24
BETA = 0.3
SMOOTHING = 0.1
CHANGES = {
    "precision.compute": "fp64",
    "preference.method": "dpo",
    "preference.beta": BETA,
    "preference.label_smoothing": SMOOTHING,
    "data.document_boundaries": True,
    "model.seq_length": LENGTH,
}
LLAMA = {"model.kind": "llama", "model.ffn_hidden": 48}
EXPERTS = LLAMA | {"model.experts": 4, "model.experts_per_token": 2, "model.balance": "none"}
LORA = {"adapt.method": "lora", "adapt.rank": 3, "model.attention_dropout": 0.0}
# Lengths of the documents of each kind of row: one, two or three pairs, with and without padding.
KINDS = ((9, 12, 3), (5, 4, 8, 7), (3, 4, 4, 3, 5, 5), (12, 12))
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


@dataclass
class Row:
    """A row of pairs: ids [s + 1], documents [s], weights and references [s] of the labels, and the
    (first, end) of the documents of pairs."""

    ids: np.ndarray
    documents: np.ndarray
    weights: np.ndarray
    references: np.ndarray
    answers: list[tuple[int, int]]


def row(number: int) -> Row:
    """Return a row; the second half of each document is an answer."""
    draws = np.random.default_rng(number)
    sizes = KINDS[number % len(KINDS)]
    ends = np.cumsum(sizes).tolist()
    spans = list(zip((0, *ends[:-1]), ends, strict=True))
    answers = spans[: len(spans) // 2 * 2]
    weights = np.zeros(LENGTH + 1, dtype=np.float32)
    for first, end in answers:
        weights[(first + end) // 2 : end] = 1
    return Row(
        draws.integers(0, VOCAB_SIZE, LENGTH + 1),
        np.repeat(np.arange(len(sizes)), sizes),
        weights[1:],
        draws.normal(-4.6, 0.5, LENGTH).astype(np.float32),
        answers,
    )


def batches(engine, step):
    """Return this data rank's microbatches of the global batch of `step`."""
    config = engine.config
    size = config.batch.micro_size
    share = config.microbatches * size
    first = step * config.batch.global_size + engine.axes["data"].rank * share
    made = []
    for start in range(first, first + share, size):
        rows = [row(number) for number in range(start, start + size)]
        ids = np.stack([one.ids for one in rows])
        batch = MicrobatchRows(
            ids[:, :-1],
            ids[:, 1:],
            np.stack([one.weights for one in rows]),
            np.arange(start, start + size),
            np.stack([one.documents for one in rows]),
            references=np.stack([one.references for one in rows]),
        )
        made.append(as_tensors(batch).at(engine.context.positions))
    return made


def by_formula(weights, config):
    """Return the mean loss of the first step, its margin and accuracy, as TRL's `dpo_loss` computes
    them (loss_type "sigmoid"): each answer is a sequence of its own."""
    losses, margins = [], []
    for number in range(config.batch.global_size):
        one = row(number)
        ratios = []
        for first, end in one.answers:
            ids = torch.from_numpy(one.ids[first:end])
            logs = log_softmax(_reference.logits(weights, config.model, ids[None, :-1])[0], -1)
            counts = torch.from_numpy(one.weights[first : end - 1]) > 0
            policy = logs.gather(-1, ids[1:, None])[:, 0][counts].sum()
            reference = torch.from_numpy(one.references[first : end - 1])[counts].double().sum()
            ratios.append(policy - reference)
        for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True):
            margins.append(BETA * (chosen - rejected))
    for margin in margins:
        losses.append(-logsigmoid(margin) * (1 - SMOOTHING) - logsigmoid(-margin) * SMOOTHING)
    return torch.stack(losses).mean(), torch.stack(margins)


def trained(comm, changes, steps=2):
    """Return the numbers of each step."""
    engine = build(World(comm), CHANGES | changes)
    results = [engine.step(step, batches(engine, step)) for step in range(steps)]
    return [
        (result.loss, result.grad_norm, *(result.losses[name].mean for name in (MARGIN, PREFERRED)))
        for result in results
    ]


@parallel(ranks=[1])
@pytest.mark.parametrize("kind", [{}, LLAMA, EXPERTS], ids=["gpt", "llama", "experts"])
def test_loss_and_gradient_are_those_of_the_formula(comm, kind):
    engine = build(World(comm), CHANGES | kind | {"optimizer.clip_norm": 0.0})
    weights = _reference.leaves(whole_weights(engine))
    loss, margins = by_formula(weights, engine.config)
    loss.backward()
    norm = sum(weight.grad.square().sum() for weight in weights.values() if weight.grad is not None)
    result = engine.step(0, batches(engine, 0))
    assert result.loss == pytest.approx(loss.item(), rel=1e-10)
    assert result.grad_norm == pytest.approx(norm.sqrt().item(), rel=1e-9)
    assert result.losses[TASK].count == len(margins) == result.losses[MARGIN].count
    assert result.losses[MARGIN].mean == pytest.approx(margins.mean().item(), rel=1e-9)
    assert result.losses[PREFERRED].sum == (margins > 0).sum()


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_pairs_are_compared_in_every_layout(comm):
    """The numbers of pairs differ from microbatch to microbatch."""
    alone = trained(MPI.COMM_SELF, {"model.layers": 4})
    for where in LAYOUTS[comm.size]:
        steps = trained(comm, {"model.layers": 4} | where)
        assert steps == [pytest.approx(step, rel=1e-9) for step in alone], where


OTHER_MODELS = {
    1: {"experts": (EXPERTS, [{"batch.micro_size": 4}]), "lora": (LORA, [{"batch.micro_size": 4}])},
    2: {
        "experts": (EXPERTS, [layout(t=2), layout(d=2) | {"parallel.expert": 2}]),
        "lora": (LORA, [layout(t=2), layout(p=2), {"parallel.context": 2}]),
    },
    4: {
        "experts": (EXPERTS, [layout(p=2, d=2) | {"parallel.expert": 2}]),
        "lora": (LORA, [layout(t=2, d=2) | {"parallel.zero": 2}]),
    },
}


@parallel(
    ranks=[pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("model", ["experts", "lora"])
def test_experts_and_adapters_compare_pairs_in_every_layout(comm, model):
    """Adapters begin at the frozen model, and move from it."""
    changes, layouts = OTHER_MODELS[comm.size][model]
    alone = trained(MPI.COMM_SELF, changes, steps=3)
    assert len({loss for loss, *_ in alone}) == 3 and all(norm > 0 for _, norm, *_ in alone)
    for where in layouts:
        steps = trained(comm, changes | where, steps=3)
        assert steps == [pytest.approx(step, rel=1e-9) for step in alone], where


@pytest.mark.cases(2)
@parallel(ranks=[2])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("where", [layout(t=2), {"parallel.context": 2}], ids=["t", "c"])
def test_half_types_are_near_float64(comm, compute, where):
    """Sums of log-probabilities of an answer are of float32 in half types, too."""
    exact = trained(MPI.COMM_SELF, {}, steps=1)[0]
    half = trained(comm, {"precision.compute": compute} | where, steps=1)[0]
    loss, norm, margin, _ = half
    assert loss == pytest.approx(exact[0], rel=2e-3)
    assert norm == pytest.approx(exact[1], rel=3e-2)
    assert margin == pytest.approx(exact[2], abs=5e-3)


@parallel(ranks=[2])
def test_validation_counts_each_pair_once_and_no_repeated_row(comm):
    engine = build(World(comm), CHANGES | {"parallel.context": 2})
    alone = build(World(MPI.COMM_SELF), CHANGES)
    expected = alone.evaluate(batches(alone, 0))
    found = engine.evaluate(batches(engine, 0))
    for name in (TASK, MARGIN, PREFERRED):
        assert found[name].count == expected[name].count
        assert found[name].sum == pytest.approx(expected[name].sum, rel=1e-10)
    one = row(1)
    twice = MicrobatchRows(
        np.stack([one.ids[:-1]] * 2),
        np.stack([one.ids[1:]] * 2),
        np.stack([one.weights, 0 * one.weights]),
        np.arange(2),
        np.stack([one.documents] * 2),
        references=np.stack([one.references] * 2),
    )
    assert as_tensors(twice).pairs.counted == len(one.answers) // 2
