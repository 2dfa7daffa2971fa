"""What data ranks tell each other of a batch of tiles: encoded, sent, decoded, averaged."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.exchange import exchange
from ptdmpi.engine.compress.compressor import Compressor, Draws
from ptdmpi.engine.compress.units import Numbers, TileBatch
from ptdmpi.model.random import fold

# Whose draws those of a server are: no data rank's, so that it does not matter who serves.
SERVER = -2


@dataclass(frozen=True)
class Coder:
    """Some tiles of a batch as one code: the units of each length, one length after the other.

    `key` is that of seed and step; `tiles`: which of the batch's, by default all. `rounds`: the
    rest that a code leaves is encoded once more, so often, and their sum is what arrives (fast
    compressed communication, Huang et al. 2022, arXiv 2206.03665, section 4.1): of the square
    (1 - delta)^rounds is left.
    """

    compressor: Compressor
    batch: TileBatch
    key: int
    rounds: int = 1
    tiles: Numbers | None = None

    def of(self, tiles: Numbers) -> "Coder":
        """That of some tiles, by their numbers in the batch."""
        return replace(self, tiles=tiles)

    def share(self, rank: int, size: int) -> "Coder":
        """That of the tiles whose server is data rank `rank` of `size`, in every layout."""
        here, host = (numbers % size == rank for numbers in self.batch.numbers)
        served = host.nonzero()[:, 0]
        # their number is known to the host, which need not wait for the device's
        mine = torch.nonzero_static(here, size=len(served))[:, 0]
        return self.of(Numbers(mine, served))

    @property
    def at(self) -> Tensor:
        """The numbers in the batch of the tiles of a share."""
        assert self.tiles is not None
        return self.tiles.here

    @property
    def count(self) -> int:
        """How many tiles."""
        return self.batch.tiles if self.tiles is None else len(self.tiles.host)

    def code_bytes(self, dtype: torch.dtype) -> int:
        """The length of a code, the same for all data ranks."""
        return sum(
            self.compressor.code_bytes(draws, length, dtype)
            for number in range(self.rounds)
            for _, length, draws in self._units(0, number)
        )

    def encode(self, x: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """[tiles, width] of data rank `source` -> [code_bytes] uint8, and what arrives of it."""
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
        """What arrives of a code of data rank `source`: [tiles, width], the bits that `encode`
        gave."""
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

    def _units(self, source: int, number: int) -> list[tuple[slice, int, Draws]]:
        units = []
        for columns, length, numbers in self.batch.units:
            if self.tiles is not None:
                numbers = numbers.of_tiles(self.tiles, self.batch.tiles)
            draws = Draws(numbers.here, fold(self.key, number), source, numbers.host)
            units.append((columns, length, draws))
        return units


def gathered_mean(coder: Coder, x: Tensor, data: Communicator) -> tuple[Tensor, Tensor]:
    """C(x) of this rank, and the mean of C(x) over the data axis, summed in ascending rank, the
    same bits on all of them: each rank's code is gathered by all."""
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
    """C(x) of this rank, and C of the mean of C(x) plus the server's `error`, the same bits on all
    ranks; `error` [tiles, width] becomes what that leaves (Tang et al. 2019, arXiv 1905.05957).

    Each data rank is the server of its share of the tiles, by their numbers: codes go to servers,
    and codes of means come back, so that a rank sends two codes' bytes however many ranks there
    are. Of `error` a rank uses and changes its share alone.
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
    # shares are of unequal length, and parts of a gather are not
    sizes = [share.code_bytes(x.dtype) for share in shares]
    padded = code.new_zeros(max(sizes))
    padded[: len(code)] = code
    every = data.all_gather(padded).view(data.size, -1)
    total = torch.empty_like(x)
    for rank, share in enumerate(shares):
        total[share.at] = share.decode(every[rank, : sizes[rank]], SERVER, x.dtype)
    return own, total


def _mean_at_server(mine: Coder, codes: list[Tensor], own: Tensor, data: Communicator) -> Tensor:
    """Send each server its code; the mean of what arrives here, summed in ascending rank."""
    arriving = [torch.empty_like(codes[data.rank]) for _ in codes]
    exchange(data, codes, arriving)
    total = torch.zeros((mine.count, own.shape[1]), dtype=own.dtype, device=own.device)
    for source, code in enumerate(arriving):
        if source == data.rank:
            total += own[mine.at]
        else:
            total += mine.decode(code, source, own.dtype)
    return total / data.size
