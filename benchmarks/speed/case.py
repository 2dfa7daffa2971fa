"""What is measured: one model and batch, in rows of layout and precision; and of weak scaling, a
larger model or batch on two ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ptdmpi.config import Config, InputError, Layout, synthetic_config

if TYPE_CHECKING:
    from torch import Tensor

PRECISIONS = ("fp32", "bf16")
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
    "d=2,weak": Layout(1, 1, 2),
    "t=2,weak": Layout(2, 1, 1),
    "p=2,weak": Layout(1, 2, 1),
}
# Which size is doubled with the ranks, so that each has as much to do as one alone.
WEAK = {"d=2,weak": "global_size", "t=2,weak": "layers", "p=2,weak": "layers"}
ALONE = "single"
COMPILED = "single,compile"  # as one rank alone, with compiled layers
ON_REQUEST = ("p=2,v=2,zb-v", "d=2,zero=1", "d=2,zero=3", COMPILED)
# Who does the same, and what its way is called there. Where that is this project, the way is
# another row's layout; one rank alone is what scaling is told by.
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
    **{layout: {"ptdmpi": ALONE} for layout in (COMPILED, *WEAK)},
}
TOOLS = ("torch", "megatron", "deepspeed", "torchtitan", "transformers", "ptdmpi")


@dataclass(frozen=True)
class GptSizes:
    """A GPT with learned positions, tanh GELU, biases and an untied head; sizes in the letters of
    the glossary. Untied, because torch's pipeline stages cannot share a table."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    seq_length: int = 512
    vocab_size: int = 8192
    global_size: int = 16
    micro_size: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_size * self.seq_length


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    layout: str
    precision: str
    case: GptSizes = field(default_factory=GptSizes)
    reproducible: bool = False

    @property
    def id(self) -> str:
        """What `--rows` calls it, such as `p2v2-bf16`."""
        return f"{_short(self.layout)}-{self.precision}"

    @property
    def sizes(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def alone(self) -> "Row":
        """What one rank does of it: the same row, in weak scaling half of it."""
        key = WEAK.get(self.layout)
        half = {} if key is None else {key: getattr(self.case, key) // 2}
        return replace(self, layout=ALONE, case=replace(self.case, **half))

    @property
    def peers(self) -> dict[str, str]:
        """Who does the same (one of TOOLS), and by what."""
        return PEERS[self.layout]

    @property
    def work(self) -> float:
        """How long a round of all sides takes, beside those of other rows: bf16 half of fp32."""
        ours = (2 if self.layout in WEAK else 1) / self.sizes.ranks
        theirs = (1 if way == ALONE else 1 / self.sizes.ranks for way in self.peers.values())
        return (ours + sum(theirs)) * (2 if self.precision == "fp32" else 1)

    @property
    def config(self) -> Config:
        """Clipping is off: torch has no call for the norm over all stages of a pipeline."""
        model = asdict(self.case)
        del model["vocab_size"]  # it comes from the data, not from the configuration
        global_size, micro_size = model.pop("global_size"), model.pop("micro_size")
        return synthetic_config(
            replace(self.sizes, micro_size=micro_size),
            {**model, "tie_embeddings": False},
            run={
                "steps": 1000,
                "threads": 1,
                "reproducible": self.reproducible,
                "compile": self.layout == COMPILED,
            },
            batch={"global_size": global_size},
            precision={"compute": self.precision},
            optimizer={"decay": "constant", "clip_norm": 0.0},
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        return cls(**{**values, "case": GptSizes(**values["case"])})


def grown(layout: str, case: GptSizes) -> GptSizes:
    """The case of a row: doubled where it is one of weak scaling."""
    key = WEAK.get(layout)
    return case if key is None else replace(case, **{key: 2 * getattr(case, key)})


def _short(layout: str) -> str:
    return layout.replace("=", "").replace(",", "")


def select(text: str | None) -> list[Row]:
    """The rows that `--rows` names: ids, layouts (`t2` or `t=2`) or precisions, spaces between.

    None is those that are measured without being asked for. Raises InputError for a name that fits
    nothing.
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
    """All rows."""
    pairs = itertools.product(LAYOUTS, PRECISIONS)
    return [Row(layout, kind, grown(layout, GptSizes())) for layout, kind in pairs]


def select_tools(text: str | None) -> list[str]:
    """The tools that `--peers` names, spaces between; None is all. Raises InputError."""
    words = list(TOOLS) if text is None else text.split()
    for word in words:
        if word not in TOOLS:
            raise InputError(f"--peers {word}: nobody known; legal are {', '.join(TOOLS)}")
    return words


def _named(row: Row, words: Sequence[str]) -> bool:
    return any(word in (row.id, row.layout, _short(row.layout), row.precision) for word in words)


@dataclass(frozen=True)
class Variant:
    """One way of doing a row with another tool, where there are several.

    `cast`: "fp32"; "microbatch" or "step" (bf16 autocast entered once for each: a step's casts each
    weight once); "masters" (bf16 weights and gradients, fp32 master weights); or "policy" (fp32
    shards, gathered as bf16, gradients reduced in fp32). `loss_parallel` and `sequence_parallel`
    belong to DTensor. `reduce_each`: gradients are reduced into shards after each microbatch, and
    never held whole; else after the last.
    """

    tool: str = "torch"
    cast: str = "fp32"
    loss_parallel: bool = False
    sequence_parallel: bool = False
    reduce_each: bool = False

    @property
    def name(self) -> str:
        casts = {
            "fp32": "fp32",
            "microbatch": "bf16 autocast",
            "step": "one bf16 autocast a step",
            "masters": "bf16 weights with fp32 masters",
            "policy": "bf16 gathered from fp32 shards",
        }
        parts = (
            casts[self.cast],
            "loss parallel" if self.loss_parallel else "",
            "sequence parallel" if self.sequence_parallel else "",
            "each microbatch reduced" if self.reduce_each else "",
        )
        return ", ".join(part for part in parts if part)


def choices(row: Row, tool: str) -> list[list[dict[str, Any]]]:
    """How `tool` can do `row`: a list of decisions, each a list of alternatives.

    They are made one after another, by measurement, and begin with the first alternatives. Every
    way keeps fp32 master weights.
    """
    decisions: list[list[dict[str, Any]]] = []
    fsdp = tool == "torch" and row.sizes.shards_weights
    if row.precision == "bf16":
        casts = ("policy",) if fsdp else CASTS[tool]
        decisions.append([{"cast": cast} for cast in casts])
    # Megatron-Core and torchtitan never gather logits; Megatron-Core divides the sequence with its
    # CUDA norms alone
    if row.sizes.tensor > 1 and tool == "torch":
        decisions.append([{"loss_parallel": True}, {"loss_parallel": False}])
    if row.sizes.tensor > 1 and tool in ("torch", "torchtitan"):
        decisions.append([{"sequence_parallel": False}, {"sequence_parallel": True}])
    if fsdp:
        decisions.append([{"reduce_each": False}, {"reduce_each": True}])
    return decisions


def synthetic_ids(row: Row, step: int) -> "Tensor":
    """Token ids [B, s + 1], the same for both sides, log-uniform: some frequent, most rare.

    Uniform ids could not be learned, so that a missing update would not show in the loss.
    """
    import torch

    case = row.case
    generator = torch.Generator().manual_seed(step)
    shape = (case.global_size, case.seq_length + 1)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (case.vocab_size**uniform).long() - 1
