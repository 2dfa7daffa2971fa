"""Error feedback: the mean over replicas of their compressed gradients, and the use of what a code
leaves out, its remainder, by the rule of `error_feedback`."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import DataParallelConfig
from ptdmpi.config.methods import BEGIN_AS_WEIGHTS, COMMON
from ptdmpi.engine.compress.choose import compressor_of
from ptdmpi.engine.compress.compressor import Compressor, Draws
from ptdmpi.engine.compress.line import Coder, gathered_mean, squeezed_mean
from ptdmpi.engine.compress.low_rank import LowRank
from ptdmpi.engine.compress.units import TileBatch, batches, slabs
from ptdmpi.engine.data_parallel.method import Replica
from ptdmpi.model.random import fold
from ptdmpi.model.state import Kept, State

# Separates the draws of compression from all other draws of a seed.
PURPOSE = 1_000_003


@dataclass(frozen=True)
class CompressedTiles:
    """Some tiles in one step: how their numbers are sent, and the state that is kept of them."""

    batch: TileBatch
    state: State
    data: Communicator
    compressor: Compressor | LowRank
    key: int
    rounds: int

    def read(self, kind: str) -> Tensor:
        """Return a copy [tiles, width] of one kind of the state."""
        return self.batch.read(self.state.kinds[kind].parts[0])

    def write(self, kind: str, values: Tensor) -> None:
        """Write values [tiles, width] to one kind of the state."""
        self.batch.write(self.state.kinds[kind].parts[0], values)

    def code_bytes(self) -> int:
        """Return the bytes that this replica sends of the tiles, or, for factors and uncompressed
        tiles, the bytes that are summed."""
        size = self.batch.tiles * self.batch.width
        dtype = self.state.buffer.precision.master
        if not isinstance(self.compressor, LowRank):
            return self.coder.code_bytes(dtype)
        lines = self.batch.lines
        length = self.batch.length
        if self.compressor.shrinks(lines, length):
            size = self.batch.tiles * self.compressor.rank * (lines + length)
        return size * dtype.itemsize

    @property
    def coder(self) -> Coder:
        """Return the encoder and decoder of these tiles."""
        assert not isinstance(self.compressor, LowRank)
        return Coder(self.compressor, self.batch, self.key, self.rounds)

    def mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return C(x) of this replica, and the mean of all replicas' C(x), for x [tiles, width]."""
        if not isinstance(self.compressor, LowRank):
            return gathered_mean(self.coder, x, self.data)
        if not self.compressor.shrinks(self.batch.lines, self.batch.length):
            return x, self.data.all_reduce(x.clone()) / self.data.size
        return self._low_rank_mean(self.compressor, x)

    def _low_rank_mean(self, compressor: LowRank, x: Tensor) -> tuple[Tensor, Tensor]:
        """Do `mean` for the compressor "low_rank". The first lines of a tile in the state
        "low_rank" keep the factor with which the next step starts."""
        lines = self.batch.lines
        length = self.batch.length
        rank = compressor.rank
        kept = self.read("low_rank").view(-1, lines, length)
        draws = Draws(self.batch.numbers.here, self.key)
        second = compressor.start(kept[:, :rank], draws)
        own, total, second = compressor.summed(x.view(-1, lines, length), second, self.data)
        kept[:, :rank] = second.mT
        self.write("low_rank", kept.view(len(x), -1))
        return own.view(x.shape), total.view(x.shape) / self.data.size


def plain(place: CompressedTiles, x: Tensor) -> Tensor:
    """Return the mean of C(x); the remainder is lost."""
    return place.mean(x)[1]


def mem_sgd(place: CompressedTiles, x: Tensor) -> Tensor:
    """Return the mean of C(x + error); the remainder of a code is added to the next x (Seide et al.
    2014; Stich et al. 2018, arXiv 1809.07599, algorithm 1)."""
    x += place.read("error")
    own, mean = place.mean(x)
    place.write("error", x - own)
    return mean


def double_squeeze(place: CompressedTiles, x: Tensor) -> Tensor:
    """Return the mean, compressed by the replicas and again by the servers, each with a memory of
    its own (Tang et al. 2019, arXiv 1905.05957, algorithm 1). With codes of several rounds this is
    NEOLITHIC (Huang et al. 2022, arXiv 2206.03665, algorithm 2)."""
    x += place.read("error")
    left = place.read("server_error")
    own, mean = squeezed_mean(place.coder, x, left, place.data)
    place.write("server_error", left)
    place.write("error", x - own)
    return mean


def ef21(place: CompressedTiles, x: Tensor) -> Tensor:
    """Return the mean of the replicas' estimates of their gradients. Each adds C(x - estimate) to
    its estimate (Richtarik et al. 2021, arXiv 2106.05203, algorithm 2). The paper begins with C of
    the first gradient, and so do estimates that begin as zero."""
    estimate = place.read("estimate")
    own, change = place.mean(x - estimate)
    place.write("estimate", estimate + own)
    mean = place.read("estimate_mean") + change
    place.write("estimate_mean", mean)
    return mean


FEEDBACK: Mapping[str, Callable[[CompressedTiles, Tensor], Tensor]] = {
    "none": plain,
    "mem_sgd": mem_sgd,
    "double_squeeze": double_squeeze,
    "ef21": ef21,
    "neolithic": double_squeeze,
}


def kinds_of(section: DataParallelConfig) -> dict[str, Kept]:
    """Return the kinds of state that a method of this section keeps of each parameter, by name."""
    return {
        name: Kept(
            () if name in COMMON else ("replicate",),
            "weights" if name in BEGIN_AS_WEIGHTS else "zero",
        )
        for name in section.kinds
    }


class Compression:
    """The codes of a flat tensor of all parameters of a rank, some tiles after the other.

    `bits_per_element` is that of the last codes; None if there is nothing to encode.
    """

    def __init__(self, replica: Replica) -> None:
        config = replica.config
        self.section = config.data_parallel
        self.seed = config.run.seed
        self.data = replica.axes["data"]
        self.compressor = compressor_of(self.section)
        self.bits_per_element: float | None = None
        # every legal size of the tensor axis divides both (`config.legality`)
        most_tensor = math.gcd(config.model.heads, config.model.ffn_hidden)
        self.batches = batches(
            list(slabs(replica.buffer, most_tensor)),
            self.compressor.longest,
            replica.buffer.device,
        )

    def places(self, state: State) -> Iterator[CompressedTiles]:
        """Yield all tiles, with the draws for the number of updates that `state` counts."""
        rounds = 1
        if self.section.error_feedback == "neolithic":
            rounds = self.section.rounds
        key = fold(self.seed, PURPOSE, state.counters.updates)
        code_bytes = elements = 0
        for batch in self.batches:
            place = CompressedTiles(batch, state, self.data, self.compressor, key, rounds)
            yield place
            code_bytes += place.code_bytes()
            elements += batch.tiles * batch.width
        self.bits_per_element = None
        if elements:
            self.bits_per_element = 8 * code_bytes / elements

    def mean(self, state: State, flat: Tensor) -> None:
        """Replace each replica's `flat`, in the flat order, by the mean of the decoded codes of all
        replicas, the same bits on all of them."""
        rule = FEEDBACK[self.section.error_feedback]
        for place in self.places(state):
            place.batch.write(flat, rule(place, place.batch.read(flat)))
