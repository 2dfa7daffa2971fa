"""Caches of the keys and values of earlier tokens, so that only new positions are computed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from ptdmpi.model.kernels.attention import AttentionCore


class Cache(ABC):
    """The base class of caches for b sequences. A cache has one tensor for each layer in `layers`,
    and all these tensors have the same shape.

    Sequences may have different lengths, because each token has its own position (see the method
    `at`). A query sees only its own and earlier positions. A short sequence is padded, so the cache
    may store padding at a position. No query sees this padding, because the sequence's own token at
    this position overwrites it first.
    """

    def __init__(
        self,
        layers: Iterable[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        rows: int,
    ) -> None:
        """Make an empty cache for `rows` sequences. `shape` is the shape of a layer's tensor."""
        self._kept = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in layers}
        self._rows = torch.arange(rows, device=device)[:, None]
        self.positions = torch.empty(0)
        self._places = torch.empty(0)

    def at(self, positions: Tensor) -> None:
        """Set the positions [s, b] of the tokens that are computed next. A position is counted
        within the token's own sequence."""
        self.positions = positions
        # the positions from 0 to the last of these tokens; later positions of the cache are not
        # read
        self._places = torch.arange(int(positions.max()) + 1, device=positions.device)

    def _seen(self, window: int) -> Tensor:
        """Return a bool mask [b, 1, s, cached positions] for s new tokens of each sequence. An
        element is True if the new token sees the key at the cached position. A token sees its own
        position and all earlier ones; if `window` is not 0, it sees only the last `window` of these
        positions."""
        here = self.positions.t()[:, None, :, None]
        seen = self._places <= here
        if window:
            seen &= self._places > here - window
        return seen

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, core: AttentionCore) -> Tensor:
        """Return the attention of new tokens (q, k, v: [b, heads, s, head size]) to the earlier
        tokens of their sequence and to themselves. If the layer has a window, a token attends only
        to tokens in its window. This method also adds the new tokens to the cache, for later
        calls."""


class KeyValueCache(Cache):
    """The keys and values of b sequences, for each layer: [b, capacity, kv heads / t, head size],
    where t is the tensor-parallel size."""

    def __init__(
        self,
        layers: Iterable[int],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make an empty cache. `shape` is the shape of the keys of a layer."""
        super().__init__(layers, (2, *shape), dtype, device, rows=shape[0])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, core: AttentionCore) -> Tensor:
        """See `Cache.attend`."""
        kept = self._kept[layer]
        for which, new in enumerate((k, v)):
            kept[which][self._rows, self.positions.t()] = new.transpose(1, 2)
        keys, values = (part[:, : len(self._places)].transpose(1, 2) for part in kept)
        return core.under_mask(q, keys, values, self._seen(core.scores.window))
