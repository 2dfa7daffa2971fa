"""The clusters and models for predictions, and the functions that load them by name.

The data of a cluster comes from two files. A cluster file (TOML) has the rates from data sheets.
The file `presets/efficiency.toml`, which `make calibrate` writes, has the fractions of these rates
that software reaches.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from ptdmpi.base.disk import read_file
from ptdmpi.base.toml import tables_of
from ptdmpi.config import InputError, ModelConfig
from ptdmpi.config.precision import PrecisionName
from ptdmpi.config.presets import DEFAULTS, model_presets, nearest_presets
from ptdmpi.config.section import FrozenTable, Positive
from ptdmpi.plan.machine.amounts import Amount, Delay, NotNegative, PositiveNumber, Triple
from ptdmpi.plan.machine.names import legal_clusters, nearest_cluster, preset_file
from ptdmpi.plan.machine.probed import KernelWays, Measured

SHORT_KEYS = {"l": "layers", "h": "hidden", "a": "heads", "s": "seq_length", "V": "vocab_size"}


class Device(FrozenTable):
    """An accelerator: its dense peak in FLOP/s for each data type, its memory and its
    multiprocessors.

    The peak is the sum over all multiprocessors. In each clock cycle, one multiprocessor moves
    `shared_bytes_per_clock` bytes through its shared memory and computes `exponentials_per_clock`
    exponentials. `kernel_s` is the launch limit: the shortest time, in seconds, between the starts
    of two consecutive kernels. `runtime_bytes` is the memory in use on a rank before its first
    tensor.
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
        """Return the peak for the data type `dtype` in FLOP/s. For fp8, return the peak for bf16 if
        the device has no peak for fp8, because such a device multiplies fp8 operands as bf16. Raise
        InputError if the device has no peak for the type."""
        for kind in (dtype, "bf16") if dtype == "fp8" else (dtype,):
            for known, flops in self.peak_flops.items():
                if known == kind:
                    return flops
        raise InputError(
            f"{self.name} has no peak FLOP/s for {dtype}; legal are {', '.join(self.peak_flops)}"
        )


class Node(FrozenTable):
    """A node: `devices` devices with links between them, and the network adapters that the devices
    share.

    The rates of links and adapters are for one direction. `tree_bytes_per_s` is an upper limit of
    the rate at which a rank sends if an all-reduce over several nodes uses NCCL's trees.
    `ll128_bytes_per_s` has upper limits of the rate of one ring over several nodes with NCCL's
    protocol LL128. There is one limit each for all-gather, reduce-scatter and all-reduce. `power_w`
    is the power of the whole node under load, in watts.
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
    """The host of a node: its memory, its link to each device, and its disk. The rate of a link is
    for one direction.

    The devices of the node share the memory and the disk. The value None means that a rate or size
    is unknown. The time of a layout cannot be predicted if it depends on an unknown value.
    """

    memory_bytes: Amount | None = None
    memory_bytes_per_s: Amount | None = None
    link_bytes_per_s: Amount | None = None
    disk_bytes_per_s: Amount | None = None


# The kinds of kernels that can be computed in Triton. Each word is the name of the kernel's file in
# `model/kernels/fused/`, and also names the kernel in presets/kernels.toml.
TritonKind = Literal["loss", "norm", "gated", "dropout", "rope", "update", "gelu"]


class Software(FrozenTable):
    """The training program on a cluster, described by the properties in which training programs
    differ.

    Computation:
    - `attention` is "unfused" if the kernels of attention write the scores to memory, and "flash"
      if the scores stay on chip.
    - `dropout` is True if the program applies dropout even if the dropout rate of the model is 0,
      as all programs did in 2021.
    - `adds_in_place` is True if the matrix product that computes a weight's gradient adds its
      result directly to the stored gradient. An embedding then adds only the gradients of the rows
      that were looked up.
    - `wide_products` is True if matrices in fp16 and bf16 are converted to float32 before they are
      multiplied, as on a CPU without instructions for these types.
    - `adds_wide` is True if the product of a weight's gradient in fp16 or bf16 adds to a float32
      sum in one kernel, as on NVIDIA's GPUs, so that no memory for the product is needed.
    - `kept_block` is the number of queries in a block, if the forward of causal attention keeps the
      probabilities of each block for the backward. A value of 0 means that the backward computes
      the probabilities again.
    - `forward_block` and `backward_block` are the numbers of queries in a block, if a CPU computes
      the forward or the backward of causal attention by matrix products. A value of 0 means that
      the CPU uses a fused kernel, which holds few scores at a time.
    - `whole_from` is the smallest length of a sequence for which the CPU uses a fused kernel even
      if `forward_block` or `backward_block` is not 0. A value of 0 means that there is no such
      length.
    - `repeats_keys` is True if attention with grouped queries copies the keys and values for each
      query head in float32 and float64, because the kernels of GPUs require this.
    - `triton` has the kinds of kernels that this trainer computes in Triton, each in one pass over
      memory.
    - `launch_s` is the time, in seconds, that the host needs for each kernel or message of a layer.
      A layer takes at least the sum of these times.

    Communication:
    - `overlap_pipeline` is True if messages over the pipeline axis are transferred while their
      ranks compute. `overlap_pipeline` also applies to the messages of ring attention.
    - `overlap_tensor` is True if messages over the tensor axis are transferred while their ranks
      compute.
    - `overlap_context` is True if context-parallel ranks gather keys and values while they compute
      the queries.
    - `zero_unit` is "tensor" if ZeRO 3 gathers each weight by a message of its own, and "layer" if
      it gathers all weights of a layer by one message.
    - `groups_per_adapter` is the number of groups of a node's ranks that send through the same
      network adapter if several groups communicate at the same time. If this number is more than 1,
      other adapters of the node are idle at that time.

    Stages and state:
    - `gradient_bytes` is the size of one element of a gradient in the sum over the data axis.
    - `balanced_stages` is True if the division of layers over stages takes the work of the output
      head into account, so that the last stage has fewer layers.
    - `keeps_outputs` is True if a stage keeps its output in memory until the backward pass, after
      it has sent the output to the next stage.
    - `tied_gradients_apart` is True if a rank that has both the first and the last stage stores two
      gradients of a tied table, one for each of the two stages.
    - `fullest` is the multiple of the mean number of rows (tokens of its experts) for which a rank
      needs memory, if experts are distributed over ranks. A program that drops tokens has no more
      rows than the mean, so its multiple is 1.
    """

    attention: Literal["unfused", "flash"]
    dropout: bool
    gradient_bytes: Positive
    overlap_pipeline: bool
    overlap_tensor: bool
    overlap_context: bool = False
    balanced_stages: bool
    zero_unit: Literal["tensor", "layer"]
    groups_per_adapter: Positive = 1
    keeps_outputs: bool = False
    fullest: Positive = 2
    adds_in_place: bool
    tied_gradients_apart: bool
    wide_products: bool = False
    adds_wide: bool = False
    kept_block: Annotated[int, Field(ge=0)] = 0
    forward_block: Annotated[int, Field(ge=0)] = 0
    backward_block: Annotated[int, Field(ge=0)] = 0
    whole_from: Annotated[int, Field(ge=0)] = 0
    repeats_keys: bool = False
    triton: Annotated[tuple[TritonKind, ...], Field(strict=False)] = ()
    # `launch_s` of this trainer, as measured by benchmarks/planning/host_time.py
    launch_s: Delay = 26e-6

    @model_validator(mode="before")
    @classmethod
    def _of_older_files(cls, values: Any) -> Any:
        """Return the values of a cluster file, completed with values for the keys that older files
        lack.

        An older file lacks the keys `adds_in_place` and `tied_gradients_apart`. If its attention is
        "flash", the file describes this trainer, so both keys are set to True. Otherwise both keys
        are set to False.
        """
        if not isinstance(values, Mapping):
            return values
        ours = values.get("attention") == "flash"
        return {"adds_in_place": ours, "tied_gradients_apart": ours, **values}


# The properties of this trainer. A cluster file that `ptdmpi probe` writes has the same properties,
# except that measured values replace some of them, for example `overlap_pipeline`.
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
    """The fractions of the data sheet's rates that software reaches. The values are calibrated, or
    measured by `ptdmpi probe`.

    `gemm_fraction` is the fraction of the peak that the inner loop of a matrix product reaches.
    `attention_fraction` is the rate of the matrix products inside FlashAttention, divided by the
    rate of other matrix products. `memory_fraction` and `link_fraction` are the fractions of the
    memory's rate and of a link's rate that software reaches. `link_step_s` is the time of one step
    of a ring within a node, and `collective_s` is the time to start a collective, in seconds.
    """

    gemm_fraction: PositiveNumber
    attention_fraction: PositiveNumber = 1.0
    memory_fraction: PositiveNumber
    link_fraction: PositiveNumber
    link_step_s: Delay
    collective_s: Delay


class Cluster(FrozenTable):
    """The data of a cluster that a prediction needs. `measured` has the measurements of `ptdmpi
    probe`, or is None if the cluster file has only data-sheet values. `kernels` has the
    implementations of kernels that measurements found to be the fastest."""

    name: str
    device: Device
    node: Node
    software: Software
    efficiency: Efficiency
    host: Host = Field(default_factory=Host)
    measured: Measured | None = None
    kernels: KernelWays = Field(default_factory=KernelWays)

    @property
    def on_host(self) -> bool:
        """Return True if ranks compute on the CPU of the host. In this case, the device's memory is
        the host's memory."""
        return self.measured is not None and not self.measured.asynchronous

    def lacks(self, offload: str) -> list[str]:
        """Return the keys of the section [host] that a prediction with `offload` needs but the
        cluster file lacks."""
        needed: list[str] = []
        if offload != "none" and not self.on_host:
            needed += ["memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"]
        if offload == "disk":
            needed.append("disk_bytes_per_s")
        return [key for key in needed if getattr(self.host, key) is None]


@dataclass(frozen=True)
class Model:
    """A model and the size of its vocabulary. In a training run, the data determines the size of
    the vocabulary."""

    name: str
    config: ModelConfig
    vocab_size: int


def _read(path: Traversable) -> dict[str, Any]:
    try:
        content = read_file(path) if isinstance(path, Path) else path.read_bytes()
        return tables_of(content)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None


def load_cluster(name: str) -> Cluster:
    """Return the preset cluster with the name or alias `name`. If there is no such preset, return
    the cluster in the file with the path `name`, which must end in ".toml".

    Raises InputError if there is neither a preset nor a file, or if the file is not valid.
    """
    path = preset_file(name)
    if path is None:
        if not name.endswith(".toml"):
            raise InputError(unknown_cluster(name))
        path = Path(name)
    tree = _read(path)
    if isinstance(tree.get("efficiency"), str):
        tables = _read(files("ptdmpi").joinpath("presets", "efficiency.toml"))
        if tree["efficiency"] not in tables:
            raise InputError(f'cluster {name}: efficiency = "{tree["efficiency"]}" is unknown')
        tree = {**tree, "efficiency": tables[tree["efficiency"]]}
    return _validated(Cluster, tree, f"cluster {name}")


def load_kernels(path: str) -> KernelWays:
    """Return the fastest kernels from the section [kernels] of a file. The file is a cluster file
    that `ptdmpi probe` has written, or a file that a run with `run.kernels = "auto"` has written.
    Raises InputError if the file cannot be read, or the section is missing or not valid."""
    tree = _read(Path(path))
    if "kernels" not in tree:
        raise InputError(
            f"{path} has no section [kernels]; legal: a file that `ptdmpi probe` has written, or a "
            'run with run.kernels = "auto"'
        )
    return _validated(KernelWays, tree["kernels"], f"kernels {path}")


def unknown_cluster(name: str) -> str:
    """Return the error message for a cluster name that is unknown."""
    near = nearest_cluster(name)
    hint = "" if near is None else f' did you mean "{near}"?'
    return (
        f'cluster "{name}" is unknown;{hint} legal are {legal_clusters()}, or the path of a .toml '
        "file: `ptdmpi cluster new` writes one to edit, `ptdmpi probe` measures one"
    )


def load_model(text: str) -> Model:
    """Return the model that `text` describes.

    `text` is the name of a preset, or sizes such as "l=96,h=12288,a=96,s=2048,V=51200". `text` can
    also be the name of a preset followed by sizes, such as "llama-65b,s=8192". These sizes then
    replace the preset's own sizes. A size may also be given by its key in the section [model] of a
    configuration, such as kv_heads=8. The defaults are 2048 for s and 51200 for V. Raises
    InputError for unknown names and illegal sizes.
    """
    name, keys = preset_and_keys(text)
    return model_of(text, {**model_presets()[name], **keys} if name else keys)


def preset_and_keys(text: str) -> tuple[str | None, dict[str, Any]]:
    """Return the name of the preset in `text` (None if there is none), and the values that `text`
    gives for vocab_size and for keys of [model].

    Raises InputError for an unknown preset, for a part of `text` that is not of the form KEY=VALUE,
    and for a key that is given twice.
    """
    parts = [part.strip() for part in text.split(",")]
    name = None if "=" in parts[0] else parts.pop(0)
    if name is not None and name not in model_presets():
        near = " or ".join(f'"{preset}"' for preset in nearest_presets(name))
        raise InputError(
            f'model "{name}" is unknown; did you mean {near}? legal are the names in '
            "docs/reference/models.md, or sizes: l=32,h=4096,a=32"
        )
    keys: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f'model {text}: "{part}" is not a size; write l=96,h=12288,a=96')
        name_of_key = SHORT_KEYS.get(key, key)
        if name_of_key in keys:
            raise InputError(f"model {text}: {name_of_key} is given twice; legal: each key once")
        # a "+" separates the names of sublayers, because a comma separates keys
        keys[name_of_key] = value.split("+") if key == "sublayers" else _value(value)
    return name, keys


def model_section(text: str) -> dict[str, Any]:
    """Return the section [model] of a configuration for sizes such as "l=4,h=128,a=4" or
    "llama3-8b,s=512".

    The result has all given keys, and, without a preset, also the sequence length. The size of the
    vocabulary is left out, because the data determines it.
    """
    preset, keys = preset_and_keys(text)
    keys.pop("vocab_size", None)
    if preset is not None:
        return {"preset": preset, **keys}
    keys = {"seq_length": DEFAULTS["seq_length"], **keys}
    return {key: keys[key] for key in ModelConfig.model_fields if key in keys}


def _value(text: str) -> Any:
    """Return the value of `text` if it is an integer, "true" or "false"; otherwise return `text`
    unchanged. `ModelConfig` validates the value later."""
    try:
        return int(text)
    except ValueError:
        return {"true": True, "false": False}.get(text, text)


def model_of(name: str, keys: dict[str, Any]) -> Model:
    """Return the model with the given values of vocab_size and of keys of [model]. Keys that are
    not given have their default values.

    Raises InputError for illegal values.
    """
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
    """Return a text about one mistake in a section: the key, what is wrong, and, for an unknown
    key, the legal keys."""
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
                return f"{name} is not a key"
        return f"{name} is not a key{_nearest(key, owner.model_fields)}"
    value = repr(mistake["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    return f"{name} = {value}: {mistake['msg'].removeprefix('Value error, ')}"


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f' did you mean "{close[0]}"?' if close else ""
    return f";{hint} legal are {', '.join(known)}"
