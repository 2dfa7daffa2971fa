"""The kernels with which the modules of a layer compute, such as matrix products, attention and
norms. They are fast on their device and save few tensors for the backward pass.

A `Kernels` object has the kernel implementations that a run has chosen, and computes matrix
products with them. Each module of a stage that computes with kernels (`Computing`) has a reference
to such an object; `compute_by` replaces it.

A CPU without bfloat16 or float16 instructions would compute products of these types with slow
scalar code: on an AVX2 machine, 0.3 to 8 GFLOP/s were measured, compared with 40 GFLOP/s for
float32. On such a CPU, ptdmpi converts the operands to float32 first, and rounds the result once.
The results are the same as on hardware with float32 accumulators.

On a CPU, PyTorch computes some operations as a sequence of simpler operations. Each simple
operation saves tensors for its own backward pass. ptdmpi computes each such operation by one
autograd Function, which saves fewer tensors, for example only its input.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptdmpi.config.precision import Precision
from ptdmpi.model.kernels import choice as choices
from ptdmpi.model.kernels import host, wide
from ptdmpi.model.kernels.choice import HostChoice
from ptdmpi.model.kernels.host import FUSED_TYPES, HALF_TYPES
from ptdmpi.model.parameters import Parameter, dtype_of


class Kernels:
    """The kernels of a run, and matrix products that are computed with them. The object is
    immutable.

    `choice` is the choice of host kernels on which the ranks of the run have agreed. If `choice` is
    None, the default kernels of this machine for the type of the operands are used. `precision`
    determines the types of matrix products; if it is None, operands are multiplied in their own
    type. If the precision uses 8-bit types with scales, only the products of the layers' linears
    are in these types (`float8`, `delayed`); all other products are in the type of their operands.
    `triton` has the kinds of kernels (`fused.KINDS`) that are computed in Triton, on a device.
    """

    def __init__(
        self,
        choice: HostChoice | None = None,
        precision: Precision | None = None,
        *,
        triton: Iterable[str] = (),
    ) -> None:
        self.choice = choice
        self.precision = precision
        self.triton = frozenset(triton)
        # the data type whose products are computed in a wider type according to `precision`
        self._narrow: torch.dtype | None = None
        if precision is None or precision.product.scaled:
            return
        if precision.product.operands == precision.compute:
            return
        if precision.product.operands != precision.master:
            raise ValueError(f"no kernel multiplies by {precision.product}")
        self._narrow = dtype_of(precision.compute)

    def settled(self, choice: HostChoice | None) -> "Kernels":
        """Return a copy of this object that has the choice of host kernels `choice`."""
        return Kernels(choice, self.precision, triton=self.triton)

    def by_triton(self, kind: str) -> bool:
        """Return True if Triton's kernels compute the operations of this kind (`fused.KINDS`).
        Triton's kernels are not used in a compiled graph, because there Inductor fuses these
        operations with other operations."""
        return kind in self.triton and not torch.compiler.is_compiling()

    def chosen(self, device_type: str, dtype: torch.dtype) -> HostChoice:
        """Return the choice of host kernels for operands of the type `dtype` on a device of the
        type `device_type`."""
        return self.choice or choices.usual_choice(device_type, dtype)

    def widens(self, device_type: str, dtype: torch.dtype) -> bool:
        """Return True if products of this type are computed in float32 on this device.

        Return True if the precision requires float32, or if this device cannot multiply the type.
        Also return True if the run began on a device that could not multiply the type: the run then
        continues in float32, so that the bits of its results do not change.
        """
        if dtype == self._narrow:
            return True
        if device_type != "cpu" or dtype not in HALF_TYPES:
            return False
        return not host.multiplies("cpu", dtype) or self.chosen("cpu", dtype).half == "widened"

    def _widens(self, x: Tensor) -> bool:
        """Return True if products of `x` are computed in float32 (`widens`). Each product calls
        this method a few times, so it first tests what is quick to test."""
        dtype = x.dtype
        if dtype != self._narrow and not (x.is_cpu and dtype in HALF_TYPES):
            return False
        return self.widens(x.device.type, dtype)

    def widened(self, x: Tensor) -> Tensor:
        """Return the operand `x` of a product, converted to the type in which the device multiplies
        such operands."""
        return x.float() if self._widens(x) else x

    def entering(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return two values for the input x [..., inputs] of a linear. The first value is the input
        in the form that the matrix products use; it may be rounded to 8 bits. The second value has
        the tensors to keep for the backward."""
        return x, (x,)

    def entered(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return the input of a linear in the form that `entering` returned, in the type `dtype`.
        `kept` has the tensors that `entering` returned for the backward."""
        return kept[0]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + b for x [..., inputs], weight W [outputs, inputs] and bias b [outputs]:
        [..., outputs]."""
        weight = operand(weight)
        # without a bias, PyTorch itself uses oneDNN for products of 16-bit types, so the fused call
        # would not be faster
        gains = bias is not None or x.dtype == torch.float32
        if gains and self._fuses(x, weight, "output"):
            return linear_by_onednn(x, weight, bias)
        if not self._widens(x):
            return F.linear(x, weight, bias)
        if bias is not None:
            bias = bias.float()
        return F.linear(x.float(), weight.float(), bias).to(x.dtype)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dy W for dy [..., outputs] and weight W [outputs, inputs]: [..., inputs]."""
        weight = operand(weight)
        if self._fuses(dy, weight, "input_gradient"):
            return linear_by_onednn(dy, weight.t(), None)
        if not self._widens(dy):
            return dy @ weight
        return (dy.float() @ weight.float()).to(dy.dtype)

    def _fuses(self, x: Tensor, weight: Tensor, which: Literal["output", "input_gradient"]) -> bool:
        """Return True if oneDNN's fused call is used for the product of x [..., inputs] and a
        matrix. `which` is the name of a field of `OneDnnLinears`; this field is the least size at
        which the fused call is used."""
        if not x.is_cpu or x.dtype not in FUSED_TYPES:
            return False
        least: float = getattr(self.chosen("cpu", x.dtype).linear, which)
        if least == math.inf or not x.numel():
            return False
        if x.numel() // x.shape[-1] * weight.numel() < least:
            return False
        # a compiled graph supports this call only for constant weights (Inductor asserts this)
        return not (self.widens("cpu", x.dtype) or torch.compiler.is_compiling())

    def add_weight_gradient(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add the gradient of a weight to `total` [outputs, inputs], which is in float32 or wider.
        The gradient is dy^T x, summed over the positions. dy [..., outputs] is the gradient of the
        output, and x [..., inputs] is the input."""
        dy = self.widened(dy.reshape(-1, dy.shape[-1]))
        x = self.widened(x.reshape(-1, x.shape[-1]))
        # if `total` has the type of the operands, one kernel computes the product and adds it to
        # `total`
        if total.dtype == dy.dtype:
            total.addmm_(dy.t(), x)
        elif host.adds_wide(dy.device.type):
            # addmm with `out_dtype` adds the float32 accumulators of the product directly to
            # `total`. A separate product would have to be written to memory and read again.
            # Compiled graphs use a separate product, because torch.compile lacks this form of addmm
            # (pytorch #163880).
            if torch.compiler.is_compiling():
                total += torch.mm(dy.t(), x, out_dtype=total.dtype)
            else:
                torch.addmm(total, dy.t(), x, out_dtype=total.dtype, out=total)
        else:
            wide.add(total, dy.t() @ x)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the batched matrix product a b, in the type of a."""
        return (self.widened(a) @ self.widened(b)).to(a.dtype)

    def wide_product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the batched matrix product a b, in float32 or wider."""
        products = self.widened(a) @ self.widened(b)
        return products.to(torch.promote_types(products.dtype, torch.float32))


USUAL = Kernels()  # the default kernels, for computations outside a run


class Computing(nn.Module):
    """The base class of modules that compute with `kernels`. The module uses the default kernels
    until `compute_by` sets other kernels."""

    kernels = USUAL

    def take(self, kernels: Kernels) -> None:
        """Use the kernels `kernels` from now on."""
        self.kernels = kernels


def compute_by(module: nn.Module, kernels: Kernels) -> None:
    """Make a module, and all modules in it, use the kernels `kernels` from now on."""
    for part in module.modules():
        if isinstance(part, Computing):
            part.take(kernels)


def operand(weight: Tensor) -> Tensor:
    """Return the tensor that a matrix product uses as the weight. It is the weight itself or, for a
    quantized weight, a new tensor with the dequantized values, which is used for this product only.
    """
    if isinstance(weight, Parameter):
        return weight.operand
    return weight


def linear_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b. The bias is added in the same kernel, whereas torch's own call would first
    copy the bias to all rows of the result. Autograd cannot differentiate this call, so only
    autograd Functions use it."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
