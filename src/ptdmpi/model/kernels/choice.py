"""The choice of kernels on a host: an implementation for each kind of computation in a layer. The
choice is based on the measurements in presets/kernels.toml. In a run, all ranks agree on one choice
(`agreement`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ptdmpi.model.kernels import host
from ptdmpi.model.kernels.host import asked_once, table
from ptdmpi.plan.layer.chunks import HOST_ELEMENTS

# The number of queries in a block. With one call for a whole sequence, PyTorch's CPU kernel skips
# keys above the diagonal only in steps of 512 keys. With one call for each block of this size, a
# block gets only the keys up to its own end. For a sequence length of 512, one call for the whole
# sequence computes 512 x 512 scores. Four blocks compute 128 x (128 + 256 + 384 + 512) scores,
# which is 5/8 of this number.
QUERY_BLOCK = 128
# The number of queries in a block for context parallelism, if one rank would compute the sequence
# in one call. Such sequences are long, or have grouped queries. With blocks of 256 queries,
# PyTorch's kernel gives the same bits as in one call, in all types (torch 2.13). The length of each
# chunk of a context rank must be a multiple of 256. With blocks of 128 queries, the bits are the
# same only in bfloat16.
LONG_BLOCK = 256

# measurements of kernels: kind of kernel -> entries in the form of presets/kernels.toml
Entries = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class AttentionByLibrary:
    """Causal attention by PyTorch's kernel. Sequences shorter than `whole_from` are computed in
    blocks of queries, and all other sequences in one call."""

    whole_from: float = math.inf

    @property
    def blocks(self) -> dict[str, int]:
        """Return the fields of the planner's `Software` that this attention sets: none."""
        return {}


@dataclass(frozen=True)
class AttentionByProducts:
    """Causal attention by matrix products over blocks of `block` queries.

    If `keeps` is True, the probabilities of a block are saved for the backward pass; otherwise the
    backward pass computes them again. If `library_forward` is True, PyTorch's kernel computes the
    forward pass. If `fpmath` is True, the scores of bfloat16 inputs are computed in oneDNN's fpmath
    mode. Sequences of at least `whole_from` positions are computed by PyTorch's kernel instead,
    unless the layer has a sliding window.
    """

    block: int = QUERY_BLOCK
    keeps: bool = False
    library_forward: bool = False
    fpmath: bool = False
    whole_from: float = math.inf

    @property
    def blocks(self) -> dict[str, int]:
        """Return the fields of the planner's `Software` that this attention sets. They are the
        length `whole_from`, which is 0 if the attention has no such length, and the numbers of
        queries in three kinds of blocks: of the forward pass, of the backward pass, and of saved
        probabilities. A number is 0 if the attention has no such blocks."""
        return {
            "whole_from": 0 if self.whole_from == math.inf else int(self.whole_from),
            "forward_block": 0 if self.library_forward else self.block,
            "backward_block": self.block,
            "kept_block": self.block if self.keeps else 0,
        }


HostAttention = AttentionByLibrary | AttentionByProducts


@dataclass(frozen=True)
class OneDnnLinears:
    """The limits for the use of oneDNN's fused call, which is one kernel for a matrix product and
    its bias. The fused call computes x W^T + b if the size (positions x inputs x outputs) is at
    least `output`, and dy W if the size is at least `input_gradient`. If a limit is infinity, the
    fused call is never used: PyTorch computes the product and then adds the bias."""

    output: float = math.inf
    input_gradient: float = math.inf


@dataclass(frozen=True)
class HostChoice:
    """The choice of kernels of a host. If `gelu` is "sigmoid", GELU's tanh form is computed by a
    sigmoid (see `activation`); if it is "library", PyTorch computes it. If `half` is "native",
    matrices in 16-bit types are multiplied in their own type; if it is "widened", they are always
    multiplied in float32. The loss computes about `loss` logits at a time, and RMSNorm about `norm`
    elements. If `norm` is None, RMSNorm computes all rows at once. The numbers `loss` and `norm` do
    not change the bits of results."""

    attention: HostAttention = AttentionByLibrary()
    linear: OneDnnLinears = OneDnnLinears()
    gelu: Literal["library", "sigmoid"] = "library"
    loss: int = HOST_ELEMENTS
    norm: int | None = None
    half: Literal["native", "widened"] = "native"


BY_LIBRARY = HostChoice()
# entries, in the form of presets/kernels.toml, that apply to every host and choose PyTorch's
# kernels
BY_PYTORCH: Entries = {
    kind: [
        {"capability": "", "type": dtype} for dtype in ("float64", "float32", "float16", "bfloat16")
    ]
    for kind in ("attention", "linear", "gelu")
}


def measured_choice(dtype: torch.dtype, own: Entries) -> HostChoice:
    """Return the fastest kernels of this host for operands of the type `dtype`.

    For each kind of computation, the first measurement that fits the host is used. The measurements
    in `own` are tried before those in presets/kernels.toml. If no measurement fits, PyTorch's
    kernel is used.
    """
    kinds = ("attention", "linear", "gelu", "loss", "norm")
    attention, linear, gelu, loss, norm = (_entry(kind, dtype, own) for kind in kinds)
    chosen = HostChoice(
        _attention(attention),
        _linear(linear, dtype),
        loss=loss.get("logits", HOST_ELEMENTS),
        norm=norm.get("elements"),
    )
    if gelu.get("way") == "sigmoid":
        return replace(chosen, gelu="sigmoid")
    return chosen


def _attention(entry: Mapping[str, Any]) -> HostAttention:
    whole_from = float(entry.get("whole_from", math.inf))
    if entry.get("way") != "products":
        return AttentionByLibrary(whole_from)
    return AttentionByProducts(
        block=entry.get("block", QUERY_BLOCK),
        keeps=entry.get("keeps", False),
        library_forward=entry.get("library_forward", False),
        fpmath=entry.get("fpmath", False),
        whole_from=whole_from,
    )


def _linear(entry: Mapping[str, Any], dtype: torch.dtype) -> OneDnnLinears:
    if not host.has_fused(dtype):
        return OneDnnLinears()
    output = float(entry.get("output", math.inf))
    return OneDnnLinears(output, float(entry.get("input_gradient", math.inf)))


def _entry(kind: str, dtype: torch.dtype, own: Entries) -> Mapping[str, Any]:
    has = torch.cpu.get_capabilities()
    for entry in (*own.get(kind, ()), *table().get(kind, ())):
        known = not entry["capability"] or has.get(entry["capability"], False)
        named = str(has.get("cpu_name", "")).startswith(entry.get("cpu", ""))
        if known and named and dtype == getattr(torch, entry["type"]):
            return entry
    return {}


@asked_once
def usual_choice(device_type: str, dtype: torch.dtype) -> HostChoice:
    """Return the default choice of kernels, which is used outside a run. The ranks of a run agree
    on a choice instead."""
    if device_type != "cpu":
        return BY_LIBRARY
    return measured_choice(dtype, {})
