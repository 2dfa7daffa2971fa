"""The mean of compressed gradients over replicas, with error feedback: each step stores its
compression error, and later steps use this error. The key `error_feedback` names the rule."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import DataParallelConfig
from ptdmpi.config.methods import BEGIN_AS_WEIGHTS, COMMON, rounds_of
from ptdmpi.engine.compress.choose import compressor_of
from ptdmpi.engine.compress.compressor import Compressor, Draws
from ptdmpi.engine.compress.line import Coder, gathered_mean, squeezed_mean
from ptdmpi.engine.compress.low_rank import LowRank
from ptdmpi.engine.compress.units import TileBatch, batches, slabs
from ptdmpi.engine.data_parallel.method import Replica
from ptdmpi.model.random import fold
from ptdmpi.model.state import Kept, State

# The hash that yields the random numbers of compression includes this number. Without this number,
# the random numbers of compression could equal other random numbers of the same seed.
PURPOSE = 1_000_003


@dataclass(frozen=True)
class CompressedTiles:
    """Some tiles (blocks of parameters, see `compress.units`) of the gradients in one step, with
    the objects that compress and send these tiles, and with their error-feedback state. `key` and
    `rounds` have the same meaning as in `Coder`."""

    batch: TileBatch
    state: State
    data: Communicator
    compressor: Compressor | LowRank
    key: int
    rounds: int

    def read(self, kind: str) -> Tensor:
        """Return a copy [tiles, width] of the values that these tiles have in the state `kind`."""
        return self.batch.read(self.state.kinds[kind].parts[0])

    def write(self, kind: str, values: Tensor) -> None:
        """Write `values` [tiles, width] to these tiles in the state `kind`."""
        self.batch.write(self.state.kinds[kind].parts[0], values)

    def code_bytes(self) -> int:
        """Return the number of bytes that this replica sends per step for these tiles (blocks of a
        parameter that are compressed together). For low-rank compression this is the size of the
        tensors that are all-reduced."""
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
        """Return two tensors [tiles, width]: C(x), which is this replica's x after compression and
        decompression, and the mean of C(x) over all replicas."""
        if not isinstance(self.compressor, LowRank):
            return gathered_mean(self.coder, x, self.data)
        if not self.compressor.shrinks(self.batch.lines, self.batch.length):
            return x, self.data.all_reduce(x.clone()) / self.data.size
        return self._low_rank_mean(self.compressor, x)

    def _low_rank_mean(self, compressor: LowRank, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return C(x) and its mean over all replicas for low-rank compression, as `mean` does for
        other compressors. The state "low_rank" has the shape of the parameters. In each tile of
        this state, the first `compressor.rank` lines store one of the two factors of this step. The
        power iteration of the next step starts from this factor."""
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
    """Return the mean of C(x), without error feedback: the compression error x - C(x) is lost."""
    return place.mean(x)[1]


def mem_sgd(place: CompressedTiles, x: Tensor) -> Tensor:
    """Return the mean of C(x + error). The compression error becomes the new `error`, which is
    added to the next x (Seide et al. 2014; Stich et al. 2018, arXiv 1809.07599, algorithm 1)."""
    x += place.read("error")
    own, mean = place.mean(x)
    place.write("error", x - own)
    return mean


def double_squeeze(place: CompressedTiles, x: Tensor) -> Tensor:
    """Return the compressed mean of x over all replicas. The replicas compress x, and the servers
    (the ranks that average the tiles) compress the mean again; replicas and servers each store
    their own compression errors (Tang et al. 2019, arXiv 1905.05957, algorithm 1). If a code
    consists of several rounds, the method is NEOLITHIC (Huang et al. 2022, arXiv 2206.03665,
    algorithm 2)."""
    x += place.read("error")
    left = place.read("server_error")
    own, mean = squeezed_mean(place.coder, x, left, place.data)
    place.write("server_error", left)
    place.write("error", x - own)
    return mean


def ef21(place: CompressedTiles, x: Tensor) -> Tensor:
    """Return the mean of the replicas' estimates of their gradients. Each replica adds C(x -
    estimate) to its estimate (Richtarik et al. 2021, arXiv 2106.05203, algorithm 2). The paper
    begins with the estimate C(first gradient). This function begins with the estimate zero, so
    after the first step the estimate is the same as in the paper."""
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
    """Return the kinds of state that the data-parallel method stores for each parameter, by name.
    `section` is the section [data_parallel], which names the method."""
    return {
        name: Kept(
            () if name in COMMON else ("replicate",),
            "weights" if name in BEGIN_AS_WEIGHTS else "zero",
            early=section.method == "compressed",
        )
        for name in section.kinds
    }


class Compression:
    """The compression of a flat tensor that has the elements of all parameters of a rank. The
    tensor is compressed in batches of tiles (blocks of parameters).

    `bits_per_element` is the average number of bits per element in the codes (compressed values) of
    the last step; None if the last step sent no codes.
    """

    def __init__(self, replica: Replica) -> None:
        config = replica.config
        self.section = config.data_parallel
        self.seed = config.run.seed
        self.data = replica.axes["data"]
        self.compressor = compressor_of(self.section)
        self.bits_per_element: float | None = None
        # every legal size of the tensor axis divides the number of heads and `ffn_hidden`
        # (`config.legality`)
        most_tensor = math.gcd(config.model.heads, config.model.ffn_hidden)
        self.batches = batches(
            list(slabs(replica.buffer, most_tensor)),
            self.compressor.longest,
            replica.buffer.device,
        )

    def places(self, state: State) -> Iterator[CompressedTiles]:
        """Yield all tiles of this rank, batch by batch. Afterwards set `bits_per_element`. The
        random numbers of a tile depend on the number of updates in `state`."""
        rounds = rounds_of(self.section)
        key = fold(self.seed, PURPOSE, state.counters.updates)
        code_bytes = elements = 0
        for batch in self.batches:
            place = CompressedTiles(
                batch=batch,
                state=state,
                data=self.data,
                compressor=self.compressor,
                key=key,
                rounds=rounds,
            )
            yield place
            code_bytes += place.code_bytes()
            elements += batch.tiles * batch.width
        self.bits_per_element = None
        if elements:
            self.bits_per_element = 8 * code_bytes / elements

    def mean(self, state: State, flat: Tensor) -> None:
        """Replace the tensor `flat`, which has the order of the flat buffer, by the mean over
        replicas that the error-feedback rule computes. The mean is bitwise equal on all
        replicas."""
        rule = FEEDBACK[self.section.error_feedback]
        for place in self.places(state):
            place.batch.write(flat, rule(place, place.batch.read(flat)))
