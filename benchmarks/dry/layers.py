"""The counts of one layer: of a microbatch's forward and backward, and of the update."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.dry.steps import Counts, configuration, ours, planned_bytes
from benchmarks.gpu.parts import MODELS, Shape

MICRO_SIZES = {"gpt 1.3b": 4, "llama 2.7b": 2}
LEAST = 2  # layers of the smaller of two models whose difference is one layer


class Layer(NamedTuple):
    """The counts of one layer.

    `microbatch` counts the forward and the backward of a microbatch, `update` the rest of a step.
    `peak_bytes` is the memory that the layer adds to the peak of a step of one microbatch.
    """

    microbatch: Counts
    update: Counts
    peak_bytes: float


def of_layer(count: Callable[[int, int], Counts]) -> Layer:
    """Return the counts of one layer: the differences between models of 2 and 3 layers, in steps
    of one and two microbatches. `count` returns the counts of a step for a number of layers and a
    number of microbatches."""
    small = count(LEAST, 1)
    large = count(LEAST + 1, 1)
    a_layer = large.minus(small)
    in_small = count(LEAST, 2).minus(small)
    in_large = count(LEAST + 1, 2).minus(large)
    microbatch = in_large.minus(in_small)
    return Layer(microbatch, a_layer.minus(microbatch), a_layer.peak_bytes)


def shown(layer: Layer) -> dict[str, Any]:
    """Return the row of a layer in the table."""
    once, update = layer.microbatch, layer.update
    return {
        "launches": round(once.launches),
        "syncs": round(once.syncs),
        "GB moved": once.moved_bytes / 1e9,
        "GB outside of products": once.other_bytes / 1e9,
        "TFLOP": once.flops / 1e12,
        "roofline, ms": 1e3 * once.roofline_s,
        "peak, GB": layer.peak_bytes / 1e9,
        "update: launches": round(update.launches),
        "update: GB moved": update.moved_bytes / 1e9,
    }


def ours_of(name: str, shape: Shape) -> dict[str, Any]:
    """Return the row of ptdmpi for a layer of a model."""
    micro_size = MICRO_SIZES[name]

    def count(layers: int, microbatches: int) -> Counts:
        return ours(_config(shape, layers, micro_size, microbatches), shape.vocab_size)

    layer = of_layer(count)
    planned = [
        planned_bytes(_config(shape, layers, micro_size, 1), shape.vocab_size)
        for layers in (LEAST, LEAST + 1)
    ]
    return shown(layer) | {"planned peak, GB": (planned[1] - planned[0]) / 1e9}


def _config(shape: Shape, layers: int, micro_size: int, microbatches: int) -> Any:
    return configuration({**shape.model, "layers": layers}, micro_size, microbatches)


def table() -> dict[str, dict[str, Any]]:
    """Return the rows of the table of layers, by name."""
    rows = {}
    for name, shape in MODELS.items():
        rows[f"{name}, ptdmpi"] = ours_of(name, shape)
    return rows
