"""Who makes which matrix orthogonal: cuts of the flat order, and owners by what there is to do."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptdmpi.config.layout import Dealing
from ptdmpi.config.zero import Sharing
from ptdmpi.plan.shape.dealt import Slice, dealt, owners, slices
from ptdmpi.plan.shape.matrices import matrix_elements
from ptdmpi.plan.shape.parameters import ModelPart
from tests._configs import small


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 50), st.data())
def test_slices_are_what_the_equal_parts_of_a_unit_have(shards, share, data):
    """Against each shard's own overlap, in a unit that begins anywhere."""
    first = data.draw(st.integers(0, 100))
    last = first + shards * share
    start = data.draw(st.integers(first, last - 1))
    stop = data.draw(st.integers(start + 1, last))
    wanted = []
    for shard in range(shards):
        begin, end = (first + share * (shard + k) for k in (0, 1))
        begin, end = max(begin, start), min(end, stop)
        if begin < end:
            wanted.append(Slice(shard, begin - start, end - start))
    assert slices(range(start, stop), range(first, last), shards) == wanted


def test_an_owner_holds_a_part_and_has_least_to_do():
    matrices = [
        ([Slice(0, 0, 5), Slice(1, 5, 6)], 10),  # 0 has more of it
        ([Slice(0, 0, 9), Slice(1, 9, 10)], 4),  # 0 is busy
        ([Slice(2, 0, 8)], 1),  # nobody else has a part
        ([Slice(1, 0, 3), Slice(2, 3, 6)], 1),
        ([Slice(0, 0, 1), Slice(1, 1, 9)], 1),
    ]
    assert list(owners(matrices)) == [0, 1, 2, 2, 1]


@pytest.mark.parametrize("shards", [1, 2, 5, 16])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("method", ["none", "lora"])
def test_all_is_made_once_and_what_one_gives_another_takes(method, zero, shards):
    config = small({"model.kind": "llama", "model.layers": 6, "adapt.method": method})
    told = (config.model, 101, ModelPart.whole(config.model), Sharing(zero, shards))
    every = dealt(*told)
    assert sum(one.elements for one in every) == matrix_elements(config.model)
    per_layer = 14 if method == "lora" else 4
    assert sum(one.makes.total() for one in every) == 6 * per_layer
    for (a, one), (b, other) in itertools.permutations(enumerate(every), 2):
        assert one.gives[b] == other.takes[a]
    for one in every:
        made = sum(own * number for (_, own), number in one.makes.items())
        assert made + one.gives.total() == one.elements
        whole = sum(kind.local * number for (kind, _), number in one.makes.items())
        assert made + one.takes.total() == whole
        assert one.most <= one.gives.total() and (shards > 1 or not one.most)


def test_experts_on_other_ranks_are_apart_from_all_else():
    """Two experts of a rank are one unit, which two shards cut between them: no part of an
    expert is sent, and each rank makes the two matrices of one expert in every layer."""
    shape = {"model.kind": "llama", "model.layers": 3, "model.experts": 4}
    model = small(shape | {"model.experts_per_token": 2, "model.expert_hidden": 16}).model
    part = ModelPart.whole(model)._replace(dealing=Dealing(2))
    for zero in (1, 3):
        for work in dealt(model, 101, part, Sharing(zero, 2)):
            for shapes in (((16, 32), (16, 32)), ((32, 16),)):
                (made,) = ((w, own) for w, own in work.makes if w.shapes == shapes)
                assert made[1] == made[0].local and work.makes[made] == 3
