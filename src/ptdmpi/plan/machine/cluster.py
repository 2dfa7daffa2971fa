"""Clusters and models by name: data sheets as TOML, and which fraction of them is reached.

A cluster file holds data sheet figures; `presets/efficiency.toml`, written by `make calibrate`,
what real software makes of them.
"""

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.config.precision import PrecisionName
from ptdmpi.config.presets import DEFAULTS, model_presets
from ptdmpi.config.section import FrozenTable, Positive
from ptdmpi.plan.machine.amounts import Amount, Delay, NotNegative, PositiveNumber, Triple
from ptdmpi.plan.machine.probed import KernelWays, Measured

SHORT_KEYS = {"l": "layers", "h": "hidden", "a": "heads", "s": "seq_length", "V": "vocab_size"}


class Device(FrozenTable):
    """One accelerator: dense peak in FLOP/s by type, memory, multiprocessors that share the peak.

    A multiprocessor moves `shared_bytes_per_clock` through its shared memory and takes so many
    exponentials. `kernel_s`: kernels do not follow each other faster than this. `runtime_bytes`:
    what a rank's memory holds before its first tensor.
    """

    name: str
    peak_flops: dict[PrecisionName, Amount]
    memory_bytes: Amount
    runtime_bytes: NotNegative = 0.0
    memory_bytes_per_s: Amount
    multiprocessors: Positive
    clock_hz: PositiveNumber
    shared_bytes_per_clock: PositiveNumber
    exponentials_per_clock: PositiveNumber
    kernel_s: Delay

    def peak(self, dtype: str) -> float:
        """FLOP/s in numbers of type `dtype`; raises InputError for one that it does not have."""
        for known, flops in self.peak_flops.items():
            if known == dtype:
                return flops
        raise InputError(f"{self.name} has no {dtype}; legal are {', '.join(self.peak_flops)}")


class Node(FrozenTable):
    """`devices` joined by links (one direction), and the adapters that they share outwards.

    `tree_bytes_per_s`: what the ranks of a tree over several nodes reach at most;
    `ll128_bytes_per_s`: and each ring over several nodes with NCCL's protocol LL128, in
    all-gathers, reduce-scatters and all-reduces. `power_w`: what all of it draws under load.
    """

    devices: Positive
    link_bytes_per_s: Amount
    adapters: Positive
    adapter_bytes_per_s: Amount
    adapter_latency_s: Delay
    switch_latency_s: Delay
    switches: Annotated[int, Field(ge=0)]
    tree_bytes_per_s: PositiveNumber = math.inf
    ll128_bytes_per_s: Triple = (math.inf, math.inf, math.inf)
    power_w: PositiveNumber | None = None


class Host(FrozenTable):
    """What a node has beside its devices: memory that they share, a link between it and each device
    (one direction), a disk that they share. What is left out is not known, and nothing that needs
    it is priced."""

    memory_bytes: Amount | None = None
    memory_bytes_per_s: Amount | None = None
    link_bytes_per_s: Amount | None = None
    disk_bytes_per_s: Amount | None = None


class Software(FrozenTable):
    """What the training program does on this cluster, where programs differ.

    `attention`: "unfused" writes the scores to memory, "flash" keeps them on chip. `dropout`: the
    program drops out whatever the model says, as all did in 2021. `gradient_bytes`
    is the size of a gradient in the sum over the data axis. The overlaps say which messages
    proceed while their rank computes. `balanced_stages` counts the output head as layers.
    `zero_unit` is what ZeRO 3 gathers at once. `groups_per_adapter`: how many groups with some of a
    node's ranks each choose the same adapter while others are idle. `keeps_outputs`: what a stage
    sent on stays in its memory until its backward pass. `adds_in_place`: products add to the
    gradients of weights, and embeddings row by row. `tied_gradients_apart`: where one rank has both
    ends of the model, a tied table has a gradient for each of them. `wide_products`: half types are
    multiplied in float32, on widened copies, as on a CPU without instructions for them.
    `kept_block`: causal attention keeps its probabilities, of blocks of so many queries; 0: it
    computes them again. `repeats_keys`: full attention of grouped queries, in types wider than
    half, on a copy of the keys and values for each query head, as a GPU's kernels want it.
    `launch_s`: the host's time for each kernel or message of a layer, which is no faster.
    """

    attention: Literal["unfused", "flash"]
    dropout: bool
    gradient_bytes: Positive
    overlap_pipeline: bool
    overlap_tensor: bool
    balanced_stages: bool
    zero_unit: Literal["tensor", "layer"]
    groups_per_adapter: Positive = 1
    keeps_outputs: bool = False
    adds_in_place: bool
    tied_gradients_apart: bool
    wide_products: bool = False
    kept_block: Annotated[int, Field(ge=0)] = 0
    repeats_keys: bool = False
    launch_s: Delay = 26e-6  # this trainer's: benchmarks/planning/host_time.py

    @model_validator(mode="before")
    @classmethod
    def _of_older_files(cls, values: Any) -> Any:
        """Files written before these keys stood there: "flash" was this trainer."""
        if not isinstance(values, Mapping):
            return values
        ours = values.get("attention") == "flash"
        return {"adds_in_place": ours, "tied_gradients_apart": ours, **values}


# What this trainer does; the messages that proceed while it computes are measured by a probe.
TRAINER = Software(
    attention="flash",
    dropout=False,
    gradient_bytes=4,
    overlap_pipeline=True,
    overlap_tensor=False,
    balanced_stages=True,
    zero_unit="layer",
    adds_in_place=True,
    tied_gradients_apart=True,
)


class Efficiency(FrozenTable):
    """What software reaches of the data sheet; each value is calibrated or probed.

    `gemm_fraction` of the peak in a product's inner loop, of that `attention_fraction` in those of
    FlashAttention; `memory_fraction` of the memory's rate; `link_fraction` of a link, `link_step_s`
    for one step of a ring, `collective_s` to start a collective.
    """

    gemm_fraction: PositiveNumber
    attention_fraction: PositiveNumber = 1.0
    memory_fraction: PositiveNumber
    link_fraction: PositiveNumber
    link_step_s: Delay
    collective_s: Delay


class Cluster(FrozenTable):
    """All that a prediction needs to know of a machine; `kernels`: how a run computes there."""

    name: str
    device: Device
    node: Node
    software: Software
    efficiency: Efficiency
    host: Host = Host()
    measured: Measured | None = None
    kernels: KernelWays = KernelWays()

    @property
    def on_host(self) -> bool:
        """Whether the host is the device, so that both have one memory."""
        return self.measured is not None and not self.measured.asynchronous

    def lacks(self, offload: str) -> list[str]:
        """The keys of `[host]` without which a layout that offloads so has no price."""
        needed: list[str] = []
        if offload != "none" and not self.on_host:
            needed += ["memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"]
        if offload == "disk":
            needed.append("disk_bytes_per_s")
        return [key for key in needed if getattr(self.host, key) is None]


@dataclass(frozen=True)
class Model:
    """A model and the size of its vocabulary, which in training comes from the data."""

    name: str
    config: ModelConfig
    vocab_size: int


def _read(path: Any) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None


def _presets(*parts: str) -> Any:
    return files("ptdmpi").joinpath("presets", *parts)


@cache
def cluster_names() -> tuple[str, ...]:
    """The clusters that come with the package."""
    entries = (entry.name for entry in _presets("clusters").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml")))


def load_cluster(name: str) -> Cluster:
    """The preset `name`, or the cluster file of that path; raises InputError if there is
    neither."""
    if name in cluster_names():
        path = _presets("clusters", f"{name}.toml")
    elif name.endswith(".toml"):
        path = Path(name)
    else:
        hint = _nearest(name, cluster_names())
        raise InputError(f'cluster "{name}" is unknown{hint}, or the path of a .toml file')
    tree = _read(path)
    if isinstance(tree.get("efficiency"), str):
        tables = _read(_presets("efficiency.toml"))
        if tree["efficiency"] not in tables:
            raise InputError(f'cluster {name}: efficiency = "{tree["efficiency"]}" is unknown')
        tree = {**tree, "efficiency": tables[tree["efficiency"]]}
    return _validated(Cluster, tree, f"cluster {name}")


def load_model(text: str) -> Model:
    """A preset by name, or sizes such as "l=96,h=12288,a=96,s=2048,V=51200", or a preset with sizes
    of your own behind it, "llama-65b,s=8192".

    Sizes may also be named by their keys in [model] of a configuration, such as kv_heads=8. Left
    out, s is 2048 and V 51200. Raises InputError for unknown names and illegal sizes.
    """
    name, keys = preset_and_keys(text)
    return model_of(text, {**model_presets()[name], **keys} if name else keys)


def preset_and_keys(text: str) -> tuple[str | None, dict[str, Any]]:
    """(the preset or None, the keys of [model] and vocab_size that are given) of a model's text.
    Raises InputError for an unknown preset, and for what is no size."""
    parts = [part.strip() for part in text.split(",")]
    name = None if "=" in parts[0] else parts.pop(0)
    if name is not None and name not in model_presets():
        known = _nearest(name, model_presets())
        raise InputError(f'model "{name}" is unknown{known}, or l=...')
    keys: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f'model {text}: "{part}" is no size; write l=96,h=12288,a=96')
        keys[SHORT_KEYS.get(key, key)] = _value(value)
    return name, keys


def _value(text: str) -> Any:
    """A whole number, true, false, or the text itself: the section says what is legal."""
    try:
        return int(text)
    except ValueError:
        return {"true": True, "false": False}.get(text, text)


def model_of(name: str, keys: dict[str, Any]) -> Model:
    """The model of a table of keys of [model], and vocab_size."""
    keys = {**DEFAULTS, **keys}
    vocab_size = keys.pop("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise InputError(f"model {name}: V = {vocab_size}: must be a number of at least 1")
    config = _validated(ModelConfig, keys, f"model {name}")
    if not config.head_size or config.heads % config.kv_heads:
        raise InputError(
            f"model {name}: heads = {config.heads} must divide hidden = {config.hidden}, "
            f"and kv_heads = {config.kv_heads} must divide heads"
        )
    return Model(name, config, vocab_size)


def _validated(section: type[FrozenTable], tree: dict[str, Any], where: str) -> Any:
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        mistakes = (_explain(section, mistake) for mistake in error.errors())
        raise InputError(f"{where}: {'; '.join(mistakes)}") from None


def _explain(section: type[FrozenTable], mistake: Any) -> str:
    """What is wrong at a key, and what would be legal."""
    *path, key = map(str, mistake["loc"]) if mistake["loc"] else ("",)
    name = ".".join([*path, key])
    if mistake["type"] == "missing":
        letters = [letter for letter, word in SHORT_KEYS.items() if word == key and not path]
        return f"{name} is missing" + (f", {letters[0]}=NUMBER" if letters else "")
    if mistake["type"] == "extra_forbidden":
        owner: Any = section
        for part in path:
            owner = getattr(owner.model_fields.get(part), "annotation", None)
            if not hasattr(owner, "model_fields"):
                return f"{name} is no key"
        return f"{name} is no key{_nearest(key, owner.model_fields)}"
    value = repr(mistake["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    return f"{name} = {value}: {mistake['msg'].removeprefix('Value error, ')}"


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f' did you mean "{close[0]}"?' if close else ""
    return f";{hint} legal are {', '.join(known)}"
