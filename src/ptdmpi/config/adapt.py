"""The section [adapt] of a configuration: which parameters of an existing model are trained."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ptdmpi.config.section import (
    Bound,
    Fraction,
    NonNegative,
    PathText,
    Positive,
    Reported,
    Section,
)

# Maps each adapter target in attention to two values. The first value is the linear layer that
# computes the target. The second value says which part of this layer's output is the target. For
# example, the output of `attention.qkv` has three parts: queries (0), keys (1) and values (2).
ATTENTION_TARGETS = {
    "attention.q": ("attention.qkv", 0),
    "attention.k": ("attention.qkv", 1),
    "attention.v": ("attention.qkv", 2),
    "attention.out": ("attention.out", 0),
}
# Maps each adapter target in an MLP to the same two values, for a gated MLP. Without a gate, the
# output of the layer "up" has only one part (`targets_of`). The names in this table are incomplete:
# the full name of a target or a linear layer begins with the name of the MLP, for example "mlp.up".
MLP_TARGETS = {"gate": ("up", 0), "up": ("up", 1), "down": ("down", 0)}
MLP = "mlp"
EXPERTS = "mlp.experts"  # the MLP name that means all experts of a layer.
# The targets of (IA)^3: keys, values, and the hidden activations of an MLP (Liu et al. 2022, arXiv
# 2205.05638, section 3.3).
IA3_TARGETS = ("attention.k", "attention.v", "mlp*.down")
AdaptMethod = Literal["none", "lora", "ia3", "full"]
WHOLE = ("none", "full")  # methods with which no weight is frozen.
# Value of `adapt.method` -> the keys of [adapt] that this method uses, in addition to `method`.
USED: dict[str, tuple[str, ...]] = {
    "none": (),
    "lora": ("rank", "alpha", "dropout", "targets", "first_layer", "base"),
    "ia3": ("targets", "first_layer", "base"),
    "full": ("base",),
}


class AdaptConfig(Section):
    """The section [adapt]: the adapters of a frozen model. Only the adapters, and the head of a
    [task], are trained. An adapter is a low-rank product that is added to the weight of a linear
    layer (LoRA, Hu et al. 2021, arXiv 2106.09685), or a factor that scales keys, values or the
    MLP's hidden activations ((IA)^3, Liu et al. 2022). `targets` has names of targets
    (`targets_of`), or globs for such names. "all" means every target; for the method "ia3", "all"
    means `IA3_TARGETS`. Layers before `first_layer` have neither adapters nor a backward pass.
    `base` is the model whose weights are frozen.

    With the method "full" no weight is frozen: all weights of `base` are trained. `resolve`
    replaces this method by the key `checkpoint.initial`, so no other code sees the method "full".
    """

    method: Bound[AdaptMethod] = "none"
    rank: Bound[Positive] = 8
    alpha: Bound[Annotated[float, Field(gt=0)]] = 16.0
    dropout: Reported[Fraction] = 0.0
    targets: Bound[
        Literal["all"]
        | Annotated[
            tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, strict=False)
        ]
    ] = "all"
    first_layer: Bound[NonNegative] = 0
    base: Reported[PathText] = ""

    @field_validator("targets", mode="before")
    @classmethod
    def _are_listed(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "all":
            known = ", ".join((*ATTENTION_TARGETS, *(f"{MLP}.{name}" for name in MLP_TARGETS)))
            raise ValueError(f'legal: "all", or a list with names or globs of {known}')
        return value

    @property
    def adapts(self) -> bool:
        """Return True if weights are frozen and only adapters (and a head for a task) are
        trained."""
        return self.method not in WHOLE

    @property
    def scale(self) -> float:
        """Return the factor by which the product of a LoRA adapter's two matrices is multiplied:
        alpha / rank."""
        return self.alpha / self.rank


def targets_of(
    adapt: AdaptConfig, gates: int, mlps: Sequence[str] = (MLP,)
) -> dict[str, tuple[str, int]]:
    """Return the targets that get adapters, as a dict. The dict maps the name of a target to two
    values. The first value is the name of the linear layer that computes the target. The second
    value says which part of this layer's output is the target, counted from 0. The result is empty
    if the model has no adapters.

    `gates` is the number of parts in the output of an MLP's first linear layer
    (`ModelConfig.gates`), and `mlps` has the names of the MLPs of a layer (`ModelConfig.mlps`). A
    target whose name begins with `EXPERTS` means a linear layer of every expert of the layer; only
    LoRA can adapt such a target.
    """
    if not adapt.adapts:
        return {}
    known = dict(ATTENTION_TARGETS)
    for mlp in mlps:
        if mlp == EXPERTS and adapt.method == "ia3":
            continue
        for leaf, (linear, output) in MLP_TARGETS.items():
            if leaf != "gate" or gates > 1:
                known[f"{mlp}.{leaf}"] = (f"{mlp}.{linear}", min(output, gates - 1))
    asked: tuple[str, ...] = ("*",) if adapt.targets == "all" else adapt.targets
    if adapt.targets == "all" and adapt.method == "ia3":
        asked = IA3_TARGETS
    return {
        name: where
        for name, where in known.items()
        if any(fnmatchcase(name, pattern) for pattern in asked)
    }
