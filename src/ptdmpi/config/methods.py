"""Data-parallel methods as a configuration has them: which keys each of them uses, what it keeps,
and what a run may ask for beside it. Every such rule stands here."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from ptdmpi.config.legality import stages_of_zero
from ptdmpi.config.zero import covers_state

if TYPE_CHECKING:
    from ptdmpi.config.model import ModelConfig
    from ptdmpi.config.sections import (
        DataParallelConfig,
        OptimizerConfig,
        ParallelConfig,
        PrecisionConfig,
        RunConfig,
    )

MethodName = Literal[
    "all_reduce", "parameter_server", "ring", "decentralized", "local", "compressed"
]
CompressorName = Literal["none", "top_k", "random_k", "sign", "qsgd", "int8", "int4", "power_sgd"]
FeedbackName = Literal["none", "mem_sgd", "double_squeeze", "ef21", "neolithic"]

# Methods after whose step replicas may hold other weights than each other.
DIFFERING = ("decentralized", "local")
# Methods whose messages may be codes: of gradients, of what a round of local steps has moved, of
# how far a replica is from what its neighbours know of it.
COMPRESSING = ("compressed", *DIFFERING)
# A key of [data_parallel] -> the methods that use it.
USED_BY: Mapping[str, tuple[str, ...]] = {
    "topology": ("decentralized",),
    "consensus_rate": ("decentralized",),
    "average_every": ("decentralized",),
    "overlap": ("decentralized",),
    "local_steps": ("local",),
    "average_moments": DIFFERING,
    "outer_learning_rate": ("local",),
    "outer_momentum": ("local",),
    "compressor": COMPRESSING,
    "ratio": COMPRESSING,
    "levels": COMPRESSING,
    "block": COMPRESSING,
    "rank": COMPRESSING,
    "error_feedback": ("compressed", "local"),
    "rounds": ("compressed",),
    "checkpoint": (*DIFFERING, "compressed"),
    "consensus_every": DIFFERING,
}
# A key of a compressor -> the compressors that use it.
COMPRESSED_BY: Mapping[str, tuple[str, ...]] = {
    "ratio": ("top_k", "random_k"),
    "levels": ("qsgd",),
    "block": ("int8", "int4"),
    "rank": ("power_sgd",),
}

# What error feedback keeps of each parameter, on each replica.
REMEMBERED: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "mem_sgd": ("error",),
    "double_squeeze": ("error", "server_error"),
    "ef21": ("estimate", "estimate_mean"),
    "neolithic": ("error", "server_error"),
}

# Kinds of these and of other methods that are the same on all replicas; of all others each has its
# own.
COMMON = ("anchor", "outer_momentum", "estimate_mean", "low_rank")
# Kinds that are the weights before the first step, where others are zero.
BEGIN_AS_WEIGHTS = ("anchor", "public")
# Neighbours take codes on graphs that are symmetric and the same in every step.
STEADY = ("ring", "grid", "torus", "hypercube", "complete")
NOT_STEADY = ("exponential", "one_peer_exponential", "random")


def steps_outside(section: "DataParallelConfig") -> bool:
    """Whether local steps end in an outer step from where the round began, not in the mean."""
    steps = section.outer_momentum > 0 or section.outer_learning_rate != 1.0
    return section.method == "local" and (steps or encodes(section))


def encodes(section: "DataParallelConfig") -> bool:
    """Whether what travels are codes."""
    return section.method in COMPRESSING and section.compressor != "none"


def kept_by(section: "DataParallelConfig") -> tuple[str, ...]:
    """Kinds of state that the method of a section keeps beside the optimizer's."""
    found: tuple[str, ...] = ()
    if steps_outside(section):
        found += ("anchor", "outer_momentum") if section.outer_momentum else ("anchor",)
    if encodes(section):
        found += ("public",) if section.method == "decentralized" else ()
        found += REMEMBERED[section.error_feedback]
        found += ("low_rank",) if section.compressor == "power_sgd" else ()
    return found


def replicas_differ(section: "DataParallelConfig") -> bool:
    """Whether replicas may hold other weights than each other, or other state beside them."""
    return section.method in (*DIFFERING, "compressed")


def stored_numbers(section: "DataParallelConfig", moments: int, replicas: int) -> int:
    """How many numbers of each parameter a checkpoint has: weights, the optimizer's `moments` and
    what the method keeps, of each of so many replicas where they differ and are kept apart."""
    kinds = kept_by(section)
    apart = sum(kind not in COMMON for kind in kinds)
    apart += 1 + moments if section.method in DIFFERING else 0
    copies = replicas if section.checkpoint == "replicas" else 1
    return 1 + moments + len(kinds) + apart * (copies - 1)


def may_share(section: "DataParallelConfig", reproducible: bool) -> tuple[int, ...]:
    """What of `parallel.zero` a run of this method may have."""
    return stages_of_zero(reproducible) if section.method == "all_reduce" else (0,)


def told(section: "DataParallelConfig") -> str:
    """What is said at the start of a run whose method changes the update; else empty."""
    if not replicas_differ(section):
        return ""
    fields = type(section).model_fields.items()
    chosen = [key for key, field in fields if getattr(section, key) != field.default]
    text = ", ".join(f"{key} = {_toml(getattr(section, key))}" for key in chosen)
    if section.method == "compressed":
        return f"data_parallel: {text}: another update than that of the whole gradients"
    return (
        f"data_parallel: {text}: another update than that of the whole batch's gradient; losses "
        "and norms are those of replicas that differ, validations and tasks those of their mean"
    )


def method_rules(
    section: "DataParallelConfig",
    parallel: "ParallelConfig | None",
    run: "RunConfig | None",
    precision: "PrecisionConfig | None",
    model: "ModelConfig | None",
    optimizer: "OptimizerConfig | None",
) -> Iterator[str]:
    """What is wrong with the section for itself, and beside others; None: they did not parse."""
    yield from _unused(section)
    yield from _together(section)
    method = f'data_parallel.method = "{section.method}"'
    if section.method == "all_reduce":
        return
    if section.method == "compressed" and section.compressor == "none":
        legal = ", ".join(f'"{one}"' for one in get_args(CompressorName) if one != "none")
        yield f"{method} needs data_parallel.compressor; legal: {legal}"
    summed = section.compressor == "power_sgd"
    if summed and section.error_feedback in ("double_squeeze", "neolithic"):
        yield (
            f'data_parallel.error_feedback = "{section.error_feedback}" compresses the mean again, '
            "and the mean of what power_sgd sends has its low rank already; legal: error_feedback "
            '= "none", "mem_sgd" or "ef21", or another compressor'
        )
    if summed and encodes(section) and model is not None:
        yield from _rank_rules(section, model)
    if section.average_moments and optimizer is not None and not optimizer.moments:
        yield (
            "data_parallel.average_moments = true averages moments, and optimizer.kind = "
            f'"{optimizer.kind}" without momentum has none; legal: average_moments = false, '
            "optimizer.momentum above 0, or another kind"
        )
    if parallel is not None:
        yield from _beside_sharding(section, method, parallel)
    if run is not None and run.reproducible:
        yield (
            "run.reproducible = true adds up the microbatches of all replicas along one tree, "
            f"whatever d is, and {method} has an update that depends on d or on its own order of "
            'sums; legal: run.reproducible = false, or method = "all_reduce"'
        )
    lossy = section.method == "compressed"
    if lossy and precision is not None and precision.scales_loss:
        yield (
            f'precision.compute = "fp16" scales the loss until gradients overflow, and {method} '
            "would remember what overflowed, in units of a scale that changes; legal: compute = "
            '"bf16", "fp32" or "fp64"'
        )


def _unused(section: "DataParallelConfig") -> Iterator[str]:
    """Keys that say something to a method or a compressor that does not hear it."""
    fields = type(section).model_fields.items()
    given = {key for key, field in fields if getattr(section, key) != field.default}
    for key, methods in USED_BY.items():
        if key in given and section.method not in methods:
            yield (
                f"data_parallel.{key} belongs to {_of('method', methods)}, not to "
                f'"{section.method}"; legal: {key} = {_default(section, key)}'
            )
    for key, compressors in COMPRESSED_BY.items():
        wrong = section.method in COMPRESSING and section.compressor not in compressors
        if key in given and wrong:
            yield (
                f"data_parallel.{key} belongs to {_of('compressor', compressors)}, not to "
                f'"{section.compressor}"; legal: {key} = {_default(section, key)}'
            )
    compresses = section.method == "compressed"
    if compresses and "rounds" in given and section.error_feedback != "neolithic":
        yield (
            'data_parallel.rounds belongs to error_feedback = "neolithic", not to '
            f'"{section.error_feedback}"; legal: rounds = {_default(section, "rounds")}'
        )


def _together(section: "DataParallelConfig") -> Iterator[str]:
    """What of one section goes with nothing that is known of, where replicas differ."""
    if section.method not in DIFFERING:
        return
    if not encodes(section):
        for key in ("error_feedback", "consensus_rate"):
            if getattr(section, key) != type(section).model_fields[key].default:
                yield (
                    f'data_parallel.{key} is of codes, and compressor = "none" makes none; legal: '
                    f"{key} = {_default(section, key)}, or another compressor"
                )
        return
    method = f'data_parallel.method = "{section.method}" with compressor = "{section.compressor}"'
    if section.average_moments:
        yield f"{method} sends parameters alone; legal: average_moments = false"
    if section.method == "local":
        if section.error_feedback not in ("none", "mem_sgd"):
            yield (
                f'{method} and error_feedback = "{section.error_feedback}" is in no paper that is '
                'known here; legal: error_feedback = "none" or "mem_sgd"'
            )
        return
    if section.compressor == "power_sgd":
        legal = ", ".join(f'"{one}"' for one in get_args(CompressorName)[1:-1])
        yield f"{method}: its factors are summed over all replicas; legal: {legal}"
    for key in ("average_every", "overlap"):
        if getattr(section, key):
            yield f"{method}: neighbours know no more than codes; legal: {key} = " + _default(
                section, key
            )
    if section.topology in NOT_STEADY:
        legal = ", ".join(f'"{one}"' for one in STEADY)
        yield (
            f'{method} needs one symmetric graph, and topology = "{section.topology}" is another '
            f"in each step, or directed; legal: {legal}, or a file of edges"
        )


def _rank_rules(section: "DataParallelConfig", model: "ModelConfig") -> Iterator[str]:
    """Factors that have more numbers than what they stand for: all of the model travels whole."""
    cut = math.gcd(model.heads, model.ffn_hidden)
    tiles = ((model.head_size, model.hidden), (model.ffn_hidden // cut, model.hidden))
    most = max((lines * length - 1) // (lines + length) for lines, length in tiles)
    if section.rank > most:
        yield (
            f"data_parallel.rank = {section.rank}: two factors of that rank have no fewer numbers "
            f"than any tile of this model; legal: 1 to {most}"
        )


def _of(key: str, names: tuple[str, ...]) -> str:
    return f"{key} = " + " or ".join(f'"{name}"' for name in names)


def _default(section: "DataParallelConfig", key: str) -> str:
    return _toml(type(section).model_fields[key].default)


def _toml(value: bool | float | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _beside_sharding(
    section: "DataParallelConfig", method: str, parallel: "ParallelConfig"
) -> Iterator[str]:
    """What shares out or moves away state that the method changes or sends whole."""
    if covers_state(parallel.zero):
        why = (
            "replicas differ, so that no rank could hold a part of another's state"
            if section.method in DIFFERING
            else "each rank needs the whole gradient"
        )
        yield (
            f"parallel.zero = {parallel.zero} shares out what all data ranks have alike, and under "
            f'{method} {why}; legal: zero = 0, or method = "all_reduce"'
        )
    if replicas_differ(section) and parallel.offload != "none":
        yield (
            f'parallel.offload = "{parallel.offload}" keeps state off the device, and {method} '
            'mixes it there in every round; legal: offload = "none"'
        )
