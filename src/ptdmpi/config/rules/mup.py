"""Rules about the maximal update parametrization (`ptdmpi.config.mup`)."""

from collections.abc import Iterator

from ptdmpi.config.configuration import Sections
from ptdmpi.config.model import ModelConfig

COVERED = ("attention", "mlp")  # the sublayers for which the table in `ptdmpi.config.mup` holds


def mup_rules(sections: Sections) -> Iterator[str]:
    """Yield a mistake for each setting for which muP is not defined."""
    model = sections.model
    if model is None:
        return
    if not model.mup_base_hidden:
        if model.mup_base_head_size:
            yield (
                f"model.mup_base_head_size = {model.mup_base_head_size} needs "
                "model.mup_base_hidden; legal: 0"
            )
        return
    refused = dict(_refused_by_model(model))
    optimizer = sections.optimizer
    if optimizer is not None and optimizer.kind == "own":
        refused['optimizer.kind = "own"'] = "adamw, lion, muon or sgd"
    adapt = sections.adapt
    if adapt is not None and adapt.adapts:
        refused[f'adapt.method = "{adapt.method}"'] = (
            'method = "none", or a base without muP, made by ptdmpi convert to-hf and then from-hf'
        )
    for key, legal in refused.items():
        yield (
            f"{key} cannot be combined with model.mup_base_hidden = {model.mup_base_hidden}; "
            f"legal: {legal}"
        )


def _refused_by_model(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield (setting, legal alternative) for each setting of the model that cannot be combined with
    muP.
    """
    if model.experts:
        yield f"model.experts = {model.experts}", "experts = 0"
    if model.masked:
        yield f'model.attention = "{model.attention}"', 'attention = "causal"'
    if model.classifies:
        yield f'model.output_head = "{model.output_head}"', 'output_head = "linear"'
    if model.scale_embedding:
        yield "model.scale_embedding = true", "scale_embedding = false"
    others = sorted({*model.sublayers} - {*COVERED})
    if others:
        yield f"model.sublayers with {others[0]}", ", ".join(COVERED)
