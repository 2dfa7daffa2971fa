"""A cache of the latent vectors of earlier tokens."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ptdmpi.model.cache import Cache
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.choice import QUERY_BLOCK


class LatentCache(Cache):
    """The latent vectors and the rotary keys of b sequences, for each layer: [b, capacity,
    `values` + rotary elements]. The first `values` elements are the normalized latent vector of
    keys and values, and the others are the rotated key. All heads read the same elements, so every
    tensor rank has the whole cache."""

    def __init__(
        self,
        layers: Iterable[int],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        values: int,
    ) -> None:
        """Make an empty cache. `shape` is the shape of a layer's tensor."""
        super().__init__(layers, shape, dtype, device, rows=shape[0])
        self._values = values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, core: AttentionCore) -> Tensor:
        """Return the outputs of the heads, which are still latent vectors, [b, heads, s, `values`].
        The queries are [b, heads, s, `values` + rotary elements], and k [b, 1, s, the same] has
        what is stored; v is not read, because a value is the first part of its key."""
        kept = self._kept[layer]
        kept[self._rows, self.positions.t()] = k[:, 0]
        keys = kept[:, None, : len(self._places)]
        seen = self._seen(core.scores.window)
        # The kernel computes with whole keys as values, because not every kernel takes values that
        # are smaller than keys. Under a mask, all heads are the queries of one key head, so a block
        # of positions limits the size of the mask.
        blocks = zip(q.split(QUERY_BLOCK, 2), seen.split(QUERY_BLOCK, 2), strict=True)
        parts = [core.under_mask(queries, keys, keys, mask) for queries, mask in blocks]
        return torch.cat(parts, 2)[..., : self._values]
