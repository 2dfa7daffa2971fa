"""Multi-head latent attention (DeepSeek-V2: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1). The
functions of this module come before the core of attention: they make queries, keys and values by
head.

In the shapes below, t is the number of tensor ranks, and a is the number of heads. For each head
and position, a query or a key has d = n + r elements: first n elements that are not rotated, then r
rotated elements. A value has v <= d elements.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.config import ModelConfig
from ptdmpi.model.kernels.norm import Norm
from ptdmpi.model.kernels.rope import Rotating
from ptdmpi.model.latent.absorbed import Absorbed, CachedPass
from ptdmpi.model.tensor_parallel import TensorAxis

Rotary = tuple[Tensor, Tensor]


class RotatingPass(CachedPass, Protocol):
    """An object that provides, for one forward pass, the cosines and sines of the rotary angles,
    and the cache."""

    @property
    def rotary(self) -> Rotary | None:
        """Return the cosines and sines, [s, 1 or b, 1, r] each, or None if the pass uses the angles
        that the layer stores."""


class Latents:
    """The function that divides the output [s, b, width] of the compressing linear layer into three
    parts: the latent vector of the queries, the latent vector of keys and values, and the rotary
    key. The latent vectors are normalized. If the model does not compress queries, the first part
    is missing."""

    def __init__(self, norms: Sequence[Norm]) -> None:
        self.norms = tuple(norms)
        self.sizes = [norm.shape[0] for norm in norms]

    def __call__(self, x: Tensor, context: object) -> tuple[Tensor, ...]:
        """Return the normalized latent vectors, and the rotary key [s, b, r]."""
        *latents, key = x.split([*self.sizes, x.shape[-1] - sum(self.sizes)], dim=-1)
        normed = (norm(latent) for norm, latent in zip(self.norms, latents, strict=True))
        return *normed, key


class LatentHeads(Rotating):
    """The function that makes queries, keys and values by head. Its inputs are the expanded queries
    [s, b, a / t * d], the expanded keys and values [s, b, a / t * (n + v)], and the rotary key [s,
    b, r]. Its results are queries and keys [b, a / t, s, d], and values [b, a / t, s, v].

    Under sequence parallelism, the rotary key has only this rank's positions. Each rotated pair
    consists of the neighbouring elements 2 i and 2 i + 1, as in the published weights. After the
    rotation, the first elements of all pairs are placed before all second elements. Queries and
    keys have the same order, so their products do not change.

    In generation with a cache, keys and values are not expanded (see `absorbed`). All heads then
    have the same keys and values: a key is a latent vector followed by its rotary key, and the
    value is the latent vector.
    """

    def __init__(self, model: ModelConfig, axis: TensorAxis, absorbed: Absorbed) -> None:
        self.axis = axis
        self.absorbed = absorbed
        self.head_size = model.head_size
        self.plain = model.head_size - model.rope_head_size
        self.values = model.value_size

    def __call__(
        self, q: Tensor, kv: Tensor, key: Tensor, context: RotatingPass
    ) -> tuple[Tensor, ...]:
        """Return queries and keys, each [b, a / t, s, d] for this rank's a / t heads of d elements,
        and values, [b, a / t, s, v]. `q` are the expanded queries, `kv` the expanded keys and
        values, and `key` the rotary key. With a cache, `kv` [s, b, c] has the latent vectors, and
        the results are queries [b, a / t, s, c + r], keys [b, 1, s, c + r], and the same keys again
        as values."""
        rotary = context.rotary or self.rotary
        assert rotary is not None, "latent attention has rotary positions"
        cos, sin = (angles.chunk(2, dim=-1)[0] for angles in rotary)
        if context.cache is not None:
            return self._unexpanded(q, kv, key, (cos, sin))
        return tuple(x.permute(1, 2, 0, 3) for x in _Join.apply(q, kv, key, _Pass(self, cos, sin)))

    def _unexpanded(
        self, q: Tensor, latent: Tensor, key: Tensor, angles: Rotary
    ) -> tuple[Tensor, ...]:
        """Return queries [b, a / t, s, c + r], keys [b, 1, s, c + r], and the same keys again as
        values, for a pass with a cache. `latent` [s, b, c] are the latent vectors. The other
        arguments are those of `__call__`, with the cosines and sines `angles`."""
        q = q.unflatten(-1, (-1, self.head_size))
        plain, rotated = q.split([self.plain, self.head_size - self.plain], dim=-1)
        queries = torch.cat((self.absorbed.queries(plain), *_rotated(rotated, *angles)), -1)
        keys = torch.cat((latent[:, :, None], *_rotated(key[:, :, None], *angles)), -1)
        keys = keys.permute(1, 2, 0, 3)
        return queries.permute(1, 2, 0, 3), keys, keys


class _Pass(NamedTuple):
    """The arguments of one forward pass of `LatentHeads`: the `LatentHeads` object, and the cosines
    and sines of the rotary angles. Each rotated pair has one cosine and one sine."""

    layer: LatentHeads
    cos: Tensor
    sin: Tensor


class _Join(Function):
    """The autograd Function of `LatentHeads`. Its results have the shapes [s, b, a / t, d] and [s,
    b, a / t, v]; `LatentHeads` permutes their dims. It saves no activations. In the backward, the
    gradient of the rotary key is summed over the heads of all tensor ranks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, key: Tensor, given: _Pass
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.given = given
        layer, cos, sin = given
        q = q.unflatten(-1, (-1, layer.head_size))
        plain, rotated = q.split([layer.plain, layer.head_size - layer.plain], dim=-1)
        queries = torch.cat((plain, *_rotated(rotated, cos, sin)), -1)
        kv = kv.unflatten(-1, (-1, layer.plain + layer.values))
        plain, values = kv.split([layer.plain, layer.values], dim=-1)
        whole = layer.axis.gather(key)[:, :, None]
        halves = (half.expand(-1, -1, plain.shape[2], -1) for half in _rotated(whole, cos, sin))
        keys = torch.cat((plain, *halves), -1)
        # copy the values, because a view would keep the whole output of the linear layer in memory
        return queries, keys, values.clone()

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        layer, *angles = ctx.given
        plain = layer.plain
        dkey = _turned_back(dk[..., plain:].sum(2), *(x[:, :, 0] for x in angles))
        dkey, summed = layer.axis.reduce_begin(dkey)
        dkv = torch.cat((dk[..., :plain], dv), -1).flatten(2)
        turned = _turned_back(dq[..., plain:], *angles)
        dq = torch.cat((dq[..., :plain], turned), -1).flatten(2)
        summed.wait()
        return dq, dkv, dkey, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs in the last dim of x [..., r] by angles with the cosines `cos` and the sines
    `sin`. Return the first elements of all rotated pairs, and the second elements: [..., r / 2]
    each."""
    first, second = x[..., 0::2], x[..., 1::2]
    turned = (first * cos).addcmul_(second, sin, value=-1.0)
    return turned, (second * cos).addcmul_(first, sin)


def _turned_back(dx: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of the argument x of `_rotated`, [..., r], for the same angles. `dx`
    [..., r] has the gradients of the rotated pairs: first those of all first elements, then those
    of all second elements."""
    first, second = dx.chunk(2, dim=-1)
    turned = (first * cos).addcmul_(second, sin)
    other = (second * cos).addcmul_(first, sin, value=-1.0)
    return torch.cat((turned[..., None], other[..., None]), -1).flatten(-2)
