"""Rules about the section [data_parallel], and about its combinations with other sections."""

import math
from collections.abc import Iterator
from typing import get_args

from ptdmpi.config.configuration import Sections
from ptdmpi.config.kinds import LATENT
from ptdmpi.config.methods import (
    COMPRESSED_BY,
    COMPRESSING,
    DIFFERING,
    NOT_STEADY,
    STEADY,
    USED_BY,
    CompressorName,
    DataParallelConfig,
    encodes,
    replicas_differ,
    toml_text,
)
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig
from ptdmpi.config.zero import covers_state


def method_rules(sections: Sections) -> Iterator[str]:
    """Yield the mistakes in [data_parallel], and a mistake for each setting of another section that
    cannot be combined with the data-parallel method.
    """
    section = sections.data_parallel
    yield from where_known(_unused, section)
    yield from where_known(_together, section)
    yield from where_known(_compressor_rules, section)
    yield from where_known(_rank_rules, section, sections.model)
    yield from where_known(_moment_rules, section, sections.optimizer)
    yield from where_known(_beside_sharding, section, sections.parallel)
    yield from where_known(_reproducible_rules, section, sections.run)
    yield from where_known(_loss_scale_rules, section, sections.precision)


def _named(section: DataParallelConfig) -> str:
    return f'data_parallel.method = "{section.method}"'


def _compressor_rules(section: DataParallelConfig) -> Iterator[str]:
    if section.method == "all_reduce":
        return
    if section.method == "compressed" and section.compressor == "none":
        legal = ", ".join(f'"{name}"' for name in get_args(CompressorName) if name != "none")
        yield f"{_named(section)} needs data_parallel.compressor; legal: {legal}"
    if section.compressor == "power_sgd" and section.error_feedback in (
        "double_squeeze",
        "neolithic",
    ):
        yield (
            f'data_parallel.error_feedback = "{section.error_feedback}" compresses the mean again, '
            "but the mean of the codes of power_sgd already has low rank; legal: error_feedback = "
            '"none", "mem_sgd" or "ef21", or another compressor'
        )


def _moment_rules(section: DataParallelConfig, optimizer: OptimizerConfig) -> Iterator[str]:
    if section.method == "all_reduce":
        return
    if section.average_moments and not optimizer.moments:
        yield (
            "data_parallel.average_moments = true averages moments, but optimizer.kind = "
            f'"{optimizer.kind}" without momentum has none; legal: average_moments = false, '
            "optimizer.momentum above 0, or another kind"
        )


def _reproducible_rules(section: DataParallelConfig, run: RunConfig) -> Iterator[str]:
    if section.method == "all_reduce":
        return
    if run.reproducible:
        yield (
            "run.reproducible = true sums the gradients of all microbatches along one tree, "
            f"whatever d is, but the update of {_named(section)} depends on d or sums in another "
            'order; legal: run.reproducible = false, or method = "all_reduce"'
        )


def _loss_scale_rules(section: DataParallelConfig, precision: PrecisionConfig) -> Iterator[str]:
    if section.method == "compressed" and precision.scales_loss:
        yield (
            'precision.compute = "fp16" changes the scale of the loss during a run, but the error '
            f"memories of {_named(section)} would contain gradients with an old scale or with "
            'overflows; legal: compute = "bf16", "fp32" or "fp64"'
        )


def _unused(section: DataParallelConfig) -> Iterator[str]:
    """Yield a mistake for each key that is set but is not used by the chosen method or
    compressor."""
    fields = type(section).model_fields.items()
    given = {key for key, field in fields if getattr(section, key) != field.default}
    for key, methods in USED_BY.items():
        if key in given and section.method not in methods:
            yield (
                f"data_parallel.{key} has an effect only with {_of('method', methods)}, not with "
                f'"{section.method}"; legal: {key} = {_default(section, key)}'
            )
    for key, compressors in COMPRESSED_BY.items():
        wrong = section.method in COMPRESSING and section.compressor not in compressors
        if key in given and wrong:
            yield (
                f"data_parallel.{key} has an effect only with {_of('compressor', compressors)}, "
                f'not with "{section.compressor}"; legal: {key} = {_default(section, key)}'
            )
    compresses = section.method == "compressed"
    if compresses and "rounds" in given and section.error_feedback != "neolithic":
        yield (
            'data_parallel.rounds has an effect only with error_feedback = "neolithic", not with '
            f'"{section.error_feedback}"; legal: rounds = {_default(section, "rounds")}'
        )


def _together(section: DataParallelConfig) -> Iterator[str]:
    """Yield a mistake for each key that has no effect without a compressor, and for each
    combination of keys that no published method has. Yield nothing for a method that keeps the
    weights of all replicas equal after each step.
    """
    if section.method not in DIFFERING:
        return
    if not encodes(section):
        for key in ("error_feedback", "consensus_rate"):
            if getattr(section, key) != type(section).model_fields[key].default:
                yield (
                    f'data_parallel.{key} has no effect with compressor = "none"; legal: '
                    f"{key} = {_default(section, key)}, or another compressor"
                )
        return
    method = f'data_parallel.method = "{section.method}" with compressor = "{section.compressor}"'
    if section.average_moments:
        yield f"{method} sends only parameters, no moments; legal: average_moments = false"
    if section.method == "local":
        if section.error_feedback not in ("none", "mem_sgd"):
            yield (
                f'{method} and error_feedback = "{section.error_feedback}" is a combination '
                'that no paper known to us uses; legal: error_feedback = "none" or "mem_sgd"'
            )
        return
    if section.compressor == "power_sgd":
        legal = ", ".join(f'"{name}"' for name in get_args(CompressorName)[1:-1])
        yield f"{method} would have to sum its factors over all replicas; legal: {legal}"
    for key in ("average_every", "overlap"):
        if getattr(section, key):
            yield f"{method}: neighbours receive only codes; legal: {key} = " + _default(
                section, key
            )
    if section.topology in NOT_STEADY:
        legal = ", ".join(f'"{name}"' for name in STEADY)
        yield (
            f'{method} needs one symmetric graph, but the graph of topology = "{section.topology}" '
            f"is directed or changes in each step; legal: {legal}, or a file of edges"
        )


def _rank_rules(section: DataParallelConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a mistake if PowerSGD would shrink no tile of the model. A tile is a matrix that is
    compressed as a whole. PowerSGD does not shrink a tile if the two low-rank factors together have
    at least as many numbers as the tile.
    """
    if section.method == "all_reduce":
        return
    if section.compressor != "power_sgd" or not encodes(section):
        return
    if model.latent:
        yield (
            f'data_parallel.compressor = "power_sgd" is not supported with the sublayer {LATENT}; '
            "legal: another compressor"
        )
        return
    cut = math.gcd(model.heads, model.ffn_hidden)
    tiles = ((model.head_size, model.hidden), (model.ffn_hidden // cut, model.hidden))
    most = max((lines * length - 1) // (lines + length) for lines, length in tiles)
    if section.rank > most:
        yield (
            f"data_parallel.rank = {section.rank}: two factors of this rank have as many numbers "
            f"as each tile of this model, or more; legal: 1 to {most}"
        )


def _of(key: str, names: tuple[str, ...]) -> str:
    return f"{key} = " + " or ".join(f'"{name}"' for name in names)


def _default(section: DataParallelConfig, key: str) -> str:
    return toml_text(type(section).model_fields[key].default)


def _beside_sharding(section: DataParallelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a mistake for each setting that shards or offloads state which the data-parallel method
    must change or send completely.
    """
    if section.method == "all_reduce":
        return
    method = _named(section)
    if covers_state(parallel.zero):
        why = "each rank needs the whole gradient"
        if section.method in DIFFERING:
            why = "replicas differ, so no rank can store a part of another rank's state"
        yield (
            f"parallel.zero = {parallel.zero} shards state that is equal on all data ranks, but "
            f'under {method} {why}; legal: zero = 0, or method = "all_reduce"'
        )
    if replicas_differ(section) and parallel.offload != "none":
        yield (
            f'parallel.offload = "{parallel.offload}" keeps state off the device, but {method} '
            'uses this state on the device in every round; legal: offload = "none"'
        )
