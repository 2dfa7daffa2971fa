"""The rows of the comparison: one model and batch in several layouts and precisions. In rows for
weak scaling, two ranks train a larger model or a larger batch than one rank."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ptdmpi.config import Config, InputError, Layout, synthetic_config

if TYPE_CHECKING:
    from torch import Tensor

PRECISIONS = ("fp32", "bf16")
# trainer -> the casts to bf16 (see `Variant.cast`) that are tried with this trainer
CASTS = {
    "torch": ("microbatch", "step", "masters"),
    "deepspeed": ("masters", "microbatch"),
    "torchtitan": ("policy",),
    "transformers": ("microbatch", "masters"),
    "megatron": ("masters",),
}

LAYOUTS = {
    "single": Layout(1, 1, 1),
    "d=2": Layout(1, 1, 2),
    "t=2": Layout(2, 1, 1),
    "p=2": Layout(1, 2, 1),
    "p=2,v=2": Layout(1, 2, 1, 2, schedule="interleaved"),
    "p=2,v=2,zb-v": Layout(1, 2, 1, 2, schedule="zb-v"),
    "d=2,zero=1": Layout(1, 1, 2, zero=1),
    "d=2,zero=3": Layout(1, 1, 2, zero=3),
    "single,compile": Layout(1, 1, 1),
    "c=2": Layout(1, 1, 1, context=2),
    "moe": Layout(1, 1, 1),
    "moe-d2": Layout(1, 1, 2),
    "moe-e2": Layout(1, 1, 2, expert=2),
    "d=2,weak": Layout(1, 1, 2),
    "t=2,weak": Layout(2, 1, 1),
    "p=2,weak": Layout(1, 2, 1),
}
# Layout for weak scaling -> the size in GptSizes that is doubled for two ranks, so that each of the
# two ranks has as much work as one rank alone.
WEAK = {"d=2,weak": "global_size", "t=2,weak": "layers", "p=2,weak": "layers"}
ALONE = "single"
COMPILED = "single,compile"  # The layout with a single rank and compiled layers.
CUT = "c=2"  # The layout in which two context ranks divide sequences of 4,096 positions.
# The layouts with experts: a single rank, two data ranks that each have all experts, and two data
# ranks that divide the experts.
EXPERTS = ("moe", "moe-d2", "moe-e2")
ON_REQUEST = ("p=2,v=2,zb-v", "d=2,zero=1", "d=2,zero=3", COMPILED, CUT, *EXPERTS)
# The trainers that are compared with ptdmpi in each layout, and the names of their implementations.
# For the trainer "ptdmpi", the name is another layout of ptdmpi. If this layout has only one rank,
# the comparison gives the scaling efficiency.
PEERS = {
    "single": {
        "torch": "torch",
        "torchtitan": "torchtitan",
        "transformers": "transformers GPT2LMHeadModel",
        "megatron": "Megatron-Core",
    },
    "d=2": {
        "torch": "torch DistributedDataParallel",
        "megatron": "Megatron-Core",
        "deepspeed": "DeepSpeed ZeRO-1",
        "ptdmpi": ALONE,
    },
    "t=2": {
        "torch": "torch DTensor",
        "megatron": "Megatron-Core",
        "torchtitan": "torchtitan DTensor",
        "ptdmpi": ALONE,
    },
    "p=2": {
        "torch": "torch pipelining Schedule1F1B",
        "megatron": "Megatron-Core 1F1B",
        "deepspeed": "DeepSpeed PipelineModule",
        "torchtitan": "torchtitan 1F1B",
        "ptdmpi": ALONE,
    },
    "p=2,v=2": {
        "torch": "torch pipelining ScheduleInterleaved1F1B",
        "megatron": "Megatron-Core interleaved",
        "torchtitan": "torchtitan Interleaved1F1B",
        "ptdmpi": ALONE,
    },
    "p=2,v=2,zb-v": {"torch": "torch pipelining ScheduleZBVZeroBubble", "ptdmpi": "p=2,v=2"},
    "d=2,zero=1": {
        "torch": "torch ZeroRedundancyOptimizer",
        "deepspeed": "DeepSpeed ZeRO-1",
        "ptdmpi": "d=2",
    },
    "d=2,zero=3": {
        "torch": "torch FSDP2",
        "deepspeed": "DeepSpeed ZeRO-3",
        "torchtitan": "torchtitan FSDP2",
        "ptdmpi": "d=2",
    },
    "moe": {"transformers": "transformers MixtralForCausalLM"},
    "moe-d2": {"transformers": "transformers MixtralForCausalLM, DistributedDataParallel"},
    # transformers does not divide experts among ranks that train with different data
    "moe-e2": {
        "transformers": "transformers MixtralForCausalLM, DistributedDataParallel",
        "ptdmpi": "moe-d2",
    },
    CUT: {"torch": "ring attention with torch's SDPA and gloo", "ptdmpi": ALONE},
    **{layout: {"ptdmpi": ALONE} for layout in (COMPILED, *WEAK)},
}
# The settings of the rows with experts. Two of the experts together have about as many parameters
# as the MLP of the other rows.
MIXTURE = {
    "kind": "mistral",
    "experts": 8,
    "experts_per_token": 2,
    "expert_hidden": 704,
    "balance": "none",
}
TOOLS = ("torch", "megatron", "deepspeed", "torchtitan", "transformers", "ptdmpi")


@dataclass(frozen=True)
class GptSizes:
    """The sizes of a GPT and of its batch. The GPT has learned positions, tanh GELU, biases and an
    untied head. The head is untied because torch's pipeline stages cannot share an embedding table.
    The rows with experts train a Mixtral that has these sizes."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    seq_length: int = 512
    vocab_size: int = 8192
    global_size: int = 16
    micro_size: int = 2

    @property
    def tokens(self) -> int:
        """Return the number of tokens in one step."""
        return self.global_size * self.seq_length


@dataclass(frozen=True)
class Row:
    """A row of the comparison: a layout, a precision, and the sizes of the model and batch that are
    trained. `kernels` says which kernels ptdmpi uses, with the words of `run.kernels`: "kept" (the
    kernels that presets/kernels.toml names), "default" (PyTorch's kernels) or "auto" (the kernels
    that are fastest in a measurement at the start)."""

    layout: str
    precision: str
    case: GptSizes = field(default_factory=GptSizes)
    reproducible: bool = False
    kernels: str = "kept"

    @property
    def id(self) -> str:
        """Return the name of the row for `--rows`, such as `p2v2-bf16`."""
        return f"{_short(self.layout)}-{self.precision}"

    @property
    def sizes(self) -> Layout:
        """Return the layout of the row."""
        return LAYOUTS[self.layout]

    @property
    def alone(self) -> "Row":
        """Return the row for one rank alone. It has the sizes of this row, with one exception: for
        weak scaling over two ranks, the size that `WEAK` names (the global batch or the number of
        layers) is half as large."""
        case = self.case
        if self.layout in WEAK:
            key = WEAK[self.layout]
            case = replace(case, **{key: getattr(case, key) // 2})
        return replace(self, layout=ALONE, case=case)

    @property
    def peers(self) -> dict[str, str]:
        """Return the trainers in TOOLS that are compared with ptdmpi in this row. The result maps
        the name of a trainer to the name of its implementation."""
        return PEERS[self.layout]

    @property
    def work(self) -> float:
        """Return an estimate of the time of one round of all trainers of the row, relative to other
        rows. The estimate assumes that bf16 takes half as long as fp32."""
        work = 1 / self.sizes.ranks
        if self.layout in WEAK:
            work *= 2
        for way in self.peers.values():
            work += 1 if way == ALONE else 1 / self.sizes.ranks
        return 2 * work if self.precision == "fp32" else work

    @property
    def config(self) -> Config:
        """Return the configuration of the row. Gradient clipping is off, because torch cannot
        compute the gradient norm over all stages of a pipeline."""
        model = asdict(self.case)
        # in a configuration, the data determines the size of the vocabulary
        del model["vocab_size"]
        if self.layout in EXPERTS:
            model |= MIXTURE
        global_size = model.pop("global_size")
        micro_size = model.pop("micro_size")
        return synthetic_config(
            replace(self.sizes, micro_size=micro_size),
            {**model, "tie_embeddings": False},
            run={
                "steps": 1000,
                "threads": 1,
                "reproducible": self.reproducible,
                "kernels": self.kernels,
                "compile": self.layout == COMPILED,
            },
            batch={"global_size": global_size},
            precision={"compute": self.precision},
            optimizer={"decay": "constant", "clip_norm": 0.0},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        """Return the row that `to_json` has converted into `values`."""
        return cls(**{**values, "case": GptSizes(**values["case"])})


def grown(layout: str, case: GptSizes) -> GptSizes:
    """Return the sizes for a row with this layout. For weak scaling, one of the sizes in `case` is
    doubled. With context parallelism, sequences are eight times as long, and a step has the same
    number of tokens."""
    if layout == CUT:
        length, size = 8 * case.seq_length, case.global_size // 8
        return replace(case, seq_length=length, global_size=size, micro_size=1)
    if layout not in WEAK:
        return case
    key = WEAK[layout]
    return replace(case, **{key: 2 * getattr(case, key)})


def _short(layout: str) -> str:
    return layout.replace("=", "").replace(",", "")


def select(text: str | None) -> list[Row]:
    """Return the rows that `text`, the value of `--rows`, names by ids, layouts (`t2` or `t=2`) or
    precisions, separated by spaces. If `text` is None, return the rows that are measured by
    default.

    Raises InputError for a name that matches no row.
    """
    rows = every()
    if text is None:
        return [row for row in rows if row.layout not in ON_REQUEST]
    words = text.split()
    for word in words:
        if not any(_named(row, [word]) for row in rows):
            raise InputError(
                f"--rows {word}: no such row; legal are {', '.join(row.id for row in rows)}, "
                "or a layout or a precision alone"
            )
    return [row for row in rows if _named(row, words)]


def every() -> list[Row]:
    """Return all rows."""
    pairs = itertools.product(LAYOUTS, PRECISIONS)
    return [Row(layout, kind, grown(layout, GptSizes())) for layout, kind in pairs]


def select_tools(text: str | None) -> list[str]:
    """Return the tools (other trainers) that `text`, the value of `--peers`, names, separated by
    spaces. If `text` is None, return all tools. Raises InputError for a name that is not in
    TOOLS."""
    if text is None:
        return list(TOOLS)
    words = text.split()
    for word in words:
        if word not in TOOLS:
            raise InputError(f"--peers {word}: no such trainer; legal are {', '.join(TOOLS)}")
    return words


def _named(row: Row, words: Sequence[str]) -> bool:
    return any(word in (row.id, row.layout, _short(row.layout), row.precision) for word in words)


@dataclass(frozen=True)
class Variant:
    """One combination of settings with which another tool can train a row.

    `cast` says how the computation uses bf16. With "fp32", it uses no bf16. With "microbatch", bf16
    autocast is entered in each microbatch, and with "step" once in each step, so that each weight
    is cast once per step. With "masters", weights and gradients are bf16, and master weights are
    fp32. With "policy", fp32 shards are gathered as bf16, and gradients are reduced in fp32.
    `loss_parallel` and `sequence_parallel` are options of torch's DTensor. If `reduce_each` is
    True, gradients are reduced into shards after each microbatch and never stored unsharded. If
    `reduce_each` is False, they are reduced after the last microbatch.
    """

    tool: str = "torch"
    cast: str = "fp32"
    loss_parallel: bool = False
    sequence_parallel: bool = False
    reduce_each: bool = False

    @property
    def name(self) -> str:
        """Return the name of the variant for tables."""
        casts = {
            "fp32": "fp32",
            "microbatch": "bf16 autocast",
            "step": "one bf16 autocast a step",
            "masters": "bf16 weights with fp32 masters",
            "policy": "bf16 gathered from fp32 shards",
        }
        switches = {
            "loss parallel": self.loss_parallel,
            "sequence parallel": self.sequence_parallel,
            "each microbatch reduced": self.reduce_each,
        }
        return ", ".join([casts[self.cast], *(name for name, on in switches.items() if on)])


def choices(row: Row, tool: str) -> list[list[dict[str, Any]]]:
    """Return the decisions about the settings that `tool` uses to train `row`. Each decision is a
    list of alternatives, and an alternative is a table with fields of a `Variant`.

    The benchmark makes the decisions one after another, by measurement, and begins with the first
    alternative of each decision. With every alternative, master weights are fp32.
    """
    decisions: list[list[dict[str, Any]]] = []
    fsdp = tool == "torch" and row.sizes.shards_weights
    if row.precision == "bf16":
        casts = ("policy",) if fsdp else CASTS[tool]
        decisions.append([{"cast": cast} for cast in casts])
    # Megatron-Core and torchtitan need no decision about loss parallelism, because they never
    # gather logits. Megatron-Core has sequence parallelism only with its CUDA norms.
    if row.sizes.tensor > 1 and tool == "torch":
        decisions.append([{"loss_parallel": True}, {"loss_parallel": False}])
    if row.sizes.tensor > 1 and tool in ("torch", "torchtitan"):
        decisions.append([{"sequence_parallel": False}, {"sequence_parallel": True}])
    if fsdp:
        decisions.append([{"reduce_each": False}, {"reduce_each": True}])
    return decisions


def synthetic_ids(row: Row, step: int) -> "Tensor":
    """Return token ids [sequences, tokens + 1] for a step, the same for all trainers. The ids have
    a log-uniform distribution: a few ids are frequent, and most ids are rare. Uniformly distributed
    ids could not be learned, so the loss would not show a missing update.
    """
    import torch

    case = row.case
    generator = torch.Generator().manual_seed(step)
    shape = (case.global_size, case.seq_length + 1)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (case.vocab_size**uniform).long() - 1
