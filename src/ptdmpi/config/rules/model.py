"""Rules about the section [model], and about its combinations with other sections."""

from collections.abc import Iterator

from ptdmpi.base.errors import InputError
from ptdmpi.base.near import divisors, nearest
from ptdmpi.base.plugins import plugin
from ptdmpi.config.model import SUBLAYERS, ModelConfig, QuantizeConfig
from ptdmpi.config.rules.latent import latent_rules
from ptdmpi.config.sections import LogConfig

MIN_MASKED_LENGTH = 8


def shape_rules(model: ModelConfig) -> Iterator[str]:
    """Yield the mistakes in three parts of [model]: the sizes of the model, its sublayers, and the
    keys of its training objective."""
    if not model.head_size:
        yield (
            f"model.heads = {model.heads} does not divide model.hidden = {model.hidden}; "
            f"legal nearby: heads {nearest(model.heads, divisors(model.hidden))}, or a "
            "model.head_size of its own"
        )
    elif model.positions == "rope" and model.head_size % 2 and not model.latent:
        yield f"model.head_size = {model.head_size} must be even for rope positions"
    if model.heads % model.kv_heads:
        yield (
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; "
            f"legal nearby: {nearest(model.kv_heads, divisors(model.heads))}"
        )
    if isinstance(model.sliding_layers, tuple):
        beyond = [layer for layer in model.sliding_layers if layer >= model.layers]
        if beyond:
            yield (
                f"model.sliding_layers names layer {beyond[0]}: legal: 0 to {model.layers - 1}, "
                '"all" or "even"'
            )
    yield from _rope_rules(model)
    yield from _sublayer_rules(model)
    yield from latent_rules(model)
    yield from _objective_rules(model)


def _rope_rules(model: ModelConfig) -> Iterator[str]:
    """Yield the mistakes in the keys that scale the angles of rotary positions."""
    scaling = f'rope_scaling = "{model.rope_scaling}"'
    if model.rope_scaling != "none":
        if model.positions != "rope":
            yield (
                f'model.{scaling} has no effect with model.positions = "{model.positions}"; '
                'legal: "none", or positions = "rope"'
            )
        if model.rope_low_factor >= model.rope_high_factor:
            yield (
                f"model.rope_low_factor = {model.rope_low_factor} must be below rope_high_factor = "
                f"{model.rope_high_factor}"
            )
    if model.rope_scaling == "yarn" and model.rope_theta <= 1.0:
        yield f"model.rope_theta = {model.rope_theta}: {scaling} needs more than 1"
    if model.rope_mscale and model.rope_scaling != "yarn":
        yield f'model.rope_mscale = {model.rope_mscale} needs rope_scaling = "yarn"; legal: 0.0'


def _sublayer_rules(model: ModelConfig) -> Iterator[str]:
    """Yield a mistake for each built-in sublayer that `model.sublayers` names more than once, and
    for each other name that cannot be imported.
    """
    names = model.sublayers
    for name in SUBLAYERS:
        if names.count(name) > 1:
            yield f"model.sublayers names {name} more than once"
    for name in sorted({*names} - {*SUBLAYERS}):
        try:
            plugin("sublayers", name)
        except InputError as error:
            yield f"model.sublayers: {error}; legal without a package: {', '.join(SUBLAYERS)}"


def _objective_rules(model: ModelConfig) -> Iterator[str]:
    """Yield the mistakes in the keys for masked language models and for heads for tasks."""
    if model.classifies != bool(model.classes):
        yield (
            f"model.classes = {model.classes} does not fit model.output_head = "
            f'"{model.output_head}": leave both out, because [task] sets them'
        )
    for key in ("tie_embeddings", "sentence_order"):
        if model.classifies and getattr(model, key):
            yield f'model.{key} = true: a model with output_head = "classes" has no such head'
    if not model.masked:
        for key, value in (
            ('output_head = "mlm"', model.output_head == "mlm"),
            (f"token_types = {model.token_types}", model.token_types),
            ("sentence_order = true", model.sentence_order),
        ):
            if value:
                yield f'model.{key} is legal only with model.attention = "bidirectional"'
        return
    if model.sliding_window:
        yield (
            f"model.sliding_window = {model.sliding_window} is legal only with "
            'model.attention = "causal"; legal here: 0'
        )
    if model.seq_length < MIN_MASKED_LENGTH:
        yield (
            f"model.seq_length = {model.seq_length}: at least {MIN_MASKED_LENGTH} with "
            "bidirectional attention, for special tokens and two segments"
        )


def masked_log_rules(model: ModelConfig, log: LogConfig) -> Iterator[str]:
    """Yield a mistake for each key of [log] that needs predictions of the next token, if the model
    is a masked model. A masked model cannot predict the next token."""
    if model.masked and log.bigram_baseline:
        yield "log.bigram_baseline predicts the next token, but this model predicts masked tokens"
    if model.masked and log.tasks:
        yield "log.tasks needs predictions of the next token, but this model predicts masked tokens"


def quantize_rules(quantize: QuantizeConfig) -> Iterator[str]:
    """Yield a mistake for each key of [quantize] that has no effect. The module `legality` checks
    that a layout does not divide a block between ranks.
    """
    default = QuantizeConfig.model_fields["block"].default
    if quantize.weights == "none" and quantize.block != default:
        yield (
            f'quantize.block has no effect with quantize.weights = "none"; legal: block = {default}'
        )
