"""Which keys of [optimizer] go together, and with which of other sections."""

from collections.abc import Iterator, Mapping

from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.methods import DIFFERING
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.config.section import Section
from ptdmpi.config.sections import (
    DataParallelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)

# A key of [optimizer] -> the kinds that use it.
OPTIMIZED_BY: Mapping[str, tuple[str, ...]] = {
    "beta1": ("adamw", "lion", "muon"),
    "beta2": ("adamw", "lion", "muon"),
    "eps": ("adamw", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd", "muon"),
    "muon_scale": ("muon",),
}


def optimizer_rules(sections: Mapping[str, Section]) -> Iterator[str]:
    """What ties the optimizer's keys together, and to other sections."""
    run, optimizer = sections.get("run"), sections.get("optimizer")
    parallel, precision = sections.get("parallel"), sections.get("precision")
    if not isinstance(optimizer, OptimizerConfig):
        return
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield "optimizer.min_learning_rate is above learning_rate"
    yield from _optimizer_keys(optimizer)
    if optimizer.has_matrices:
        yield from _matrix_rules(sections)
    has_masters = (
        isinstance(precision, PrecisionConfig) and PRECISIONS[precision.compute].has_masters
    )
    offloads = isinstance(parallel, ParallelConfig) and parallel.offload != "none"
    if offloads and not optimizer.moments and not has_masters:
        yield (
            'parallel.offload: optimizer.kind = "sgd" without momentum keeps nothing of a '
            'parameter but its weight; legal: offload = "none"'
        )
    if isinstance(run, RunConfig):
        last = optimizer.last_steps(run.steps) if optimizer.decay == "wsd" else 0
        if optimizer.warmup_steps > run.steps:
            yield (
                f"optimizer.warmup_steps = {optimizer.warmup_steps} is more than "
                f"run.steps = {run.steps}"
            )
        elif optimizer.warmup_steps + last > run.steps:
            left = run.steps - optimizer.warmup_steps
            legal = f"decay_steps of at most {left}" if left else "fewer warmup_steps"
            yield (
                f"optimizer.warmup_steps = {optimizer.warmup_steps} and the {last} that "
                f'decay = "wsd" ends with are more than run.steps = {run.steps}; legal: {legal}'
            )
    section = sections.get("data_parallel")
    method = section.method if isinstance(section, DataParallelConfig) else ""
    if optimizer.ema_decay and method in DIFFERING:
        yield (
            "optimizer.ema_decay follows the weights of every update, and data_parallel.method = "
            f'"{method}" mixes them after it; legal: ema_decay = 0, or method = "all_reduce"'
        )


def _matrix_rules(sections: Mapping[str, Section]) -> Iterator[str]:
    """What moves or replaces the matrices that Muon orthogonalizes as wholes."""
    parallel, adapt = sections.get("parallel"), sections.get("adapt")
    section, muon = sections.get("data_parallel"), 'optimizer.kind = "muon"'
    if isinstance(parallel, ParallelConfig) and parallel.offload != "none":
        yield (
            f'parallel.offload = "{parallel.offload}" updates the state in chunks on the host, and '
            f'{muon} orthogonalizes whole matrices; legal: offload = "none", or another kind'
        )
    if isinstance(adapt, AdaptConfig) and adapt.method == "ia3":
        yield (
            f'adapt.method = "ia3" trains vectors, and {muon} orthogonalizes matrices; legal: '
            'adapt.method = "lora", or optimizer.kind = "adamw"'
        )
    if isinstance(section, DataParallelConfig) and section.average_moments:
        yield (
            f"data_parallel.average_moments = true: {muon} keeps other moments of matrices than of "
            "the rest; legal: average_moments = false, or another kind"
        )


def _optimizer_keys(optimizer: OptimizerConfig) -> Iterator[str]:
    """Keys that say something to another kind of optimizer, or of decay."""
    kind, fields = optimizer.kind, OptimizerConfig.model_fields
    for key, kinds in OPTIMIZED_BY.items():
        if getattr(optimizer, key) != fields[key].default and kind not in kinds:
            default = fields[key].default
            legal = f'"{default}"' if isinstance(default, str) else str(default).lower()
            yield (
                f'optimizer.{key} is of no use to optimizer.kind = "{kind}"; legal: {key} = {legal}'
            )
    if kind == "sgd" and optimizer.nesterov and not optimizer.momentum:
        yield "optimizer.nesterov = true needs optimizer.momentum above 0"
    if optimizer.decay != "wsd" and optimizer.decay_steps != fields["decay_steps"].default:
        yield (
            f'optimizer.decay_steps belongs to decay = "wsd": decay = "{optimizer.decay}" has '
            f"nothing in front of it; legal: decay_steps = {fields['decay_steps'].default}"
        )
