"""A test that checks which losses change when one token of the input changes.

A causal model predicts a token at the position before the token. The positions from the token to
the end of its document attend to the token. In a bidirectional model, all positions of the sample
attend to the token. The test knows in advance which losses must change, and compares them with the
losses that do change. If the code has a fault, a different set of losses changes. Examples of
faults are labels that are shifted at the edge of a slice, a document that attends to another
document, and masks at wrong positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptdmpi.comm.wires import Wire
from ptdmpi.comm.world import Axes, World
from ptdmpi.config.choices import CONTEXT_METHODS
from ptdmpi.config.kinds import LATENT
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.parity.layouts import SEQ_LENGTH, Case, ComparedLayout, ComparedModel
from ptdmpi.parity.run import Blocks, TrainingTask, configuration, microbatches

SECTION = "A perturbed token changes the losses that see it, and no others"
ALONE = ComparedLayout(micro_size=2)
MODELS = (
    ComparedModel(kind="llama", layers=2, masked=False, documents=True),
    ComparedModel(kind="gpt", layers=2, masked=False),
    ComparedModel(kind="bert", layers=2, masked=False),
)
# this layout is probed with each context-parallel method and each model
PLAIN = replace(ALONE, context=2)
# Each layout in `COMBINED` is probed once with each context-parallel method. The model changes from
# one method to the next.
COMBINED = (
    replace(ALONE, context=4),
    replace(PLAIN, tensor=2, sequence_parallel=True),
    replace(PLAIN, pipeline=2),
)
# Three context ranks divide sequences of 18 tokens. They cannot share the 4 heads of the models, so
# `ulysses` is left out.
THREE = replace(ALONE, context=3)
THREE_LENGTH = 18
THREE_METHODS = tuple(method for method in CONTEXT_METHODS if method != "ulysses")
# The perturbed tokens: 4, 9 and 14. At least one of them is at the edge of a chunk: token 4 with 2
# context ranks, token 9 with 3 context ranks, and token 14 with 4 context ranks.
TOKENS = range(SEQ_LENGTH // 4, SEQ_LENGTH, 5)


# The sublayers in which each position uses every position that the mask allows.
ATTENTION = {"attention", LATENT}


@dataclass(frozen=True)
class Probed:
    """A case, and one line of text for each perturbed token that changes a wrong set of losses."""

    case: Case
    faults: Sequence[str]


def cases(ranks: int, *, short: bool = False) -> list[Case]:
    """Return the cases that `ranks` ranks can probe. If `short` is True, return one case for each
    context-parallel method."""
    every = [
        Case(replace(PLAIN, context_method=method), model)
        for model in MODELS
        for method in CONTEXT_METHODS
    ]
    for shift, method in enumerate(CONTEXT_METHODS):
        for number, layout in enumerate(COMBINED, shift):
            model = MODELS[number % len(MODELS)]
            every.append(Case(replace(layout, context_method=method), model))
    for model, method in zip(MODELS, THREE_METHODS, strict=False):
        longer = replace(model, seq_length=THREE_LENGTH)
        every.append(Case(replace(THREE, context_method=method), longer))
    if short:
        every = every[: len(CONTEXT_METHODS)]
    possible = [case for case in every if case.layout.ranks <= ranks]
    return possible or [Case(ALONE, model) for model in MODELS]


def run(
    world: World,
    wanted: Sequence[Case],
    *,
    wire: Wire,
    say: Callable[[str], None] = lambda line: None,
) -> list[Probed]:
    """Probe the cases `wanted`. Small layouts are probed at the same time on different ranks. Every
    rank calls this function with the same arguments. Return the results on rank 0 of the world, []
    on other ranks. `say` is called with a line of progress on rank 0."""
    if wanted and world.rank == 0:
        say(f"parity: perturbed tokens in {len(wanted)} cases")
    blocks = Blocks(world, wire)
    faults_by_task: dict[TrainingTask, list[str]] = {}
    tasks = [TrainingTask(case, "fp64", steps=1) for case in wanted]
    for ranks in sorted({task.case.layout.ranks for task in tasks}):
        alike = [task for task in tasks if task.case.layout.ranks == ranks]
        faults_by_task |= blocks.run(alike, work=_faults_of)
    if world.rank:
        return []
    return [Probed(task.case, faults_by_task[task]) for task in tasks]


def _faults_of(task: TrainingTask, axes: Axes) -> list[str] | None:
    """Probe a case. Return one text for each fault on rank 0 of `axes`, and None on all other
    ranks."""
    engine = Engine(configuration(task), axes, task.case.model.vocab_size)
    batch = microbatches(engine.config, task.case, 0, 0)[0]
    lines = faults(engine, batch, TOKENS)
    return lines if axes.world.rank == 0 else None


def faults(engine: Engine, batch: Microbatch, tokens: Sequence[int]) -> list[str]:
    """Perturb the tokens at the positions `tokens` of the first sample of a batch, one after the
    other. Return one line of text for each token that changes a wrong set of losses.

    All ranks call this function. The given batch has all positions of its sequences, even if the
    ranks divide the sequences. Masked tokens of the batch are not perturbed. In a model with
    attention, a token must change exactly the losses of `seen_by`. In a model without attention,
    the token may change only these losses, but need not change all of them.
    """
    lines = []
    every = not ATTENTION.isdisjoint(engine.config.model.sublayers)
    before = losses_of(engine, batch)
    for token in tokens:
        if batch.masked is not None and token in batch.masked[:, 0]:
            continue
        after = losses_of(engine, perturbed(batch, token, engine.vocab_size))
        changed = (after != before).nonzero().flatten().tolist()
        expected = seen_by(batch, token)
        if every and changed != expected:
            lines.append(f"token {token} changes losses {changed}, and should change {expected}")
        elif not set(changed) <= set(expected):
            lines.append(f"token {token} changes losses {changed}, and may change only {expected}")
    return lines


def losses_of(engine: Engine, batch: Microbatch) -> Tensor:
    """Return a vector of losses in nats. The first elements are the losses of the labels of the
    first sample. If there are more samples, one more element is the sum of the losses of all other
    samples. Each loss is computed separately, with weight 0 for all other labels. All ranks call
    this function."""
    labels, samples = batch.labels.shape
    losses = []
    for label in range(labels + (samples > 1)):
        weights = torch.zeros(batch.labels.shape)
        if label < labels:
            weights[label, 0] = 1.0
        else:
            weights[:, 1:] = 1.0
        asked = replace(batch, weights=weights).at(engine.context.positions)
        losses.append(engine.evaluate([asked])["task"].sum)
    return torch.tensor(losses, dtype=torch.float64)


def perturbed(batch: Microbatch, token: int, vocab_size: int) -> Microbatch:
    """Return a copy of the batch in which one input token of the first sample has another id. The
    label at the position before the token also changes, unless the batch has masked tokens."""
    inputs = batch.inputs.clone()
    inputs[token, 0] = (inputs[token, 0] + 1) % vocab_size
    if batch.masked is not None:
        return replace(batch, inputs=inputs)
    labels = batch.labels.clone()
    if token:
        labels[token - 1, 0] = inputs[token, 0]
    return replace(batch, inputs=inputs, labels=labels)


def seen_by(batch: Microbatch, token: int) -> list[int]:
    """Return the indices of the losses in `losses_of` that a token of the first sample must
    change."""
    if batch.masked is not None:
        return list(range(len(batch.masked)))
    end = len(batch.inputs)
    if batch.documents is not None:
        end = next(
            end for row, begin, end in batch.documents.pieces if row == 0 and begin <= token < end
        )
    return list(range(max(0, token - 1), end))
