"""Rules about the section [precision]."""

from collections.abc import Iterator

from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.configuration import Sections
from ptdmpi.config.model import ModelConfig, QuantizeConfig
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import RunConfig


def precision_rules(sections: Sections) -> Iterator[str]:
    """Yield a mistake for each setting that cannot be combined with matrix products in 8-bit
    floating point. Also yield a mistake if `precision.fp8` is set, but the precision uses no
    scales."""
    if sections.precision is None:
        return
    if sections.precision.scaling == "none":
        if sections.precision.fp8 != "block":
            yield (
                f'precision.fp8 = "{sections.precision.fp8}" has an effect only with compute = '
                f'"fp8", not with "{sections.precision.compute}"; legal: compute = "fp8", or no '
                "precision.fp8"
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
    # the rounding to 8-bit floating point was not tested with compilation
    if run.compile is True:
        yield "run.compile = true", "compile = false"


def _quantized(quantize: QuantizeConfig) -> Iterator[tuple[str, str]]:
    if quantize.weights != "none":
        yield f'quantize.weights = "{quantize.weights}"', 'weights = "none"'
