"""What `ptdmpi probe` writes into a cluster file: times of kernels and messages, and which ways of
computing them are the quickest there."""

import itertools
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ptdmpi.config.section import FrozenTable, Positive
from ptdmpi.plan.machine.amounts import NotNegative, PositiveNumber


def _ascending(sizes: tuple[float, ...]) -> tuple[float, ...]:
    if any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ValueError("must ascend")
    return sizes


Numbers = Annotated[tuple[PositiveNumber, ...], Field(min_length=1, strict=False)]
Ascending = Annotated[Numbers, AfterValidator(_ascending)]
Pair = Annotated[tuple[PositiveNumber, PositiveNumber], Field(strict=False)]
Rates = Annotated[tuple[Numbers, ...], Field(min_length=1, strict=False)]


class Gemm(FrozenTable):
    """FLOP/s of products (m, k) x (k, n) at ascending sizes: `flops_per_s[i][j][l]` at m[i], n[j],
    k[l]."""

    m: Ascending
    n: Ascending
    k: Ascending
    flops_per_s: Annotated[tuple[Rates, ...], Field(min_length=1, strict=False)]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        shape = (len(self.m), len(self.n), len(self.k))
        found = {(len(self.flops_per_s), len(a), len(b)) for a in self.flops_per_s for b in a}
        if found != {shape}:
            raise ValueError(f"flops_per_s must be of {' x '.join(map(str, shape))} numbers")
        return self


class Stream(FrozenTable):
    """Rate of a kernel that moves so many bytes, those read and those written."""

    moved_bytes: Ascending
    bytes_per_s: Numbers

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.moved_bytes) != len(self.bytes_per_s):
            raise ValueError("moved_bytes and bytes_per_s must be of one length")
        return self


class AttentionTimes(FrozenTable):
    """Seconds per score that is computed, at two sizes of a head."""

    head_sizes: Annotated[Pair, AfterValidator(_ascending)]
    forward_s_per_score: Pair
    backward_s_per_score: Pair


class Messages(FrozenTable):
    """Seconds of a collective over `ranks`, which stand on `nodes` (1, or each on its own), by the
    bytes of the whole tensor; "send": of one message, while one comes the other way."""

    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
    ranks: Annotated[int, Field(ge=2)]
    nodes: Positive
    sizes_bytes: Ascending
    seconds: Numbers

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.sizes_bytes) != len(self.seconds):
            raise ValueError("sizes_bytes and seconds must be of one length")
        return self


class Measured(FrozenTable):
    """What `ptdmpi probe` measured, which then counts in place of the data sheets.

    `asynchronous`: the host is ahead of the device, so that launches are hidden behind kernels. A
    step takes `step_s` beside its kernels and messages, and `update_s_per_element` for each
    parameter of a rank: its gradient's norm, clipping, AdamW.
    `seconds_per_element`: of an activation function ("gelu", "gelu_backward"), a norm, the loss.
    """

    asynchronous: bool
    gemm: Gemm
    stream: Stream
    attention: AttentionTimes
    seconds_per_element: dict[str, PositiveNumber]
    messages: Annotated[tuple[Messages, ...], Field(strict=False)]
    step_s: NotNegative
    update_s_per_element: NotNegative


class KernelWay(FrozenTable):
    """How a processor computes one kind of kernel of one type, as in presets/kernels.toml, whose
    entries come behind these. `capability`: of torch.cpu.get_capabilities(), "" is any; `cpu`: how
    the processor's name begins; `measured`: in words."""

    capability: str
    cpu: str = ""
    type: Literal["float16", "bfloat16", "float32", "float64"]
    measured: str


class AttentionWay(KernelWay):
    """Causal attention by products over blocks of so many queries, which keep their probabilities
    where memory holds them or not, or go back alone, after `library_forward`, with scores of
    bfloat16 in oneDNN's `fpmath` mode or not; or by the library's kernel, in blocks of queries
    below `whole_from` positions and at once from there."""

    way: Literal["products", "library"]
    whole_from: Positive | None = None
    block: Literal[128, 256, 512] | None = None
    keeps: bool | None = None
    library_forward: bool | None = None
    fpmath: bool | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.keeps and self.library_forward:
            raise ValueError("keeps = true: the library's forward has no probabilities to keep")
        if self.way != "products" and (self.keeps or self.library_forward or self.fpmath):
            raise ValueError('keeps, library_forward and fpmath are for way = "products"')
        if self.fpmath and self.type != "bfloat16":
            raise ValueError('fpmath = true is for type = "bfloat16"')
        return self


class GeluWay(KernelWay):
    """GELU's tanh form by a sigmoid, its derivative kept, or as the library has it."""

    way: Literal["sigmoid", "library"]


class LinearWay(KernelWay):
    """From how many products of two numbers on oneDNN's one call takes x W^T + b, and dy W; None:
    never."""

    output: NotNegative | None = None
    input_gradient: NotNegative | None = None


class KernelWays(FrozenTable):
    """The first entry that fits a processor counts."""

    attention: Annotated[tuple[AttentionWay, ...], Field(strict=False)] = ()
    linear: Annotated[tuple[LinearWay, ...], Field(strict=False)] = ()
    gelu: Annotated[tuple[GeluWay, ...], Field(strict=False)] = ()

    def entries(self) -> dict[str, list[dict[str, Any]]]:
        """As presets/kernels.toml has them."""
        return self.model_dump(mode="json", exclude_none=True)
