"""Latent attention in generation, in which keys and values are not expanded (DeepSeek-V2:
DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2).

The product of a query with an expanded key is q (W x) for the latent vector x, and equals (q W) x.
So queries are multiplied by the matrix that expands keys. The outputs of the heads are then sums of
latent vectors, and are multiplied by the matrix that expands values. In the shapes below, a / t is
the number of heads of a tensor rank. For each head, n elements of a key are not rotated, and a
value has v elements.
"""

from typing import Protocol

from torch import Tensor

from ptdmpi.config import ModelConfig
from ptdmpi.model.cache import Cache
from ptdmpi.model.kernels import operand
from ptdmpi.model.tensor_parallel import ColumnParallelLinear


class CachedPass(Protocol):
    """An object that provides the cache of a forward pass."""

    @property
    def cache(self) -> Cache | None:
        """Return the cache of earlier tokens, or None if the pass has all tokens."""


class Absorbed:
    """The matrix products that replace the expansion of latent vectors: queries and outputs of the
    heads are multiplied by the weight of `linear`. Without a cache, `linear` expands latent vectors
    of c elements to keys and values."""

    def __init__(self, model: ModelConfig, linear: ColumnParallelLinear) -> None:
        self._linear = linear
        self._sizes = [model.head_size - model.rope_head_size, model.value_size]

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Return the matrices of this rank's heads that expand keys, [a / t, n, c], and values,
        [a / t, v, c]."""
        by_head = operand(self._linear.weight).unflatten(0, (-1, sum(self._sizes)))
        keys, values = by_head.split(self._sizes, dim=1)
        return keys, values

    def queries(self, plain: Tensor) -> Tensor:
        """Return q W, [s, b, a / t, c], for the unrotated elements q of the queries, `plain` [s, b,
        a / t, n], and the matrix W of each head that expands keys. The scores are products of q W
        and latent vectors."""
        keys, _ = self._weights()
        product = self._linear.kernels.product(plain.permute(1, 2, 0, 3), keys)
        return product.permute(2, 0, 1, 3)

    def outputs(self, y: Tensor) -> Tensor:
        """Return the outputs of the heads, [s, b, a / t * v]. `y` [s, b, a / t * c] has, for each
        head, the sum of latent vectors weighted by the attention probabilities."""
        _, values = self._weights()
        sums = y.unflatten(-1, (len(values), -1)).permute(1, 2, 0, 3)
        product = self._linear.kernels.product(sums, values.transpose(-1, -2))
        return product.permute(2, 0, 1, 3).flatten(2)
