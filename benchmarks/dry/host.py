"""The host's processor time for each launch, measured on the null GPU, whose launches return at
once. This processor time is the only time that can be measured without a GPU."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.dry.bounds import OURS
from benchmarks.dry.device import NullGpu
from benchmarks.dry.layers import SETTINGS
from benchmarks.dry.steps import (
    DEVICE,
    begin,
    configuration,
    offered_attention,
    step_of_ours,
    workload_of,
)
from benchmarks.gpu import peers
from benchmarks.gpu.parts import MODELS, Shape
from benchmarks.gpu.timing import Numbers, Row
from ptdmpi.config import Config

LAYERS = 8
MICROBATCHES = 4
STEPS = 20
WARM_UP = 2  # the first steps, in which PyTorch allocates its memory, are not timed


def timed(step: Callable[[], object]) -> Numbers:
    """Do some training steps, and return the number of launches of a step and the shortest of the
    process's processor times, as a row of the table. Processor time does not include the time of
    other programs, but these programs also use the caches, so the times of steps differ. Only one
    thread of the process works at a time: autograd's thread in the backward, and otherwise the main
    thread."""
    gpu = NullGpu()
    times = []
    launches = 0
    for _ in range(STEPS):
        before, begin_s = gpu.launched(), time.process_time()
        step()
        times.append(time.process_time() - begin_s)
        launches = gpu.launched() - before
    step_s = min(times[WARM_UP:])
    return {
        "launches of a step": launches,
        "ms": 1e3 * step_s,
        "us a launch": 1e6 * step_s / launches,
    }


def config_of(shape: Shape) -> Config:
    """Return the configuration of the timed steps: microbatches of one sequence."""
    return configuration({**shape.model, "layers": LAYERS}, 1, MICROBATCHES)


def of_ours(shape: Shape) -> Numbers:
    """Return the host's time for a step of ptdmpi and for each of its launches."""
    step = step_of_ours(config_of(shape), shape.vocab_size)
    with offered_attention():
        return timed(step)


def _of_theirs(
    workload: peers.Workload,
    size: peers.Size,
    loss_of: Callable[[Tensor], Tensor],
    model: torch.nn.Module,
) -> Numbers:
    """Return the host's time for a step of another trainer and for each of its launches. The
    arguments are those of `peers.timed`."""
    update = torch.optim.AdamW(model.parameters(), fused=True)
    microbatches = peers.ids_of(workload, size[0], 0)
    return timed(lambda: peers.one_step(microbatches, loss_of, update))


def of_transformers(shape: Shape, way: str) -> Numbers:
    """Return the host's time for a step of transformers in the setting `way`, and for each of its
    launches."""
    begin()
    workload = workload_of(config_of(shape), shape.vocab_size)
    return peers.transformers_way(workload, peers.WAYS[way], (1, "none"), _of_theirs)


def of_torchtitan(shape: Shape) -> Numbers:
    """Return the host's time for a step of torchtitan and for each of its launches."""
    begin()
    workload = workload_of(config_of(shape), shape.vocab_size)
    with peers.alone_in_torchtitan(DEVICE):
        return peers.torchtitan_way(workload, (1, "none"), _of_theirs, compiled=False)


def rows() -> Iterator[Row]:
    """Yield, for each row of the table, its name and a function that returns its numbers."""
    torch.set_num_threads(1)
    for name, shape in MODELS.items():
        yield f"{name}: {OURS}", partial(of_ours, shape)
        for way in SETTINGS:
            yield f"{name}: transformers, {way}", partial(of_transformers, shape, way)
        if shape.model.get("kind") == "llama":  # torchtitan has no GPT model
            yield f"{name}: torchtitan", partial(of_torchtitan, shape)
