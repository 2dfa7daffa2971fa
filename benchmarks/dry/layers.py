"""Counts of launches, waits, bytes, FLOPs and memory that one layer of a model adds to a training
step, for ptdmpi and for other trainers, without compilation."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from benchmarks.dry.bounds import CUDNN, OURS, PEAK, PLANNED_PEAK
from benchmarks.dry.steps import (
    DEVICE,
    Counts,
    begin,
    configuration,
    ours,
    planned_bytes,
    theirs,
    workload_of,
)
from benchmarks.gpu import peers
from benchmarks.gpu.parts import MODELS, Shape
from benchmarks.gpu.timing import Numbers, Row
from ptdmpi.config import Config

MICRO_SIZES = {"gpt 1.3b": 4, "llama 2.7b": 2}
LEAST = 2  # number of layers of the smaller model; the larger model has one layer more
SETTINGS = ("autocast", "bf16 weights")  # the settings in which transformers is counted
# (number of layers, number of microbatches) -> the counts of a step
Count = Callable[[int, int], Counts]


class Layer(NamedTuple):
    """The counts (launches, bytes, memory, ...) that one layer adds to the forward and backward of
    one microbatch, and to a complete step of two microbatches."""

    microbatch: Counts
    step: Counts


def of_layer(count: Count) -> Layer:
    """Return the counts (launches, bytes, memory, ...) of one layer, which are the counts of a
    model with three layers minus the counts of a model with two layers. For one microbatch, they
    are the counts of a step with two microbatches minus the counts of a step with one microbatch.
    `count` returns the counts of a step, given the numbers of layers and of microbatches."""
    step = count(LEAST + 1, 2).minus(count(LEAST, 2))
    less = count(LEAST + 1, 1).minus(count(LEAST, 1))
    return Layer(microbatch=step.minus(less), step=step)


def shown(layer: Layer) -> Numbers:
    """Return the counts (launches, bytes, memory, ...) of a layer as a row of the table."""
    once, step = layer
    return {
        "launches": round(once.launches),
        CUDNN: round(once.cudnn),
        "syncs": round(once.syncs),
        "GB moved": once.moved_bytes / 1e9,
        "GB outside of products": once.other_bytes / 1e9,
        "TFLOP": once.flops / 1e12,
        "roofline, ms": 1e3 * once.roofline_s,
        "step: launches": round(step.launches),
        "step: GB moved": step.moved_bytes / 1e9,
        "state, GB": step.state_bytes / 1e9,
        "activations, GB": (step.peak_bytes - step.state_bytes) / 1e9,
        PEAK: step.peak_bytes / 1e9,
    }


def config_of(name: str, shape: Shape, layers: int, microbatches: int) -> Config:
    """Return the configuration of a step of a model of `make gpu` with other numbers of layers and
    microbatches."""
    return configuration({**shape.model, "layers": layers}, MICRO_SIZES[name], microbatches)


def of_ours(name: str, shape: Shape) -> Numbers:
    """Run training steps of ptdmpi on the null GPU, and return the counts (launches, bytes, memory,
    ...) of one layer as a row of the table."""

    def count(layers: int, microbatches: int) -> Counts:
        return ours(config_of(name, shape, layers, microbatches), shape.vocab_size)

    layer = of_layer(count)
    less, more = (
        planned_bytes(config_of(name, shape, layers, 2), shape.vocab_size)
        for layers in (LEAST, LEAST + 1)
    )
    return shown(layer) | {PLANNED_PEAK: (more - less) / 1e9}


def of_transformers(name: str, shape: Shape, way: str) -> Numbers:
    """Run training steps of transformers in the setting `way` on the null GPU, and return the
    counts (launches, bytes, memory, ...) of one layer as a row of the table."""

    def count(layers: int, microbatches: int) -> Counts:
        begin()
        workload = workload_of(config_of(name, shape, layers, microbatches), shape.vocab_size)
        size = (workload.micro_size, "none")
        return peers.transformers_way(workload, peers.WAYS[way], size, theirs)

    return shown(of_layer(count))


def of_torchtitan(name: str, shape: Shape) -> Numbers:
    """Run training steps of torchtitan on the null GPU, and return the counts (launches, bytes,
    memory, ...) of one layer as a row of the table."""

    def count(layers: int, microbatches: int) -> Counts:
        begin()
        workload = workload_of(config_of(name, shape, layers, microbatches), shape.vocab_size)
        size = (workload.micro_size, "none")
        return peers.torchtitan_way(workload, size, theirs, compiled=False)

    with peers.alone_in_torchtitan(DEVICE):
        return shown(of_layer(count))


def rows() -> Iterator[Row]:
    """Yield, for each row of the table, its name and a function that returns its counts."""
    for name, shape in MODELS.items():
        yield f"{name}: {OURS}", partial(of_ours, name, shape)
        for way in SETTINGS:
            yield f"{name}: transformers, {way}", partial(of_transformers, name, shape, way)
        if shape.model.get("kind") == "llama":  # torchtitan has no GPT model
            yield f"{name}: torchtitan", partial(of_torchtitan, name, shape)
