"""The attention core: scores, softmax, and the weighted sum of values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ptdmpi.config import ModelConfig
from ptdmpi.config.precision import FLOAT32
from ptdmpi.plan.layer.account import (
    FusedAttention,
    Item,
    Kernel,
    MatrixProduct,
    MemoryPass,
    Message,
    Phase,
)
from ptdmpi.plan.layer.attention.blocks import (
    in_blocks,
    kept_probabilities,
    product_bytes,
    queries_at_once,
)
from ptdmpi.plan.layer.attention.ring import RingCore
from ptdmpi.plan.layer.attention.shape import CoreShape, core_shape, keeps_outputs
from ptdmpi.plan.layer.balance import imbalance
from ptdmpi.plan.layer.latent.values import filled_bytes, filling, fills_values, kept_filled
from ptdmpi.plan.layer.operator import Operator, hash_bytes
from ptdmpi.plan.layer.sizes import Sizes

# Megatron-LM of 2021 fuses scaling, mask and softmax under two conditions: there are at most
# FUSED_KEYS keys, and FUSED_HEADS divides the number of heads times the number of sequences in a
# microbatch (megatron/model/fused_softmax.py).
FUSED_KEYS = 2048
FUSED_HEADS = 4
# Bytes that the softmax moves for each score, as (forward, backward). The numbers are for scores of
# two bytes. The fused kernel (FUSED_SOFTMAX) reads only the half of the scores that the causal mask
# allows, but writes all scores. Without fusion (PLAIN_SOFTMAX), each term of a sum is one kernel.
# The kernels of the forward convert to float32, scale, mask, take the softmax, and convert to half
# precision. The backward has these kernels in reverse order, and also copies the gradient before it
# is masked.
FUSED_SOFTMAX = (3.0, 4.0)
PLAIN_SOFTMAX = (6 + 8 + 9 + 8 + 6, 6 + 12 + 8 + 9 + 8 + 6)


@dataclass(frozen=True)
class Attend(Operator):
    """softmax(Q K^T) V for each head, with mask, cap, window and dropout, followed by the
    concatenation of the outputs of all heads.

    Explicit attention writes all scores to memory: one score for each query, each key and each head
    of this rank. FlashAttention keeps no scores (Dao et al. 2022, arXiv 2205.14135, algorithm 4).
    `RingCore` describes the costs of ring attention. `feeds_kept` is True if the next linear layer
    keeps its input, which is the output of this operator. `feeds_kept` is False if the linear layer
    is frozen and has no adapters.
    """

    feeds_kept: bool = True

    recomputed_selectively: ClassVar[bool] = True

    def multiplications(self, model: ModelConfig) -> float:
        """Return the number of multiplications per position in Q K^T and P V, where P is the
        softmax of the scores. In a layer without a window, all positions of the sequence count as
        keys of a query, even under a causal mask. In a layer with a sliding window, the number of
        keys is the size of the window. Only some layers may have a window, so the result is the
        mean over all layers. Zeros that fill up the values of latent attention (`latent.values`)
        are not counted."""
        return (model.attention_width + model.values_width) * model.mean_keys

    # -- time -------------------------------------------------------------------------------------

    def core(self, sizes: Sizes, backward: bool) -> Iterator[Kernel]:
        """Yield the kernels that compute the outputs of the heads from queries, keys and values,
        or, if `backward` is True, the kernels of the backward. If the scores have a soft cap, the
        kernels are not fused."""
        if _in_ring(sizes):
            yield from RingCore(sizes).kernels(seen_share(sizes), backward)
            return
        s, d, v = sizes.model.seq_length, sizes.model.head_size, sizes.model.value_size
        heads, _, queries = CoreShape.of(sizes, sizes.priced_heads)
        batch = sizes.layout.micro_size * heads
        capped = sizes.model.attention_softcap > 0.0
        if sizes.fused_attention and not capped:
            # `of_values` is the number of matrix products that have the size of values instead of
            # the size of keys: one of the two products of a forward (P V), and two of the five
            # products of a backward (dO V^T and P^T dO).
            products, of_values = (5, 2) if backward else (2, 1)
            taken = d if fills_values(sizes) else v
            yield FusedAttention(
                rows=batch * queries,
                columns=s,
                head_size=d - of_values * (d - taken) / products,
                products=products,
                seen=seen_share(sizes),
            )
            yield from filling(sizes, backward=backward)
            return
        # The products are Q K^T and P V in a forward, and dO V^T, P^T dO, dS K and dS^T Q in a
        # backward. The backward of capped scores also computes Q K^T again, because the kernel for
        # capped scores keeps no scores.
        yield MatrixProduct(queries, s, v if backward else d, batch)
        yield MatrixProduct(queries, v, s, batch)
        again = backward and capped and sizes.fused_attention
        for _ in range(2 * backward + again):
            yield MatrixProduct(queries, d, s, batch)
        scores = batch * queries * s
        fused = not capped and s <= FUSED_KEYS and batch % FUSED_HEADS == 0
        softmax = (FUSED_SOFTMAX if fused else PLAIN_SOFTMAX)[backward]
        e = sizes.compute_bytes
        # the constants in `softmax` are for scores of two bytes, and a score has e bytes
        yield MemoryPass(scores * softmax * e / 2)
        if sizes.software.dropout:
            yield MemoryPass(scores * (2 * e + 1))

    def recomputed(self, sizes: Sizes) -> Iterator[Kernel]:
        # ring attention keeps no scores, so recomputing its core would free no memory
        if not _in_ring(sizes):
            yield from self.core(sizes, backward=False)

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        if _in_ring(sizes):
            yield from RingCore(sizes).messages(phase, seen_share(sizes), input_trains)

    def _merged(self, sizes: Sizes) -> Kernel:
        """Return the kernel that joins the outputs of the heads. In the backward, the same kernel
        splits the gradient of the joined output by head."""
        heads, _ = sizes.priced_heads
        width = heads * sizes.model.value_size
        return MemoryPass(sizes.tokens * width * 2 * sizes.compute_bytes)

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        yield from self.core(sizes, backward=False)
        yield self._merged(sizes)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        yield self._merged(sizes)
        yield from self.core(sizes, backward=True)

    # -- memory -----------------------------------------------------------------------------------

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the tensors that are kept for the backward. The output of attention is kept if the
        next linear layer keeps it as its input, or if the backward of the attention kernel reads
        it. With "ulysses", the operator `JoinHeads` keeps the output instead."""
        model, c = sizes.model, sizes.compute_bytes
        heads, kv_heads, _ = core_shape(sizes)
        explicit = model.attention_dropout > 0.0
        if sizes.layout.exchange != "ulysses" and (
            self.feeds_kept or self._keeps_own_output(sizes, mode)
        ):
            width = sizes.share(model.values_width)
            yield Item(f"{self.name}.output", sizes.tokens * width, c)
        if _in_ring(sizes):
            yield from RingCore(sizes).kept()
            return
        if not sizes.fused_attention:
            yield from self._kept_by_published_program(sizes)
            return
        # explicit attention (which stores its scores) copies each key head and value head for every
        # query head that shares it, but FlashAttention makes no copies
        repeated = heads if explicit else kv_heads
        # The kernel for capped scores also makes float32 copies, but does not keep them: for the
        # backward, it keeps its operands in their own type.
        capped = model.attention_softcap > 0.0 and not explicit
        copied = repeated != kv_heads
        copied = copied or (sizes.operand_bytes != c and not capped)
        queries = heads * _rows(sizes) * model.head_size
        keys = sizes.keys * sizes.key_value_size
        # If attention reads copies of queries, keys and values (`copied`), its backward needs only
        # the copies. Selective recomputation makes the copies again, so it keeps the original
        # tensors instead.
        if mode == "selective" or not copied:
            yield Item("attention.query_key_value", queries + kv_heads * keys, c)
        if copied:
            size = queries + repeated * keys
            yield Item("attention.query_key_value.copy", size, sizes.operand_bytes, "none")
        if explicit:
            yield from self._kept_scores(sizes)
        else:
            yield from self._kept_by_kernels(sizes)
        yield from kept_filled(sizes)

    def _keeps_own_output(self, sizes: Sizes, mode: str) -> bool:
        """Return True if the attention kernel keeps its output for its own backward, as the same
        tensor that the next operator reads. The output is then in memory even if the next linear
        layer does not keep its input. A kernel that converts its operands to float32 keeps a
        separate output in float32, so the result is False (`_kept_by_kernels` counts this output).
        For ring attention, and for a program without FlashAttention, the result is always True."""
        if _in_ring(sizes) or not sizes.fused_attention:
            return True
        same = sizes.operand_bytes == sizes.compute_bytes
        return same and keeps_outputs(sizes.model, selective=mode == "selective")

    def _kept_by_published_program(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the tensors that Megatron-LM keeps according to Korthikanti et al. 2022 (arXiv
        2205.05198, section 4.1). In that program, attention weights have dropout, and the softmax
        is the only fused kernel."""
        c, per_head = sizes.compute_bytes, sizes.tokens * sizes.model.head_size
        heads, kv_heads = sizes.local_heads
        scores = sizes.tokens * heads * sizes.model.seq_length
        yield Item("attention.query_key", (heads + kv_heads) * per_head, c)
        yield Item("attention.softmax", scores, c, "none")
        yield Item("attention.softmax.mask", scores, 1, "none")
        yield Item("attention.softmax.dropped", scores, c, "none")
        yield Item("attention.value", kv_heads * per_head, c)

    def _kept_scores(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the tensors that explicit attention keeps. Explicit attention stores its scores; it
        is used if attention weights have dropout. The tensors are the causal mask, if attention is
        causal, and several tensors as large as the scores. These are the probabilities before and
        after dropout, the dropout mask, and, with a soft cap, the values tanh(score / cap)."""
        model, scores = sizes.model, _scores(sizes)
        if model.attention == "causal":
            queries = core_shape(sizes).queries
            yield Item("attention.future", queries * model.seq_length, 1, "none")
        if model.attention_softcap:
            yield Item("attention.tangents", scores, sizes.compute_bytes, "none")
        yield Item("attention.softmax", scores, sizes.wide_bytes, "none")
        yield Item("attention.softmax.mask", scores, 1, "none")
        yield Item("attention.softmax.dropped", scores, sizes.operand_bytes, "none")

    def _kept_by_kernels(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the tensors that PyTorch's attention keeps in addition to queries, keys and values.
        The probabilities are among these tensors in two cases: if no fused kernel is available
        (`_stores_scores`), and if matrix products compute attention and keep the probabilities of
        each block of queries (`Software.kept_block`)."""
        model, c = sizes.model, sizes.compute_bytes
        heads, kv_heads, _ = core_shape(sizes)
        rows = _rows(sizes)
        if _stores_scores(sizes):
            yield Item("attention.softmax", _scores(sizes), sizes.wide_bytes, "none")
        elif not model.attention_softcap:  # the backward recomputes a capped softmax
            yield Item("attention.logsumexp", rows * heads, sizes.wide_bytes, "none")
        repeats = sizes.software.repeats_keys and not model.attention_softcap
        if repeats and c >= sizes.wide_bytes and kv_heads < heads:
            size = heads * sizes.keys * sizes.key_value_size
            yield Item("attention.key_value.copy", size, c, "none")
        if sizes.software.kept_block:
            yield Item("attention.probabilities", heads * kept_probabilities(sizes), c, "none")
        if sizes.operand_bytes != c and not model.attention_softcap:
            size = heads * rows * model.value_size
            yield Item("attention.output.copy", size, sizes.wide_bytes, "none")

    def forward_bytes(self, sizes: Sizes) -> int:
        """Return the working bytes of the forward, which are the sum over five groups of tensors:
        - queries, keys, values and the output
        - float32 copies of these tensors, if matrix products need such copies
        - values and outputs that are filled up with zeros (`latent.values`)
        - copies of keys and values, if a CPU computes attention in blocks of queries
        - the scores that are in memory at the same time
        """
        if _in_ring(sizes):
            return RingCore(sizes).forward_bytes()
        each = sizes.compute_bytes
        by_products = product_bytes(sizes, backward=False)
        if sizes.operand_bytes > each and not by_products:
            each += sizes.operand_bytes
        shape = core_shape(sizes)
        width = shape.heads * sizes.key_value_size
        scores = by_products + filled_bytes(sizes, backward=False)
        if in_blocks(sizes) and not by_products:
            copies = shape.kv_heads * sizes.keys * sizes.key_value_size
            scores += copies * sizes.operand_bytes
        if sizes.model.attention_dropout > 0.0:
            # While the mask is drawn, the probabilities are still in float32 or float64.
            scores = self.drawing_bytes(sizes)
            scores += _scores(sizes) * (sizes.wide_bytes - sizes.compute_bytes)
        elif _stores_scores(sizes):
            scores = 2 * _scores(sizes) * sizes.wide_bytes  # scores and probabilities
        return (_rows(sizes) + sizes.keys) * width * each + scores

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the working bytes of the backward.

        If scores are stored, the result counts the gradient of the values, and all tensors of the
        size of the scores that are in memory at the same time. With dropout, two such tensors are
        the gradients that a kernel reads and writes. On a CPU, a third one is a copy of the dropout
        mask in the type of the gradients. If no scores are stored, the result counts the gradients
        of the operands and of the output. The output itself is added if the kernel's backward reads
        it, but the planner counts it as freed (`_has_output_again`).
        """
        if _in_ring(sizes):
            return RingCore(sizes).backward_bytes()
        model = sizes.model
        heads = core_shape(sizes).heads
        rows = heads * _rows(sizes)
        if model.attention_dropout > 0.0:
            scores = _scores(sizes) * (2 + sizes.on_host) * sizes.wide_bytes
            # The published list of Megatron-LM's tensors (Korthikanti et al. 2022) does not include
            # the gradient of the values.
            if not sizes.fused_attention:
                return scores
            return scores + heads * sizes.keys * model.value_size * sizes.operand_bytes
        keys = heads * sizes.keys
        operands = (rows + keys) * sizes.key_value_size * sizes.operand_bytes
        if _stores_scores(sizes):
            # The softmax's backward needs three tensors as large as the scores, and the gradient of
            # the values.
            stored = 3 * _scores(sizes) + keys * model.value_size
            operands = max(operands, stored * sizes.wide_bytes)
        if in_blocks(sizes):
            operands = max(operands, self._blocked_bytes(sizes))
        if by_products := product_bytes(sizes, backward=True):
            operands = by_products
        elif self._has_output_again(sizes):
            operands += rows * model.value_size * sizes.compute_bytes
        return operands + filled_bytes(sizes, backward=True)

    def _has_output_again(self, sizes: Sizes) -> bool:
        """Return True if the kernel's backward reads the output of attention, and `backward_bytes`
        must add the bytes of this output.

        Another operator keeps this output: the next linear layer keeps it as its input, or, with
        "ulysses", `JoinHeads` keeps it. The planner counts tensors that later operators keep as
        freed before the backward of attention begins. But this output is still in memory during the
        backward of attention, because the kernel reads it. With "ulysses", the kernel reads the
        copy that `JoinHeads` has sent back.
        """
        reads = keeps_outputs(sizes.model, selective=False)
        if sizes.operand_bytes != sizes.compute_bytes or not reads:
            return False
        if sizes.layout.exchange == "ulysses":
            return True
        return self.feeds_kept and sizes.fused_attention

    def _blocked_bytes(self, sizes: Sizes) -> int:
        """Return the working bytes of the backward if a CPU computes attention in blocks of
        queries. The result counts the gradients of all operands and of the output, copies of the
        output's gradient, of the keys and of the values, and the gradients that one call of the
        kernel returns. A call has one block of queries, with up to all keys."""
        shape, d, both = core_shape(sizes), sizes.model.head_size, sizes.key_value_size
        block = queries_at_once(sizes)
        rows = shape.heads * (both * _rows(sizes) + 3 * d * block * sizes.layout.micro_size)
        return (rows + 3 * both * shape.kv_heads * sizes.keys) * sizes.operand_bytes

    def drawing_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes that are needed to draw the dropout mask of the attention
        weights. Drawing needs the hashes from which the mask is computed, and two tensors as large
        as the scores."""
        if sizes.model.attention_dropout == 0.0 or _in_ring(sizes):
            return 0
        scores = _scores(sizes)
        return hash_bytes(scores) + 2 * scores * sizes.compute_bytes


def _in_ring(sizes: Sizes) -> bool:
    return sizes.layout.exchange == "ring"


def _rows(sizes: Sizes) -> int:
    """Return the number of queries that this rank has for each of its heads in a microbatch."""
    return core_shape(sizes).queries * sizes.layout.micro_size


def _scores(sizes: Sizes) -> int:
    """Return the number of scores that this rank's heads have in a microbatch."""
    return core_shape(sizes).heads * _rows(sizes) * sizes.model.seq_length


def _stores_scores(sizes: Sizes) -> bool:
    """Return True if PyTorch's attention stores scores. PyTorch stores scores on a GPU in float64,
    because no GPU kernel fuses attention in float64. Capped scores are never stored, because they
    are computed in blocks of queries in every type."""
    wide = sizes.compute_bytes > FLOAT32.bytes and not sizes.model.attention_softcap
    return wide and sizes.fused_attention and not sizes.on_host


def seen_share(sizes: Sizes) -> float:
    """Return the fraction of the scores of a causal layer that lie in the sliding window. The
    fraction is the mean over all layers, where layers without a window count as 1. The result is
    for the context-parallel rank with the most scores in the window.

    On one rank, if every layer has a window and r = window / sequence length, the result is 1 - (1
    - r)^2.
    """
    model = sizes.model
    s, window = model.seq_length, model.sliding_window
    if not 0 < window < s:
        return 1.0
    sliding = (s - model.mean_keys) / (s - window)
    hidden = (1.0 - window / s) ** 2
    # with "ulysses" each rank has all queries of its heads, so all ranks have the same number of
    # scores
    ranks = s // core_shape(sizes).queries
    hidden -= (1.0 - hidden) * (imbalance(s, window, ranks) - 1.0)
    return 1.0 - sliding * hidden
