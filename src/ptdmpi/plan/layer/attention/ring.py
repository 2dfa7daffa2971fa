"""The costs of ring attention."""

from collections.abc import Iterator

from ptdmpi.plan.layer.account import Item, Kernel, MatrixProduct, MemoryPass, Message, Phase
from ptdmpi.plan.layer.chunks import QUERY_BLOCK, scores_at_once
from ptdmpi.plan.layer.operator import hash_bytes
from ptdmpi.plan.layer.sizes import Sizes

# Number of times that a score is read or written outside matrix products, in (forward, backward).
# The kernels of the forward compute maximum, difference, exponential and sum. The kernels of the
# backward compute difference, exponential, and the gradient of the scores.
SOFTMAX_PASSES = (6, 10)
# Bytes of a query's hash, from which the dropout mask of the query's attention weights is drawn.
HASH_BYTES = 8
# Number of times that the output is read or written for each block of keys and values that arrives.
# The sum over the blocks that arrived earlier is rescaled, and the contribution of the new block is
# added.
MERGE_PASSES = 5


class RingCore:
    """Ring attention: this rank's queries attend to the keys and values of all ranks, which arrive
    one block after the other.

    A block is the keys and values of one rank. Each block is sent around the ring of
    context-parallel ranks, and a visit is the time for which a block is on one rank. The sequence
    is cut into 2 c chunks for c ranks. Rank r has the chunks r and 2 c - 1 - r (zigzag order), so a
    rank has two chunks of queries, and a block has two chunks of keys. During a visit, there are
    four pairs of a query chunk and a key chunk. If the block comes from another rank, a causal mask
    hides two of the four pairs. If it is the rank's own block, the mask hides one pair, and cuts
    two of the other pairs along the diagonal.

    Scores are computed by matrix products in float32 or float64, for some of the queries and one
    chunk of keys at a time, and are not kept.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.chunk = sizes.model.seq_length // (2 * sizes.layout.context)
        heads, kv_heads = sizes.local_heads
        self.query_elements = heads * sizes.tokens * sizes.model.head_size
        self.output_elements = heads * sizes.tokens * sizes.model.value_size
        self.key_elements = kv_heads * sizes.tokens * sizes.key_value_size

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (number of queries, number of keys) for each pair of a query chunk and a key chunk
        whose scores are computed. If the two chunks of a pair have the same positions, the queries
        are computed in blocks, and each block reads only the keys up to its own last position. The
        number of keys of such a pair is therefore the mean over its blocks."""
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
        `seen` is the fraction of the scores that lie in the sliding window. The keys and values of
        each rank visit all other context-parallel ranks. In a backward, the gradients of these keys
        and values follow them, and in the end return to the rank that owns the keys and values.

        While a rank computes with one block of keys and values, the next block is already being
        sent. In a forward, all matrix products overlap with this message. In a backward, the
        products that compute scores overlap with the messages of keys and values, and all other
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
        """Return the working bytes of the forward, which are the sum over these tensors:
        - queries, keys and values of this rank, and the output
        - copies of the queries and the output in float32 or float64
        - two received blocks of keys and values (the present and the next block)
        - the scores that are computed at once
        """
        rows = self.query_elements + self.output_elements
        narrow = (rows + 3 * self.key_elements) * self.sizes.compute_bytes
        return narrow + rows * self.sizes.wide_bytes + self._tile_bytes(backward=False)

    def backward_bytes(self) -> int:
        """Return the working bytes of the backward, which are the sum over these tensors:
        - the gradient of the output
        - the queries and their gradient, in float32 or float64
        - two blocks of keys and values (the present and the next block)
        - three blocks of gradients of keys and values, in float32 or float64: this rank's
          contribution, the sum that arrives, and the new sum
        - the scores that are computed at once
        """
        wide = 2 * self.query_elements + 3 * self.key_elements
        narrow = self.output_elements + 2 * self.key_elements
        taken = wide * self.sizes.wide_bytes + narrow * self.sizes.compute_bytes
        return taken + self._tile_bytes(backward=True)

    def _tile_bytes(self, backward: bool) -> int:
        """Return the bytes of the tensors for one tile, which is the set of scores that are
        computed at once. These tensors are the attention weights, their gradients, the gradients of
        scores, and, with a soft cap, the values tanh(score / cap). Copies of the tile's queries,
        and of the gradients of their outputs, are included.

        With dropout, the weights or their gradients are in memory both before and after dropout,
        and the mask and a hash of each query are added. While the mask is drawn, memory holds only
        the weights and, in a forward, the weights of the previous tile.
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
