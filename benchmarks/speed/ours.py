"""ptdmpi's trainer in the comparison: the engine of `ptdmpi train`, with synthetic batches."""

import contextlib
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.speed.case import Row, synthetic_ids
from ptdmpi.base.heap import give_back, keep_freed
from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.world import Axes, World, fail_together
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.kernels import Kernels, host
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.blocks import Scores
from ptdmpi.model.kernels.choice import (
    BY_LIBRARY,
    BY_PYTORCH,
    AttentionByProducts,
    Entries,
    HostAttention,
    HostChoice,
    OneDnnLinears,
    measured_choice,
)
from ptdmpi.model.kernels.timing.here import measured_here, sizes_of
from ptdmpi.model.kernels.timing.quickest import ATTENTION
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train.capacity import Memory
from ptdmpi.watch.stopwatch import Stopwatch

REPEATS = 6
INSIDE = " > "  # separates the names in a key of `OurTrainer.profile`


class OurTrainer:
    """ptdmpi's trainer on one rank: the engine of `ptdmpi train`."""

    def __init__(self, row: Row, world: World) -> None:
        config = row.config
        torch.set_num_threads(config.run.threads)
        keep_freed(os.environ)
        axes = world.split(grid_of(config))
        self.row = row
        self.rank = world.rank
        self.data_rank = axes["data"].rank
        self.microbatches = config.microbatches
        choice = _settled(row, world, axes)
        self.engine = Engine(config, axes, row.case.vocab_size)
        self.engine.compute_by(choice)
        give_back()

    def batch(self, step: int) -> list[Microbatch]:
        """Return this rank's microbatches for a step."""
        size = self.row.case.micro_size
        ids = synthetic_ids(self.row, step)
        first = self.data_rank * self.microbatches * size
        mine = ids[first : first + self.microbatches * size]
        samples = torch.arange(len(mine)) + step * self.row.case.global_size + first
        here = self.engine.context.positions
        return [
            Microbatch.of_ids(part.t(), numbers).at(here)
            for part, numbers in zip(mine.split(size), samples.split(size), strict=True)
        ]

    def step(self, step: int, batch: list[Microbatch]) -> float:
        """Train a step and return its loss."""
        return self.engine.step(step, batch).loss

    def profile(self, step: int) -> dict[str, float]:
        """Train a step under torch's profiler. Return the seconds that this rank spent in each kind
        of work. The seconds of a function do not include the seconds of the functions that it
        calls. A key is a call stack: the names of the functions, the outermost first, separated by
        INSIDE. The names are the spans of the step, "messages" for collectives, and PyTorch's
        functions and operations."""
        batch = self.batch(step)
        with profile(activities=[ProfilerActivity.CPU]) as done, _named(), record_function("step"):
            self.step(step, batch)
        seconds: Counter[str] = Counter()
        for event in done.events():
            names, outer = [event.name], event.cpu_parent
            while outer is not None:
                names.insert(0, outer.name)
                outer = outer.cpu_parent
            if names[0] == "step":
                seconds[INSIDE.join(names)] += 1e-6 * event.self_cpu_time_total
        return dict(seconds)

    def limits_s(self) -> tuple[float, float]:
        """Return two numbers: the seconds of a step's GEMMs of linear layers, and the seconds of
        these GEMMs plus the step's attention. GEMMs and attention are measured separately."""
        gemms = self._gemm_time_s()
        return gemms, gemms + self._attention_time_s()

    def _attention_time_s(self) -> float:
        """Return the seconds of attention in a step, over all microbatches and all layers of this
        rank, with the implementation that is fastest on this machine."""
        case = self.row.case
        layers = sum(len(stage.layers) for stage in self.engine.stages.values())
        shape = (
            case.micro_size,
            case.heads // self.row.sizes.tensor,
            case.seq_length,
            case.hidden // case.heads,
        )
        dtype = data_types(self.row.precision).compute
        ways = (*ATTENTION.values(), AttentionByProducts(keeps=True))
        once = min(_attention_time_s(shape, dtype, way) for way in ways)
        # Divide by the number c of context ranks, not by c^2: a context rank has 1/c of the
        # queries, but they attend to the keys of all ranks.
        return once * layers * self.microbatches / self.row.sizes.context

    def _gemm_time_s(self) -> float:
        """Return the seconds of a step's GEMMs: output, input gradient and weight gradient of each
        linear layer and microbatch, in the data type in which the layers compute on this device.
        Each rank is assumed to send equally many tokens to all experts, and an expert multiplies
        the tokens of each sending rank separately."""
        model = self.row.config.model
        tokens = self.row.case.micro_size * self.row.case.seq_length // self.row.sizes.context
        shapes: Counter[tuple[int, ...]] = Counter()
        for stage in self.engine.stages.values():
            for name, weight in stage.named_logical_parameters():
                rows, sources = tokens, 1
                if re.search(r"\bexperts\.\d", name):
                    rows = tokens * model.experts_per_token // model.experts
                    sources = self.row.sizes.expert
                if weight.dim() == 2 and not name.startswith("embedding."):
                    shapes[(rows, *weight.shape)] += sources
        dtype = data_types(self.row.precision).compute
        if not host.multiplies("cpu", dtype):
            dtype = torch.float32
        once = sum(count * _linear_time_s(*shape, dtype) for shape, count in shapes.items())
        return once * self.microbatches


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Return a context in which a profile shows the spans of a step and the collectives."""
    timed, span = Communicator.timed, Stopwatch.span

    def named(comm: Communicator, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        with record_function("messages"):
            return timed(comm, name, work, *arguments)

    @contextlib.contextmanager
    def spanned(watch: Stopwatch, kind: str, op: str = "", peer: int | None = None) -> Iterator:
        with record_function(kind), span(watch, kind, op, peer):
            yield

    with (
        mock.patch.object(Communicator, "timed", named),
        mock.patch.object(Stopwatch, "span", spanned),
    ):
        yield


def _settled(row: Row, world: World, axes: Axes) -> HostChoice:
    """Return the kernels that `ptdmpi train` would use on this machine for the configuration of the
    row."""
    dtype = data_types(row.precision).compute
    own: Entries = {}
    if row.kernels == "default":
        own = BY_PYTORCH
    elif row.kernels == "auto":
        sizes = sizes_of(row.config, row.case.vocab_size)
        own = measured_here(world, axes, sizes, dtype, say=lambda line: None)
    memory = Memory(row.config, row.case.vocab_size, world, torch.device("cpu"))
    chosen = world.control.bcast(measured_choice(dtype, own))
    settled = memory.settle(chosen, lambda line: None)
    assert isinstance(settled, HostChoice), "the host's"
    return settled


def _linear_time_s(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> float:
    """Measure the products of a linear: the output x W^T, the input gradient dy W and the weight
    gradient dy^T x. Return the sum of their shortest times, in seconds. Each product is computed by
    its fastest kernel."""
    x = torch.randn(rows, inputs).to(dtype)
    dy = torch.randn(rows, outputs).to(dtype)
    weight = torch.randn(outputs, inputs).to(dtype)
    products: tuple[Callable[[Kernels], object], ...] = (
        lambda kernels: kernels.linear(x, weight),
        lambda kernels: kernels.input_gradient(dy, weight),
        lambda kernels: dy.t() @ x,
    )
    choices = [BY_LIBRARY]
    if host.has_fused(dtype):
        choices.append(HostChoice(linear=OneDnnLinears(0.0, 0.0)))
    least = [math.inf] * len(products)
    for _ in range(REPEATS):
        for choice in choices:
            works = [partial(product, Kernels(choice)) for product in products]
            least = [min(t, _time_s(work)) for t, work in zip(least, works, strict=True)]
    return sum(least)


def _attention_time_s(shape: tuple[int, ...], dtype: torch.dtype, way: HostAttention) -> float:
    """Measure causal attention with the implementation `way`, forward and backward, and return the
    shortest time in seconds."""
    if not host.multiplies("cpu", dtype):
        dtype = torch.float32
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
    dy = torch.randn(shape).to(dtype)
    core = AttentionCore(Scores(shape[-1] ** -0.5), Kernels(HostChoice(attention=way)))

    def forward_and_backward() -> None:
        torch.autograd.grad(core(q, k, v), (q, k, v), dy)

    return min(_time_s(forward_and_backward) for _ in range(REPEATS))


def _time_s(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def run(row: Row, serve: Callable[[OurTrainer], None]) -> None:
    """Build the trainer of a row on this rank, and pass it to `serve`. If one rank fails, all ranks
    end."""
    world = World()
    with fail_together(world):
        serve(OurTrainer(row, world))
