"""Attention, softmax(q k^T) v, and the kernel implementations that compute it on each device.

Each layer has an `AttentionCore` with a list of implementations. For each input, the first
implementation in the list that supports the input computes attention:
- `ProductKernel` uses matrix products over blocks of queries, with scores in float32 at least. It
  computes attention with soft caps, which no fused kernel supports. It also computes long causal
  attention on a CPU if the run has chosen this kernel.
- `PackedKernel` is FlashAttention, with all sequences concatenated to one. It computes attention
  with windows or documents on a GPU, in 16-bit types.
- `MaskedKernel` is PyTorch's kernel with a mask. It computes attention with windows or documents on
  a GPU in wider types, and in a compiled graph.
- `BlockedKernel` calls PyTorch's kernel for each block of queries. It computes attention with
  windows or documents, and long causal attention, on a CPU.
- `WholeKernel` calls PyTorch's kernel once. It computes all other inputs.

No kernel saves scores for the backward pass, but `ProductKernel` can save the probabilities.
"""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import USUAL, Kernels, host
from ptdmpi.model.kernels.blocks import BlockedAttention, BlockedWork, Scores, Sight
from ptdmpi.model.kernels.by_products import ProductAttention, ProductWork, by_key_head
from ptdmpi.model.kernels.choice import LONG_BLOCK, QUERY_BLOCK, AttentionByProducts
from ptdmpi.model.kernels.norm import soft_cap
from ptdmpi.model.latent.filled import FilledAttention, FilledWork, cut, filled, flash_takes
from ptdmpi.model.sequence.positions import ALL, Positions


class Input(NamedTuple):
    """The input of attention. Queries are [b, heads, s, head size]. Keys and values have as many
    heads as the queries, or fewer (grouped queries): the number of key heads divides the number of
    query heads. Values may have a smaller head size than keys. `documents` is None if each sequence
    is one document. `positions` are the positions of the queries; keys and values may have more
    positions."""

    q: Tensor
    k: Tensor
    v: Tensor
    documents: Documents | None
    positions: Positions = ALL

    def sight(self, scores: Scores) -> Sight:
        """Return the rules that say which keys each query sees. They follow from `scores` (causal
        mask and window), the documents and the positions."""
        return Sight(scores, self.documents, self.positions)


class AttentionResult(NamedTuple):
    """The result of attention, `out` [b, heads, s, head size of the values], and the log-sum-exp of
    each query's scores, `logsumexp` [b, heads, s].

    `logsumexp` is in float32 or wider and has no gradient. It is None if it was not requested, or
    if the implementation cannot return it.
    """

    out: Tensor
    logsumexp: Tensor | None


class Implementation(Protocol):
    """The interface of an implementation of attention, such as `MaskedKernel`."""

    def takes(self, given: Input) -> bool:
        """Return True if the implementation computes this input. This method is called only if all
        earlier implementations in the list have returned False."""

    def forward(self, given: Input, with_logsumexp: bool) -> AttentionResult:
        """Compute attention. Also return the log-sum-exp, if it is requested and the implementation
        supports it."""


class AttentionCore:
    """The function softmax(scores) v of one layer. For each input, the first of `implementations`
    that supports the input computes attention.

    `grouped` is True if the model has fewer key heads than query heads. `grouped` has the same
    value on a rank that has only some of the heads. Such a rank may have a key head for each query
    head. It still calls the kernel in the same way as a single rank with all heads, so that the
    results are bitwise equal.
    """

    def __init__(self, scores: Scores, kernels: Kernels = USUAL, *, grouped: bool = False) -> None:
        self.scores = scores
        self.kernels = kernels
        self.implementations: tuple[Implementation, ...] = (
            ProductKernel(scores, kernels),
            PackedKernel(scores),
            MaskedKernel(scores),
            BlockedKernel(scores, kernels, grouped=grouped),
            WholeKernel(scores, kernels),
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        *,
        positions: Positions = ALL,
    ) -> Tensor:
        """Return softmax(scores) v, where each position sees only its own document. The arguments
        have the same meaning as the fields of `Input`."""
        return self.forward(q, k, v, documents, positions=positions).out

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        *,
        positions: Positions = ALL,
        with_logsumexp: bool = False,
    ) -> AttentionResult:
        """Return the same output as `__call__`, together with the log-sum-exp of the scores if
        `with_logsumexp` is True and the kernel can return it."""
        given = Input(q=q, k=k, v=v, documents=documents, positions=positions)
        for implementation in self.implementations:
            if implementation.takes(given):
                return implementation.forward(given, with_logsumexp)
        raise AssertionError("the last implementation takes every input")

    def under_mask(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Return the attention of each query to the keys for which `seen` (bool [b, 1, queries,
        keys]) is True. This method is used for generation with a cache."""
        kernels = self.kernels
        scores = self.scores
        shape = (*q.shape[:3], v.shape[3])
        if not scores.softcap:
            # With a mask, fused GPU kernels need as many key heads as query heads. So all queries
            # that share a key head are treated as the queries of one head.
            out = F.scaled_dot_product_attention(
                kernels.widened(by_key_head(q, k)),
                kernels.widened(k),
                _as_kernels_need(q, kernels.widened(v)),
                attn_mask=seen.repeat(1, 1, q.shape[1] // k.shape[1], 1),
                scale=scores.scale,
            )
            return out[..., : v.shape[3]].reshape(shape).to(q.dtype)
        products = kernels.wide_product(by_key_head(q, k), k.transpose(-1, -2))
        capped = soft_cap(products * scores.scale, scores.softcap)
        capped = capped.unflatten(2, (-1, q.shape[2])).masked_fill(~seen[:, :, None], -torch.inf)
        weights = capped.softmax(-1).flatten(2, 3).to(q.dtype)
        return kernels.product(weights, v).view(shape)


class ProductKernel:
    """Attention by matrix products over blocks of queries (`by_products`)."""

    def __init__(self, scores: Scores, kernels: Kernels) -> None:
        self.scores = scores
        self.kernels = kernels

    def _chosen(self, given: Input) -> AttentionByProducts | None:
        # in a compiled graph, attention is not divided into blocks of queries, and the chosen
        # kernels are not used
        if not self.scores.causal or not _is_long_on_cpu(given):
            return None
        chosen = self.kernels.chosen(given.q.device.type, given.q.dtype).attention
        if not isinstance(chosen, AttentionByProducts):
            return None
        if given.k.shape[2] >= chosen.whole_from and not self.scores.window:
            return None
        return chosen

    def takes(self, given: Input) -> bool:
        """Return True for attention with soft caps. Also return True for long causal attention on a
        CPU if matrix products are the chosen kernel for its length."""
        return self.scores.softcap > 0 or self._chosen(given) is not None

    def forward(self, given: Input, with_logsumexp: bool) -> AttentionResult:
        """Compute attention; see `Implementation.forward`."""
        how = self._chosen(given) or AttentionByProducts()
        work = ProductWork(given.sight(self.scores), how, self.kernels, with_logsumexp)
        return AttentionResult(*ProductAttention.apply(*given[:3], work))


class PackedKernel:
    """FlashAttention over concatenated documents. This implementation supports only 16-bit types on
    GPUs, and does not return the log-sum-exp."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores

    def takes(self, given: Input) -> bool:
        """Return True for attention with windows or documents on a GPU, if this rank has all
        positions and FlashAttention supports the input's type and sizes."""
        q = given.q
        if q.device.type == "cpu" or not _is_limited(self.scores, given):
            return False
        # If this rank has only some positions, they form several runs of consecutive positions.
        # This implementation is not used, because it would need a copy of the keys for each run.
        if not given.positions.are_all:
            return False
        fits = _has_flash(q) and flash_takes(q.shape[3])
        return fits and _packed_attention() is not None

    def forward(self, given: Input, with_logsumexp: bool) -> AttentionResult:
        """Compute attention; see `Implementation.forward`."""
        q, k, v, documents, _ = given
        packed_attention = _packed_attention()
        assert packed_attention is not None, "`takes` has checked this"
        b, _, s, size = q.shape
        if documents is None:
            offsets = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q.device)
            longest = s
        else:
            offsets = documents.offsets
            longest = documents.longest
        each = q, k, filled(v, size)
        packed = (x.transpose(1, 2).flatten(0, 1) for x in each)  # [b s, heads, head size]
        window = (-1, -1)  # how many keys a query sees (before its own key, after it); -1 means all
        if self.scores.causal:
            window = (self.scores.window - 1, 0)
        out = packed_attention(
            *packed,
            offsets,
            offsets,
            longest,
            longest,
            scale=self.scores.scale,
            window_size=window,
            enable_gqa=_is_grouped(given),
        )
        return AttentionResult(cut(out.unflatten(0, (b, s)).transpose(1, 2), v.shape[3]), None)


class MaskedKernel:
    """PyTorch's kernel with a mask. If several query heads share a key head, the keys and values
    are first copied for each query head, because no fused kernel supports shared keys with a mask.
    On a GPU the kernel does not return the log-sum-exp."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores

    def takes(self, given: Input) -> bool:
        """Return True for attention with windows or documents on a GPU, or in a compiled graph."""
        return not _in_blocks(given.q) and _is_limited(self.scores, given)

    def forward(self, given: Input, with_logsumexp: bool) -> AttentionResult:
        """Compute attention; see `Implementation.forward`."""
        q, scale = given.q, self.scores.scale
        hidden = hidden_keys(given.k, given.sight(self.scores))
        keys, values = _for_each_head(q, given.k, _as_kernels_need(q, given.v))
        size = given.v.shape[3]
        if with_logsumexp and q.device.type == "cpu":
            mask = None if hidden is None else _added(hidden, q)
            out, sums = _fused_on_cpu(q, keys, values, scale, mask=mask)
            return AttentionResult(cut(out, size), sums)
        seen = None if hidden is None else ~hidden
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale)
        return AttentionResult(cut(out, size), None)


class BlockedKernel:
    """Attention by PyTorch's CPU kernel, which is called for one block of queries at a time
    (`blocks`)."""

    def __init__(self, scores: Scores, kernels: Kernels, *, grouped: bool = False) -> None:
        self.scores = scores
        self.kernels = kernels
        self.grouped = grouped

    def takes(self, given: Input) -> bool:
        """Return True for attention with windows or documents. Also return True for long causal
        attention on a CPU, if the model has no grouped queries and the sequence is shorter than
        `whole_from`. From this length on, PyTorch's kernel computes a sequence in one call."""
        if _is_limited(self.scores, given):
            return True
        q = given.q
        if not self.scores.causal or self._is_grouped(given) or not _is_long_on_cpu(given):
            return False
        return q.shape[2] < self.kernels.chosen(q.device.type, q.dtype).attention.whole_from

    def forward(self, given: Input, with_logsumexp: bool) -> AttentionResult:
        """Compute attention; see `Implementation.forward`."""
        wide = (self.kernels.widened(part) for part in given[:3])
        whole_from = self.kernels.chosen(given.q.device.type, given.q.dtype).attention.whole_from
        is_plain = given.documents is None and not self.scores.window
        block = QUERY_BLOCK
        # Without context parallelism, one call computes such a sequence. Here, the rank has only
        # some positions of the sequence, and blocks of this size give the same bits as one call.
        if is_plain and (self._is_grouped(given) or given.k.shape[2] >= whole_from):
            block = LONG_BLOCK
        work = BlockedWork(given.sight(self.scores), with_logsumexp, block)
        out, sums = BlockedAttention.apply(*wide, work)
        return AttentionResult(out.to(given.q.dtype), sums)

    def _is_grouped(self, given: Input) -> bool:
        return self.grouped or _is_grouped(given)


class WholeKernel:
    """Attention by PyTorch's kernel, which is called once for whole sequences. On a GPU this
    implementation does not return the log-sum-exp."""

    def __init__(self, scores: Scores, kernels: Kernels) -> None:
        self.scores = scores
        self.kernels = kernels

    def takes(self, given: Input) -> bool:
        """Return True, because this kernel, the last one in the list, computes every remaining
        input."""
        return True

    def forward(self, given: Input, with_logsumexp: bool) -> AttentionResult:
        """Compute attention; see `Implementation.forward`."""
        q, k, v = (self.kernels.widened(part) for part in given[:3])
        grouped = _is_grouped(given)
        fills = v.shape[3] < q.shape[3] and _needs_filled_values(given.q)
        if grouped and (fills or not _shares_keys(given.q)):
            k, v = _for_each_head(given.q, k, v)
            grouped = False
        causal = self.scores.causal
        scale = self.scores.scale
        if fills:
            out, sums = self._filled(q, k, v)
            return AttentionResult(out.to(given.q.dtype), sums if with_logsumexp else None)
        if with_logsumexp and q.device.type == "cpu":
            out, sums = _fused_on_cpu(q, k, v, scale, causal=causal)
            return AttentionResult(out.to(given.q.dtype), sums)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        return AttentionResult(out.to(given.q.dtype), None)

    def _filled(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionResult:
        """Compute attention with values that are filled up with zeros to the head size of the
        queries, because the kernel needs values of this size."""
        causal, scale = self.scores.causal, self.scores.scale
        if torch.compiler.is_compiling():  # the compiler decides what it saves for the backward
            values = filled(v, q.shape[3])
            out = F.scaled_dot_product_attention(q, k, values, is_causal=causal, scale=scale)
            return AttentionResult(cut(out, v.shape[3]), None)
        out, sums = FilledAttention.apply(q, k, v, FilledWork(causal, scale))
        return AttentionResult(out, sums if q.device.type == "cpu" else None)


def _needs_filled_values(q: Tensor) -> bool:
    """Return True if the kernel of attention without a mask needs values with the head size of the
    queries q [b, heads, s, head size]. PyTorch's CPU kernel and FlashAttention need such values.
    The GPU kernel for wider types also supports values with a smaller head size.
    """
    return q.device.type == "cpu" or (_has_flash(q) and flash_takes(q.shape[3]))


def _as_kernels_need(q: Tensor, v: Tensor) -> Tensor:
    """Return the values v in the shape that PyTorch's kernel of attention with a mask needs. On a
    CPU, values are filled up with zeros to the head size of the queries q. On a GPU, they are
    unchanged."""
    return filled(v, q.shape[3]) if q.device.type == "cpu" else v


def _is_grouped(given: Input) -> bool:
    return given.q.shape[1] != given.k.shape[1]


def _is_limited(scores: Scores, given: Input) -> bool:
    """Return True if windows or documents limit the keys that a query sees, or if this rank has the
    queries of only some positions."""
    return given.documents is not None or scores.window > 0 or not given.positions.are_all


def _shares_keys(q: Tensor) -> bool:
    """Return True if the kernel of full attention can share a key head among several query heads.

    The CPU kernel and FlashAttention can share key heads. Other GPU kernels either cannot do so, or
    write all scores to memory. For these kernels the result is False.
    """
    return q.device.type == "cpu" or _has_flash(q)


def _has_flash(q: Tensor) -> bool:
    return q.dtype in host.HALF_TYPES and host.has_flash(q.device.type)


def _for_each_head(q: Tensor, *parts: Tensor) -> Sequence[Tensor]:
    """Return the tensors `parts` (keys or values) with as many heads as the queries q: [b, key
    heads, s, head size] -> [b, heads, s, head size]. A key head that several query heads share is
    copied for each of them."""
    group = q.shape[1] // parts[0].shape[1]
    if group == 1:
        return parts
    return [part.repeat_interleave(group, dim=1) for part in parts]


def _in_blocks(q: Tensor) -> bool:
    """Return True if queries are computed in blocks: on a CPU, but not in a compiled graph, which
    would have to contain every block separately."""
    return q.device.type == "cpu" and not torch.compiler.is_compiling()


def _is_long_on_cpu(given: Input) -> bool:
    return _in_blocks(given.q) and given.k.shape[2] > QUERY_BLOCK


def _fused_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> AttentionResult:
    """Call the kernel of PyTorch's CPU attention directly, because unlike
    F.scaled_dot_product_attention this call also returns the log-sum-exp."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return AttentionResult(*fused(q, k, v, 0.0, causal, attn_mask=mask, scale=scale))


def _added(hidden: Tensor, q: Tensor) -> Tensor:
    """Return a mask, in the type of q and in the shape of `hidden`, that is added to scores. It is
    -inf for keys that `hidden` marks, and 0 for all other keys."""
    zeros = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    return zeros.masked_fill(hidden, -torch.inf)


def hidden_keys(k: Tensor, seen: Sight) -> Tensor | None:
    """Return a bool mask that is True for the keys that a query does not see: [b, 1, queries, s] if
    `seen` has documents, otherwise [queries, s]. The keys `k` are [b, heads, s, head size]. Return
    None if every query sees all keys."""
    hidden, scores = None, seen.scores
    if scores.causal:
        keys = torch.arange(k.shape[2], device=k.device)
        queries = seen.positions.of(keys)[:, None]
        hidden = keys > queries
        if scores.window:
            hidden |= keys <= queries - scores.window
    if seen.documents is None:
        return hidden
    others = seen.documents.others(seen.positions)
    if hidden is not None:
        others.logical_or_(hidden)
    return others


@cache
def _packed_attention() -> Callable[..., Any] | None:
    """Return PyTorch's attention function for concatenated sequences. Return None if this version
    of PyTorch lacks the function, or if the function does not support windows, a scale or grouped
    queries. The function returns only the output of attention, unless further results are
    requested."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters.keys()
    if not {"window_size", "enable_gqa", "scale"} <= known:
        return None
    return varlen_attn
