"""What is measured: one model and batch, in ten rows of layout and precision."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ptdmpi.config import Config, InputError, Layout, synthetic_config

if TYPE_CHECKING:
    from torch import Tensor

PRECISIONS = ("fp32", "bf16")
CASTS = ("microbatch", "step", "masters")


LAYOUTS = {
    "single": Layout(1, 1, 1),
    "d=2": Layout(1, 1, 2),
    "t=2": Layout(2, 1, 1),
    "p=2": Layout(1, 2, 1),
    "p=2,v=2": Layout(1, 2, 1, 2, schedule="interleaved"),
}
# What plain torch calls its way of doing the same.
PEERS = {
    "single": "torch",
    "d=2": "torch DistributedDataParallel",
    "t=2": "torch DTensor",
    "p=2": "torch pipelining Schedule1F1B",
    "p=2,v=2": "torch pipelining ScheduleInterleaved1F1B",
}


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
    def peer(self) -> str:
        return PEERS[self.layout]

    @property
    def config(self) -> Config:
        """Clipping is off: torch has no call for the norm over all stages of a pipeline."""
        model = asdict(self.case)
        del model["vocab_size"]  # it comes from the data, not from the configuration
        global_size, micro_size = model.pop("global_size"), model.pop("micro_size")
        return synthetic_config(
            replace(self.sizes, micro_size=micro_size),
            {**model, "tie_embeddings": False},
            run={"steps": 1000, "threads": 1, "reproducible": self.reproducible},
            batch={"global_size": global_size},
            precision={"compute": self.precision},
            optimizer={"decay": "constant", "clip_norm": 0.0},
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        return cls(**{**values, "case": GptSizes(**values["case"])})


def _short(layout: str) -> str:
    return layout.replace("=", "").replace(",", "")


def select(text: str | None) -> list[Row]:
    """The rows that `--rows` names: ids, layouts (`t2` or `t=2`) or precisions, spaces between.

    None is all of them. Raises InputError for a name that fits nothing.
    """
    every = [Row(*pair) for pair in itertools.product(LAYOUTS, PRECISIONS)]
    if text is None:
        return every
    words = text.split()
    for word in words:
        if not any(_named(row, [word]) for row in every):
            raise InputError(
                f"--rows {word}: no such row; legal are {', '.join(row.id for row in every)}, "
                "or a layout or a precision alone"
            )
    return [row for row in every if _named(row, words)]


def _named(row: Row, words: Sequence[str]) -> bool:
    return any(word in (row.id, row.layout, _short(row.layout), row.precision) for word in words)


@dataclass(frozen=True)
class Variant:
    """One way of doing a row in plain torch, where there are several.

    `cast`: "fp32"; "microbatch" or "step" (bf16 autocast entered once for each: a step's casts each
    weight once); or "masters" (bf16 weights and gradients, fp32 master weights). The others belong
    to DTensor.
    """

    cast: str = "fp32"
    loss_parallel: bool = False
    sequence_parallel: bool = False

    @property
    def name(self) -> str:
        casts = {
            "fp32": "fp32",
            "microbatch": "bf16 autocast",
            "step": "one bf16 autocast a step",
            "masters": "bf16 weights with fp32 masters",
        }
        parts = (
            casts[self.cast],
            "loss parallel" if self.loss_parallel else "",
            "sequence parallel" if self.sequence_parallel else "",
        )
        return ", ".join(part for part in parts if part)


def choices(row: Row) -> list[list[dict[str, Any]]]:
    """How plain torch can do `row`: a list of decisions, each a list of alternatives.

    They are made one after another, by measurement, and begin with the first alternatives. Every
    way keeps fp32 master weights.
    """
    decisions: list[list[dict[str, Any]]] = []
    if row.precision == "bf16":
        decisions.append([{"cast": cast} for cast in CASTS])
    if row.sizes.tensor > 1:
        decisions.append([{"loss_parallel": True}, {"loss_parallel": False}])
        decisions.append([{"sequence_parallel": False}, {"sequence_parallel": True}])
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
