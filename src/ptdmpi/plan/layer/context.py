"""Attention over the context axis, whose ranks have different positions of a sequence: the part of
the attention core that a rank computes, and the operators that communicate.

Each method of context parallelism has its own operators. The operators of methods that a layout
does not use have no costs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ptdmpi.config import ModelConfig
from ptdmpi.plan.layer.account import Item, Kernel, MatrixProduct, MemoryPass, Message, Phase
from ptdmpi.plan.layer.chunks import QUERY_BLOCK, scores_at_once
from ptdmpi.plan.layer.operator import Operator, hash_bytes
from ptdmpi.plan.layer.sizes import Sizes

# How often a score is read or written outside of matrix products, in a forward and in a backward.
# The forward computes maximum, difference, exponential and sum. The backward computes difference,
# exponential, and the gradient of the scores.
SOFTMAX_PASSES = (6, 10)
HASH_BYTES = 8  # Bytes of a query's hash, from which the dropout of its attention weights is drawn.
# The number of times that the output is read or written for each block of keys and values that
# arrives: the output so far is scaled, and the block's contribution is added.
MERGE_PASSES = 5


def key_copies(kv_heads: int, ranks: int) -> int:
    """Return the number of copies of each key head that are needed to distribute the key heads over
    `ranks` ranks. The result is the smallest number of copies with which all ranks have equally
    many key heads.

    If `ranks` divides the number of query heads, the number of copies divides the number of query
    heads that share a key head.
    """
    return ranks // math.gcd(kv_heads, ranks)


def keeps_outputs(model: ModelConfig, selective: bool) -> bool:
    """Return True if the kernels of attention keep their outputs for the backward.

    With dropout or soft caps, attention is computed by products, which do not need the outputs.
    Under `selective` recomputation, no outputs are kept.
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
        """Return the part of the core that a context rank computes. `heads_of_both` is (number of
        query heads, number of key heads) of the tensor rank.

        With "all_gather" and "ring" a context rank computes all heads for its own queries. With
        "ulysses" a context rank computes 1/c of the heads for all queries, where c is the number of
        context ranks.
        """
        heads, kv_heads = heads_of_both
        length, c = sizes.model.seq_length, sizes.layout.context
        if sizes.layout.exchange != "ulysses":
            return cls(heads, kv_heads, length // c)
        return cls(-(-heads // c), -(-kv_heads * key_copies(kv_heads, c) // c), length)


@dataclass(frozen=True)
class _Exchange(Operator, ABC):
    """Messages over the context axis before or after the attention core, and the copies that they
    need."""

    @abstractmethod
    def _bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the exchanged tensors; 0 if the layout has another method."""

    @abstractmethod
    def _copies(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the copies before and after a message."""

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
    """The gather of keys and values from all context ranks. Each rank then has the keys and values
    of all positions. Only the method "all_gather" needs this gather.

    The gradients of keys and values are summed over the context axis (Dubey et al. 2024, arXiv
    2407.21783, section 3.3.2).
    """

    def _bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the keys and values of all positions; 0 if they are not gathered."""
        if sizes.layout.exchange != "all_gather":
            return 0
        size = 2 * sizes.local_heads[1] * sizes.keys * sizes.model.head_size
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
        """Yield the kernels that run during the message: the product of the queries, or the
        products of its backward."""
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
    """An all-to-all before or after the attention core. Before the first all-to-all a rank has all
    heads at its own positions; after it the rank has some heads at all positions. The all-to-all
    after the core does the reverse. Only the method "ulysses" needs these all-to-alls.

    In the core each of c context ranks has 1/c of the heads at all positions (Jacobs et al. 2023,
    arXiv 2309.14509, section 3.1).
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
            # an all-to-all counts the bytes that leave the rank
            yield Message("all_to_all", size - size // sizes.layout.context, "context")


@dataclass(frozen=True)
class DealHeads(_Dealing):
    """Queries, keys and values of all heads at this rank's positions -> queries, keys and values of
    this rank's heads at all positions. Key heads are repeated if their number is not divisible by
    the number of context ranks."""

    def _elements(self, sizes: Sizes) -> int:
        heads, kv_heads = sizes.local_heads
        keys = 2 * kv_heads * key_copies(kv_heads, sizes.layout.context)
        return sizes.tokens * (heads + keys) * sizes.model.head_size


@dataclass(frozen=True)
class JoinHeads(_Dealing):
    """Outputs of this rank's part of the heads at all positions -> outputs of all heads at this
    rank's positions.

    If the kernel of attention keeps its outputs, the memory of these outputs is freed. In the
    backward, ranks first send the outputs back, and then their gradients. `feeds_kept` is True if
    the next linear keeps its input.
    """

    feeds_kept: bool = True

    def _elements(self, sizes: Sizes) -> int:
        return sizes.tokens * sizes.share(sizes.model.attention_width)

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
        """Yield the joined outputs if the next linear keeps them as its input, or if the backward
        sends them back."""
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
    """Attention of this rank's queries to the keys and values of all ranks, which arrive one block
    after the other.

    Scores are computed by matrix products in float32 or wider, for a block of queries and a chunk
    of keys at a time, and are not kept. The arrival of one block of keys and values is called a
    visit. A rank has two chunks of queries, and a block has two chunks of keys, so each visit has
    four pairs of a query chunk and a key chunk. Under a causal mask, a rank computes the scores of
    two of the four pairs. For its own block of keys, the rank computes three pairs, of which two
    are on the diagonal.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.chunk = sizes.model.seq_length // (2 * sizes.layout.context)
        heads, kv_heads = sizes.local_heads
        self.query_elements = heads * sizes.tokens * sizes.model.head_size
        self.key_elements = 2 * kv_heads * sizes.tokens * sizes.model.head_size

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (number of queries, number of keys) for each pair of chunks whose scores are
        computed. On the diagonal, each block of queries reads the keys up to its own last position,
        and the number of keys is the mean over blocks."""
        chunk, visits = self.chunk, self.sizes.layout.context
        if self.sizes.model.attention != "causal":
            yield from [(chunk, chunk)] * (4 * visits)
            return
        yield from [(chunk, chunk)] * (2 * visits - 1)
        yield from [(chunk, (chunk + min(QUERY_BLOCK, chunk)) // 2)] * 2

    def kernels(self, seen: float, backward: bool) -> Iterator[Kernel]:
        """Yield the kernels of a forward or of a backward. `seen` is the fraction of the scores
        that lie in the sliding window."""
        sizes = self.sizes
        for queries, all_keys in self._pairs():
            keys = max(1, round(all_keys * seen))
            yield from self._score_products(queries, keys, backward)
            yield from self._value_products(queries, keys, backward)
            passes, blocks = SOFTMAX_PASSES[backward], -(-queries // QUERY_BLOCK)
            moved_bytes = self._batch * queries * keys * passes * sizes.wide_bytes
            yield MemoryPass(moved_bytes, launches=passes * blocks)
        merged_bytes = MERGE_PASSES * self.query_elements * sizes.wide_bytes
        yield MemoryPass(merged_bytes * sizes.layout.context)

    @property
    def _batch(self) -> int:
        return self.sizes.layout.micro_size * self.sizes.priced_heads[0]

    def _score_products(self, queries: int, keys: int, backward: bool) -> Iterator[Kernel]:
        """Yield the matrix products whose result has the shape of the scores of a pair of chunks: Q
        K^T, and in a backward also dO V^T."""
        yield from [MatrixProduct(queries, keys, self.sizes.model.head_size, self._batch)] * (
            1 + backward
        )

    def _value_products(self, queries: int, keys: int, backward: bool) -> Iterator[Kernel]:
        """Yield the matrix products that read the scores of a pair of chunks: P V in a forward, and
        P^T dO, dS^T Q and dS K in a backward."""
        d = self.sizes.model.head_size
        if backward:
            yield from [MatrixProduct(keys, d, queries, self._batch)] * 2
        yield MatrixProduct(queries, d, keys, self._batch)

    def messages(self, phase: Phase, seen: float, input_trains: bool) -> Iterator[Message]:
        """Yield the messages of one phase (forward, backward, or a part of a split backward). Each
        block of keys and values visits all other context ranks. In a backward, the gradients of the
        block are sent after the block. At the end, the gradients return to the rank that owns the
        block.

        The products of a visit overlap with the messages of the next visit. In a backward the
        products that compute scores overlap with the messages of keys and values. All other
        products overlap with the messages of gradients, except with the last message, in which the
        gradients return to their own rank.
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
        """Yield the tensors that attention in a ring keeps for the backward in addition to its
        output."""
        sizes = self.sizes
        size = self.query_elements + self.key_elements
        yield Item("attention.query_key_value", size, sizes.compute_bytes)
        rows = sizes.tokens * sizes.local_heads[0]
        yield Item("attention.logsumexp", rows, sizes.wide_bytes)

    def forward_bytes(self) -> int:
        """Return the number of working bytes of the forward: for the inputs and the output, for the
        queries and the output in the type of sums, for two blocks of keys and values (the present
        and the next block), and for the scores."""
        narrow = 2 * self.query_elements + 3 * self.key_elements
        wide = 2 * self.query_elements * self.sizes.wide_bytes
        return narrow * self.sizes.compute_bytes + wide + self._tile_bytes(backward=False)

    def backward_bytes(self) -> int:
        """Return the number of working bytes of the backward, for these tensors: the gradient of
        the output; the queries and their gradient in the type of sums; two blocks of keys and
        values; three blocks of their gradients (this rank's part, the sum that arrives, and the new
        sum); the scores."""
        wide = 2 * self.query_elements + 3 * self.key_elements
        narrow = self.query_elements + 2 * self.key_elements
        taken = wide * self.sizes.wide_bytes + narrow * self.sizes.compute_bytes
        return taken + self._tile_bytes(backward=True)

    def _tile_bytes(self, backward: bool) -> int:
        """Return the number of bytes for the scores that are computed at once: the weights, their
        gradients and the gradients of scores; with a soft cap also the values tanh(score / cap).
        The bytes include copies of the queries that these scores belong to, and of the gradients of
        the outputs of these queries.

        With dropout, there are also the weights or gradients before and after dropout, the mask,
        and a hash of each query. While the mask is drawn, only the weights are in memory and, in a
        forward, the weights of the previous scores.
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
        return taken + 2 * scores // self.chunk * model.head_size * sizes.compute_bytes
