"""Multi-head latent attention (DeepSeek-AI 2024, V2: arXiv 2405.04434, section 2.1): from the
compressed vectors of each position to queries, keys and values by head, and from the outputs of the
heads to the values.

In the shapes below, t is the number of tensor ranks, and a the number of heads. A head of queries
and keys has n elements that are not rotated, and then r rotated elements, n + r = d. Its values
have v <= d elements.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ptdmpi.config import ModelConfig
from ptdmpi.model.kernels.norm import Norm
from ptdmpi.model.tensor_parallel import TensorAxis

Rotary = tuple[Tensor, Tensor]


class Rotating(Protocol):
    """An object with the cosines and sines of the rotary angles [s, 1 or b, 1, r]; None if they are
    those that the layer stores."""

    @property
    def rotary(self) -> Rotary | None:
        """Return the cosines and sines."""


class Latents:
    """The function that divides the output [s, b, width] of the compressing linear layer into the
    latent vectors of queries and of keys and values, and the rotary key. The latent vectors are
    normalized. Without compressed queries there is only one latent vector."""

    def __init__(self, norms: Sequence[Norm]) -> None:
        self.norms = tuple(norms)
        self.sizes = [norm.shape[0] for norm in norms]

    def __call__(self, x: Tensor, context: object) -> tuple[Tensor, ...]:
        """Return the normalized latent vectors, and the rotary key."""
        *latents, key = x.split([*self.sizes, x.shape[-1] - sum(self.sizes)], dim=-1)
        normed = (norm(latent) for norm, latent in zip(self.norms, latents, strict=True))
        return *normed, key


class LatentHeads:
    """The function that makes queries, keys and values [b, a / t, s, d] from the expanded queries
    [s, b, a / t * d], the expanded keys and values [s, b, a / t * (n + v)] and the rotary key [s,
    b, r]. Values are filled up with zeros.

    The rotary key has only this rank's positions under sequence parallelism. The pairs of elements
    that are rotated are neighbours (2 i, 2 i + 1), as in the published weights. After the rotation
    the first elements of all pairs come before the second elements, in queries and in keys, which
    does not change their products.
    """

    def __init__(self, model: ModelConfig, axis: TensorAxis) -> None:
        self.axis = axis
        self.head_size = model.head_size
        self.plain = model.head_size - model.rope_head_size
        self.values = model.values_width // model.heads
        self.rotary: Rotary | None = None

    def __call__(self, q: Tensor, kv: Tensor, key: Tensor, context: Rotating) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        rotary = context.rotary or self.rotary
        assert rotary is not None, "latent attention has rotary positions"
        cos, sin = (angles.chunk(2, dim=-1)[0] for angles in rotary)
        return tuple(x.permute(1, 2, 0, 3) for x in _Join.apply(q, kv, key, _Pass(self, cos, sin)))


class _Pass(NamedTuple):
    """One forward pass of `LatentHeads`, with the cosines and sines of one element of each pair."""

    layer: LatentHeads
    cos: Tensor
    sin: Tensor


class _Join(Function):
    """The function of `LatentHeads`, before the heads come before the positions. The function saves
    no activations. The gradient of the rotary key is summed over the heads of all tensor ranks."""

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
        if layer.values < layer.head_size:
            return queries, keys, F.pad(values, (0, layer.head_size - layer.values))
        # copy the values, because a view would keep the whole output of the linear layer in memory
        return queries, keys, values.clone()

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        layer, *angles = ctx.given
        plain = layer.plain
        dkey = _turned_back(dk[..., plain:].sum(2), *(x[:, :, 0] for x in angles))
        dkey, summed = layer.axis.reduce_begin(dkey)
        dkv = torch.cat((dk[..., :plain], dv[..., : layer.values]), -1).flatten(2)
        turned = _turned_back(dq[..., plain:], *angles)
        dq = torch.cat((dq[..., :plain], turned), -1).flatten(2)
        summed.wait()
        return dq, dkv, dkey, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the second elements of the pairs in the last dim of x, after the
    rotation by the angles of their positions: [..., r / 2] each."""
    first, second = x[..., 0::2], x[..., 1::2]
    turned = (first * cos).addcmul_(second, sin, value=-1.0)
    return turned, (second * cos).addcmul_(first, sin)


def _turned_back(dx: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of the pairs [..., r], if `dx` [..., r] has the gradients of the first
    elements, and then of the second elements, of the rotated pairs."""
    first, second = dx.chunk(2, dim=-1)
    turned = (first * cos).addcmul_(second, sin)
    other = (second * cos).addcmul_(first, sin, value=-1.0)
    return torch.cat((turned[..., None], other[..., None]), -1).flatten(-2)


class FilledValues:
    """The function that cuts off the zeros with which `LatentHeads` has filled the values up: [s,
    b, a / t * d] -> [s, b, a / t * v]."""

    def __init__(self, model: ModelConfig) -> None:
        self.head_size = model.head_size
        self.values = model.values_width // model.heads

    def __call__(self, y: Tensor, context: object) -> Tensor:
        """Return the outputs of the heads, without zeros."""
        taken: Tensor = _Take.apply(y, self.head_size, self.values)
        return taken


class _Take(Function):
    """The function of `FilledValues`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, head_size: int, values: int) -> Tensor:
        ctx.sizes = head_size, values
        return y.unflatten(-1, (-1, head_size))[..., :values].clone().flatten(-2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        head_size, values = ctx.sizes
        dy = dy.unflatten(-1, (-1, values))
        return F.pad(dy, (0, head_size - values)).flatten(-2), None, None
