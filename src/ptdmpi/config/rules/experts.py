"""Rules about models with experts: the legal sizes, and the settings that cannot be combined with
experts.
"""

from collections.abc import Iterator

from ptdmpi.base.near import divisors, nearest
from ptdmpi.config.adapt import EXPERTS, AdaptConfig, targets_of
from ptdmpi.config.configuration import Sections
from ptdmpi.config.methods import toml_text
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import RunConfig

# the keys of [model] that have no effect in a model without experts, except `expert_hidden`
KEYS = (
    "experts_per_token",
    "shared_experts",
    "dense_layers",
    "moe_every",
    "router",
    "router_normalize",
    "router_scale",
    "router_groups",
    "router_top_groups",
    "balance",
    "balance_coefficient",
    "z_loss_coefficient",
)


def expert_rules(sections: Sections) -> Iterator[str]:
    """Yield the mistakes in the keys about experts, and in their combinations with
    other sections.
    """
    model = sections.model
    if model is None:
        return
    if not model.experts:
        yield from _unused_keys(model)
        return
    yield from _size_rules(model)
    yield from _layer_rules(model)
    default = ModelConfig.model_fields["balance_coefficient"].default
    if model.balance == "none" and model.balance_coefficient != default:
        yield (
            f"model.balance_coefficient = {model.balance_coefficient} has no effect with balance = "
            f'"none"; legal: {default}'
        )
    yield from _form_rules(model)
    if sections.adapt is not None and sections.adapt.adapts:
        yield from _adapter_rules(model, sections.adapt)
    for key, legal in _excluded(sections):
        yield f"model.experts = {model.experts} excludes {key}; legal: {legal}, or experts = 0"
    parallel = sections.parallel
    dealt = 1 if parallel is None else parallel.expert
    for key, legal in _dealing(sections) if dealt > 1 else ():
        yield f"parallel.expert = {dealt} excludes {key}; legal: {legal}, or expert = 1"
    if parallel is not None and parallel.expert_tensor == 1 < parallel.tensor:
        adapt = sections.adapt
        if adapt is not None and adapt.adapts:
            key = f'adapt.method = "{adapt.method}"'
            yield f'parallel.expert_tensor = 1 excludes {key}; legal: expert_tensor = "all"'
        for key, legal in _sending(sections):
            yield f'parallel.expert_tensor = 1 excludes {key}; legal: {legal}, or "all"'


def _unused_keys(model: ModelConfig) -> Iterator[str]:
    for key in KEYS:
        value = getattr(model, key)
        default = ModelConfig.model_fields[key].default
        if value != default:
            yield (
                f"model.{key} = {toml_text(value)} has no effect without experts; legal: {key} = "
                f"{toml_text(default)}, or model.experts above 0"
            )
    if model.expert_hidden != model.ffn_hidden:
        yield (
            f"model.expert_hidden = {model.expert_hidden} has no effect without experts; legal: "
            f"{model.ffn_hidden}, the value of model.ffn_hidden, or model.experts above 0"
        )


def _size_rules(model: ModelConfig) -> Iterator[str]:
    """Yield a mistake if the number of experts does not fit the number of experts per token or the
    number of router groups. Also yield a mistake if the weight of a single expert would be
    normalized.
    """
    if not 1 <= model.experts_per_token <= model.experts:
        yield (
            f"model.experts_per_token = {model.experts_per_token}, but model.experts = "
            f"{model.experts}; legal: 1 to {model.experts}"
        )
        return
    if model.experts_per_token == 1 and model.router_normalize:
        yield (
            "model.router_normalize = true gives a single expert the weight 1, so the router has "
            "no gradient; legal: router_normalize = false, or model.experts_per_token above 1"
        )
    if model.experts % model.router_groups:
        yield (
            f"model.router_groups = {model.router_groups} does not divide model.experts = "
            f"{model.experts}; legal nearby: "
            f"{nearest(model.router_groups, divisors(model.experts))}"
        )
        return
    each = model.experts // model.router_groups
    least = -(-model.experts_per_token // each)
    if not least <= model.router_top_groups <= model.router_groups:
        yield (
            f"model.router_top_groups = {model.router_top_groups}: each of the "
            f"{model.router_groups} groups contains {each} of the experts, and a token uses "
            f"{model.experts_per_token}; legal: {least} to {model.router_groups}"
        )


def _layer_rules(model: ModelConfig) -> Iterator[str]:
    """Yield a mistake if no layer of the model would have experts."""
    if model.moe_every > model.layers:
        yield (
            f"model.moe_every = {model.moe_every} gives no layer experts, since model.layers = "
            f"{model.layers}; legal: 1 to {model.layers}"
        )
        return
    last = model.layers // model.moe_every * model.moe_every - 1
    if model.dense_layers > last:
        yield (
            f"model.dense_layers = {model.dense_layers} gives no layer experts, since the last "
            f"layer that may have experts is layer {last}; legal: 0 to {last}"
        )


def _form_rules(model: ModelConfig) -> Iterator[str]:
    """Yield a mistake for each setting of the layers (biases, sublayers, position of norms) that is
    not supported in models with experts.
    """
    if model.mlp_bias:
        yield (
            f"model.bias = {toml_text(model.bias)}: experts have no biases; legal: "
            'bias = false, "attention" or "qkv"'
        )
    if "mlp" not in model.sublayers:
        yield 'model.sublayers has no "mlp", which experts replace; legal: sublayers with "mlp"'
    if model.block_norm == "post":
        yield 'model.block_norm = "post" cannot be combined with experts; legal: "pre", "sandwich"'


def _adapter_rules(model: ModelConfig, adapt: AdaptConfig) -> Iterator[str]:
    """Yield a mistake for each setting that would train routers, because routers are frozen in a
    model with adapters. Also yield a mistake for dropout in adapters of experts.
    """
    frozen = f'adapt.method = "{adapt.method}" freezes the routers'
    if model.balance in ("sequence", "batch"):
        yield (
            f'model.balance = "{model.balance}" adds a loss of the routers, but {frozen}; legal: '
            'balance = "none", also if the base was trained with this loss'
        )
    for key in ("balance_coefficient", "z_loss_coefficient"):
        value, default = getattr(model, key), ModelConfig.model_fields[key].default
        if value != default and (key, model.balance) != ("balance_coefficient", "none"):
            yield f"model.{key} = {value} has no effect, because {frozen}; legal: {default}"
    targets = [name for name in targets_of(adapt, model.gates, model.mlps) if EXPERTS in name]
    if adapt.dropout and targets:
        yield (
            f"adapt.dropout = {adapt.dropout} with adapters of experts ({', '.join(targets)}); "
            'legal: dropout = 0, or targets without experts, such as "attention.*"'
        )


def _excluded(sections: Sections) -> Iterator[tuple[str, str]]:
    """Yield (setting, legal alternative) for each setting that cannot be combined with experts."""
    method = sections.data_parallel
    if method is not None and method.method != "all_reduce":
        yield f'data_parallel.method = "{method.method}"', 'data_parallel.method = "all_reduce"'
    if sections.quantize is not None and sections.quantize.weights != "none":
        yield f'quantize.weights = "{sections.quantize.weights}"', 'quantize.weights = "none"'
    # a layer with experts cannot be compiled, because the host counts the tokens of each expert in
    # the middle of the layer
    yield from where_known(_compiles, sections.run)
    yield from where_known(_own_loss, sections.model, sections.run)


def may_deal(sections: Sections) -> bool:
    """Return True if experts may be distributed over ranks, because no setting of `sections` needs
    all experts on every rank."""
    return not any(True for _ in _dealing(sections))


def _dealing(sections: Sections) -> Iterator[tuple[str, str]]:
    """Yield (setting, legal alternative) for each setting that needs all experts on every rank."""
    if sections.run is not None and sections.run.reproducible:
        # A reproducible run sums gradients along a binary tree, which has one leaf for each
        # microbatch. A rank needs the complete gradient of a microbatch for a leaf, but with
        # distributed experts this gradient is on several ranks.
        yield "run.reproducible = true", "reproducible = false"
    log = sections.log
    if log is not None and log.gradient_noise_every_steps:
        # The measurement of gradient noise needs, on each data rank, a gradient that comes only
        # from the rank's own tokens. With distributed experts, the gradient of an expert comes from
        # the tokens of several data ranks, even before gradients are summed.
        yield f"log.gradient_noise_every_steps = {log.gradient_noise_every_steps}", "0"
    # When tasks are evaluated during training, data ranks answer different questions. With
    # distributed experts, data ranks must start the same number of all-to-alls of tokens, but
    # different questions need different numbers of forward passes.
    yield from _sending(sections)


def _sending(sections: Sections) -> Iterator[tuple[str, str]]:
    """Yield (setting, legal alternative) for each setting that needs sequences of other lengths
    than `model.seq_length`."""
    log = sections.log
    if log is not None and log.tasks_every_steps:
        yield f"log.tasks_every_steps = {log.tasks_every_steps}", "0"


def _compiles(run: RunConfig) -> Iterator[tuple[str, str]]:
    if run.compile is True:
        yield "run.compile = true", "run.compile = false"


def _own_loss(model: ModelConfig, run: RunConfig) -> Iterator[tuple[str, str]]:
    # the number of terms of a user's own loss is not known when the gradients of routers are
    # computed
    if run.loss and model.router_losses:
        yield f'run.loss = "{run.loss}" with losses of routers', 'balance = "bias" or "none"'
