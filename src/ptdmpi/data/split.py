"""The training order where each data rank draws from datasets of its own (`data.split`)."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ptdmpi.data.order import Part, SampleOrder, Start


class SplitOrder(SampleOrder):
    """The order of all training samples of a run whose datasets are dealt to `ranks` data ranks, in
    contiguous blocks of equal number; every rank draws from its own block alone.

    Of the B = `global_size` samples of step k data rank r trains on the r-th block of B / ranks, as
    ever, and these are samples k B / ranks and following of an order of its own: a `SampleOrder` of
    its datasets, with their weights. So what global sample n is still is a pure function of seed
    and n, whatever t and p. Raises ValueError where datasets or samples cannot be dealt equally,
    and InputError as `SampleOrder`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        seed: int,
        ranks: int,
        global_size: int,
        start: Start,
    ) -> None:
        if len(parts) % ranks or global_size % ranks:
            raise ValueError(f"{ranks} ranks share {len(parts)} datasets and {global_size} samples")
        # all of them once: what is wrong with a dataset is told by its number among all
        super().__init__(parts, seed, start)
        self.ranks, self.global_size = ranks, global_size
        self.block = len(parts) // ranks  # datasets of a rank
        share = range(0, len(parts) + 1, self.block)
        # keys by the place among all: the orders of two ranks are not one, of equal datasets either
        keyed = [
            Part(one.samples, one.weight, one.epochs, k if one.key is None else one.key, one.drawn)
            for k, one in enumerate(parts)
        ]
        self._orders = [SampleOrder(keyed[a:b], seed) for a, b in pairwise(share)]

    def locate(self, global_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Dataset (int64 [n]) and sample within it (int64 [n]) of global samples (int [n], from
        the start on)."""
        indices = np.asarray(global_indices, dtype=np.int64) - self.start.sample
        mine = self.global_size // self.ranks
        steps, places = np.divmod(indices, self.global_size)
        ranks, places = np.divmod(places, mine)
        datasets, samples = np.empty_like(indices), np.empty_like(indices)
        for rank, order in enumerate(self._orders):
            chosen = np.flatnonzero(ranks == rank)
            if chosen.size:
                found, samples[chosen] = order.locate(steps[chosen] * mine + places[chosen])
                datasets[chosen] = found + rank * self.block
        return datasets, samples

    def counts(self, total_samples: int) -> list[int]:
        """How many of the first `total_samples` samples come from each dataset, with what was drawn
        before the start."""
        mine = self.global_size // self.ranks
        steps, rest = divmod(total_samples - self.start.sample, self.global_size)
        found = []
        for rank, order in enumerate(self._orders):
            begun = min(mine, max(0, rest - rank * mine))
            found += order.counts(steps * mine + begun)
        return found
