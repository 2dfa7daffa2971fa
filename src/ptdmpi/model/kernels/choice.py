"""The choice of kernels on a host: for each kind of work in a layer, the implementation that
computes it, by the measurements of presets/kernels.toml or as a run has agreed on it
(`agreement`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ptdmpi.model.kernels import host
from ptdmpi.model.kernels.host import asked_once
from ptdmpi.model.kernels.table import table

# PyTorch's CPU kernel skips keys above the diagonal only in steps of 512 keys. In blocks of this
# number of queries, each with the keys up to its end, s = 512 costs five eighths.
QUERY_BLOCK = 128

Entries = Mapping[str, Sequence[Mapping[str, Any]]]  # like the table: kind -> entries


@dataclass(frozen=True)
class AttentionByLibrary:
    """Causal attention by the library's kernel: in blocks of queries, or at once from `whole_from`
    positions on."""

    whole_from: float = math.inf


@dataclass(frozen=True)
class AttentionByProducts:
    """Causal attention by matrix products over blocks of `block` queries.

    The probabilities of a block are computed again in the backward pass, or kept for it (`keeps`).
    With `library_forward` the library's kernel computes the forward pass. With `fpmath` the scores
    of bfloat16 are computed in oneDNN's mode of that name.
    """

    block: int = QUERY_BLOCK
    keeps: bool = False
    library_forward: bool = False
    fpmath: bool = False

    @property
    def kept_block(self) -> int:
        """Return the queries of a block whose probabilities are kept; 0 if they are not kept."""
        return self.block * self.keeps


HostAttention = AttentionByLibrary | AttentionByProducts


@dataclass(frozen=True)
class OneDnnLinears:
    """The least number of multiplications (positions x inputs x outputs) for which oneDNN's fused
    call computes x W^T + b (`output`) and dy W (`input_gradient`). Infinity: never; then the
    library computes the product, and adds the bias."""

    output: float = math.inf
    input_gradient: float = math.inf


@dataclass(frozen=True)
class HostChoice:
    """The choice of kernels of a host. `gelu`: GELU's tanh form is computed by a sigmoid
    (`activation`) or by the library. `half`: half types are multiplied as they are, or in float32
    even if the processor multiplies them."""

    attention: HostAttention = AttentionByLibrary()
    linear: OneDnnLinears = OneDnnLinears()
    gelu: Literal["library", "sigmoid"] = "library"
    half: Literal["native", "widened"] = "native"


BY_LIBRARY = HostChoice()


def measured_choice(dtype: torch.dtype, own: Entries) -> HostChoice:
    """Return the fastest kernels of this host for operands of a type.

    For each kind the first entry that fits the host is used: of `own`, then of the table. If none
    fits, the library computes it.
    """
    attention, linear, gelu = (_entry(kind, dtype, own) for kind in ("attention", "linear", "gelu"))
    chosen = HostChoice(_attention(attention), _linear(linear))
    if gelu.get("way") == "sigmoid":
        return replace(chosen, gelu="sigmoid")
    return chosen


def _attention(entry: Mapping[str, Any]) -> HostAttention:
    if entry.get("way") != "products":
        return AttentionByLibrary(float(entry.get("whole_from", math.inf)))
    return AttentionByProducts(
        entry.get("block", QUERY_BLOCK),
        entry.get("keeps", False),
        entry.get("library_forward", False),
        entry.get("fpmath", False),
    )


def _linear(entry: Mapping[str, Any]) -> OneDnnLinears:
    if not host.has_fused():
        return OneDnnLinears()
    output = float(entry.get("output", math.inf))
    return OneDnnLinears(output, float(entry.get("input_gradient", math.inf)))


def _entry(kind: str, dtype: torch.dtype, own: Entries) -> Mapping[str, Any]:
    has = torch.cpu.get_capabilities()
    for entry in (*own.get(kind, ()), *table()[kind]):
        known = not entry["capability"] or has.get(entry["capability"], False)
        named = str(has.get("cpu_name", "")).startswith(entry.get("cpu", ""))
        if known and named and dtype == getattr(torch, entry["type"]):
            return entry
    return {}


@asked_once
def usual_choice(device_type: str, dtype: torch.dtype) -> HostChoice:
    """Return the choice that is used outside a run, which would have agreed on one."""
    if device_type != "cpu":
        return BY_LIBRARY
    return measured_choice(dtype, {})
