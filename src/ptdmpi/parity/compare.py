"""Differences between two training runs, and the tolerances (`BARS`) that they must not exceed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ptdmpi.parity.layouts import ComparedModel, MuonModel
from ptdmpi.parity.run import Training

# The largest relative differences that are allowed between a training run and the training run of
# the same model on one rank. The tolerance for parameters is wider, because Adam divides by the
# root of a small second moment, which amplifies rounding.
BARS = {
    "fp64": {"loss": 1e-12, "norm": 1e-12, "gradients": 1e-12, "parameters": 1e-11},
    "fp32": {"loss": 1e-5, "norm": 1e-5, "gradients": 1e-5, "parameters": 1e-3},
}
# Muon's matrix iterations are in bfloat16, unless the precision of the run is fp64. A difference in
# the last bit of a gradient can make a bfloat16 value round in the other direction. The update then
# differs by much more than the last bit.
MUON_BARS = {**BARS, "fp32": {**BARS["fp32"], "loss": 1e-4, "norm": 1e-4}}
BITWISE = ("fp32", "bf16")
KEY_BIAS = "attention.qkv.bias"


def bars_of(model: ComparedModel) -> dict[str, dict[str, float]]:
    """Return the tolerances for the training runs of a model: compute type -> kind of value
    ("loss", "norm", "gradients", "parameters") -> tolerance."""
    if isinstance(model, MuonModel):
        return MUON_BARS
    return BARS


@dataclass(frozen=True)
class Greatest:
    """The greatest relative difference, and the step or tensor where it occurs."""

    value: float
    where: str

    def within(self, bar: float) -> bool:
        """Return True if the difference does not exceed the tolerance `bar`; False for NaN."""
        return self.value <= bar  # for NaN, the comparison gives False


def differences(actual: Training, expected: Training) -> dict[str, Greatest]:
    """Return the greatest differences in the losses, in the gradient norms, in the gradients of the
    first step, and in the final parameters."""
    return {
        "loss": _greatest_of_curve(actual.losses, expected.losses),
        "norm": _greatest_of_curve(actual.norms, expected.norms),
        "gradients": _greatest_of_tensors(actual.gradients, expected.gradients),
        "parameters": _greatest_of_tensors(actual.parameters, expected.parameters),
    }


def first_other_bit(actual: Training, expected: Training) -> str | None:
    """Return the name of the first value whose bits differ between the two runs. Return None if all
    bits are equal."""
    for step, (a, b) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        if a != b:
            return f"loss of step {step}"
    for step, (a, b) in enumerate(zip(actual.norms, expected.norms, strict=True)):
        if a != b:
            return f"norm of step {step}"
    for kind in ("gradients", "parameters"):
        mine = getattr(actual, kind)
        theirs = getattr(expected, kind)
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name]):
                return f"{kind}: {name}"
    return None


def left_out(models: Iterable[ComparedModel]) -> list[str]:
    """Return the names of the biases of queries, keys and values. In these biases, comparisons
    leave out the elements that belong to keys.

    A key bias adds the same number to all scores of a query, and this number cancels in the
    softmax. The true gradient of a key bias is therefore zero, and the computed gradient consists
    only of rounding errors.
    """
    kinds = ("gpt", "bert", "qwen2")
    layers = max((model.layers for model in models if model.kind in kinds), default=0)
    return [f"layers.{layer}.{KEY_BIAS}" for layer in range(layers)]


def _greatest_of_curve(actual: list[float], expected: list[float]) -> Greatest:
    return _greatest(
        Greatest(abs(a - b) / abs(b), f"step {step}")
        for step, (a, b) in enumerate(zip(actual, expected, strict=True))
    )


def _greatest_of_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> Greatest:
    if actual.keys() != expected.keys():
        (name, *_) = sorted(actual.keys() ^ expected.keys())
        return Greatest(torch.inf, f"{name} is missing")
    return _greatest(
        Greatest(_relative(_compared(name, actual[name]), _compared(name, whole)), name)
        for name, whole in expected.items()
    )


def _compared(name: str, whole: Tensor) -> Tensor:
    """Return the elements of the tensor `whole` that are compared. If the tensor is the bias of
    queries, keys and values, the elements for keys are left out."""
    if not name.endswith(KEY_BIAS):
        return whole
    query, _, value = whole.chunk(3)
    return torch.cat((query, value))


def _relative(actual: Tensor, expected: Tensor) -> float:
    """Return the greatest absolute difference between two elements, divided by the greatest
    magnitude of an element of the expected tensor."""
    smallest = torch.finfo(expected.dtype).tiny
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=smallest))


def _greatest(all_differences: Iterable[Greatest]) -> Greatest:
    """Return the greatest of several differences. NaN is treated as the greatest value, because the
    plain function `max` could ignore a NaN."""

    return max(
        all_differences,
        key=lambda difference: (math.isnan(difference.value), difference.value),
    )
