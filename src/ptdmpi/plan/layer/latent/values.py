"""Attention whose values have fewer elements in each head than its keys.

PyTorch's CPU kernel of attention, and FlashAttention on a GPU, need values of the size of keys.
These kernels get values that are filled up with zeros, and the zeros are cut off from the outputs.
FlashAttention with a sliding window keeps the filled tensors for its backward. Without a window,
and on a CPU, the filled tensors are freed, and the backward fills up values, outputs and gradients
again. Other kernels of attention need no zeros.
"""

from collections.abc import Iterator

from ptdmpi.plan.layer.account import Item, Kernel, MemoryPass
from ptdmpi.plan.layer.attention.blocks import queries_at_once
from ptdmpi.plan.layer.attention.shape import CoreShape, core_shape
from ptdmpi.plan.layer.sizes import Sizes


def fills_values(sizes: Sizes) -> bool:
    """Return True if the kernel of attention gets values that are filled up with zeros."""
    model, exchange = sizes.model, sizes.layout.exchange
    if model.value_size == model.head_size or not sizes.fused_attention or exchange == "ring":
        return False
    if model.attention_softcap or model.attention_dropout:
        return False  # attention by matrix products
    if sizes.on_host:
        return True
    # Two kinds of kernels also accept values that are smaller than keys: the kernels for float32
    # and float64, and the kernels for a rank that has queries at only some positions.
    return sizes.compute_bytes < sizes.wide_bytes and exchange != "all_gather"


def keeps_filled(sizes: Sizes) -> bool:
    """Return True if filled values and outputs are kept for the backward."""
    return fills_values(sizes) and not sizes.on_host and sizes.model.sliding_window > 0


def filling(sizes: Sizes, *, backward: bool) -> Iterator[Kernel]:
    """Yield the kernels that fill up the values, and cut off the zeros of the outputs. A backward
    fills up the values, the outputs, and the gradients of the outputs."""
    if not fills_values(sizes):
        return
    model = sizes.model
    shape = CoreShape.of(sizes, sizes.priced_heads)
    rows = shape.heads * shape.queries * sizes.layout.micro_size
    both = (model.head_size + model.value_size) * sizes.operand_bytes
    yield MemoryPass(shape.kv_heads * sizes.keys * both)
    if backward:
        yield MemoryPass(rows * both)
        yield MemoryPass(rows * both)
    else:
        yield MemoryPass(2 * rows * model.value_size * sizes.operand_bytes)


def filled_bytes(sizes: Sizes, *, backward: bool) -> int:
    """Return the working bytes of the filled tensors: values and outputs, and, in a backward, also
    the gradients of both. The values of all keys are counted, but only the outputs of the queries
    that one call of the kernel processes (`queries_at_once`)."""
    if not fills_values(sizes):
        return 0
    shape = core_shape(sizes)
    rows = queries_at_once(sizes) * sizes.layout.micro_size
    elements = shape.heads * rows + shape.kv_heads * sizes.keys
    return (1 + backward) * elements * sizes.model.head_size * sizes.operand_bytes


def kept_filled(sizes: Sizes) -> Iterator[Item]:
    """Yield the bytes that filling adds to the kept tensors: the zeros after the values, and the
    outputs with zeros."""
    if not keeps_filled(sizes):
        return
    model, shape = sizes.model, core_shape(sizes)
    rows = shape.heads * shape.queries * sizes.layout.micro_size
    zeros = shape.kv_heads * sizes.keys * (model.head_size - model.value_size)
    yield Item("attention.filled", zeros + rows * model.head_size, sizes.operand_bytes, "none")
