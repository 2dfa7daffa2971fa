"""The operators of multi-head latent attention between its linear layers (DeepSeek-AI 2024, V2:
arXiv 2405.04434, section 2.1).

One linear layer compresses each position to a latent vector: `q_lora_rank` elements for the
queries, `kv_lora_rank` elements for keys and values, and `rope_head_size` elements of the rotary
key, which all heads share. Two further linear layers expand the latent vector to queries, keys and
values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ptdmpi.plan.layer.account import Elementwise, Item, Kernel, MemoryPass, Message, Phase
from ptdmpi.plan.layer.elementwise import norm_backward, norm_operands, norm_statistics
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Norm, Part
from ptdmpi.plan.layer.products import Multiply, summed
from ptdmpi.plan.layer.sizes import Sizes

# Number of times that the rotation reads or writes each rotated element. For each half of the
# rotated elements, the rotation computes a product and a sum.
ROTATED_MOVES = 5
EXPANSION = "attention.kv_up"  # name of the operator that expands keys and values


@dataclass(frozen=True)
class SplitLatents(Operator):
    """The output of the compressing linear layer, [rows, `width`] -> the normalized latent vectors
    of queries (if the model compresses queries) and of keys and values, and the rotary key.

    `norms` are the norms of the latent vectors, in the order of the outputs. Under sequence
    parallelism, the rows are only this rank's positions.
    """

    norms: tuple[tuple[str, Norm], ...]
    width: int

    def parts(self) -> dict[str, Part]:
        return dict(self.norms)

    def _elements(self, sizes: Sizes) -> int:
        return sizes.local_tokens * self.width

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        e = sizes.compute_bytes
        for _, norm in self.norms:
            yield Elementwise(sizes.model.norm, sizes.local_tokens * norm.size, (2 * e,))

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels of the norms' backward, and the kernel that joins the gradients of the
        latent vectors and of the rotary key."""
        e = sizes.compute_bytes
        for _, norm in self.norms:
            elements = sizes.local_tokens * norm.size
            yield Elementwise(f"{sizes.model.norm}_backward", elements, (3 * e, 2 * e))
        yield MemoryPass(2 * self._elements(sizes) * e)

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the input and the statistics of the norms. The input is the whole output of the
        compressing linear layer, because the inputs of the norms are views of this output."""
        yield Item("attention.latents.input", self._elements(sizes), sizes.compute_bytes)
        yield norm_statistics(sizes, "attention.latents", len(self.norms) * sizes.local_tokens)

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        for name, norm in self.norms:
            yield from norm_operands(sizes, name, norm)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the working bytes of the backward. The norms are computed from the last to the
        first; the gradients of their inputs stay in memory until they are joined."""
        most = done = 0
        for _, norm in reversed(self.norms):
            elements = sizes.local_tokens * norm.size
            most = max(most, done + norm_backward(sizes, elements))
            done += elements * sizes.compute_bytes
        return max(most, done + self._elements(sizes) * sizes.compute_bytes)


class ExpandLatents(Multiply):
    """The linear layer that expands the latent vector to the keys and values of this rank's heads.
    In generation with a cache, the latent vectors are not expanded: the attention core works on the
    latent vectors themselves (V2, section 2.1.2)."""


@dataclass(frozen=True)
class JoinLatents(Operator):
    """Expanded queries [positions, sequences, heads of this rank x head size], expanded keys and
    values [positions, sequences, heads of this rank x (unrotated elements + values)] and the rotary
    key [rows, rotated elements] -> queries, keys and values by head.

    The rotated elements are the last ones of each query and of each key. All heads have the same
    rotary key, so each tensor rank computes only a summand of the gradient of the rotary key.
    """

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that compute queries, keys and values. For the queries, the kernels
        rotate the last elements and join them with the unrotated elements. For the keys, the
        kernels rotate the rotary key and join it with the unrotated elements of each head's key.
        The values are copied."""
        shape = _Shape.of(sizes)
        e = sizes.compute_bytes
        yield from shape.rotations(e, turns_back=False)
        yield MemoryPass(2 * shape.queries * e)
        yield MemoryPass((shape.plain + shape.key + shape.queries) * e)
        yield MemoryPass(2 * shape.values * e)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels of the backward. These kernels rotate gradients back, sum the gradient
        of the rotary key over the heads, and join the rotated and the unrotated elements of each
        input's gradient."""
        shape = _Shape.of(sizes)
        e = sizes.compute_bytes
        yield from shape.rotations(e, turns_back=True)
        yield MemoryPass(2 * shape.queries * e)
        yield MemoryPass(2 * (shape.plain + shape.values) * e)
        yield MemoryPass((shape.rotated + shape.key) * e)

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        """Yield the gather of the rotary key under sequence parallelism, and the sum of the rotary
        key's gradient over the tensor axis."""
        if sizes.layout.tensor == 1:
            return
        size = _Shape.of(sizes).key * sizes.compute_bytes
        if phase == "forward" and sizes.divides_sequence:
            yield Message("all_gather", size)
        if phase in ("backward", "inputs") and input_trains:
            yield summed(sizes, size)

    def forward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the inputs, of the outputs, and of the rotated elements of the
        queries."""
        shape = _Shape.of(sizes)
        elements = shape.inputs + shape.rotated + 2 * shape.queries + shape.values
        return elements * sizes.compute_bytes

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the gradients of the inputs, and of one more tensor: the gradient of
        the queries' rotated elements is separate until it is joined with the rest of the queries'
        gradient."""
        shape = _Shape.of(sizes)
        return (shape.inputs + shape.rotated) * sizes.compute_bytes


@dataclass(frozen=True)
class _Shape:
    """The numbers of elements on one tensor rank, at all positions of a context rank. `queries` is
    the number of elements of the queries, and also of the keys. `plain` and `rotated` are the
    numbers of unrotated and rotated elements of the queries. `values` is for the values, and `key`
    for the rotary key."""

    queries: int
    plain: int
    rotated: int
    values: int
    key: int

    @classmethod
    def of(cls, sizes: Sizes) -> "_Shape":
        """Return the numbers of elements for the model and the layout of `sizes`."""
        model, tokens = sizes.model, sizes.tokens
        each = tokens * sizes.local_heads[0]
        return cls(
            queries=each * model.head_size,
            plain=each * (model.head_size - model.rope_head_size),
            rotated=each * model.rope_head_size,
            values=tokens * sizes.share(model.values_width),
            key=tokens * model.rope_head_size,
        )

    @property
    def inputs(self) -> int:
        """Return the number of elements of the inputs of `JoinLatents`."""
        return self.queries + self.plain + self.values + self.key

    def rotations(self, element_bytes: int, *, turns_back: bool) -> Iterator[Kernel]:
        """Yield the kernels that rotate the queries and the rotary key. If `turns_back` is True,
        the kernels rotate gradients back, and another kernel then copies the gradient with the two
        elements of each rotated pair next to each other."""
        for elements in (self.rotated, self.key):
            yield MemoryPass(ROTATED_MOVES * elements * element_bytes, launches=4)
            if turns_back:
                yield MemoryPass(2 * elements * element_bytes)


class ExpandOutputs(Operator):
    """The expansion of the outputs of the heads to the size of a head's values, in generation with
    a cache. In such generation, the outputs of the attention core are weighted sums of latent
    vectors. In training, the values are expanded before the attention core, so this operator
    returns its input and has no costs."""
