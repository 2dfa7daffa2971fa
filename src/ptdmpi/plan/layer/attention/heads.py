"""The operator between attention's first linear layer and its core: the division into heads."""

from collections.abc import Iterator
from dataclasses import dataclass

from ptdmpi.config import Layout
from ptdmpi.plan.layer.account import Elementwise, Item, Kernel, MemoryPass
from ptdmpi.plan.layer.elementwise import norm_backward, norm_operands, norm_statistics
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Norm, Part
from ptdmpi.plan.layer.sizes import Sizes


@dataclass(frozen=True)
class SplitHeads(Operator):
    """The division of the output of attention's first linear layer into queries, keys and values by
    head, and the norms and the rotation of queries and keys. The output of the linear layer is
    [positions, sequences, (query heads + 2 key heads) of this rank x head size].

    `norms` has the norm of queries and the norm of keys, or is empty if the model has no such
    norms. Each norm is over one head (Dehghani et al. 2023, arXiv 2302.05442, section 2), or, if
    `joins_heads` is True, over all heads together (Muennighoff et al. 2024, arXiv 2409.02060,
    section 2). `rotates` is True if the model has RoPE (Su et al. 2021, arXiv 2104.09864).
    """

    norms: tuple[tuple[str, Norm], ...] = ()
    rotates: bool = False
    joins_heads: bool = False

    def parts(self) -> dict[str, Part]:
        return dict(self.norms)

    def refuses(self, layout: Layout) -> str | None:
        # the norm covers all heads, but each tensor-parallel rank has only some of them
        if self.joins_heads and layout.tensor > 1:
            return (
                f'model.qk_norm = "all" normalises all heads together, but parallel.tensor = '
                f"{layout.tensor} divides them; legal: tensor = 1"
            )
        return None

    def _normalised(self, sizes: Sizes, backward: bool) -> Iterator[Kernel]:
        """Yield the kernels of the norm of queries and the norm of keys. Their time is computed as
        if a single norm covered both queries and keys."""
        if not self.norms:
            return
        heads, kv_heads = sizes.priced_heads
        each = sizes.tokens * sizes.model.head_size
        e = sizes.compute_bytes
        name: str = sizes.model.norm
        moved: tuple[int, ...] = (2 * e,)
        if backward:
            name = f"{name}_backward"
            moved = (3 * e, 2 * e, 3 * e)
        yield Elementwise(name, each * (heads + kv_heads), moved)
        yield Elementwise(name, each * kv_heads, moved, priced=False)

    def rotations(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels of the rotation: one kernel in Triton, or four kernels in PyTorch (two
        products, a difference and a sum). Queries and keys are rotated as one tensor, or as two
        tensors if they have norms. No time is counted for these kernels (`priced` is False),
        because the predicted times of other kernels already include it (see `account.py`)."""
        if not self.rotates:
            return
        heads, kv_heads = sizes.priced_heads
        rotations: tuple[int, ...] = (heads + kv_heads,)
        if self.norms:
            rotations = heads, kv_heads
        for count in rotations:
            moved = _moved_bytes(sizes, count)
            if sizes.by_triton("rope"):
                yield MemoryPass(moved, priced=False)
                continue
            # each product reads and writes all elements; each other kernel reads two halves and
            # writes one half
            yield MemoryPass(2 * moved * (1 + 0.75), launches=4, priced=False)

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels of norms and rotation. If queries and keys are rotated, values are
        copied. Without the copy, values would be a view of the linear layer's output, and would
        keep this whole output in memory."""
        yield from self._normalised(sizes, backward=False)
        yield from self.rotations(sizes)
        if self.rotates:
            _, kv_heads = sizes.priced_heads
            yield MemoryPass(_moved_bytes(sizes, kv_heads), priced=False)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that join the gradients of queries, keys and values, and the kernels of
        the backward of norms and rotation. If queries and keys were rotated together, their
        gradients are joined before the rotation's backward."""
        yield from self._normalised(sizes, backward=True)
        yield from self.rotations(sizes)
        heads, kv_heads = sizes.priced_heads
        if self.rotates and not self.norms:
            yield MemoryPass(_moved_bytes(sizes, heads + kv_heads), priced=False)
        yield MemoryPass(_moved_bytes(sizes, heads + 2 * kv_heads))

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the input and the statistics of the norms of queries and keys. Queries and keys
        before the norms are views of the first linear layer's output, so the whole output is kept,
        including the values."""
        if not self.norms:
            return
        heads, kv_heads = sizes.local_heads
        size = sizes.tokens * (heads + 2 * kv_heads) * sizes.model.head_size
        yield Item("attention.query_key_norms.input", size, sizes.compute_bytes)
        rows = sizes.tokens * (2 if self.joins_heads else heads + kv_heads)
        yield norm_statistics(sizes, "attention.query_key_norms", rows)

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        for name, norm in self.norms:
            yield from norm_operands(sizes, name, norm)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the working bytes of the backward: the gradient of the input, and the tensors that
        the backwards of rotation and norms need.

        The gradients of queries and keys are joined in one tensor before the backward of the
        rotation. This backward writes two more tensors of the same size (in Triton, one). If there
        are norms, the backward of the queries' norm comes last, and the gradients of queries and
        keys are still in memory at that time. For a program without FlashAttention (Megatron-LM of
        2021) the result is 0, because the published list of a layer's tensors (Korthikanti et al.
        2022) does not include these tensors.
        """
        if not sizes.fused_attention:
            return 0
        heads, kv_heads = sizes.local_heads
        each, c = sizes.tokens * sizes.model.head_size, sizes.compute_bytes
        joined = each * (heads + 2 * kv_heads) * c
        both = each * (heads + kv_heads) * c
        if self.norms:
            return both + max(joined, norm_backward(sizes, each * heads))
        if self.rotates and not sizes.by_triton("rope"):
            return both + max(joined, 2 * both)
        if self.rotates:
            return both + joined
        return joined


def _moved_bytes(sizes: Sizes, heads: int) -> int:
    """Return the number of bytes that a kernel moves if it reads and writes `heads` heads at all
    positions."""
    return 2 * sizes.tokens * heads * sizes.model.head_size * sizes.compute_bytes
