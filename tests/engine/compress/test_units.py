"""Units are those of the logical model: whatever the tensor axis, the same elements make up the
same units, and get the same codes."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.engine.compress.line import Coder
from ptdmpi.engine.compress.quantise import Qsgd
from ptdmpi.engine.compress.sparse import TopK
from ptdmpi.engine.compress.units import Numbers, TileBatch, batches, slabs
from ptdmpi.model.flat import FlatOrder, Portion
from ptdmpi.model.parameters import Split, declare

HEADS, SIZE, KEY_HEADS, FFN, VOCABULARY = 4, 6, 2, 40, 37
HIDDEN = HEADS * SIZE
MOST = math.gcd(HEADS, FFN)


def named(tensor_size: int):
    parts, most = (HIDDEN, KEY_HEADS * SIZE, KEY_HEADS * SIZE), (HEADS, KEY_HEADS, KEY_HEADS)
    qkv = Split(0, parts, most)
    shapes = {
        "qkv.weight": ((sum(parts), HIDDEN), qkv),
        "qkv.bias": ((sum(parts),), qkv),
        "down.weight": ((HIDDEN, FFN), Split(1, (FFN,))),
        "norm.weight": ((HIDDEN,), None),
        "table.weight": ((VOCABULARY, HIDDEN), Split(0, (VOCABULARY,))),
        "positions.weight": ((10, HIDDEN), None),
    }
    return [(name, declare(tensor_size, *one, split=split)) for name, (shape, split) in
            shapes.items() for one in [(shape, 0.0)]]  # fmt: skip


def order(tensor_rank: int, tensor_size: int) -> FlatOrder:
    return FlatOrder(named(tensor_size), Portion(tensor_rank, tensor_size))


def local(whole: dict, flat_order: FlatOrder) -> torch.Tensor:
    """What a rank holds of logical tensors, flat; the padding is 7."""
    flat = torch.full((flat_order.size,), 7.0)
    portion = flat_order.portion
    for name, entry in flat_order.entries.items():
        for share in entry.declaration.held(portion.tensor_rank, portion.tensor_size):
            entry.view(flat)[share.local.index] = whole[name][share.logical.index]
    return flat


def compressed(flat_order: FlatOrder, flat: torch.Tensor, compressor, most: int = 2**20):
    """C of everything, in place; the names of all units with their lengths."""
    names = []
    some = list(slabs(flat_order, MOST))
    for batch in batches(some, compressor.longest, flat.device, most):
        coder = Coder(compressor, batch, key=5)
        code, arrives = coder.encode(batch.read(flat), source=1)
        assert len(code) == coder.code_bytes(flat.dtype)
        assert torch.equal(coder.decode(code, 1, flat.dtype), arrives)
        batch.write(flat, arrives)
        names += [(n, length) for _, length, numbers in batch.units for n in numbers.host.tolist()]
    return names


@pytest.mark.parametrize("compressor", [TopK(0.1), Qsgd(3, unbiased=True)], ids=["top_k", "qsgd"])
@pytest.mark.parametrize("longest", [None, 50])
def test_the_tensor_axis_changes_no_bit(compressor, longest):
    compressor = copy.copy(compressor)
    compressor.longest = longest or compressor.longest
    generator = torch.Generator().manual_seed(1)
    whole = {
        name: torch.randn(parameter.declaration.shape, generator=generator)
        for name, parameter in named(1)
    }
    serial = order(0, 1)
    flat = local(whole, serial)
    names = compressed(serial, flat, compressor)
    assert len(set(names)) == len(names)
    assert sum(length for _, length in names) == sum(x.numel() for x in whole.values())
    result = {name: entry.view(flat) for name, entry in serial.entries.items()}
    assert any(not torch.equal(result[name], whole[name]) for name in whole)
    for size in (2, 4):
        every = set()
        for rank in range(size):
            mine = order(rank, size)
            flat = local(whole, mine)
            every.update(compressed(mine, flat, compressor))
            assert torch.equal(flat, local(result, mine))  # and the padding is as it was
        assert every == set(names)


@pytest.mark.long
@given(st.integers(1, 5000))
def test_batches_of_any_size_are_the_same(most):
    serial = order(0, 1)
    flat = torch.randn(serial.size, generator=torch.Generator().manual_seed(2))
    once, again = flat.clone(), flat.clone()
    names = compressed(serial, once, TopK(0.2))
    assert sorted(compressed(serial, again, TopK(0.2), most)) == sorted(names)
    assert torch.equal(once, again)


def test_tiles_are_whole_heads_and_any_row_of_a_table():
    tiles = {(slab.entry.name, slab.first): slab for slab in slabs(order(0, 1), MOST)}
    assert (tiles["qkv.weight", 0].lines, tiles["qkv.weight", 0].length) == (SIZE, HIDDEN)
    assert (tiles["down.weight", 0].lines, tiles["down.weight", 0].length) == (FFN // 4, HIDDEN)
    assert (tiles["table.weight", 0].lines, tiles["table.weight", 0].length) == (1, HIDDEN)
    assert tiles["norm.weight", 0].tiles == tiles["positions.weight", 0].tiles == 1


def test_some_tiles_of_a_batch_have_a_code_of_their_own():
    """That of these tiles alone: who owns which tiles says nothing of their values."""
    serial = order(0, 1)
    flat = torch.randn(serial.size, generator=torch.Generator().manual_seed(2))
    (slab,) = [one for one in slabs(serial, MOST) if one.entry.name == "table.weight"]
    batch = TileBatch([slab], 10, flat.device)
    x = batch.read(flat)
    some = torch.tensor([3, 8, 36])
    numbers = Numbers(some, some)
    for one in (TopK(0.3), Qsgd(2, unbiased=True)):
        for rounds in (1, 2):
            whole = Coder(one, batch, 5, rounds)
            part = whole.of(numbers)
            every = whole.encode(x, 0)[1]
            code, arrives = part.encode(x[some], 0)
            assert len(code) == part.code_bytes(x.dtype)
            assert torch.equal(part.decode(code, 0, x.dtype), arrives)
            assert torch.equal(arrives, every[some])


def test_rounds_leave_ever_less():
    """A round sends the rest of those before: (1 - delta)^R is left."""
    serial = order(0, 1)
    flat = torch.randn(serial.size, generator=torch.Generator().manual_seed(2))
    for batch in batches(list(slabs(serial, MOST)), 4096, flat.device):
        x = batch.read(flat)
        for rounds in (1, 2, 5):
            left = (Coder(TopK(0.2), batch, 5, rounds).encode(x, 0)[1] - x).square().sum()
            assert left <= (1 - 0.2) ** rounds * x.square().sum() * 1.05
