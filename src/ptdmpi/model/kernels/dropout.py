"""Dropout of hidden activations: the outputs of sublayers and of the embedding, and the inputs of
adapters."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.kernels import Kernels
from ptdmpi.model.random import RandomStream, dropout


def drop_hidden(x: Tensor, stream: RandomStream, rate: float, kernels: Kernels) -> Tensor:
    """Return x [s, b, h] after dropout with the probability `rate`. `stream` determines which
    elements become zero."""
    if kernels.by_triton("dropout"):
        return _FusedDropout.apply(x, stream, rate)
    return dropout(x, stream.hidden_mask(x.shape, rate), rate)


class _FusedDropout(Function):
    """Dropout by a kernel in Triton, which computes the mask again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: RandomStream, rate: float) -> Tensor:
        from ptdmpi.model.kernels.fused.dropout import dropped

        ctx.given = stream, rate
        return dropped(x.contiguous(), stream, rate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        from ptdmpi.model.kernels.fused.dropout import dropped

        return dropped(dy.contiguous(), *ctx.given), None, None
