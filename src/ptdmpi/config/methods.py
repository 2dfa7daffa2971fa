"""The section [data_parallel] of a configuration: the keys of each data-parallel method, and the
state that each method keeps.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ptdmpi.config.section import Fraction, NonNegative, Positive, Reported, Section
from ptdmpi.config.zero import stages_of_zero

MethodName = Literal[
    "all_reduce", "parameter_server", "ring", "decentralized", "local", "compressed"
]
CompressorName = Literal["none", "top_k", "random_k", "sign", "qsgd", "int8", "int4", "power_sgd"]
FeedbackName = Literal["none", "mem_sgd", "double_squeeze", "ef21", "neolithic"]

# Data-parallel methods with which the weights of replicas may differ after a step.
DIFFERING = ("decentralized", "local")
# Data-parallel methods that can send compressed messages (codes). "compressed" compresses
# gradients. "local" compresses the change of the weights in a round of local steps. "decentralized"
# compresses the difference between a replica's weights and the copy of these weights that its
# neighbours have.
COMPRESSING = ("compressed", *DIFFERING)
# Key of [data_parallel] -> the methods that use the key.
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
# Key of a compressor -> the compressors that use the key.
COMPRESSED_BY: Mapping[str, tuple[str, ...]] = {
    "ratio": ("top_k", "random_k"),
    "levels": ("qsgd",),
    "block": ("int8", "int4"),
    "rank": ("power_sgd",),
}

# Method of error feedback -> the kinds of state that this method keeps on each replica.
REMEMBERED: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "mem_sgd": ("error",),
    "double_squeeze": ("error", "server_error"),
    "ef21": ("estimate", "estimate_mean"),
    "neolithic": ("error", "server_error"),
}

# Kinds of state that have the same values on all replicas. All other kinds of state that a
# data-parallel method or its error feedback keeps may differ between replicas.
COMMON = ("anchor", "outer_momentum", "estimate_mean", "low_rank")
# Kinds of state whose initial values are the weights; all other kinds are initially zero. "anchor"
# has the weights at the start of a round of local steps. "public" has the approximation of a
# replica's weights that its neighbours also have.
BEGIN_AS_WEIGHTS = ("anchor", "public")
# Topologies with a symmetric graph that does not change between steps. Neighbours can send
# compressed messages only if the graph is symmetric and does not change.
STEADY = ("ring", "grid", "torus", "hypercube", "complete")
NOT_STEADY = ("exponential", "one_peer_exponential", "random")


class DataParallelConfig(Section):
    """The section [data_parallel]: which messages replicas exchange, and when. The tables of this
    module list the keys that each method uses; `rules.methods` checks the combinations with other
    settings."""

    method: Reported[MethodName] = "all_reduce"
    topology: Reported[Annotated[str, Field(min_length=1)]] = "ring"
    average_every: Reported[NonNegative] = 0
    overlap: Reported[bool] = False
    local_steps: Reported[Positive] = 1
    average_moments: Reported[bool] = False
    outer_learning_rate: Reported[Annotated[float, Field(gt=0)]] = 1.0
    outer_momentum: Reported[Fraction] = 0.0
    compressor: Reported[CompressorName] = "none"
    ratio: Reported[Annotated[float, Field(gt=0, le=1)]] = 0.01
    levels: Reported[Annotated[int, Field(ge=1, le=2**15 - 1)]] = 127
    block: Reported[Positive] = 256
    rank: Reported[Positive] = 2
    error_feedback: Reported[FeedbackName] = "none"
    rounds: Reported[Positive] = 2
    consensus_rate: Reported[Annotated[float, Field(gt=0, le=1)]] = 0.05
    checkpoint: Reported[Literal["replicas", "average"]] = "replicas"
    consensus_every: Reported[NonNegative] = 100

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of state that the data-parallel method keeps, in addition to the weights
        and the optimizer's moments. Each kind has one number for each element of a parameter, in
        the type of the master weights.
        """
        return kept_by(self)


def steps_outside(section: DataParallelConfig) -> bool:
    """Return True if the data-parallel method is "local" and each round of local steps ends with an
    outer optimizer step. The outer step updates the weights that the replicas had at the start of
    the round. Without an outer step, the result of a round is the mean of the replicas' weights."""
    steps = section.outer_momentum > 0 or section.outer_learning_rate != 1.0
    return section.method == "local" and (steps or encodes(section))


def encodes(section: DataParallelConfig) -> bool:
    """Return True if the messages between replicas are compressed."""
    return section.method in COMPRESSING and section.compressor != "none"


def rounds_of(section: DataParallelConfig) -> int:
    """Return the number of codes (compressed tensors) in one message: `rounds` for NEOLITHIC,
    otherwise 1."""
    if section.error_feedback == "neolithic":
        return section.rounds
    return 1


def kept_by(section: DataParallelConfig) -> tuple[str, ...]:
    """Return the kinds of state that the data-parallel method keeps, in addition to the weights and
    the optimizer's moments."""
    kinds: tuple[str, ...] = ()
    if steps_outside(section):
        kinds += ("anchor",)
        if section.outer_momentum:
            kinds += ("outer_momentum",)
    if encodes(section):
        if section.method == "decentralized":
            kinds += ("public",)
        kinds += REMEMBERED[section.error_feedback]
        if section.compressor == "power_sgd":
            kinds += ("low_rank",)
    return kinds


def replicas_differ(section: DataParallelConfig) -> bool:
    """Return True if replicas may have different values of the weights, or of any other kind of
    state."""
    return section.method in (*DIFFERING, "compressed")


def stored_numbers(section: DataParallelConfig, moments: int, replicas: int) -> int:
    """Return how many numbers a checkpoint stores for each element of a parameter: one for the
    weight, `moments` for the optimizer, and the numbers of the method's state. A kind of state that
    differs between replicas is stored once for each of the `replicas` replicas, unless the
    checkpoint stores only the average over the replicas.
    """
    kinds = kept_by(section)
    apart = sum(kind not in COMMON for kind in kinds)
    if section.method in DIFFERING:
        apart += 1 + moments
    tensors = 1 + moments + len(kinds)
    if section.checkpoint == "replicas":
        tensors += apart * (replicas - 1)
    return tensors


def may_share(section: DataParallelConfig, reproducible: bool) -> tuple[int, ...]:
    """Return the values of `parallel.zero` that are legal with the data-parallel method of
    `section`. A reproducible run (`reproducible` is True) cannot shard gradients or weights."""
    if section.method != "all_reduce":
        return (0,)
    return stages_of_zero(reproducible)


def said_at_start(section: DataParallelConfig) -> str:
    """Return a log line for the start of the run if the data-parallel method changes the update of
    the weights. Return an empty text if the method does not change the update."""
    if not replicas_differ(section):
        return ""
    fields = type(section).model_fields.items()
    chosen = [key for key, field in fields if getattr(section, key) != field.default]
    text = ", ".join(f"{key} = {toml_text(getattr(section, key))}" for key in chosen)
    if section.method == "compressed":
        return f"data_parallel: {text}: the update differs from the update with exact gradients"
    return (
        f"data_parallel: {text}: the update differs from the update with the gradient of the "
        "global batch; losses and norms come from the separate replicas, validations and tasks use "
        "the mean of the replicas"
    )


def toml_text(value: bool | float | str) -> str:
    """Return a value as it is written in a TOML file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)
