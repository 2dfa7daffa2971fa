"""The tables that `ptdmpi probe` writes into a cluster file.

The tables contain the times of kernels and messages on the measured machine, and the fastest
implementations of kernels on it.
"""

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
    """The rates of matrix products (m, k) x (k, n) in FLOP/s, for the sizes in `m`, `n` and `k`,
    each of which is ascending.

    `flops_per_s[i][j][l]` is the rate at m[i], n[j], k[l].
    """

    m: Ascending
    n: Ascending
    k: Ascending
    flops_per_s: Annotated[tuple[Rates, ...], Field(min_length=1, strict=False)]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        shape = (len(self.m), len(self.n), len(self.k))
        shapes = {(len(self.flops_per_s), len(a), len(b)) for a in self.flops_per_s for b in a}
        if shapes != {shape}:
            raise ValueError(f"flops_per_s must have {' x '.join(map(str, shape))} numbers")
        return self


class Stream(FrozenTable):
    """The rates, in bytes per second, of kernels that read and write `moved_bytes` in total."""

    moved_bytes: Ascending
    bytes_per_s: Numbers

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.moved_bytes) != len(self.bytes_per_s):
            raise ValueError("moved_bytes and bytes_per_s must have the same length")
        return self


class AttentionTimes(FrozenTable):
    """The times of attention in seconds per computed score, for two head sizes."""

    head_sizes: Annotated[Pair, AfterValidator(_ascending)]
    forward_s_per_score: Pair
    backward_s_per_score: Pair


class Messages(FrozenTable):
    """The times of a collective over `ranks` ranks: `seconds` has a time for each size of the whole
    tensor in `sizes_bytes`.

    The ranks are on `nodes` nodes, either all on one node or each on a different node. The times of
    "send" are for one message while another message travels in the opposite direction.
    """

    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
    ranks: Annotated[int, Field(ge=2)]
    nodes: Positive
    sizes_bytes: Ascending
    seconds: Numbers

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.sizes_bytes) != len(self.seconds):
            raise ValueError("sizes_bytes and seconds must have the same length")
        return self


class Measured(FrozenTable):
    """The measurements of `ptdmpi probe`, which replace the rates from data sheets.

    `asynchronous` is True if the host runs ahead of the device, so that launches overlap with
    kernels. `step_s` is the time that a step takes in addition to its kernels and messages.
    `update_s_per_element` is the time that the gradient norm, clipping and AdamW take for each
    parameter of a rank. `seconds_per_element` has the times of activation functions ("gelu",
    "gelu_backward"), norms and the loss.
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
    """The implementation of one kind of kernel, for one data type on one kind of processor.

    Entries with this information are in cluster files and in presets/kernels.toml. The entries of a
    cluster file take precedence. `capability` is a key of torch.cpu.get_capabilities(); "" means
    any processor. `cpu` is the beginning of the processor's name. `measured` is a text
    with the measured times of the implementations that were compared.
    """

    capability: str
    cpu: str = ""
    type: Literal["float16", "bfloat16", "float32", "float64"]
    measured: str


class AttentionWay(KernelWay):
    """The implementation of causal attention: matrix products, or the kernel of torch (the
    library).

    If `way` is "products", attention is computed by matrix products, in blocks of `block` queries.
    If `keeps` is True, the forward keeps the probabilities for the backward if there is enough
    memory. If `library_forward` is True, torch computes the forward, and only the backward is
    computed by matrix products. If `fpmath` is True, scores in bfloat16 are computed in oneDNN's
    fpmath mode. If `way` is "library", torch's kernel computes attention, for one block of queries
    at a time. With both ways, torch's kernel computes sequences of at least `whole_from` positions
    in one call."""

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
    """The implementation of GELU in its tanh form: "sigmoid" computes GELU from a sigmoid and keeps
    the derivative for the backward, and "library" calls torch."""

    way: Literal["sigmoid", "library"]


class LinearWay(KernelWay):
    """The smallest sizes of linear layers for which oneDNN is called: `output` for the output x W^T
    + b, and `input_gradient` for the gradient dy W of the input.

    The size of a linear layer is the number of scalar multiplications in its matrix product. None
    means that oneDNN is never called.
    """

    output: NotNegative | None = None
    input_gradient: NotNegative | None = None


class LossWay(KernelWay):
    """The number of logits that the loss on a CPU converts to float32 at a time (`logits`). This
    number affects the speed of the loss, but not the bits of the result."""

    logits: Positive


class NormWay(KernelWay):
    """The number of elements that RMSNorm computes at a time (`elements`), or None for all elements
    at once. This number affects the speed of RMSNorm, but not the bits of the result."""

    elements: Positive | None = None


class KernelWays(FrozenTable):
    """The implementations of kernels that measurements found to be the fastest. The first entry
    that fits a processor is used."""

    attention: Annotated[tuple[AttentionWay, ...], Field(strict=False)] = ()
    linear: Annotated[tuple[LinearWay, ...], Field(strict=False)] = ()
    gelu: Annotated[tuple[GeluWay, ...], Field(strict=False)] = ()
    loss: Annotated[tuple[LossWay, ...], Field(strict=False)] = ()
    norm: Annotated[tuple[NormWay, ...], Field(strict=False)] = ()

    def entries(self) -> dict[str, list[dict[str, Any]]]:
        """Return the implementations as lists of entries, in the form of presets/kernels.toml: kind
        of kernel -> entries."""
        return self.model_dump(mode="json", exclude_none=True)
