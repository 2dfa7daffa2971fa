"""Keys and values of the tokens so far, so that a new token costs one position, not all again."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ptdmpi.model import kernels


class KeyValueCache:
    """For each of `layers`, keys and values [b, capacity, kv heads / t, head size] of b sequences.

    Sequences may be of different lengths: every token says where in its own sequence it stands
    (`at`). A place that was filled by padding is overwritten by the token that belongs there before
    anything looks at it, for nothing looks ahead.
    """

    def __init__(
        self,
        layers: Iterable[int],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kept = {
            layer: torch.zeros((2, *shape), dtype=dtype, device=device) for layer in layers
        }
        self._rows = torch.arange(shape[0], device=device)[:, None]
        self.positions = torch.empty(0)
        self._seen = torch.empty(0)

    def at(self, positions: Tensor) -> None:
        """The tokens that come next stand at `positions` [s, b] of their sequences."""
        self.positions = positions
        places = torch.arange(int(positions.max()) + 1, device=positions.device)
        self._seen = places <= positions.t()[:, None, :, None]  # [b, 1, s, places]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of new tokens (q, k, v: [b, heads, s, head size]) to themselves and all that is
        before them in their sequence; keeps their keys and values."""
        kept = self._kept[layer]
        for which, new in enumerate((k, v)):
            kept[which][self._rows, self.positions.t()] = new.transpose(1, 2)
        keys, values = (part[:, : self._seen.shape[-1]].transpose(1, 2) for part in kept)
        return kernels.masked_attention(q, keys, values, self._seen)
