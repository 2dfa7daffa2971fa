"""Attention with context parallelism, where ranks have different positions of a sequence: the part
of the attention core that a rank computes, and the operators that communicate.

Each method of context parallelism has its own operators. A model has the operators of all methods,
but only the operators of the method that a layout uses have costs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ptdmpi.config import ModelConfig
from ptdmpi.plan.layer.account import Item, Kernel, MatrixProduct, MemoryPass, Message, Phase
from ptdmpi.plan.layer.chunks import EARLIER_BLOCK, QUERY_BLOCK, scores_at_once
from ptdmpi.plan.layer.operator import Operator, hash_bytes
from ptdmpi.plan.layer.sizes import Sizes

# Number of times that a score is read or written outside matrix products, in (forward, backward).
# The forward computes maximum, difference, exponential and sum. The backward computes difference,
# exponential, and the gradient of the scores.
SOFTMAX_PASSES = (6, 10)
# Bytes of a query's hash, from which the dropout mask of the query's attention weights is drawn.
HASH_BYTES = 8
# Number of times that the output is read or written for each block of keys and values that arrives.
# The output so far is scaled, and the contribution of the block is added.
MERGE_PASSES = 5


def key_copies(kv_heads: int, ranks: int) -> int:
    """Return the smallest number of copies of each key head with which the key heads can be
    distributed evenly over `ranks` ranks.

    If `ranks` divides the number of query heads, the result divides the number of query heads that
    share a key head.
    """
    return ranks // math.gcd(kv_heads, ranks)


def keeps_outputs(model: ModelConfig, selective: bool) -> bool:
    """Return True if the kernels of attention keep their outputs for the backward.

    With dropout or soft caps, attention is computed by matrix products, whose backward does not
    need the outputs. If `selective` is True (selective recomputation), no outputs are kept.
    """
    return not (selective or model.attention_dropout or model.attention_softcap)


class CoreShape(NamedTuple):
    """The part of the attention core, softmax(Q K^T) V, that a rank computes in each sequence. The
    fields are the number of query heads, the number of key heads, and the number of queries of each
    head. The rank reads the keys of all positions."""

    heads: int
    kv_heads: int
    queries: int

    @classmethod
    def of(cls, sizes: Sizes, heads_of_both: tuple[int, int]) -> "CoreShape":
        """Return the part of the core that a context-parallel rank computes. `heads_of_both` is
        (number of query heads, number of key heads) of the tensor-parallel rank.

        With "all_gather" and "ring", the rank computes all these heads for its own queries. With
        "ulysses", the rank computes 1/c of the heads for all queries, where c is the
        context-parallel size.
        """
        heads, kv_heads = heads_of_both
        length, c = sizes.model.seq_length, sizes.layout.context
        if sizes.layout.exchange != "ulysses":
            return cls(heads, kv_heads, length // c)
        return cls(-(-heads // c), -(-kv_heads * key_copies(kv_heads, c) // c), length)


def core_shape(sizes: Sizes) -> CoreShape:
    """Return the part of the attention core that a rank computes. If the tensor-parallel size does
    not divide the number of heads, the rank's number of heads is rounded up."""
    return CoreShape.of(sizes, sizes.local_heads)


def in_blocks(sizes: Sizes) -> bool:
    """Return True if the model runs on a CPU, and the CPU computes attention in blocks of queries,
    with one kernel for each block."""
    model = sizes.model
    is_cut = core_shape(sizes).queries < model.seq_length or model.sliding_window > 0
    is_long = model.attention == "causal" and model.seq_length > QUERY_BLOCK
    return sizes.on_host and sizes.fused_attention and (is_cut or is_long)


def queries_at_once(sizes: Sizes) -> int:
    """Return the number of queries of a head whose gradients one kernel computes."""
    queries = core_shape(sizes).queries
    if not in_blocks(sizes):
        return queries
    if queries < sizes.model.seq_length and not sizes.model.sliding_window:
        return min(EARLIER_BLOCK, queries // 2)  # this rank has two runs of queries
    return min(QUERY_BLOCK, queries)


def kept_probabilities(sizes: Sizes) -> int:
    """Return the number of attention probabilities per head that the forward of a microbatch keeps
    for the backward.

    The probabilities are kept in blocks of queries. A block has all keys up to the position of its
    last query, including keys that are outside the window or in other documents.
    """
    model, block = sizes.model, sizes.software.kept_block
    if model.attention != "causal" or model.attention_softcap:
        return 0
    count = 0
    # count the queries of the first context-parallel rank; in zigzag order all ranks have equally
    # many
    runs = [range(model.seq_length)]
    if core_shape(sizes).queries < model.seq_length:
        chunk = model.seq_length // (2 * sizes.layout.context)
        runs = [range(chunk), range(model.seq_length - chunk, model.seq_length)]
    for run in runs:
        for first in range(run.start, run.stop, block):
            end = min(first + block, run.stop)
            count += end * (end - first)
    return count * sizes.layout.micro_size


def capped_block_bytes(sizes: Sizes) -> int:
    """Return the working bytes of attention with a soft cap on the scores, for one block of queries
    with all keys.

    Five tensors with one element for each score are counted. Four of them are in float32 or
    float64: the scores, their tanh and the gradients of both. The fifth tensor, the attention
    weights, is in the type of matrix products, or, on a CPU, also in float32 or float64.
    """
    model = sizes.model
    if not model.attention_softcap:
        return 0
    micro_size, length = sizes.layout.micro_size, model.seq_length
    heads = core_shape(sizes).heads * micro_size
    group = model.heads // model.kv_heads * micro_size
    scores = scores_at_once(length, length, heads=heads, group=group)
    weights = sizes.wide_bytes if sizes.on_host else sizes.operand_bytes
    return scores * (4 * sizes.wide_bytes + weights)


@dataclass(frozen=True)
class _Exchange(Operator, ABC):
    """Messages over the context axis before or after the attention core, and the copies that these
    messages need."""

    @abstractmethod
    def _bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the exchanged tensors; 0 if the layout has another context-parallel
        method."""

    @abstractmethod
    def _copies(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the copy kernels that run before and after the message."""

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        yield from self._copies(sizes)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        yield from self._copies(sizes)

    def forward_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes of the exchanged tensors, which are in memory twice: in the
        order of ranks, and in the order in which they are used."""
        return 2 * self._bytes(sizes)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes of the gradients, which are in memory three times: in the
        order in which they were computed, in the order in which they are sent, and as received."""
        return 3 * self._bytes(sizes)


@dataclass(frozen=True)
class GatherKeys(_Exchange):
    """The gather of keys and values from all context-parallel ranks, after which each rank has the
    keys and values of all positions. Only the method "all_gather" needs this gather.

    In the backward, the gradients of keys and values are summed over the context axis (Dubey et al.
    2024, arXiv 2407.21783, section 3.3.2).
    """

    def _bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the keys and values of all positions; 0 if they are not gathered."""
        if sizes.layout.exchange != "all_gather":
            return 0
        size = sizes.local_heads[1] * sizes.keys * sizes.key_value_size
        return size * sizes.compute_bytes

    def _copies(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the copies that join keys and values in one tensor before the message, and put the
        positions in order after it."""
        if size := self._bytes(sizes):
            yield MemoryPass(2 * size * (1 + 1 / sizes.layout.context))

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        size, behind = self._bytes(sizes), tuple(self._overlapping(sizes, phase))
        if size and phase == "forward":
            yield Message("all_gather", size, "context", behind=behind)
        if size and phase in ("backward", "inputs") and input_trains:
            yield Message("reduce_scatter", size, "context", behind=behind)

    def _overlapping(self, sizes: Sizes, phase: Phase) -> Iterator[Kernel]:
        """Yield the kernels that run during the message: the matrix product that computes the
        queries, or the matrix products of its backward."""
        if not sizes.gathers_early:
            return
        rows, inputs, outputs = sizes.tokens, sizes.model.hidden, sizes.query_width
        if phase == "forward":
            yield MatrixProduct(rows, outputs, inputs)
            return
        yield MatrixProduct(rows, inputs, outputs)
        if phase == "backward" and not sizes.model.adapt.adapts:
            yield MatrixProduct(inputs, outputs, rows)


@dataclass(frozen=True)
class _Dealing(_Exchange):
    """An all-to-all before or after the attention core. The all-to-all before the core exchanges
    all heads at a rank's own positions for some of the heads at all positions. The all-to-all after
    the core does the reverse. Only the method "ulysses" needs these two all-to-alls.

    In the core, each of c context-parallel ranks has 1/c of the heads at all positions (Jacobs et
    al. 2023, arXiv 2309.14509, section 3.1).
    """

    @abstractmethod
    def _elements(self, sizes: Sizes) -> int:
        """Return the number of elements that a rank has before the exchange. The rank has the same
        number of elements after the exchange."""

    def _bytes(self, sizes: Sizes) -> int:
        """Return the bytes that a rank has before the exchange; 0 if nothing is exchanged."""
        deals = sizes.layout.exchange == "ulysses"
        return deals * self._elements(sizes) * sizes.compute_bytes

    def _copies(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the copies before and after the exchange. The first copy collects the elements for
        each receiver, and the second copy restores the order of heads and positions."""
        if size := self._bytes(sizes):
            yield MemoryPass(4 * size, launches=2)

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        size = self._bytes(sizes)
        sends = phase == "forward" or (phase in ("backward", "inputs") and input_trains)
        if size and sends:
            # the size of an all-to-all is the number of bytes that leave the rank
            yield Message("all_to_all", size - size // sizes.layout.context, "context")


@dataclass(frozen=True)
class DealHeads(_Dealing):
    """Queries, keys and values of all heads at this rank's positions -> queries, keys and values of
    this rank's heads at all positions. Key heads are repeated if their number is not divisible by
    the context-parallel size."""

    def _elements(self, sizes: Sizes) -> int:
        heads, kv_heads = sizes.local_heads
        keys = kv_heads * key_copies(kv_heads, sizes.layout.context)
        return sizes.tokens * (heads * sizes.model.head_size + keys * sizes.key_value_size)


@dataclass(frozen=True)
class JoinHeads(_Dealing):
    """Outputs of this rank's heads at all positions -> outputs of all heads at this rank's
    positions.

    If the backward of the attention kernel needs the kernel's outputs, they are not kept where they
    were computed: in the backward, ranks first send the outputs back, and then the gradients of the
    outputs. `feeds_kept` is True if the next linear layer keeps its input.
    """

    feeds_kept: bool = True

    def _elements(self, sizes: Sizes) -> int:
        return sizes.tokens * sizes.share(sizes.model.values_width)

    def sends_back(self, sizes: Sizes) -> bool:
        """Return True if the backward sends outputs back to the ranks that have computed them."""
        selective = sizes.layout.recompute == "selective"
        return self._bytes(sizes) > 0 and keeps_outputs(sizes.model, selective)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        for _ in range(1 + self.sends_back(sizes)):
            yield from self._copies(sizes)

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        for _ in range(1 + (phase != "forward" and self.sends_back(sizes))):
            yield from super().messages(sizes, phase, input_trains)

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the joined outputs if the next linear layer keeps them as its input, or if the
        backward sends them back."""
        sends_back = keeps_outputs(sizes.model, selective=mode == "selective")
        size = self._bytes(sizes)
        if size and (self.feeds_kept or sends_back):
            each = sizes.compute_bytes
            yield Item(f"{self.name}.output", size // each, each)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the gradients during the exchange, and of the outputs that are sent
        back."""
        return super().backward_bytes(sizes) + self.sends_back(sizes) * self._bytes(sizes)


class RingCore:
    """Ring attention: this rank's queries attend to the keys and values of all ranks, which arrive
    one block after the other.

    Scores are computed by matrix products in float32 or float64, for a block of queries and a chunk
    of keys at a time, and are not kept. A block of keys and values visits each rank. A rank has two
    chunks of queries, and a block has two chunks of keys, so a visit has four pairs of a query
    chunk and a key chunk. Under a causal mask, the rank computes the scores of only two of the four
    pairs, or, for its own block, of three pairs, two of which are on the diagonal.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.chunk = sizes.model.seq_length // (2 * sizes.layout.context)
        heads, kv_heads = sizes.local_heads
        self.query_elements = heads * sizes.tokens * sizes.model.head_size
        self.output_elements = heads * sizes.tokens * sizes.model.value_size
        self.key_elements = kv_heads * sizes.tokens * sizes.key_value_size

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (number of queries, number of keys) for each pair of chunks whose scores are
        computed. In a pair on the diagonal, each block of queries reads only the keys up to its own
        last position, so the number of keys is a mean over these blocks."""
        chunk, visits = self.chunk, self.sizes.layout.context
        if self.sizes.model.attention != "causal":
            yield from [(chunk, chunk)] * (4 * visits)
            return
        yield from [(chunk, chunk)] * (2 * visits - 1)
        yield from [(chunk, (chunk + min(QUERY_BLOCK, chunk)) // 2)] * 2

    def kernels(self, seen: float, backward: bool) -> Iterator[Kernel]:
        """Yield the kernels of ring attention in a forward, or, if `backward` is True, in a
        backward. `seen` is the fraction of the scores that lie in the sliding window."""
        sizes = self.sizes
        for queries, all_keys in self._pairs():
            keys = max(1, round(all_keys * seen))
            yield from self._score_products(queries, keys, backward)
            yield from self._value_products(queries, keys, backward)
            passes, blocks = SOFTMAX_PASSES[backward], -(-queries // QUERY_BLOCK)
            moved_bytes = self._batch * queries * keys * passes * sizes.wide_bytes
            yield MemoryPass(moved_bytes, launches=passes * blocks)
        merged_bytes = MERGE_PASSES * self.output_elements * sizes.wide_bytes
        yield MemoryPass(merged_bytes * sizes.layout.context)

    @property
    def _batch(self) -> int:
        return self.sizes.layout.micro_size * self.sizes.priced_heads[0]

    def _score_products(self, queries: int, keys: int, backward: bool) -> Iterator[Kernel]:
        """Yield the matrix products whose result has the shape of the scores [queries, keys] of a
        pair of chunks: Q K^T, and in a backward also dO V^T."""
        model = self.sizes.model
        yield MatrixProduct(queries, keys, model.head_size, self._batch)
        if backward:
            yield MatrixProduct(queries, keys, model.value_size, self._batch)

    def _value_products(self, queries: int, keys: int, backward: bool) -> Iterator[Kernel]:
        """Yield the matrix products that read the scores [queries, keys] of a pair of chunks: P V
        in a forward, and P^T dO, dS^T Q and dS K in a backward."""
        d, v = self.sizes.model.head_size, self.sizes.model.value_size
        if not backward:
            yield MatrixProduct(queries, v, keys, self._batch)
            return
        yield MatrixProduct(keys, v, queries, self._batch)
        yield MatrixProduct(keys, d, queries, self._batch)
        yield MatrixProduct(queries, d, keys, self._batch)

    def messages(self, phase: Phase, seen: float, input_trains: bool) -> Iterator[Message]:
        """Yield the messages of one phase (forward, backward, or a part of a split backward).
        `seen` is the fraction of the scores that lie in the sliding window. Each block of keys and
        values visits all other context-parallel ranks. In a backward, the gradients of the block
        follow the block, and in the end return to the rank that owns it.

        The matrix products of a visit overlap with the messages of the next visit. In a backward,
        the products that compute scores overlap with the messages of keys and values, and all other
        products overlap with the messages of gradients. Nothing overlaps with the last message, in
        which the gradients return to their own rank.
        """
        if phase == "weights" or (phase != "forward" and not input_trains):
            return
        sizes, visits = self.sizes, self.sizes.layout.context
        backward = phase != "forward"
        pairs = 2 if sizes.model.attention == "causal" else 4
        shape = (self.chunk, max(1, round(self.chunk * seen)), backward)
        scores, values = tuple(self._score_products(*shape)), tuple(self._value_products(*shape))
        hides = scores * pairs if backward else (*scores, *values) * pairs
        size = self.key_elements * sizes.compute_bytes
        for _ in range(visits - 1):
            yield Message("all_to_all", size, "context", to_next=True, behind=hides)
        if backward:
            wide = self.key_elements * sizes.wide_bytes
            for _ in range(visits - 1):
                yield Message("all_to_all", wide, "context", to_next=True, behind=values * pairs)
            yield Message("all_to_all", wide, "context", to_next=True)

    def kept(self) -> Iterator[Item]:
        """Yield the tensors that ring attention keeps for the backward, in addition to its
        output."""
        sizes = self.sizes
        size = self.query_elements + self.key_elements
        yield Item("attention.query_key_value", size, sizes.compute_bytes)
        rows = sizes.tokens * sizes.local_heads[0]
        yield Item("attention.logsumexp", rows, sizes.wide_bytes)

    def forward_bytes(self) -> int:
        """Return the working bytes of the forward: the bytes of the inputs and the output, of
        copies of the queries and the output in float32 or float64, of two blocks of keys and values
        (the present and the next block), and of the scores."""
        rows = self.query_elements + self.output_elements
        narrow = (rows + 3 * self.key_elements) * self.sizes.compute_bytes
        return narrow + rows * self.sizes.wide_bytes + self._tile_bytes(backward=False)

    def backward_bytes(self) -> int:
        """Return the working bytes of the backward. The result counts the bytes of the gradient of
        the output; of the queries and their gradient in float32 or float64; of two blocks of keys
        and values; of three blocks of their gradients (this rank's contribution, the sum that
        arrives, and the new sum); and of the scores."""
        wide = 2 * self.query_elements + 3 * self.key_elements
        narrow = self.output_elements + 2 * self.key_elements
        taken = wide * self.sizes.wide_bytes + narrow * self.sizes.compute_bytes
        return taken + self._tile_bytes(backward=True)

    def _tile_bytes(self, backward: bool) -> int:
        """Return the bytes for the scores that are computed at once: the bytes of the attention
        weights, of their gradients and of the gradients of scores, and, with a soft cap, of the
        values tanh(score / cap). Copies of the queries to which these scores belong, and of the
        gradients of the outputs of these queries, are included.

        With dropout, the weights or gradients are in memory both before and after dropout, and the
        mask and a hash of each query are added. While the mask is drawn, memory holds only the
        weights and, in a forward, the weights of the previous scores.
        """
        sizes, model = self.sizes, self.sizes.model
        micro_size = sizes.layout.micro_size
        group = model.heads // model.kv_heads * micro_size
        heads = sizes.local_heads[0] * micro_size
        scores = scores_at_once(self.chunk, self.chunk, heads=heads, group=group)
        each = scores * sizes.wide_bytes
        taken = 3 * each
        if model.attention_dropout > 0.0:
            rows = sizes.local_heads[0] * sizes.tokens
            drawing = (2 - backward) * each + hash_bytes(scores)
            taken = max(4 * each, drawing) + scores + HASH_BYTES * rows
        if model.attention_softcap:
            taken += each
        each = model.head_size + model.value_size
        return taken + scores // self.chunk * each * sizes.compute_bytes
