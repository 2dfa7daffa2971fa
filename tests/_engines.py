"""Short trainings in one layout on synthetic tokens, and their results."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.world import World
from ptdmpi.config import Config
from ptdmpi.engine.engine import Engine
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.trained_on import synthetic
from ptdmpi.model.batch import Microbatch, MicrobatchPass
from ptdmpi.model.kernels.choice import HostChoice
from ptdmpi.model.output.losses import ahead_name
from ptdmpi.model.parameters import data_types
from ptdmpi.model.state import WEIGHTS, Piece
from ptdmpi.parity.run import as_masked
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from tests._configs import Changes, small
from tests._layers import assemble

VOCAB_SIZE = 101  # no axis divides it
Half = Literal["native", "widened"]
HALVES = get_args(Half)


@dataclass(frozen=True)
class Run:
    """Losses and gradient norms of each step, and logical tensors after the last one."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]


def tokens(config: Config, step: int, vocab_size: int = VOCAB_SIZE) -> tuple[Tensor, Tensor]:
    """Return the global batch of `step`: ids [B, s + 1], and weights [B, s] of 0 and 1.

    Each sequence has another share of valid tokens.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    size, length = config.batch.global_size, config.model.seq_length
    ids = torch.randint(vocab_size, (size, length + 1), generator=generator)
    share = torch.rand(size, 1, generator=generator)
    weights = (torch.rand(size, length, generator=generator) < share).float()
    weights[:, 0] = 1.0
    return ids, weights


def microbatches(
    config: Config, step: int, data_rank: int, *, masked: bool = True, vocab_size: int = VOCAB_SIZE
) -> list[Microbatch]:
    """Return a data rank's microbatches of the global batch of `step`."""
    ids, weights = tokens(config, step, vocab_size)
    m, b = config.microbatches, config.batch.micro_size
    batches = []
    for start in range(data_rank * m * b, (data_rank + 1) * m * b, b):
        x = ids[start : start + b].t()
        mask = weights[start : start + b].t().contiguous() if masked else None
        samples = torch.arange(start, start + b) + step * config.batch.global_size
        batch = Microbatch(x[:-1].contiguous(), x[1:].contiguous(), mask, samples)
        if config.model.classifies:
            batch = as_classified(batch, config)
        elif config.model.masked:
            batch = as_masked(batch, config.model)
        batches.append(batch)
    return [batch.with_ahead(config.model.mtp_modules) for batch in batches]


def passes(batches: Iterable[Microbatch], step: int | None = 0) -> list[MicrobatchPass]:
    """The batches as microbatches of a step, of losses that are summed."""
    return [
        MicrobatchPass(number, batch, step, weights=_of_modules(batch))
        for number, batch in enumerate(batches)
    ]


def _of_modules(batch: Microbatch) -> dict[str, float]:
    """The factors of the losses of modules for multi-token prediction."""
    counts = () if batch.ahead is None else batch.ahead.counts
    return {ahead_name(number): 1.0 for number in range(len(counts))}


def as_classified(batch: Microbatch, config: Config) -> Microbatch:
    """Return the sequences as samples of a task, whose classes follow from their numbers."""
    rows, each = len(batch.samples), config.task.sequences
    classes = max(config.task.choices, config.task.classes)
    last = 0 if config.model.masked else len(batch.inputs) - 1
    return replace(
        batch,
        labels=(batch.samples[::each] // each % classes)[None],
        weights=None,
        masked=torch.full((1, rows), last),
        types=torch.zeros_like(batch.inputs),
    )


def logical(engine: Engine, pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Return the whole tensors of all parameters, from every rank's `pieces` of one kind."""
    sent = [replace(p, values=_as_bytes(p.values)) for p in pieces]  # pickled quickly
    everyone = engine.axes.world.all_gather_object(sent)
    received = (piece for of_rank in everyone for piece in of_rank)
    return assemble(replace(piece, values=_from_bytes(*piece.values)) for piece in received)


def _as_bytes(values: Tensor) -> tuple[np.ndarray, torch.dtype]:
    """Return the bytes of a tensor, in its shape but for the last dim, and its type."""
    return values.detach().cpu().contiguous().view(torch.uint8).numpy(), values.dtype


def _from_bytes(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return the tensor of which `_as_bytes` returned the bytes."""
    return torch.from_numpy(array).view(dtype)


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """Return the whole master weights."""
    return logical(engine, (one for one in engine.state.pieces() if one.kind == WEIGHTS))


def whole_gradients(engine: Engine) -> dict[str, Tensor]:
    """Return the whole gradients."""
    return logical(engine, engine.state.gradients())


def course(config: Config) -> Course:
    """Return the course of a run on the tokens of this file."""
    return Course(config, synthetic(config))


def build(
    world: World, changes: Changes, vocab_size: int = VOCAB_SIZE, half: Half = "native"
) -> Engine:
    """Return an engine of a small model on all ranks of `world`.

    `half`: how it multiplies half types. "widened" computes on every processor as one without
    instructions for them does.
    """
    config = small(changes, world.size)
    axes = world.split(grid_of(config))
    engine = Engine(config, axes, vocab_size)
    if half == "widened":
        engine.compute_by(HostChoice(half=half))
    return engine


def foreseen_by(engine: Engine) -> MemoryModel:
    """Return the account of an engine's memory, with the kernels that it computes with."""
    types = data_types(engine.config.precision.compute)
    products = (types.compute, types.iteration)
    kernels = {
        "wide_products": any(engine.kernels.widens("cpu", dtype) for dtype in products),
        **engine.kernels.chosen("cpu", types.compute).attention.blocks,
    }
    return MemoryModel.of(engine.config, engine.vocab_size, kernels=kernels)


def steps_of(engine: Engine, count: int, *, masked: bool = True) -> list:
    """Run the first `count` steps and return their results."""
    config, rank, size = engine.config, engine.axes["data"].rank, engine.vocab_size
    return [
        engine.step(k, microbatches(config, k, rank, masked=masked, vocab_size=size))
        for k in range(count)
    ]


def train(
    comm, changes: Changes, *, steps: int = 5, masked: bool = True, vocab_size: int = VOCAB_SIZE
) -> Run:
    """Train on the first t p d ranks of `comm`; return the result on every rank of it."""
    sizes = [changes.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "data")]
    world = World(comm).first(sizes[0] * sizes[1] * sizes[2])
    run = None
    if world is not None:
        engine = build(world, changes, vocab_size)
        results = steps_of(engine, steps, masked=masked)
        run = Run(
            [result.loss for result in results],
            [result.grad_norm for result in results],
            whole_weights(engine),
            whole_gradients(engine),
        )
    return from_root(comm, run)


def load(engine: Engine, whole: dict[str, Tensor]) -> None:
    """Copy this rank's slices of the logical tensors into its weights."""
    for piece in engine.state.pieces():
        if piece.kind == WEIGHTS:
            assert whole[piece.name].shape == piece.shape, piece.name
            piece.values.copy_(whole[piece.name][piece.box.index])
    engine.state.changed()


def logits_of(engine: Engine, batch) -> Tensor | None:
    """Return the logits [s, b, V] on the last pipeline rank, and None on the others."""
    axes, model = engine.axes, engine.config.model
    (stage,) = engine.stages.values()
    here = axes["pipeline"].rank
    with torch.no_grad():
        x = None
        if here > 0:
            shape = (model.seq_length, batch.inputs.shape[1], model.hidden)
            x = axes["pipeline"].recv(torch.empty(shape), here - 1)
        x = stage.logits(batch, x, None)
        if here < axes["pipeline"].size - 1:
            axes["pipeline"].send(x, here + 1)
            return None
        columns = axes["tensor"].all_gather(x.movedim(-1, 0).contiguous())
    assert (columns[engine.vocab_size :] == -torch.inf).all()
    return columns[: engine.vocab_size].movedim(0, -1)


def from_root(comm: MPI.Comm, value: Any) -> Any:
    """Return rank 0's `value` on every rank.

    Waiting ranks sleep: with more ranks than cores, MPI's own waiting would take half the cores
    from the ranks that compute.
    """
    here = comm.Ibarrier()
    while not here.Test():
        time.sleep(0.005)
    return comm.bcast(value, root=0)


def greatest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the greatest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def assert_same_bits(found: Run, expected: Run) -> None:
    """Check that losses, norms and final parameters are equal to the bit."""
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert found.parameters.keys() == expected.parameters.keys()
    for name, values in found.parameters.items():
        assert torch.equal(values, expected.parameters[name]), name
