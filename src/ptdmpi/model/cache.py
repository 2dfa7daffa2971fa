"""Keys and values of the tokens so far, so that a new token costs one position, not all again."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ptdmpi.model.kernels.attention import AttentionCore


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
        self._places = torch.empty(0)

    def at(self, positions: Tensor) -> None:
        """The tokens that come next stand at `positions` [s, b] of their sequences."""
        self.positions = positions
        # no further than the furthest token: what lies behind in the capacity is never read
        self._places = torch.arange(int(positions.max()) + 1, device=positions.device)

    def _seen(self, window: int) -> Tensor:
        """[b, 1, s, places] bool: what each of the next tokens sees of all places."""
        here = self.positions.t()[:, None, :, None]
        seen = self._places <= here
        return seen & (self._places > here - window) if window else seen

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
        """Attention of new tokens (q, k, v: [b, heads, s, head size]) to themselves and all that is
        before them in their sequence, or in its window; keeps their keys and values."""
        kept = self._kept[layer]
        for which, new in enumerate((k, v)):
            kept[which][self._rows, self.positions.t()] = new.transpose(1, 2)
        keys, values = (part[:, : len(self._places)].transpose(1, 2) for part in kept)
        return core.under_mask(q, keys, values, self._seen(core.scores.window))
