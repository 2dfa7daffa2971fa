"""Rules about the section [optimizer], and about its combinations with other sections."""

from collections.abc import Iterator, Mapping

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import call_mistake, plugin
from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.configuration import Sections
from ptdmpi.config.methods import DIFFERING, DataParallelConfig, toml_text
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import (
    WEIGHTS,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)

# Key of [optimizer] -> the kinds of optimizer that use the key.
OPTIMIZED_BY: Mapping[str, tuple[str, ...]] = {
    "own": ("own",),
    "beta1": ("adamw", "lion", "muon", "own"),
    "beta2": ("adamw", "lion", "muon", "own"),
    "eps": ("adamw", "muon", "own"),
    "momentum": ("sgd", "muon", "own"),
    "nesterov": ("sgd", "muon", "own"),
    "muon_scale": ("muon",),
}

# The arguments of the method `update` of the user's own optimizer.
UPDATE_ARGUMENTS = ("config", "group", "rate", "updates")

MUON = 'optimizer.kind = "muon"'


def optimizer_rules(sections: Sections) -> Iterator[str]:
    """Yield the mistakes in [optimizer], and in its combinations with other sections."""
    optimizer = sections.optimizer
    if optimizer is None:
        return
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield "optimizer.min_learning_rate is above learning_rate"
    yield from _optimizer_keys(optimizer)
    if optimizer.kind == "own":
        mistake = _own_mistake(optimizer.own)
        if mistake:
            yield mistake
            return
    if optimizer.has_matrices:
        yield from where_known(_matrices_and_offload, sections.parallel)
        yield from where_known(_matrices_and_adapters, sections.adapt)
        yield from where_known(_matrices_and_moments, sections.data_parallel)
    precision = sections.precision or PrecisionConfig()
    yield from where_known(_offload_rules, optimizer, sections.parallel, precision)
    yield from where_known(_step_rules, optimizer, sections.run)
    yield from where_known(_average_rules, optimizer, sections.data_parallel)


def _matrices_and_offload(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.offload != "none":
        yield (
            f'parallel.offload = "{parallel.offload}" updates the state in chunks on the host, but '
            f'{MUON} orthogonalizes whole matrices; legal: offload = "none", or another kind'
        )


def _matrices_and_adapters(adapt: AdaptConfig) -> Iterator[str]:
    if adapt.method == "ia3":
        yield (
            f'adapt.method = "ia3" trains vectors, but {MUON} orthogonalizes matrices; legal: '
            'adapt.method = "lora", or optimizer.kind = "adamw"'
        )


def _matrices_and_moments(section: DataParallelConfig) -> Iterator[str]:
    if section.average_moments:
        yield (
            f"data_parallel.average_moments = true: {MUON} keeps other moments for matrices than "
            "for other parameters; legal: average_moments = false, or another kind"
        )


def _offload_rules(
    optimizer: OptimizerConfig, parallel: ParallelConfig, precision: PrecisionConfig
) -> Iterator[str]:
    """Yield a mistake if `parallel.offload` is set but there is no state to offload: neither
    moments nor separate master weights."""
    has_masters = PRECISIONS[precision.compute].has_masters
    if parallel.offload != "none" and not optimizer.moments and not has_masters:
        yield (
            'parallel.offload: optimizer.kind = "sgd" without momentum keeps no state that could '
            'be offloaded; legal: offload = "none"'
        )


def _step_rules(optimizer: OptimizerConfig, run: RunConfig) -> Iterator[str]:
    """Yield a mistake if the warm-up, or warm-up and final decay together, have more steps than the
    run."""
    last = 0
    if optimizer.decay == "wsd":
        last = optimizer.last_steps(run.steps)
    if optimizer.warmup_steps > run.steps:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps} is more than "
            f"run.steps = {run.steps}"
        )
    elif optimizer.warmup_steps + last > run.steps:
        left = run.steps - optimizer.warmup_steps
        legal = f"decay_steps of at most {left}" if left else "fewer warmup_steps"
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps} and the {last} last steps of "
            f'decay = "wsd" are together more than run.steps = {run.steps}; legal: {legal}'
        )


def _average_rules(optimizer: OptimizerConfig, section: DataParallelConfig) -> Iterator[str]:
    if optimizer.ema_decay and section.method in DIFFERING:
        yield (
            "optimizer.ema_decay averages the weights after every update, but data_parallel.method "
            f'= "{section.method}" averages them later; legal: ema_decay = 0, or method = '
            '"all_reduce"'
        )


def _own_mistake(name: str) -> str:
    """Return the mistake in the user's own optimizer, which `name` names; "" if there is no
    mistake."""
    if not name:
        return 'optimizer.kind = "own" needs optimizer.own = "module:class"'
    try:
        own = plugin("optimizers", name)
    except InputError as error:
        return f"optimizer.own: {error}"
    lacking = [part for part in ("moments", "update") if not hasattr(own, part)]
    if lacking:
        return f"optimizer.own: {name} has no {lacking[0]}; legal: a class with moments and update"
    if not callable(own.update):
        return f"optimizer.own: {name} has an update of type {type(own.update).__name__}"
    mistake = call_mistake(own.update, UPDATE_ARGUMENTS)
    if mistake:
        return (
            f"optimizer.own: {name} has an update that cannot be called ({mistake}); legal: a "
            f"static method update({', '.join(UPDATE_ARGUMENTS)})"
        )
    names = own.moments
    if not isinstance(names, tuple | list) or not all(_names_a_moment(name) for name in names):
        return (
            f"optimizer.own: {name} has moments = {names!r}; legal: a tuple of names without the "
            f"characters / and #, and without the name {WEIGHTS}"
        )
    if len(set(names)) < len(names):
        return f"optimizer.own: {name} has moments = {names!r}; legal: each name once"
    return ""


def _names_a_moment(name: object) -> bool:
    """Return True if a checkpoint can store a kind of optimizer state under this name."""
    if not isinstance(name, str) or not name.isprintable() or set(name) & set("/#"):
        return False
    return name not in ("", WEIGHTS)


def _optimizer_keys(optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield a mistake for each key that is set but has no effect with the chosen kind of optimizer
    or of decay.
    """
    kind, fields = optimizer.kind, OptimizerConfig.model_fields
    for key, kinds in OPTIMIZED_BY.items():
        if getattr(optimizer, key) != fields[key].default and kind not in kinds:
            legal = toml_text(fields[key].default)
            yield (
                f'optimizer.{key} has no effect with optimizer.kind = "{kind}"; legal: {key} = '
                f"{legal}"
            )
    if kind == "sgd" and optimizer.nesterov and not optimizer.momentum:
        yield "optimizer.nesterov = true needs optimizer.momentum above 0"
    if optimizer.decay != "wsd" and optimizer.decay_steps != fields["decay_steps"].default:
        yield (
            f'optimizer.decay_steps has an effect only with decay = "wsd", not with decay = '
            f'"{optimizer.decay}"; legal: decay_steps = {fields["decay_steps"].default}'
        )
