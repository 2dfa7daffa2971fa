"""How far two trainings are apart, and the bars that decide."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ptdmpi.parity.layouts import ComparedModel, MuonModel
from ptdmpi.parity.run import Training

# Greatest relative difference from one rank. Adam divides by the root of a small second moment and
# so amplifies rounding, hence a wider bar for what it has updated.
BARS = {
    "fp64": {"loss": 1e-12, "norm": 1e-12, "gradients": 1e-12, "parameters": 1e-11},
    "fp32": {"loss": 1e-5, "norm": 1e-5, "gradients": 1e-5, "parameters": 1e-3},
}
# Muon's iteration is in bfloat16, but for fp64: where the last bit of a gradient has that round the
# other way, an update differs by much more than the bit.
MUON_BARS = {**BARS, "fp32": {**BARS["fp32"], "loss": 1e-4, "norm": 1e-4}}
BITWISE = ("fp32", "bf16")
KEY_BIAS = "attention.qkv.bias"


def bars_of(model: ComparedModel) -> dict[str, dict[str, float]]:
    """The bars of the trainings of a model, by compute type."""
    return MUON_BARS if isinstance(model, MuonModel) else BARS


@dataclass(frozen=True)
class Greatest:
    """The greatest relative difference, and the step or tensor in which it is."""

    value: float
    where: str

    def within(self, bar: float) -> bool:
        return self.value <= bar  # False for NaN


def differences(found: Training, expected: Training) -> dict[str, Greatest]:
    """Loss, norm, gradients of the first step and final parameters, against `expected`."""
    return {
        "loss": _greatest_of_curve(found.losses, expected.losses),
        "norm": _greatest_of_curve(found.norms, expected.norms),
        "gradients": _greatest_of_tensors(found.gradients, expected.gradients),
        "parameters": _greatest_of_tensors(found.parameters, expected.parameters),
    }


def first_other_bit(found: Training, expected: Training) -> str | None:
    """The first thing that is not equal to the bit; None if all is."""
    for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if a != b:
            return f"loss of step {step}"
    for step, (a, b) in enumerate(zip(found.norms, expected.norms, strict=True)):
        if a != b:
            return f"norm of step {step}"
    for kind in ("gradients", "parameters"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs or not torch.equal(mine[name], theirs[name]):
                return f"{kind}: {name}"
    return None


def left_out(models: Iterable[ComparedModel]) -> list[str]:
    """Names of the tensors whose part for the keys takes no part in relative differences.

    A key bias adds the same number to all scores of a query, which the softmax does not see: its
    true gradient is zero, and what is computed is rounding alone.
    """
    layers = max((model.layers for model in models if model.kind in ("gpt", "bert")), default=0)
    return [f"layers.{layer}.{KEY_BIAS}" for layer in range(layers)]


def _greatest_of_curve(found: list[float], expected: list[float]) -> Greatest:
    return _greatest(
        Greatest(abs(a - b) / abs(b), f"step {step}")
        for step, (a, b) in enumerate(zip(found, expected, strict=True))
    )


def _greatest_of_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Greatest:
    if found.keys() != expected.keys():
        (name, *_) = sorted(found.keys() ^ expected.keys())
        return Greatest(torch.inf, f"{name} is missing")
    return _greatest(
        Greatest(_relative(_compared(name, found[name]), _compared(name, whole)), name)
        for name, whole in expected.items()
    )


def _compared(name: str, whole: Tensor) -> Tensor:
    """The tensor without the key bias, the middle third of the bias of q, k and v."""
    if not name.endswith(KEY_BIAS):
        return whole
    query, _, value = whole.chunk(3)
    return torch.cat((query, value))


def _relative(found: Tensor, expected: Tensor) -> float:
    """Greatest difference over greatest magnitude of the tensor."""
    smallest = torch.finfo(expected.dtype).tiny
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=smallest))


def _greatest(all_differences: Iterable[Greatest]) -> Greatest:
    # NaN is the greatest of all: a plain max would drop it
    return max(all_differences, key=lambda one: torch.inf if one.value != one.value else one.value)
