"""The training order for runs in which each data rank reads only its own datasets
(`data.split`)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ptdmpi.data.order import Part, SampleOrder, Start


class SplitOrder(SampleOrder):
    """The order of all training samples of a run whose datasets are divided among `ranks` data
    ranks.

    Each rank gets a contiguous block of datasets, and reads only the datasets of this block. All
    ranks get the same number of datasets. As in a run without this division, the B = `global_size`
    samples of step k are cut into `ranks` equal blocks, and data rank r trains on block r. Each
    data rank has an order of its own: a `SampleOrder` of its datasets with their weights. In step k
    the data rank trains on B / ranks samples of this order, beginning with sample k B / ranks.
    Global sample n is therefore a pure function of seed, n and the number of data ranks, and does
    not depend on the tensor- and pipeline-parallel sizes.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        seed: int,
        *,
        ranks: int,
        global_size: int,
        start: Start,
    ) -> None:
        """Raise ValueError if datasets or samples cannot be divided equally. Also raise the same
        errors as `SampleOrder`."""
        if len(parts) % ranks or global_size % ranks:
            raise ValueError(f"{ranks} ranks share {len(parts)} datasets and {global_size} samples")
        # Check all datasets together before they are divided. The numbers of datasets in error
        # messages then count from the first dataset of the run, not from the first dataset of a
        # rank.
        super().__init__(parts, seed, start)
        self.ranks = ranks
        self.global_size = global_size
        self.block = len(parts) // ranks  # number of datasets per rank.
        # A dataset's key is its number among all datasets. If two ranks have equal datasets, the
        # orders of their samples are therefore different.
        keyed = []
        for number, part in enumerate(parts):
            keyed.append(part if part.key is not None else replace(part, key=number))
        share = range(0, len(parts) + 1, self.block)
        self._orders = [SampleOrder(keyed[a:b], seed) for a, b in pairwise(share)]

    def locate(self, global_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each global sample (int [n], at or after the start) the number of its dataset
        (int64 [n]), and the number of the sample in this dataset (int64 [n])."""
        indices = np.asarray(global_indices, dtype=np.int64) - self.start.sample
        mine = self.global_size // self.ranks
        steps, places = np.divmod(indices, self.global_size)
        ranks, places = np.divmod(places, mine)
        datasets = np.empty_like(indices)
        samples = np.empty_like(indices)
        for rank, order in enumerate(self._orders):
            chosen = np.flatnonzero(ranks == rank)
            if chosen.size:
                inside, samples[chosen] = order.locate(steps[chosen] * mine + places[chosen])
                datasets[chosen] = inside + rank * self.block
        return datasets, samples

    def counts(self, total_samples: int) -> list[int]:
        """Return how many of the first `total_samples` samples of the run come from each dataset,
        including the samples used before the start."""
        mine = self.global_size // self.ranks
        steps, rest = divmod(total_samples - self.start.sample, self.global_size)
        counts = []
        for rank, order in enumerate(self._orders):
            begun = min(mine, max(0, rest - rank * mine))
            counts += order.counts(steps * mine + begun)
        return counts
