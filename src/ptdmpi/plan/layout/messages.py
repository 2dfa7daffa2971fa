"""What a data rank tells the others in a step, by method: in which pieces, and how many bytes.

The engine cuts what it sends by the sizes that stand here; traffic and memory are counted by them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from ptdmpi.base.traffic import Tally
from ptdmpi.config import Config, DataParallelConfig, InputError
from ptdmpi.config.methods import DIFFERING, encodes
from ptdmpi.plan.layout.topology import topology
from ptdmpi.plan.shape.codes import scratch_bytes

# Elements of what is sent as one, at most: of gradients between pairs, and of what neighbours
# exchange, of which two are under way where nothing overlaps.
MESSAGE_ELEMENTS, BUCKET_ELEMENTS = 1 << 24, 1 << 22


def pieces(elements: int, most: int) -> Iterator[int]:
    """The sizes that so many elements are cut into, none above `most`, as `Tensor.split` does."""
    whole, rest = divmod(elements, most)
    yield from (most for _ in range(whole))
    if rest:
        yield rest


@dataclass(frozen=True)
class RunMethod:
    """The data-parallel method of a run. `moments`: how many numbers the optimizer keeps of a
    parameter (AdamW 2); `matrices`: of the layers' matrices one less, for it updates these as
    wholes (Muon); `steps`: how many the run has, of which the last one is measured; `noise_every`:
    every how many of them each rank's own gradient has its norm taken, 0: never."""

    section: DataParallelConfig = field(default_factory=DataParallelConfig)
    moments: int = 2
    seed: int = 0
    steps: int | None = None
    matrices: bool = False
    noise_every: int = 0

    @classmethod
    def of(cls, config: Config) -> "RunMethod":
        """That of a resolved configuration."""
        optimizer, run = config.optimizer, config.run
        numbers, matrices = optimizer.numbers, optimizer.has_matrices
        noise_every = config.log.gradient_noise_every_steps
        return cls(config.data_parallel, numbers, run.seed, run.steps, matrices, noise_every)

    @property
    def kinds(self) -> int:
        """Numbers of the masters' type that are kept of a parameter beside its master."""
        return self.moments + len(self.section.kinds)

    @property
    def averaged_kinds(self) -> int:
        """How many kinds of state are mixed where replicas differ."""
        return 1 + (self.moments if self.section.average_moments else 0)

    def measures(self, step: int) -> bool:
        """Whether the consensus distance is asked for in step `step` (from 0)."""
        every, done = self.section.consensus_every, step + 1
        asked = every > 0 and (done % every == 0 or done == self.steps)
        return asked and self.section.method in DIFFERING

    def norms(self, step: int) -> int:
        """How many norms of gradients, or of what stands in their place, are taken in step `step`
        (from 0)."""
        own = self.noise_every > 0 and (step + 1) % self.noise_every == 0
        return 1 + self.measures(step) + own

    def room_bytes(self, n: int, elements: int, element_bytes: int, tile: int = 0) -> int:
        """What messages are received into, and codes are made in, behind the backwards, or with
        `overlap` behind the update, on the one of n data ranks that needs most of it. `tile`:
        elements of the largest tile that is compressed (`ptdmpi.plan.shape.codes`)."""
        method, mixed = self.section.method, elements * self.averaged_kinds
        if encodes(self.section):
            return scratch_bytes(self.section, n, elements, tile, element_bytes)
        if n == 1:
            return 0
        if method == "ring":
            return min(-(-elements // (n - 1)), MESSAGE_ELEMENTS) * element_bytes
        if method == "parameter_server":
            return min(elements, MESSAGE_ELEMENTS) * element_bytes
        if method == "decentralized":
            if not self.section.overlap:  # two pieces, or all of less
                mixed = min(mixed, 2 * min(elements, BUCKET_ELEMENTS))
            return _most_neighbours(self.section.topology, n, self.seed) * mixed * element_bytes
        return 0

    def copies_bytes(self, n: int, elements: int, element_bytes: int) -> int:
        """What stands all the time of what neighbours have made public, where codes travel."""
        if n == 1 or self.section.method != "decentralized" or not encodes(self.section):
            return 0
        neighbours = _most_neighbours(self.section.topology, n, self.seed)
        return neighbours * elements * element_bytes

    def averages(self, step: int) -> bool:
        """Whether replicas that differ all take their mean behind step `step` (from 0)."""
        every = {"local": self.section.local_steps, "decentralized": self.section.average_every}
        found = every.get(self.section.method, 0)
        return found > 0 and (step + 1) % found == 0

    def tells_codes(self, step: int) -> bool:
        """Whether codes travel in step `step` (from 0)."""
        return encodes(self.section) and (self.section.method != "local" or self.averages(step))

    def neighbours(self, n: int, rank: int, step: int) -> int:
        """How many of n data ranks rank `rank` tells in step `step` (from 0). Raises InputError for
        a topology's file that does not fit."""
        return len(topology(self.section.topology, n, self.seed).destinations(step, rank))

    def tell(
        self,
        tally: Tally,
        rank: int,
        step: int,
        gradients: int,
        weights: Sequence[int],
        element_bytes: int,
    ) -> None:
        """Count what data rank `rank` sends in step `step` (from 0) of so many elements of
        gradients, and of weights by unit; all but codes. Raises InputError for a topology's file
        that does not fit."""
        n, method = tally.ranks, self.section.method
        mixed = [] if encodes(self.section) else list(weights) * self.averaged_kinds
        sums = list(weights) if self.measures(step) else []
        sums += mixed if self.averages(step) else []
        sums += [gradients] if method == "all_reduce" else []
        for size in filter(None, sums):  # of a rank of which nothing trains
            tally.add("all_reduce", size * element_bytes)
        if method == "ring":
            for some in pieces(gradients, max(1, n - 1) * MESSAGE_ELEMENTS):
                # along 0, 1, .., n - 1, and on along n - 1, 0, .., n - 2
                times = (rank < n - 1) + (rank != n - 2)
                for part in pieces(some, -(-some // max(1, n - 1))):
                    tally.add("send", part * element_bytes, times)
        elif method == "parameter_server":
            for part in pieces(gradients, MESSAGE_ELEMENTS):
                tally.add("send", part * element_bytes, 1 if rank else n - 1)
        elif method == "decentralized" and not self.averages(step):
            told = self.neighbours(n, rank, step)
            for size in mixed:
                for part in pieces(size, BUCKET_ELEMENTS):
                    tally.add("neighbours", part * element_bytes, told)


@cache
def _most_neighbours(name: str, n: int, seed: int) -> int:
    """The neighbours of one of n ranks; of a file for another number as many as there can be."""
    with contextlib.suppress(InputError):
        return topology(name, n, seed).most_neighbours
    return n - 1
