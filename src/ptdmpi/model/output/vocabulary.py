"""The linear that computes the logits of the vocabulary. The rows of its weight are divided over
the tensor axis."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.kernels import Computing
from ptdmpi.model.kernels.norm import soft_cap
from ptdmpi.model.parameters import Parameter, Split, declare
from ptdmpi.model.tensor_parallel import (
    ColumnLinear,
    LinearPass,
    TensorAxis,
    accumulate_bias_gradient,
    declared_bias,
)


class _AddBias(Function):
    """An autograd Function that adds a bias to a tensor in place. If the linear's own kernel added
    the bias, the result would be a view, which the loss could not overwrite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Parameter) -> Tensor:
        ctx.bias = bias
        ctx.mark_dirty(x)
        return x.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        accumulate_bias_gradient(ctx.bias, dy)
        return dy, None


class VocabularyHead(Computing):
    """The linear from activations [s, b, h] to this rank's logits [s, b, ceil(V/t)], for a
    vocabulary of size V. The logits are capped if `softcap` is not 0. Padded columns have the logit
    -inf."""

    def __init__(
        self,
        axis: TensorAxis,
        vocab_size: int,
        hidden: int,
        *,
        init_std: float,
        bias: bool = False,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.softcap = softcap
        split = Split(0, (vocab_size,))
        self.weight = declare(axis.size, (vocab_size, hidden), init_std, split=split)
        self.bias = declared_bias(bias, axis.size, vocab_size, split=split)
        share = -(-vocab_size // axis.size)
        self.valid_columns = max(0, min(share, vocab_size - axis.rank * share))

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's logits [s, b, ceil(V/t)]."""
        layer = LinearPass(self.weight, None, self.axis, self.kernels)
        logits = ColumnLinear.apply(x, layer, *layer.tracked(x))
        if self.bias is not None:
            logits = _AddBias.apply(logits, self.bias)
        if self.softcap:
            logits = soft_cap(logits, self.softcap)
        if self.valid_columns < logits.shape[-1]:
            logits = logits.clone()
            # exp(-inf) = 0, so padded columns do not contribute to the softmax
            logits[..., self.valid_columns :] = -torch.inf
        return logits
