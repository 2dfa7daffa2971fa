"""The number and the sizes (in bytes) of the messages that a rank sends over the data axis in a
step, for each data-parallel method. A large tensor is split into several messages.

The training engine and the planner, which predicts traffic and memory, both use the sizes in this
file.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from ptdmpi.base.traffic import Tally
from ptdmpi.config import Config, DataParallelConfig, InputError
from ptdmpi.config.methods import DIFFERING, encodes, stored_numbers
from ptdmpi.plan.layout.topology import topology
from ptdmpi.plan.shape.codes import scratch_bytes

# The largest number of elements in one message: MESSAGE_ELEMENTS for gradients between two ranks,
# and BUCKET_ELEMENTS for the exchange with neighbours in decentralised training. If the exchange
# does not overlap with computation, two of these messages are in flight at the same time.
MESSAGE_ELEMENTS = 1 << 24
BUCKET_ELEMENTS = 1 << 22


def pieces(elements: int, most: int) -> Iterator[int]:
    """Yield the sizes of the pieces into which `Tensor.split(most)` divides `elements` elements.
    All pieces have `most` elements; only the last one may have fewer."""
    whole, rest = divmod(elements, most)
    yield from (most for _ in range(whole))
    if rest:
        yield rest


@dataclass(frozen=True)
class RunMethod:
    """The data-parallel method of a run.

    `moments` is the number of values that the optimizer keeps for each parameter (AdamW: 2). If
    `matrices` is True, the optimizer (Muon) updates each matrix of a layer as a whole, and keeps
    one value fewer per element of a matrix. `steps` is the number of steps of the run. A run that
    measures the consensus distance (how far the replicas are apart) always measures it in the last
    step, so this object must know the last step. The norm of each rank's own gradient is computed
    every `noise_every` steps, or never if `noise_every` is 0. `copies` is the number of files that
    a node keeps in its memory for each of its ranks, so that a failed run can continue without
    reading a disk. Each file is a rank's shard of a checkpoint. `reproducible` is the key
    `run.reproducible`; if it is True, gradients are summed along a tree over the microbatches.
    `one_pass` is True if a kernel in Triton can do the complete update.
    """

    section: DataParallelConfig = field(default_factory=DataParallelConfig)
    moments: int = 2
    seed: int = 0
    steps: int | None = None
    matrices: bool = False
    noise_every: int = 0
    copies: int = 0
    reproducible: bool = False
    one_pass: bool = True

    @classmethod
    def of(cls, config: Config, nodes: int = 1) -> "RunMethod":
        """Return the method of a complete configuration (a result of `resolve`) that runs on
        `nodes` nodes."""
        return cls(
            config.data_parallel,
            moments=config.optimizer.numbers,
            seed=config.run.seed,
            steps=config.run.steps,
            matrices=config.optimizer.has_matrices,
            noise_every=config.log.gradient_noise_every_steps,
            copies=copies_at_once(config, nodes),
            reproducible=config.run.reproducible,
            one_pass=config.optimizer.has_one_pass and config.data_parallel.method not in DIFFERING,
        )

    @property
    def kinds(self) -> int:
        """Return the number of values that are kept for each parameter in addition to its master
        weight, in the data type of the master weights."""
        return self.moments + len(self.section.kinds)

    def copied_numbers(self, replicas: int) -> int:
        """Return the number of values per parameter in a copy of the training state that the nodes
        keep in memory. The values of all `replicas` replicas are counted. Unlike a checkpoint, such
        a copy always includes every replica."""
        section = self.section.model_copy(update={"checkpoint": "replicas"})
        return stored_numbers(section, self.moments, replicas)

    @property
    def averaged_kinds(self) -> int:
        """Return the number of values per parameter that are averaged if replicas differ: 1 for the
        weight, plus the number of moments if moments are also averaged."""
        if self.section.average_moments:
            return 1 + self.moments
        return 1

    def measures(self, step: int) -> bool:
        """Return True if the run measures the consensus distance (how far the replicas are apart)
        in step `step`, counted from 0."""
        every = self.section.consensus_every
        done = step + 1
        asked = every > 0 and (done % every == 0 or done == self.steps)
        return asked and self.section.method in DIFFERING

    def norms(self, step: int) -> int:
        """Return the number of norms that step `step` (counted from 0) computes. Every step
        computes the norm of the gradients. Some steps also compute the consensus distance, and some
        the norm of a rank's own gradient, for the gradient noise."""
        own = self.noise_every > 0 and (step + 1) % self.noise_every == 0
        return 1 + self.measures(step) + own

    def room_bytes(self, n: int, elements: int, element_bytes: int, tile: int = 0) -> int:
        """Return the bytes of the buffers for received messages and for codes (compressed gradients
        or weights). The result is the maximum over the `n` data-parallel ranks.

        The buffers are allocated after the backward passes, or, with `overlap`, after the update.
        At that time, the memory of the activations is free. A rank has `elements` gradients of
        `element_bytes` bytes each. `tile` is the number of elements of the largest tile that is
        compressed (see `scratch_bytes`).
        """
        method = self.section.method
        mixed = elements * self.averaged_kinds
        if encodes(self.section):
            return scratch_bytes(self.section, n, elements, tile=tile, number_bytes=element_bytes)
        if n == 1:
            return 0
        if method == "ring":
            return min(-(-elements // (n - 1)), MESSAGE_ELEMENTS) * element_bytes
        if method == "parameter_server":
            return min(elements, MESSAGE_ELEMENTS) * element_bytes
        if method == "decentralized":
            # Without overlap, at most two messages of a neighbour are in memory at the same time;
            # with overlap, all messages are.
            if not self.section.overlap:
                mixed = min(mixed, 2 * min(elements, BUCKET_ELEMENTS))
            return _most_neighbours(self.section.topology, n, self.seed) * mixed * element_bytes
        return 0

    def copies_bytes(self, n: int, elements: int, element_bytes: int) -> int:
        """Return the bytes of the copies of weights that a rank keeps in decentralised training. A
        rank has `elements` weights of `element_bytes` bytes each. If neighbours exchange codes
        (compressed changes of weights), a rank keeps, during the whole run, an approximate copy of
        each neighbour's weights, to which it adds the received changes. Otherwise there are no
        copies, and the result is 0."""
        if n == 1 or self.section.method != "decentralized" or not encodes(self.section):
            return 0
        neighbours = _most_neighbours(self.section.topology, n, self.seed)
        return neighbours * elements * element_bytes

    def averages(self, step: int) -> bool:
        """Return True if every replica is replaced by the mean of all replicas after step `step`
        (counted from 0)."""
        every = {"local": self.section.local_steps, "decentralized": self.section.average_every}
        steps = every.get(self.section.method, 0)
        return steps > 0 and (step + 1) % steps == 0

    def tells_codes(self, step: int) -> bool:
        """Return True if step `step` (counted from 0) sends codes (compressed gradients or
        weights)."""
        return encodes(self.section) and (self.section.method != "local" or self.averages(step))

    def neighbours(self, n: int, rank: int, step: int) -> int:
        """Return the number of the `n` data ranks to which data rank `rank` sends in step `step`
        (counted from 0).

        Raises InputError if the topology is a file that does not fit `n` ranks.
        """
        return len(topology(self.section.topology, n, self.seed).destinations(step, rank))

    def tell(
        self,
        tally: Tally,
        rank: int,
        step: int,
        *,
        gradients: int,
        weights: Sequence[int],
        element_bytes: int,
    ) -> None:
        """Add to `tally` the messages that data rank `rank` sends in step `step` (counted from 0),
        except codes.

        `gradients` is the number of elements of the gradients. `weights` has the number of weights
        of each unit (a set of parameters that are sent in one message). `element_bytes` is the size
        of one gradient or weight. Raises InputError if the topology is a file that does not fit the
        number of data ranks.
        """
        n = tally.ranks
        method = self.section.method
        mixed: list[int] = []
        if not encodes(self.section):
            mixed = list(weights) * self.averaged_kinds
        sums: list[int] = []
        if self.measures(step):
            sums += weights
        if self.averages(step):
            sums += mixed
        if method == "all_reduce":
            sums.append(gradients)
        for size in filter(None, sums):  # the sizes are 0 on a rank that trains nothing
            tally.add("all_reduce", size * element_bytes)
        if method == "ring":
            for chunk in pieces(gradients, max(1, n - 1) * MESSAGE_ELEMENTS):
                # The sums travel along the ranks 0, 1, ..., n - 1, and then the complete sums along
                # the ranks n - 1, 0, ..., n - 2. Each rank except the last in a row sends a
                # message.
                times = (rank < n - 1) + (rank != n - 2)
                for part in pieces(chunk, -(-chunk // max(1, n - 1))):
                    tally.add("send", part * element_bytes, times)
        elif method == "parameter_server":
            times = 1 if rank else n - 1  # rank 0 is the parameter server
            for part in pieces(gradients, MESSAGE_ELEMENTS):
                tally.add("send", part * element_bytes, times)
        elif method == "decentralized" and not self.averages(step):
            times = self.neighbours(n, rank, step)
            for size in mixed:
                for part in pieces(size, BUCKET_ELEMENTS):
                    tally.add("neighbours", part * element_bytes, times)


def copies_at_once(config: Config, nodes: int) -> int:
    """Return the number of files that a node has in its memory for each of its ranks while the
    ranks of `nodes` nodes write a copy of the state. For each of its ranks, a node stores the new
    and the previous file of this rank, and, if there are several nodes, also the new and the
    previous file of a rank of the neighbouring node. Return 0 if the run keeps no copies in
    memory."""
    if not config.checkpoint.memory_every_steps:
        return 0
    return 2 * min(2, nodes)


@cache
def _most_neighbours(name: str, n: int, seed: int) -> int:
    """Return the largest number of neighbours that any of the `n` ranks has in the topology `name`.

    If the topology is a file that does not fit `n` ranks, return the upper bound `n` - 1.
    """
    with contextlib.suppress(InputError):
        return topology(name, n, seed).most_neighbours
    return n - 1
