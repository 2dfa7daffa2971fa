"""Rules about the section [adapt], and about its combinations with other sections."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from ptdmpi.base.words import counted
from ptdmpi.config.adapt import USED, AdaptConfig, targets_of
from ptdmpi.config.configuration import Sections
from ptdmpi.config.kinds import LATENT
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import CheckpointConfig, TaskConfig


def adapt_rules(sections: Sections) -> Iterator[str]:
    """Yield the mistakes in [adapt], and in its combinations with other sections."""
    yield from where_known(_base_rules, sections.adapt)
    yield from where_known(_beginning_rules, sections.adapt, sections.checkpoint)
    yield from where_known(_unused_keys, sections.adapt)
    task = sections.task or TaskConfig()
    yield from where_known(_layer_rules, sections.adapt, sections.model, task)


def _base_rules(adapt: AdaptConfig) -> Iterator[str]:
    if adapt.method == "full" and not adapt.base:
        yield (
            'adapt.method = "full" trains all weights of a model: adapt.base is missing; legal: a '
            "run directory, a checkpoint, or the output of `ptdmpi convert from-hf`"
        )


def _beginning_rules(adapt: AdaptConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    if adapt.method == "full" and checkpoint.initial is not None:
        yield (
            'adapt.method = "full" begins from adapt.base, so checkpoint.initial must not name '
            "other weights; legal: one of the two"
        )


def _unused_keys(adapt: AdaptConfig) -> Iterator[str]:
    unused = [
        key
        for key, field in AdaptConfig.model_fields.items()
        if key != "method"
        and key not in USED[adapt.method]
        and getattr(adapt, key) != field.default
    ]
    if unused:
        names = " and ".join(f"adapt.{key}" for key in unused)
        keys = "this key" if len(unused) == 1 else "these keys"
        methods = [f'"{name}"' for name, used in USED.items() if used and {*unused} <= {*used}]
        yield (
            f'adapt.method = "{adapt.method}" does not use {names}; legal: remove {keys}, or '
            f"method = {' or '.join(methods)}"
        )


def _layer_rules(adapt: AdaptConfig, model: ModelConfig, task: TaskConfig) -> Iterator[str]:
    """Yield the mistakes in the keys that choose which transformer layers get adapters, and which
    linear layers in these transformer layers. If the head of a task is trained, it is legal that no
    layer has adapters.
    """
    if not adapt.adapts:
        return
    has_task = task.kind != "none"
    most = model.layers - 1
    head = f", or {model.layers} with a [task], whose head trains alone"
    if has_task:
        most = model.layers
        head = ""
    if adapt.first_layer > most:
        yield (
            f"adapt.first_layer = {adapt.first_layer}, but the model has "
            f"{counted(model.layers, 'layer')}; legal: 0 to {most}{head}"
        )
    if model.has_unlike_layers:
        yield (
            f'adapt.method = "{adapt.method}": adapters are not supported in models in which only '
            "some layers have experts; legal: model.dense_layers = 0 with model.moe_every = 1"
        )
    if model.latent:
        yield (
            f'adapt.method = "{adapt.method}": adapters are not supported in models with the '
            f'sublayer {LATENT}; legal: method = "none" or "full"'
        )
        return
    if adapt.targets == "all":
        return
    every = adapt.model_copy(update={"targets": ("*",)})
    known = list(targets_of(every, model.gates, model.mlps))
    for pattern in adapt.targets:
        if not any(fnmatchcase(name, pattern) for name in known):
            yield f'adapt.targets: "{pattern}" matches no target; legal: {", ".join(known)}'
