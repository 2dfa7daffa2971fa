"""The operators of context parallelism that communicate before and after the attention core. With
context parallelism, each rank has some of the positions of every sequence.

Each method of context parallelism has its own operators. Every model description has the operators
of all methods, but an operator has costs only if the layout uses its method.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from ptdmpi.plan.layer.account import Item, Kernel, MatrixProduct, MemoryPass, Message, Phase
from ptdmpi.plan.layer.attention.shape import keeps_outputs, key_copies
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.sizes import Sizes


@dataclass(frozen=True)
class _Exchange(Operator, ABC):
    """An operator that sends messages over the context axis before or after the attention core. Its
    only kernels are the copies before and after the messages."""

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
        """Yield the copies before and after the gather. Keys and values are first joined in one
        tensor, and after the gather, the positions are put in order."""
        if size := self._bytes(sizes):
            yield MemoryPass(2 * size * (1 + 1 / sizes.layout.context))

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        size, behind = self._bytes(sizes), tuple(self._overlapping(sizes, phase))
        if size and phase == "forward":
            yield Message("all_gather", size, "context", behind=behind)
        if size and phase in ("backward", "inputs") and input_trains:
            yield Message("reduce_scatter", size, "context", behind=behind)

    def _overlapping(self, sizes: Sizes, phase: Phase) -> Iterator[Kernel]:
        """Yield the kernels that run during the message. During the gather of a forward, the matrix
        product of the queries runs. During the sum of a backward, the products run that compute the
        gradients for this matrix product."""
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
    """An all-to-all before or after the attention core. Before the all-to-all that precedes the
    core, a rank has all heads at its own positions. After this all-to-all, the rank has only some
    of the heads, but at all positions. The all-to-all after the core does the reverse. Only the
    method "ulysses" needs these two all-to-alls.

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
    """The all-to-all before the core. Its input is the queries, keys and values of all heads at
    this rank's positions, and its output is the queries, keys and values of this rank's heads at
    all positions. If the context-parallel size does not divide the number of key heads, key heads
    are first repeated (`key_copies`)."""

    def _elements(self, sizes: Sizes) -> int:
        heads, kv_heads = sizes.local_heads
        keys = kv_heads * key_copies(kv_heads, sizes.layout.context)
        return sizes.tokens * (heads * sizes.model.head_size + keys * sizes.key_value_size)


@dataclass(frozen=True)
class JoinHeads(_Dealing):
    """The all-to-all after the core. Its input is the outputs of this rank's heads at all
    positions, and its output is the outputs of all heads at this rank's positions.

    The backward of the attention kernel may need the kernel's outputs. The outputs are kept only
    after the all-to-all, where they are also the input of the next linear layer. In the backward, a
    first all-to-all therefore sends the outputs back to the ranks that have computed them, and a
    second one sends the gradients of the outputs. `feeds_kept` is True if the next linear layer
    keeps its input.
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
        """Return the bytes of the gradients during the all-to-all, and of the outputs that are sent
        back to the ranks that have computed them."""
        return super().backward_bytes(sizes) + self.sends_back(sizes) * self._bytes(sizes)
