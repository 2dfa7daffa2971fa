"""The steps of a layer with fused kernels in Triton: one kernel computes a norm together with the
residual sum before it, and another computes GELU together with the bias of the linear layer before
it."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ptdmpi.model.built import Product
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels.activation import Activation, gelu_with_bias
from ptdmpi.model.kernels.norm import Norm
from ptdmpi.model.operators import Normalized, Residual, RowStep
from ptdmpi.plan.layer.elementwise import Activate, Normalize


@dataclass(frozen=True)
class NormOfSum:
    """The function that computes a residual sum x + y and its norm. Without `residual` the sum is x
    itself. If `keeps` is True, later steps read the sum, so the function returns the sum, too. The
    backward of the norm then also adds the gradient of the sum."""

    norm: Norm
    residual: Residual | None
    keeps: bool

    def __call__(self, x: Tensor, *rest: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm or, if `keeps` is True, the pair (sum, norm). `rest` has y and the
        context; it is empty if there is no residual."""
        y = None
        if self.residual is not None:
            y, context = rest
            y = self.residual.dropout(y, context.stream, context.positions)
        total, normed = self.norm.of_sum(x, y)
        return (total, normed) if self.keeps else normed


@dataclass(frozen=True)
class GeluOfProduct:
    """The function that computes a column-parallel linear layer without its bias, and then GELU of
    the sum of its outputs and the bias."""

    product: Product
    activation: Activation

    def __call__(self, x: Tensor, context: Any) -> Tensor:
        """Return GELU(x W^T + b) for the inputs x of the linear layer."""
        bias = self.product.linear.bias
        assert bias is not None
        outputs = self.product(x, context, adds_bias=False)
        return gelu_with_bias(outputs, bias, self.activation.function.name)


def fused_steps(steps: tuple[RowStep, ...], kernels: Kernels) -> tuple[RowStep, ...]:
    """Return the steps of a layer, in which fused kernels compute the operators of the kinds that
    `kernels` computes in Triton."""
    return _with_biases(_with_sums(steps, kernels), kernels)


def _with_biases(steps: tuple[RowStep, ...], kernels: Kernels) -> tuple[RowStep, ...]:
    """Return the steps of a layer. If GELU with a bias is computed in Triton, each such GELU and
    the linear layer before it become one step."""
    if not kernels.by_triton("gelu"):
        return steps
    joined: list[RowStep] = []
    for step in steps:
        row, compute = step.row, step.compute
        if isinstance(row, Activate) and row.bias != "none":
            assert isinstance(compute, Activation)
            before = joined.pop()
            assert isinstance(before.compute, Product)
            row = replace(row, inputs=before.row.inputs)
            step = RowStep(row, GeluOfProduct(before.compute, compute), before.last)
        joined.append(step)
    return tuple(joined)


def _with_sums(steps: tuple[RowStep, ...], kernels: Kernels) -> tuple[RowStep, ...]:
    """Return the steps of a layer. If norms are computed in Triton, each norm and the residual sum
    before it become one step."""
    if not kernels.by_triton("norm"):
        return steps
    joined: list[RowStep] = []
    for step in steps:
        row, compute = step.row, step.compute
        if isinstance(compute, Normalized):
            assert isinstance(row, Normalize)
            (source,) = row.inputs
            keeps = source not in step.last and source not in row.outputs
            inputs, last, residual = row.inputs, step.last, None
            if row.follows_sum:
                before = joined.pop()
                assert isinstance(before.compute, Residual)
                inputs, last, residual = before.row.inputs, before.last, before.compute
            outputs = (source, *row.outputs) if keeps else row.outputs
            row = replace(row, inputs=inputs, outputs=outputs)
            step = RowStep(row, NormOfSum(compute.norm, residual, keeps), last)
        joined.append(step)
    return tuple(joined)
