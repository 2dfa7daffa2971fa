"""One training of a case, and what it leaves behind as whole logical tensors."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from tempfile import gettempdir

import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.wires import Wire
from ptdmpi.comm.world import Axes, World
from ptdmpi.config import Config, Layout, ModelConfig, synthetic_config
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Batch
from ptdmpi.model.documents import Documents
from ptdmpi.model.state import WEIGHTS, Piece, assemble
from ptdmpi.parity.layouts import GLOBAL_SIZE, SEQ_LENGTH, AdaptedModel, Case, MuonModel
from ptdmpi.plan.layout.grid import Grid, training_grid

SEED = 1234
MEAN_DOCUMENT = 6  # tokens, where sequences hold documents
# At this width the usual 0.02 leaves the residual stream almost alone, and faults would drown.
INIT_STD = 0.1
# Adam's step of an element whose gradient is rounding is itself rounding over epsilon. With 1e-8
# that is up to the whole learning rate, and a machine's luck decides about the parameters' bar.
EPSILON = 1e-6
SAID_EVERY_S = 20.0


@dataclass(frozen=True)
class TrainingTask:
    """A training to be done: a case in one compute type for a number of steps.

    `attempt` tells two trainings of one case apart.
    """

    case: Case
    compute: str
    steps: int
    attempt: int = 0


@dataclass(frozen=True)
class Training:
    """Loss and gradient norm of each step, the gradients of the first step as the optimizer gets
    them, the final master weights, and the names of tensors whose copies on several ranks differ.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)


def configuration(task: TrainingTask) -> Config:
    """The configuration of a task, checked like a user's."""
    layout, model = task.case.layout, task.case.model
    rate = 0.1 if model.dropout else 0.0
    return synthetic_config(
        layout,
        {**model.keys, "init_std": INIT_STD, "dropout": rate, "attention_dropout": rate},
        run={
            "seed": SEED,
            "steps": task.steps,
            "reproducible": layout.reproducible,
            "dir": gettempdir(),  # of what is offloaded to a file
        },
        batch={"global_size": GLOBAL_SIZE},
        precision={"compute": task.compute},
        optimizer={
            "kind": "muon" if isinstance(model, MuonModel) else "adamw",
            "warmup_steps": min(5, task.steps),
            "eps": EPSILON,
        },
        adapt=model.adapt if isinstance(model, AdaptedModel) else {},
    )


def microbatches(config: Config, case: Case, step: int, data_rank: int) -> list[Batch]:
    """One data rank's microbatches of the global batch of `step`: random tokens, the same in every
    layout. Masked sequences keep each another share of their tokens."""
    generator = torch.Generator().manual_seed(SEED + step)
    shape = (GLOBAL_SIZE, SEQ_LENGTH)
    ids = torch.randint(case.model.vocab_size, (shape[0], shape[1] + 1), generator=generator)
    kept = torch.rand(GLOBAL_SIZE, 1, generator=generator)
    weights = (torch.rand(shape, generator=generator) < kept).float()
    m, b = config.microbatches, config.batch.micro_size
    batches = []
    for start in range(data_rank * m * b, (data_rank + 1) * m * b, b):
        rows = slice(start, start + b)
        sequences = ids[rows].t()  # [s + 1, b]
        numbers = (ids[rows, :-1] % MEAN_DOCUMENT == 0).cumsum(1)
        batch = Batch(
            inputs=sequences[:-1].contiguous(),
            labels=sequences[1:].contiguous(),
            weights=weights[rows].t().contiguous() if case.model.masked else None,
            samples=torch.arange(start, start + b) + step * GLOBAL_SIZE,
            documents=Documents.of(numbers) if case.model.documents else None,
        )
        batches.append(as_masked(batch, config.model) if config.model.masked else batch)
    return batches


def as_masked(batch: Batch, model: ModelConfig) -> Batch:
    """The same tokens as masked samples: what stands in a sequence decides which of its positions
    are asked for, its number in which order its two halves are."""
    places = torch.arange(len(batch.inputs))[:, None]
    masked = ((batch.inputs * 7919 + places * 104729) % 1009).argsort(dim=0, stable=True)
    masked = masked[: model.predictions()]
    return replace(
        batch,
        labels=batch.inputs.gather(0, masked),
        weights=None if batch.weights is None else batch.weights.gather(0, masked),
        inputs=batch.inputs.scatter(0, masked, 0),
        masked=masked,
        types=(places >= len(places) // 2).long().expand_as(batch.inputs),
        order=batch.samples % 2,
    )


def train(task: TrainingTask, axes: Axes) -> Training | None:
    """Train on the ranks of `axes`; their rank 0 gets the result, the others None."""
    config = configuration(task)
    torch.set_num_threads(config.run.threads)
    engine = Engine(config, axes, task.case.model.vocab_size)
    losses, norms = [], []
    gradients: list[Piece] = []
    for step in range(task.steps):
        result = engine.step(step, microbatches(config, task.case, step, axes["data"].rank))
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step == 0:
            gradients = [piece.copied() for piece in engine.state.gradients()]
    weights = [piece.copied() for piece in engine.state.pieces() if piece.kind == WEIGHTS]
    everyone = axes.world.control.gather((gradients, weights), root=0)
    if everyone is None:
        return None
    first, torn = assemble(piece for of_rank in everyone for piece in of_rank[0])
    last, also_torn = assemble(piece for of_rank in everyone for piece in of_rank[1])
    return Training(losses, norms, first, last, list(dict.fromkeys(torn + also_torn)))


class Blocks:
    """The world cut into blocks of equal size, so that small layouts train side by side.

    One set of communicators serves all trainings: MPI libraries have a limited number of them.
    """

    def __init__(self, world: World, wire: Wire) -> None:
        self.world, self.wire = world, wire
        self._parts: dict[int, World | None] = {}
        self._axes: dict[Grid, Axes] = {}

    def run(
        self, tasks: Sequence[TrainingTask], say: Callable[[str], None] = lambda line: None
    ) -> dict[TrainingTask, Training]:
        """Train all tasks, which need the same number of ranks; every rank of the world calls it.

        Rank 0 of the world gets the results, the others an empty mapping. `say` is told now and
        then how many of the own block's are done.
        """
        ranks = tasks[0].case.layout.ranks
        blocks = self.world.size // ranks
        mine: dict[TrainingTask, Training] = {}
        block = self.world.rank // ranks
        part = self._part(ranks, block if block < blocks else MPI.UNDEFINED)
        if part is not None:
            own, told_at = tasks[block::blocks], time.monotonic()
            for done, task in enumerate(own, 1):
                result = train(task, self._split(part, task.case.layout))
                if result is not None:
                    mine[task] = result
                if time.monotonic() - told_at >= SAID_EVERY_S and done < len(own):
                    say(f"parity: {done} of {len(own)}")
                    told_at = time.monotonic()
        gathered = self.world.control.gather(mine, root=0) or []
        return {task: result for part in gathered for task, result in part.items()}

    def _part(self, ranks: int, block: int) -> World | None:
        """This rank's block as a world of its own; None for a rank that is in none. Every rank of
        the world calls it alike."""
        if ranks not in self._parts:
            control = self.world.control.Split(block, key=self.world.rank)
            self._parts[ranks] = World(control) if block != MPI.UNDEFINED else None
        return self._parts[ranks]

    def _split(self, part: World, layout: Layout) -> Axes:
        sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline}
        grid = training_grid(layout.data, layout.shards, **sizes)
        if grid not in self._axes:
            self._axes[grid] = part.split(grid, self.wire)
        return self._axes[grid]
