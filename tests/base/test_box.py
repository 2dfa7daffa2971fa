"""The rectangle: what it says of itself is what numpy finds in an array."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.base.box import Box

SHAPE = (5, 4, 3)
TABLE = np.arange(60).reshape(SHAPE)


@st.composite
def boxes(draw) -> Box:
    corners = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in SHAPE]
    ends = [(a, b) if a < b else (0, n) for (a, b), n in zip(corners, SHAPE, strict=True)]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@given(boxes(), boxes())
def test_overlap_holds_what_both_hold(one, other):
    common = set(TABLE[one.index].flat) & set(TABLE[other.index].flat)
    found = one.overlap(other)
    assert (set() if found is None else set(TABLE[found.index].flat)) == common
    if found is not None:
        inside = TABLE[one.index][found.relative(one).index]
        np.testing.assert_array_equal(inside, TABLE[found.index])
        assert found.relative(one).within(one) == found


@given(boxes(), st.integers(1, 6))
def test_sizes_rows_and_slabs(box, rows):
    values = TABLE[box.index]
    assert box.size == values.shape and box.elements == values.size
    np.testing.assert_array_equal(TABLE[box.rows(0, 1).index], values[:1])
    slabs = [TABLE[slab.index] for slab in box.slabs(rows)]
    np.testing.assert_array_equal(np.concatenate(slabs), values)
    assert {len(slab) for slab in slabs[:-1]} <= {rows}
    np.testing.assert_array_equal(TABLE.T[box.transposed().index], values.T)


def test_other_dims_and_words():
    box = Box.whole((5, 4)).along(1, 2, 3)
    assert str(box) == "[0:5, 2:3]" and box.index == (slice(0, 5), slice(2, 3))
    with pytest.raises(ValueError, match="argument 2 is"):
        box.overlap(Box.whole((5,)))
