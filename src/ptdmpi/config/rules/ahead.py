"""Rules about modules for multi-token prediction: the settings that exclude them."""

from collections.abc import Iterator

from ptdmpi.config.configuration import Sections
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import DistillationConfig, PreferenceConfig, RunConfig


def ahead_rules(sections: Sections) -> Iterator[str]:
    """Yield the mistakes in the keys for multi-token prediction, and in their combinations with
    other keys. Each mistake names the legal values."""
    model = sections.model
    if model is None:
        return
    if not model.mtp_depth:
        default = ModelConfig.model_fields["mtp_loss_coefficient"].default
        if model.mtp_loss_coefficient != default:
            yield (
                f"model.mtp_loss_coefficient = {model.mtp_loss_coefficient} has no effect with "
                f"mtp_depth = 0; legal: {default}, or mtp_depth above 0"
            )
        return
    refusals = [
        *_of_model(model),
        *where_known(_own_loss, sections.run),
        *where_known(_pairs, sections.preference),
        *where_known(_teacher, sections.distillation),
    ]
    for key, legal in refusals:
        depth = f"model.mtp_depth = {model.mtp_depth}"
        yield f"{depth} excludes {key}; legal: {legal}, or mtp_depth = 0"


def _of_model(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.masked:
        yield f'model.attention = "{model.attention}"', 'attention = "causal"'
    elif model.block_norm == "post":
        yield 'model.block_norm = "post"', '"pre", "sandwich"'


def _own_loss(run: RunConfig) -> Iterator[tuple[str, str]]:
    if run.loss:
        yield f'run.loss = "{run.loss}"', 'loss = ""'


def _pairs(preference: PreferenceConfig) -> Iterator[tuple[str, str]]:
    if preference.compares:
        yield f'preference.method = "{preference.method}"', 'method = "none"'


def _teacher(distillation: DistillationConfig) -> Iterator[tuple[str, str]]:
    if distillation.teaches:
        yield "[distillation]", "no [distillation]"
