"""Kinds of layers. All layers of one kind have the same operators, parameters and costs; only their
attention windows may differ."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple


class LayerKind(NamedTuple):
    """The properties in which the layers of a model differ. `mixes` is True if the layer has
    experts. `idle` is True if the layer comes before the first layer with adapters, and therefore
    has no backward pass."""

    mixes: bool = False
    idle: bool = False


class LayerRun(NamedTuple):
    """A run of layers: `layers` neighbouring layers of the same kind."""

    kind: LayerKind
    layers: int


Runs = tuple[LayerRun, ...]


def merged(runs: Iterable[LayerRun]) -> Runs:
    """Return `runs` with neighbouring runs of the same kind merged into one run."""
    groups = itertools.groupby(runs, key=lambda run: run.kind)
    return tuple(LayerRun(kind, sum(run.layers for run in group)) for kind, group in groups)


def count_of(runs: Iterable[LayerRun]) -> int:
    """Return the total number of layers in `runs`."""
    return sum(run.layers for run in runs)


def mixing_layers(layers: int, dense_layers: int, moe_every: int) -> tuple[int, ...]:
    """Return the numbers of the layers with experts, in a model that has experts. The first
    `dense_layers` layers have no experts. Any other layer has experts if its number, counted from
    1, is a multiple of `moe_every`. The returned numbers count from 0.
    """
    return tuple(n for n in range(dense_layers, layers) if (n + 1) % moe_every == 0)


def trained_runs(runs: Iterable[LayerRun]) -> Runs:
    """Return the runs whose layers have a backward pass."""
    return tuple(run for run in runs if not run.kind.idle)
