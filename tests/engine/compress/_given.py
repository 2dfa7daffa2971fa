"""Gradients that are given, and the units of an engine, beside numpy."""

import math

import torch

from ptdmpi.model.random import fold
from tests.engine.compress._reference import Unit


def fill(engine, number: int) -> None:
    """Gradients that depend on the data rank, `number` and the logical element alone."""
    engine.buffer.gradients.zero_()
    for piece in engine.state.gradients():
        count = math.prod(piece.shape)
        seed = fold(number, len(piece.name), sum(map(ord, piece.name)), engine.axes["data"].rank)
        generator = torch.Generator().manual_seed(seed >> 1 & 2**62 - 1)
        whole = torch.randn(count, generator=generator, dtype=piece.values.dtype)
        # of every magnitude, as gradients are
        whole *= torch.logspace(-3, 1, count, dtype=piece.values.dtype)
        piece.values.copy_(whole.view(piece.shape)[piece.box.index])


def units_of(engine) -> list:
    """(unit, its places in the flat order) of all that the method compresses."""
    found = []
    for batch in engine.policy.compression.batches:
        places = batch.read(torch.arange(engine.buffer.size))
        for columns, length, numbers in batch.units:
            cut = places[:, columns].reshape(-1, length).numpy()
            found += zip(map(Unit, numbers.host.tolist()), cut, strict=True)
    return found
