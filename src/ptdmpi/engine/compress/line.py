"""Compressed messages between data ranks: a batch of tiles (blocks of parameters, see `units`) is
encoded, sent, decoded and averaged."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.engine.compress.compressor import Compressor, Draws
from ptdmpi.engine.compress.units import Numbers, TileBatch
from ptdmpi.engine.exchange import exchange
from ptdmpi.model.random import fold

# A server is the data rank that averages a tile. When a server encodes, `Draws.source` has this
# value instead of the number of a data rank, so that the random numbers do not depend on which rank
# is the server.
SERVER = -2


class DrawnUnits(NamedTuple):
    """The compression blocks of one length in some tiles: their columns in a tensor [tiles, width],
    their length, and their random numbers."""

    columns: slice
    length: int
    draws: Draws


@dataclass(frozen=True)
class Coder:
    """An encoder and decoder for some tiles (blocks of parameters) of a `TileBatch`. A code
    contains first all compression blocks of one length, then all blocks of the next length.

    `key` is the hash of seed and step. `tiles` selects tiles of the batch; by default it selects
    all tiles. If `rounds` > 1, a code consists of several rounds: each round encodes the error that
    the previous rounds have left, and the receiver adds up the decoded values of all rounds (fast
    compressed communication, Huang et al. 2022, arXiv 2206.03665, section 4.1). The squared error
    of the decoded values is then at most (1 - delta)^rounds times the squared norm of the encoded
    values.
    """

    compressor: Compressor
    batch: TileBatch
    key: int
    rounds: int = 1
    tiles: Numbers | None = None

    def of(self, tiles: Numbers) -> "Coder":
        """Return a coder for the tiles whose indices in the batch are `tiles`."""
        return replace(self, tiles=tiles)

    def share(self, rank: int, size: int) -> "Coder":
        """Return the coder of the tiles that data rank `rank`, one of `size` data ranks, averages.
        This data rank is called the server of these tiles. The server of a tile depends only on the
        data-parallel size, not on the other sizes of the layout."""
        here, host = (numbers % size == rank for numbers in self.batch.numbers)
        served = host.nonzero()[:, 0]
        # pass the number of tiles, so that the host need not wait for the device
        mine = torch.nonzero_static(here, size=len(served))[:, 0]
        return self.of(Numbers(mine, served))

    @property
    def at(self) -> Tensor:
        """Return the tiles that this coder selects, as indices into the batch."""
        assert self.tiles is not None
        return self.tiles.here

    @property
    def count(self) -> int:
        """Return the number of tiles that this coder encodes."""
        return self.batch.tiles if self.tiles is None else len(self.tiles.host)

    def code_bytes(self, dtype: torch.dtype) -> int:
        """Return the length of a code in bytes, which is the same on all data ranks."""
        return sum(
            self.compressor.code_bytes(draws, length, dtype)
            for number in range(self.rounds)
            for _, length, draws in self._units(0, number)
        )

    def encode(self, x: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """Encode x [tiles, width] of data rank `source`. Return the code, [code_bytes] uint8, and
        its decoded values, [tiles, width]."""
        codes = []
        left = x
        arrived = torch.zeros_like(x)
        for number in range(self.rounds):
            decoded = torch.empty_like(x)
            for columns, length, draws in self._units(source, number):
                part = left[:, columns].reshape(-1, length)
                code = self.compressor.encode(part, draws)
                value = self.compressor.decode(code, draws, length, x.dtype)
                place = decoded[:, columns]
                place.copy_(value.view(place.shape))
                codes.append(code)
            arrived += decoded
            if number + 1 < self.rounds:
                left = left - decoded
        return torch.cat(codes), arrived

    def decode(self, code: Tensor, source: int, dtype: torch.dtype) -> Tensor:
        """Decode a code of data rank `source` to [tiles, width]. The result is bitwise equal to the
        decoded values that `encode` returned on that rank."""
        arrived = torch.zeros((self.count, self.batch.width), dtype=dtype, device=code.device)
        at = 0
        for number in range(self.rounds):
            for columns, length, draws in self._units(source, number):
                size = self.compressor.code_bytes(draws, length, dtype)
                values = self.compressor.decode(code[at : at + size], draws, length, dtype)
                place = arrived[:, columns]
                place += values.view(place.shape)
                at += size
        return arrived

    def _units(self, source: int, number: int) -> list[DrawnUnits]:
        units = []
        for columns, length, numbers in self.batch.units:
            if self.tiles is not None:
                numbers = numbers.of_tiles(self.tiles, self.batch.tiles)
            draws = Draws(numbers.here, fold(self.key, number), source, numbers.host)
            units.append(DrawnUnits(columns, length, draws))
        return units


def gathered_mean(coder: Coder, x: Tensor, data: Communicator) -> tuple[Tensor, Tensor]:
    """Return two tensors [tiles, width]: C(x), which is this rank's x after encoding and decoding,
    and the mean of C(x) over the data axis.

    Each rank gathers the codes of all ranks and adds up the decoded values in ascending order of
    ranks, so the mean is bitwise equal on all ranks.
    """
    code, own = coder.encode(x, data.rank)
    every = data.all_gather(code).view(data.size, -1)
    total = None
    for source in range(data.size):
        mine = source == data.rank
        value = own if mine else coder.decode(every[source], source, x.dtype)
        if total is None:
            total = value.clone()
        else:
            total += value
    assert total is not None
    return own, total / data.size


def squeezed_mean(
    coder: Coder, x: Tensor, error: Tensor, data: Communicator
) -> tuple[Tensor, Tensor]:
    """Return two tensors [tiles, width]: C(x), which is this rank's x after encoding and decoding,
    and C(y), which all ranks decode from the codes that the servers send. Here y is the mean of
    C(x) over all ranks plus `error` [tiles, width], the compression error that the server has
    stored in the previous step. C(y) is bitwise equal on all ranks. After the exchange, `error` is
    y - C(y) (Tang et al. 2019, arXiv 1905.05957).

    Each data rank is the server of some tiles; the number of a tile determines its server. Each
    rank sends the code of each tile to the server of the tile. Each server averages its tiles, adds
    its error, encodes the result, and sends this code to all ranks. A rank therefore sends about
    twice as many bytes as a code of the batch has, for any number of ranks. Each rank uses and
    changes `error` only for the tiles that it serves.
    """
    shares = [coder.share(rank, data.size) for rank in range(data.size)]
    own = torch.empty_like(x)
    codes = []
    for share in shares:
        code, value = share.encode(x[share.at], data.rank)
        own[share.at] = value
        codes.append(code)
    mine = shares[data.rank]
    mean = _mean_at_server(mine, codes, own, data)
    aimed = mean + error[mine.at]
    code, value = mine.encode(aimed, SERVER)
    error[mine.at] = aimed - value
    # the codes of the servers have unequal lengths, but an all-gather needs equal lengths, so the
    # shorter codes are padded
    sizes = [share.code_bytes(x.dtype) for share in shares]
    padded = code.new_zeros(max(sizes))
    padded[: len(code)] = code
    every = data.all_gather(padded).view(data.size, -1)
    total = torch.empty_like(x)
    for rank, share in enumerate(shares):
        total[share.at] = share.decode(every[rank, : sizes[rank]], SERVER, x.dtype)
    return own, total


def _mean_at_server(mine: Coder, codes: list[Tensor], own: Tensor, data: Communicator) -> Tensor:
    """Return the mean over all ranks of the tiles that this rank serves. `codes[k]` is the code of
    this rank's values for the tiles that rank k serves. Every rank sends `codes[k]` to each rank k.
    The decoded codes are added in ascending order of ranks."""
    arriving = [torch.empty_like(codes[data.rank]) for _ in codes]
    exchange(data, codes, arriving)
    total = torch.zeros((mine.count, own.shape[1]), dtype=own.dtype, device=own.device)
    for source, code in enumerate(arriving):
        if source == data.rank:
            total += own[mine.at]
        else:
            total += mine.decode(code, source, own.dtype)
    return total / data.size
