"""The form in which a run stores its choice of kernels: {kind: [text, ...]}. The choice is stored
in the file kernels.json of the run directory and in the manifest of a checkpoint.

For a host, one text is stored for each kind of kernel. The text is the name of an implementation;
sizes and words may follow the name, separated by colons:

    attention   "library", "library:1024" (one call from 1024 positions on), "products" (in blocks
                of 128 queries), "products:256:kept" (in blocks of 256 queries; the probabilities
                are saved for the backward); see WORDS
    linear      "library", "onednn:OUTPUT:INPUT_GRADIENT" (oneDNN from these sizes on); older
                versions stored "onednn", which means all sizes
    gelu        "library", "sigmoid"
    loss        "chunks:LOGITS" (the loss computes about this number of logits at a time)
    norm        "whole", "chunks:ELEMENTS" (RMSNorm computes about this number of elements at a
                time)
    half        "native", "widened"

On other devices the kind "attention" has the names of the attention backends, in the order in which
they are tried. The kind "triton", if it is stored, has the names of the kinds of kernels that are
computed in Triton (`fused.KINDS`). The kind "layers" is stored if a measurement has chosen compiled
or uncompiled layers: "compiled" or "uncompiled". Unknown texts are skipped, because a run on
another type of device, or another version of ptdmpi, may have written them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ptdmpi.model.kernels.choice import (
    QUERY_BLOCK,
    AttentionByLibrary,
    AttentionByProducts,
    HostAttention,
    HostChoice,
    OneDnnLinears,
)

Stored = Mapping[str, Sequence[str]]

# word after the block size in "products:SIZE:WORD" -> attribute of `AttentionByProducts`
WORDS = {"kept": "keeps", "library_forward": "library_forward", "fpmath": "fpmath"}
# the beginning of the last word in "products:SIZE:WORD:whole_from=LENGTH", up to the number
WHOLE_FROM = "whole_from="


def written(choice: HostChoice) -> dict[str, list[str]]:
    """Return the stored form of a choice of kernels for hosts: {kind: [text]}."""
    return {kind: [text_of(kind, getattr(choice, kind))] for kind in KINDS}


def text_of(kind: str, chosen: Any) -> str:
    """Return the text that is stored for the chosen kernel `chosen` of the kind `kind`, a key of
    `KINDS`."""
    return KINDS[kind].write(chosen)


def sound(stored: object) -> Stored | None:
    """Return the choice `stored`, which was read from a file. Return None if `stored` has another
    structure or an impossible size, because the file is damaged."""
    if not isinstance(stored, dict) or not all(map(_are_texts, stored.values())):
        return None
    try:
        read(stored)
    except ValueError:
        return None
    return stored


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def read(stored: Stored) -> dict[str, Any]:
    """Return the stored choice as a dict: name of an attribute of `HostChoice` -> its value. For
    each kind, the first text in `stored` that names a known kernel is used. A kind without such a
    text is not in the result. Raise ValueError if a text has an illegal size, such as
    the block of 0 queries in "products:0"."""
    chosen: dict[str, Any] = {}
    for kind, form in KINDS.items():
        values = [form.read(text.split(":")) for text in stored.get(kind, ())]
        known = [value for value in values if value is not None]
        if known:
            chosen[kind] = known[0]
    return chosen


def _write_attention(attention: HostAttention) -> str:
    if isinstance(attention, AttentionByLibrary):
        if attention.whole_from == math.inf:
            return "library"
        return f"library:{attention.whole_from:.0f}"
    words = [word for word, name in WORDS.items() if getattr(attention, name)]
    if attention.whole_from != math.inf:
        words.append(f"{WHOLE_FROM}{attention.whole_from:.0f}")
    if words or attention.block != QUERY_BLOCK:
        return ":".join(("products", str(attention.block), *words))
    return "products"


def _read_attention(parts: Sequence[str]) -> HostAttention | None:
    name, *rest = parts
    if name == "library":
        return AttentionByLibrary(*map(_size, rest[:1]))
    if name != "products":
        return None
    words = {attribute: word in rest for word, attribute in WORDS.items()}
    whole_from = math.inf
    if rest and rest[-1].startswith(WHOLE_FROM):
        whole_from = _size(rest[-1].removeprefix(WHOLE_FROM))
    chosen = AttentionByProducts(**words, whole_from=whole_from)
    if rest and int(rest[0]) < 1:
        raise ValueError(f"a block of {rest[0]} queries")
    if rest:
        return replace(chosen, block=int(rest[0]))
    return chosen


def _size(text: str) -> float:
    size = float(text)
    if not size >= 0:
        raise ValueError(f"the size {text}")
    return size


def _write_linear(linear: OneDnnLinears) -> str:
    if linear == OneDnnLinears():
        return "library"
    return f"onednn:{linear.output:.0f}:{linear.input_gradient:.0f}"


def _read_linear(parts: Sequence[str]) -> OneDnnLinears | None:
    name, *sizes = parts
    if name == "library":
        return OneDnnLinears()
    if name != "onednn":
        return None
    # this assignment raises ValueError if the number of sizes is not two
    output, input_gradient = map(_size, sizes or ("0", "0"))
    return OneDnnLinears(output, input_gradient)


def _write_chunks(elements: int | None) -> str:
    return "whole" if elements is None else f"chunks:{elements}"


def _read_chunks(parts: Sequence[str]) -> int | None:
    name, *sizes = parts
    if name != "chunks":
        return None
    # this assignment raises ValueError if the number of sizes is not one
    (elements,) = map(int, sizes)
    if elements < 1:
        raise ValueError(f"chunks of {elements} elements")
    return elements


def _one_of(*names: str) -> Callable[[Sequence[str]], str | None]:
    return lambda parts: next((name for name in names if name == parts[0]), None)


@dataclass(frozen=True)
class Form:
    """The stored form of one kind of kernel, as two functions. `write` returns the text that is
    stored for a choice. `read` returns the choice for a text that was split at its colons, or None
    for an unknown text."""

    write: Callable[[Any], str]
    read: Callable[[Sequence[str]], Any]


# the kinds of kernels of a host, which are attributes of `HostChoice`
KINDS = {
    "attention": Form(_write_attention, _read_attention),
    "linear": Form(_write_linear, _read_linear),
    "gelu": Form(str, _one_of("sigmoid", "library")),
    "loss": Form(_write_chunks, _read_chunks),
    "norm": Form(_write_chunks, _read_chunks),
    "half": Form(str, _one_of("native", "widened")),
}
