"""Training runs of cases. Each run returns complete tensors, assembled from the shards on its
ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from tempfile import gettempdir
from typing import TypeVar

import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.wires import Wire
from ptdmpi.comm.world import Axes, World
from ptdmpi.config import Config, Layout, ModelConfig, synthetic_config
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.documents import Documents
from ptdmpi.model.state import WEIGHTS, Piece, assemble
from ptdmpi.parity.layouts import GLOBAL_SIZE, Case
from ptdmpi.parity.mixtures import Choices, Chooser, MixtureModel
from ptdmpi.plan.layout.grid import Grid, layout_grid

T = TypeVar("T")
SEED = 1234
MEAN_DOCUMENT = 6  # Mean number of tokens in a document, in models with documents.
# With the usual standard deviation of 0.02, layers of this width would hardly change the residual
# stream, and faults would not be visible.
INIT_STD = 0.1
# If a gradient consists only of rounding errors, Adam divides these errors by their own size plus
# epsilon. With an epsilon of 1e-8 the step of a parameter could then be as large as the full
# learning rate, and chance would decide whether parameters stay within their tolerance.
EPSILON = 1e-6
PROGRESS_EVERY_S = 20.0


@dataclass(frozen=True)
class TrainingTask:
    """A training run that the comparisons need: a case, the compute type, and the number of steps.

    `attempt` distinguishes two runs of the same case.
    """

    case: Case
    compute: str
    steps: int
    attempt: int = 0

    @property
    def reference(self) -> "TrainingTask":
        """Return the training run of the same model on one rank."""
        case = replace(self.case, layout=self.case.layout.reference)
        return replace(self, case=case, attempt=0)

    @property
    def watches_choices(self) -> bool:
        """Return True if the choices of experts are compared with the choices of `reference`. In
        float32 the choices of `reference` are also used in place of the run's own choices."""
        is_mixture = isinstance(self.case.model, MixtureModel)
        return is_mixture and self.compute in ("fp64", "fp32") and self != self.reference


@dataclass(frozen=True)
class Training:
    """The results of a training run.

    `losses` and `norms` have the loss and the gradient norm of each step. `gradients` are the
    gradients of the first step, as the optimizer gets them. `parameters` are the final master
    weights. `torn` has the names of tensors whose copies on several ranks differ. If the model has
    experts, the run on one rank stores the experts of each token in `choices`. Every other run
    counts in `flips` how many of its choices differ from the choices of the run on one rank.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)
    choices: Choices = field(default_factory=dict)
    flips: int = 0


def configuration(task: TrainingTask) -> Config:
    """Return the configuration for a task, checked like the configuration of a user."""
    layout = task.case.layout
    model = task.case.model
    rate = 0.1 if model.dropout else 0.0
    return synthetic_config(
        layout,
        {**model.keys, "init_std": INIT_STD, "dropout": rate, "attention_dropout": rate},
        run={
            "seed": SEED,
            "steps": task.steps,
            "reproducible": layout.reproducible,
            "dir": gettempdir(),  # the directory for offloaded state
        },
        batch={"global_size": GLOBAL_SIZE},
        precision={"compute": task.compute},
        optimizer={
            "kind": model.optimizer,
            "warmup_steps": min(5, task.steps),
            "eps": EPSILON,
        },
        adapt=model.adapt,
    )


def microbatches(config: Config, case: Case, step: int, data_rank: int) -> list[Microbatch]:
    """Return the microbatches of one data rank, from the global batch of `step`.

    The tokens are random, and the same in every layout. If the model is `masked`, some random
    positions of each sequence have a loss with weight 1, and the others have weight 0. The fraction
    of positions with weight 1 differs between sequences.
    """
    generator = torch.Generator().manual_seed(SEED + step)
    shape = (GLOBAL_SIZE, case.model.seq_length)
    ids = torch.randint(case.model.vocab_size, (shape[0], shape[1] + 1), generator=generator)
    kept = torch.rand(GLOBAL_SIZE, 1, generator=generator)
    weights = (torch.rand(shape, generator=generator) < kept).float()
    m = config.microbatches
    b = config.batch.micro_size
    batches = []
    for start in range(data_rank * m * b, (data_rank + 1) * m * b, b):
        rows = slice(start, start + b)
        samples = torch.arange(start, start + b) + step * GLOBAL_SIZE
        batch = Microbatch.of_ids(ids[rows].t(), samples)
        if case.model.masked:
            batch = replace(batch, weights=weights[rows].t().contiguous())
        if case.model.documents:
            numbers = (ids[rows, :-1] % MEAN_DOCUMENT == 0).cumsum(1)
            batch = replace(batch, documents=Documents.of(numbers))
        if config.model.masked:
            batch = as_masked(batch, config.model)
        batches.append(batch)
    return batches


def as_masked(batch: Microbatch, model: ModelConfig) -> Microbatch:
    """Return the tokens of a batch as samples for a masked language model.

    The tokens of a sequence determine which positions of the sequence are masked. The label for
    sentence-order prediction is the sample number modulo 2.
    """
    places = torch.arange(len(batch.inputs))[:, None]
    masked = ((batch.inputs * 7919 + places * 104729) % 1009).argsort(dim=0, stable=True)
    masked = masked[: model.predictions()]
    weights = batch.weights
    if weights is not None:
        weights = weights.gather(0, masked)
    return replace(
        batch,
        labels=batch.inputs.gather(0, masked),
        weights=weights,
        inputs=batch.inputs.scatter(0, masked, 0),
        masked=masked,
        types=(places >= len(places) // 2).long().expand_as(batch.inputs),
        order=batch.samples % 2,
    )


def train(
    task: TrainingTask, axes: Axes, known: Mapping[TrainingTask, Choices] | None = None
) -> Training | None:
    """Train on the ranks of `axes`. Return the result of the training run on rank 0 of `axes`, and
    None on all other ranks. If the task watches the choices of experts, `known` has the choices of
    the runs on one rank."""
    config = configuration(task)
    torch.set_num_threads(config.run.threads)
    engine = Engine(config, axes, task.case.model.vocab_size)
    expected = (known or {})[task.reference] if task.watches_choices else None
    chooser = Chooser(engine, expected, replaces=task.compute == "fp32" and expected is not None)
    losses = []
    norms = []
    gradients: list[Piece] = []
    for step in range(task.steps):
        whole = microbatches(config, task.case, step, axes["data"].rank)
        batches = [batch.at(engine.context.positions) for batch in whole]
        chooser.begin(step, batches)
        result = engine.step(step, batches)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step == 0:
            gradients = [piece.copied() for piece in engine.state.gradients()]
    weights = [piece.copied() for piece in engine.state.pieces() if piece.kind == WEIGHTS]
    everyone = axes.world.control.gather((gradients, weights, chooser.flips), root=0)
    if everyone is None:
        return None
    first, torn = assemble(piece for of_rank in everyone for piece in of_rank[0])
    last, also_torn = assemble(piece for of_rank in everyone for piece in of_rank[1])
    return Training(
        losses=losses,
        norms=norms,
        gradients=first,
        parameters=last,
        torn=list(dict.fromkeys(torn + also_torn)),
        choices=chooser.recorded if task == task.reference else {},
        flips=sum(of_rank[2] for of_rank in everyone),
    )


class Blocks:
    """The ranks of the world, divided into blocks of equal size. Several small layouts can be
    trained at the same time, each on one block.

    Training runs with the same grid of ranks use the same communicators, because MPI libraries can
    create only a limited number of communicators.
    """

    def __init__(self, world: World, wire: Wire) -> None:
        self.world = world
        self.wire = wire
        self._parts: dict[int, World | None] = {}
        self._axes: dict[Grid, Axes] = {}

    def run(
        self,
        tasks: Sequence[TrainingTask],
        say: Callable[[str], None] = lambda line: None,
        *,
        work: Callable[[TrainingTask, Axes], T | None],
    ) -> dict[TrainingTask, T]:
        """Call `work` for all tasks. All tasks must need the same number of ranks. Every rank of
        the world calls this method.

        Return the results on rank 0 of the world, {} on other ranks. Every PROGRESS_EVERY_S
        seconds, `say` is called with a line that has the number of finished tasks of this block.
        """
        ranks = tasks[0].case.layout.ranks
        blocks = self.world.size // ranks
        mine: dict[TrainingTask, T] = {}
        block = self.world.rank // ranks
        if block >= blocks:
            block = MPI.UNDEFINED
        part = self._part(ranks, block)
        if part is not None:
            own = tasks[block::blocks]
            reported_at = time.monotonic()
            for done, task in enumerate(own, 1):
                result = work(task, self._split(part, task.case.layout))
                if result is not None:
                    mine[task] = result
                if time.monotonic() - reported_at >= PROGRESS_EVERY_S and done < len(own):
                    say(f"parity: {done} of {len(own)}")
                    reported_at = time.monotonic()
        gathered = self.world.control.gather(mine, root=0) or []
        return {task: result for part in gathered for task, result in part.items()}

    def _part(self, ranks: int, block: int) -> World | None:
        """Return this rank's block as a separate world; None if the rank is in no block.

        If no earlier call had the same `ranks`, the world is split, and all its ranks must take
        part. So every rank of the world must call this method with the same values of `ranks`, in
        the same order.
        """
        if ranks not in self._parts:
            control = self.world.control.Split(block, key=self.world.rank)
            self._parts[ranks] = None
            if block != MPI.UNDEFINED:
                self._parts[ranks] = World(control)
        return self._parts[ranks]

    def _split(self, part: World, layout: Layout) -> Axes:
        """Return the communicators for a layout on the ranks of a block."""
        grid = layout_grid(layout)
        if grid not in self._axes:
            self._axes[grid] = part.split(grid, self.wire)
        return self._axes[grid]
