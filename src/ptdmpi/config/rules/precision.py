"""Rules about the section [precision]."""

from collections.abc import Iterator

from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.configuration import Sections
from ptdmpi.config.model import ModelConfig, QuantizeConfig
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import RunConfig


def precision_rules(sections: Sections) -> Iterator[str]:
    """Yield a mistake for each setting that cannot be combined with products in 8-bit floating
    point, and for scales of a precision that has none."""
    if sections.precision is None:
        return
    if sections.precision.scaling == "none":
        if sections.precision.fp8 != "block":
            yield (
                f'precision.fp8 = "{sections.precision.fp8}" belongs to compute = "fp8", and '
                f'compute = "{sections.precision.compute}"; legal: compute = "fp8", or no fp8'
            )
        return
    refusals = [
        *where_known(_experts, sections.model),
        *where_known(_adapters, sections.adapt),
        *where_known(_quantized, sections.quantize),
        *where_known(_compiled, sections.run),
    ]
    for key, legal in refusals:
        yield (
            f'precision.compute = "{sections.precision.compute}" cannot be combined with {key}; '
            f'legal: {legal}, or compute = "bf16"'
        )


def _experts(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.experts:
        yield f"model.experts = {model.experts}", "experts = 0"


def _adapters(adapt: AdaptConfig) -> Iterator[tuple[str, str]]:
    if adapt.adapts:
        yield f'adapt.method = "{adapt.method}"', 'method = "none"'


def _compiled(run: RunConfig) -> Iterator[tuple[str, str]]:
    # no test compiles the rounding
    if run.compile:
        yield "run.compile = true", "compile = false"


def _quantized(quantize: QuantizeConfig) -> Iterator[tuple[str, str]]:
    if quantize.weights != "none":
        yield f'quantize.weights = "{quantize.weights}"', 'weights = "none"'
