"""Comparisons and probes of a small model with the sublayers of a user."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ptdmpi.base.errors import InputError
from ptdmpi.config.choices import CONTEXT_METHODS
from ptdmpi.config.files import parsed
from ptdmpi.config.model import SUBLAYERS
from ptdmpi.parity import probe
from ptdmpi.parity.layouts import Case, ComparedLayout, ComparedModel, refusal, shape_of
from ptdmpi.parity.suite import Comparison
from ptdmpi.plan.layer.legality import refusals

SECTION = "The sublayers of the configuration"
LAYERS = 4  # one layer in each chunk, for two pipeline ranks with two chunks each
# Keys of [model] that change the layers and do not depend on sizes. The small model takes their
# values from the user's configuration.
KEPT = ("sublayers", "norm", "activation", "positions", "block_norm")
# The sizes of latent attention in the small model, if the user's model has latent attention.
LATENT_SIZES = {"q_lora_rank": 16, "kv_lora_rank": 16, "rope_head_size": 4, "value_head_size": 6}
# The compared layouts. Together they have tensor, pipeline, data and context parallelism with every
# context method, sequence parallelism, ZeRO 1 to 3, recomputation, and schedules that delay the
# gradients of weights.
LAYOUTS = (
    ComparedLayout(micro_size=4, recompute="full"),
    ComparedLayout(tensor=2, sequence_parallel=True, recompute="full", micro_size=4),
    ComparedLayout(pipeline=2, schedule="zb-h1", micro_size=4),
    ComparedLayout(data=2, zero=3, recompute="selective", micro_size=4),
    *(ComparedLayout(context=2, context_method=name, micro_size=4) for name in CONTEXT_METHODS),
    ComparedLayout(tensor=2, pipeline=2, virtual=2, schedule="zb-v", micro_size=4),
    ComparedLayout(tensor=2, data=2, context=2, zero=1, sequence_parallel=True, micro_size=4),
    ComparedLayout(
        tensor=2, pipeline=2, data=2, schedule="1f1b", scatter_gather=True, zero=2, micro_size=2
    ),
)
PROBED = (
    probe.ALONE,
    replace(probe.ALONE, tensor=2, sequence_parallel=True),
    replace(probe.ALONE, pipeline=2),
    *(replace(probe.PLAIN, context_method=name) for name in CONTEXT_METHODS),
)


@dataclass(frozen=True)
class OwnModel(ComparedModel):
    """A model with sublayers of a user. `more` has keys of the section [model] as (key, value), in
    addition to those of `ComparedModel`."""

    more: tuple[tuple[str, Any], ...] = ()

    @property
    def keys(self) -> dict[str, Any]:
        """Return the settings (key -> value) of the configuration section [model] that describe the
        compared model."""
        return {**super().keys, **dict(self.more)}


class OwnRows(NamedTuple):
    """The rows of the parity table for a user's model, and a line for each layout in which the
    model cannot be trained."""

    comparisons: list[Comparison]
    probes: list[Case]
    left_out: list[str]


def model_of(tree: Mapping[str, Any]) -> OwnModel:
    """Return a small model with the kind, the sublayers and the norms of the model in the
    configuration `tree`. It has packed documents if `data.document_boundaries` is True. Experts are
    replaced by one MLP. Raise InputError if the configuration has mistakes, or no sublayers of the
    user."""
    sections, mistakes, _ = parsed(tree)
    if mistakes:
        raise InputError("\n".join(mistakes))
    model = sections.model
    if model is None or set(model.sublayers) <= {*SUBLAYERS}:
        raise InputError(
            "model.sublayers names no sublayer of your own, and --parity without a configuration "
            "tests all others; legal: a configuration with such a sublayer"
        )
    kept = {key: getattr(model, key) for key in KEPT}
    sizes = {key: size if getattr(model, key) else 0 for key, size in LATENT_SIZES.items()}
    return OwnModel(
        model.kind,
        layers=LAYERS,
        tied=model.tie_embeddings,
        documents=sections.data is not None and sections.data.document_boundaries,
        more=tuple({**kept, **sizes}.items()),
    )


def rows(model: OwnModel, ranks: int, *, short: bool = False) -> OwnRows:
    """Return the comparisons and the probes of a model that are possible with `ranks` ranks. If
    `short` is True, return at most two of each. `left_out` has no line for layouts that need more
    ranks. Every second comparison has dropout. Raise InputError if a sublayer cannot be
    imported."""
    cases: list[Case] = []
    left_out: list[str] = []
    for layout in (layout for layout in LAYOUTS if layout.ranks <= ranks):
        case = Case(layout, replace(model, dropout=len(cases) % 2 > 0))
        if reason := _refusal(case, ranks):
            left_out.append(f"{layout}, {layout.exchange}: {reason}")
        else:
            cases.append(case)
    probes = [Case(layout, replace(model, layers=2, masked=False)) for layout in PROBED]
    probes = [case for case in probes if not _refusal(case, ranks)]
    if short:
        cases, probes = cases[-2:], probes[-2:]
    compared = [Comparison(SECTION, case, replace(case, layout=case.layout.base)) for case in cases]
    return OwnRows(compared, probes, left_out)


def _refusal(case: Case, ranks: int) -> str | None:
    """Return the reason why the case cannot be trained on `ranks` ranks; None if it can be trained.
    The reason is either a rule of layouts, or an operator of the model that refuses the layout."""
    return refusal(case, ranks) or next(refusals(case.layout, shape_of(case.model)), None)
