"""Where the documents of a microbatch lie: attention and positions begin anew in each of them.

A document is here what sees itself only: a text of a packed sample, or the padding behind it.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Documents of b sequences of s tokens.

    `numbers` [b, s] tells the documents of a row apart, `positions` [s, b] count from 0 in each;
    `pieces` are (row, begin, end) of all of them, row by row, on the host, since they say which
    kernels run. `offsets` int32 [documents + 1] are their places in the rows laid end to end.
    """

    numbers: Tensor
    positions: Tensor
    pieces: tuple[tuple[int, int, int], ...]
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, numbers: Tensor, device: torch.device | str = "cpu") -> "Documents":
        """From the numbers [b, s] on the host; a document is a run of one number in a row."""
        rows, length = numbers.shape
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        indices = torch.arange(length).expand(rows, length)
        # the greatest beginning so far is that of the document in which a token stands
        positions = indices - torch.where(begins, indices, 0).cummax(1).values
        flat = [*begins.flatten().nonzero().flatten().tolist(), rows * length]
        pieces = tuple(
            (begin // length, begin % length, begin % length + end - begin)
            for begin, end in pairwise(flat)
        )
        return cls(
            begins.cumsum(1).to(device),
            positions.t().contiguous().to(device),
            pieces,
            torch.tensor(flat, dtype=torch.int32, device=device),
            max(end - begin for _, begin, end in pieces),
        )

    def others(self) -> Tensor:
        """[b, 1, s, s] bool: where query and key are of two documents."""
        return self.numbers[:, None, :, None] != self.numbers[:, None, None, :]
