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
        """Return the outputs of the heads [b, heads, s, `values`], which are weighted sums of
        latent vectors. The queries are [b, heads, s, `values` + rotary elements]. The cache stores
        k, which is [b, 1, s, `values` + rotary elements]. v is not read, because a value consists
        of the first elements of its key."""
        kept = self._kept[layer]
        kept[self._rows, self.positions.t()] = k[:, 0]
        keys = kept[:, None, : len(self._places)]
        seen = self._seen(core.scores.window)
        # The kernel gets complete keys as values, because not every kernel supports values that are
        # smaller than keys. `under_mask` needs a mask with a row for each query of each head. So
        # that this mask stays small, one block of positions is computed at a time.
        blocks = zip(q.split(QUERY_BLOCK, 2), seen.split(QUERY_BLOCK, 2), strict=True)
        parts = [core.under_mask(queries, keys, keys, mask) for queries, mask in blocks]
        return torch.cat(parts, 2)[..., : self._values]
