"""Logical parameters, their boxes and their flat buffers."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.base.box import Box
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import Portion
from ptdmpi.model.parameters import (
    Declaration,
    Split,
    data_types,
    declare,
)
from ptdmpi.plan.layer.parts import ALIGNMENT
from tests._layers import CPU, whole_initial

QKV = Split(0, (7, 3, 3))


@given(
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    size=st.integers(1, 5),
    dim=st.integers(0, 1),
)
def test_boxes_deal_every_element_once(parts, size, dim):
    shape = (sum(parts), 3) if dim == 0 else (3, sum(parts))
    declaration = Declaration(shape, Split(dim, tuple(parts)), init=1.0, decay=True)
    counted = torch.zeros(shape, dtype=torch.int64)
    for rank in range(size):
        held = torch.zeros(declaration.local_shape(size), dtype=torch.int64)
        for one in declaration.held(rank, size):
            counted[one.logical.index] += 1
            held[one.local.index] += 1
            assert one.logical.size == one.local.size
        assert held.max() <= 1
    assert (counted == 1).all()


def test_boxes_take_the_same_share_of_each_part():
    declaration = Declaration((8, 2), Split(0, (4, 2, 2)), init=1.0, decay=True)
    boxes = [[one.logical for one in declaration.held(rank, 2)] for rank in (0, 1)]
    rows = [[list(range(box.start[0], box.stop[0])) for box in mine] for mine in boxes]
    assert rows == [[[0, 1], [4], [6]], [[2, 3], [5], [7]]]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shares_that_several_ranks_hold_count_once(size):
    """Eight queries and two keys and values: with eight ranks four hold one key each."""
    split = Split(0, (8, 2, 2), (8, 2, 2))
    declaration = Declaration((12, 3), split, init=1.0, decay=True)
    held, counted = torch.zeros(12), torch.zeros(12)
    for rank in range(size):
        rows = declaration.local_shape(size)[0]
        assert rows == 8 // size + 2 * max(1, 2 // size)
        for part, one in enumerate(declaration.held(rank, size)):
            first, last = one.logical.start[0], one.logical.stop[0]
            assert one.copies == (max(1, size // 2) if part else 1)
            held[first:last] += 1
            counted[first:last] += one.counts
            if part:  # the key that the queries of this rank belong to
                assert first - 6 - 2 * part == rank * 2 // size
    assert (counted == 1).all()
    assert held.tolist() == [1] * 8 + [max(1, size // 2)] * 4


def test_what_is_not_split_is_whole_on_every_rank():
    declaration = Declaration((5, 2), None, init=1.0, decay=True)
    for rank in range(3):
        (one,) = declaration.held(rank, 3)
        assert one.logical == one.local == Box((0, 0), (5, 2))


def named(size: int):
    return [
        ("table", declare(size, (11, 6), 0.3, split=Split(0, (11,)))),
        ("gain", declare(1, (6,), "ones", shared_gradient=True)),
        ("qkv.weight", declare(size, (13, 6), 0.1, split=QKV)),
        ("qkv.bias", declare(size, (13,), "zeros", split=QKV)),
        ("out.weight", declare(size, (6, 7), 0.1, split=Split(1, (7,)))),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_initial_weights_are_the_same_in_every_layout(size, precision):
    for rank in range(size):
        buffer = ParameterBuffer(named(size), data_types(precision), CPU, Portion(rank, size))
        buffer.initialise(42)
        for name, entry in buffer.entries.items():
            shape, init = entry.declaration.shape, entry.declaration.init
            whole = whole_initial(42, name, shape, init).to(buffer.masters[0].dtype)
            held = torch.zeros(entry.shape, dtype=torch.bool)
            local = entry.view(buffer.masters[0])
            for one in entry.declaration.held(rank, size):
                assert torch.equal(local[one.local.index], whole[one.logical.index])
                held[one.local.index] = True
            assert not local[~held].any(), "padding is not zero"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_are_views_of_the_buffers(precision):
    parameters = named(1)
    buffer = ParameterBuffer(parameters, data_types(precision), CPU, Portion())
    buffer.initialise(1)
    types = data_types(precision)
    assert (buffer.masters[0].dtype, buffer.gradients.dtype) == (types.master, types.master)
    spans = []
    for name, parameter in parameters:
        entry = buffer.entries[name]
        assert parameter.dtype == types.compute and parameter.requires_grad
        assert parameter.data_ptr() == entry.view(buffer.weights).data_ptr()
        assert parameter.main_grad.data_ptr() == entry.view(buffer.gradients).data_ptr()
        assert entry.start % ALIGNMENT == 0
        spans.append((entry.start, entry.start + parameter.numel()))
    by_place = sorted(buffer.entries.values(), key=lambda entry: entry.start)
    decays = [entry.declaration.decay for entry in by_place]
    assert decays == sorted(decays, reverse=True), "those with weight decay stand together"
    spans.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    buffer.masters[0] += 1
    buffer.refresh_weights()
    for name, parameter in parameters:
        expected = buffer.entries[name].view(buffer.masters[0]).to(types.compute)
        assert torch.equal(parameter.detach(), expected)


def test_weight_decay_is_for_matrices():
    decays = {name: parameter.declaration.decay for name, parameter in named(1)}
    assert [name for name, decay in decays.items() if not decay] == ["gain", "qkv.bias"]


def test_autograd_adds_to_main_grad_in_float32():
    parameters = [("gain", declare(1, (6,), "ones"))]
    buffer = ParameterBuffer(parameters, data_types("bf16"), CPU, Portion())
    buffer.initialise(0)
    ((_, gain),) = parameters
    for factor in (256.0, 1.0, 1.0):  # bfloat16 would stay at 256
        (gain * factor).sum().backward()
    assert gain.grad is None
    assert (gain.main_grad == 258.0).all()


def test_a_name_that_occurs_twice_is_one_weight_with_two_gradients():
    tables = [declare(1, (11, 6), 0.3), declare(1, (11, 6), 0.3)]
    buffer = ParameterBuffer(
        [("t", tables[0]), ("t", tables[1])], data_types("fp32"), CPU, Portion()
    )
    assert list(buffer.entries) == ["t"]
    assert tables[0].data_ptr() == tables[1].data_ptr()
    tables[0].main_grad += 1
    tables[1].main_grad += 2
    assert (buffer.entries["t"].view(buffer.gradients) == 1).all()
    assert (buffer.second["t"].view(buffer.gradients) == 2).all()
