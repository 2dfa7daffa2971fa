"""The scores that each context rank computes, counted position by position."""

import itertools

import pytest

from ptdmpi.config import Layout
from ptdmpi.model.sequence.positions import Positions
from ptdmpi.plan.layer.attention.core import seen_share
from ptdmpi.plan.layer.balance import imbalance
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.machine.cluster import load_model

LENGTH = 960
CONTEXTS = (1, 2, 3, 4, 5, 8)


def counted(context: int, window: int) -> list[int]:
    """The scores of each rank: a query at position i sees min(i + 1, window) keys."""
    ranks = (Positions(rank, context) for rank in range(context))
    return [
        sum(min(i + 1, window) for i in itertools.chain(*positions.runs(LENGTH)))
        for positions in ranks
    ]


def busiest(context: int, window: int) -> float:
    scores = counted(context, window)
    return max(scores) * context / sum(scores)


@pytest.mark.parametrize("context", CONTEXTS)
def test_causal_attention_is_the_same_work_on_every_rank(context):
    """At most 3 % is what is promised; the zigzag has none at all."""
    assert busiest(context, LENGTH) == 1.0 == imbalance(LENGTH, LENGTH, context)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("window", [60, 200, 480, 700, 900])
def test_windows_are_priced_as_on_the_busiest_rank(context, window):
    """The closed form is that of continuous positions, which has no diagonal."""
    assert imbalance(LENGTH, window, context) == pytest.approx(busiest(context, window), rel=5e-3)
    assert (imbalance(LENGTH, window, context) > 1) == (context > 1)
    model = load_model(f"l=2,h=64,a=2,s={LENGTH}").config
    model = model.model_copy(update={"sliding_window": window})
    sizes = Sizes(model, Layout(1, 1, 1, context=context), "fp32")
    whole = LENGTH * (LENGTH + 1) / 2 / context
    assert seen_share(sizes) == pytest.approx(max(counted(context, window)) / whole, rel=5e-3)


def test_slices_in_order_would_not_be_balanced():
    """What the zigzag avoids: with slices in the order of ranks the last has 1.75 of the mean."""
    slices = [range(n * LENGTH // 4, (n + 1) * LENGTH // 4) for n in range(4)]
    scores = [sum(i + 1 for i in own) for own in slices]
    assert max(scores) * 4 / sum(scores) == pytest.approx(1.75, rel=1e-2)
