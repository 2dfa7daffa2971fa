"""The covering set has every legal pair, and no case that cannot be trained."""

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.parity import layouts, probe
from ptdmpi.parity.layouts import (
    LAYOUT_FACTORS,
    MODEL_FACTORS,
    Case,
    ComparedLayout,
    pairs,
    refusal,
)
from ptdmpi.parity.mixtures import mixture_cases
from ptdmpi.parity.run import TrainingTask, configuration

# by hand: 1f1b and zb-h1 have one chunk per rank, zb-v two; partitioned activations are recomputed
# in full and not divided along the sequence; all other pairs can be trained on 16 ranks
ILLEGAL = {
    frozenset({("virtual", virtual), ("schedule", schedule)})
    for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2))
    for virtual in {1, 2, 3} - {chunks}
} | {
    frozenset({("partition_activations", True), other})
    for other in (("recompute", "none"), ("recompute", "selective"), ("sequence_parallel", True))
}
# what zero 2 and 3 sum at once the split backwards put off; groups need sharding, and several ranks
ILLEGAL |= {
    frozenset({("zero", zero), ("schedule", schedule)})
    for zero, schedule in itertools.product((2, 3), ("zb-h1", "zb-v"))
}
ILLEGAL |= {frozenset({("shard_group", 2), other}) for other in (("zero", 0), ("data", 1))}


@functools.cache
def held() -> set[layouts.Pair]:
    """Return the pairs of settings and effects in all cases."""
    cases = layouts.covering_set()
    return {pair for case in cases for pair in pairs(case.settings | case.effects)}


def strategy(factors: dict[str, tuple]) -> st.SearchStrategy[tuple]:
    return st.tuples(*(st.sampled_from(values) for values in factors.values()))


@pytest.mark.long
def test_every_legal_pair_of_settings_is_covered():
    values = [(name, v) for name, of in (LAYOUT_FACTORS | MODEL_FACTORS).items() for v in of]
    every = {frozenset(pair) for pair in itertools.combinations(values, 2) if len(dict(pair)) == 2}
    cases = layouts.covering_set()
    covered = {frozenset(pair) for case in cases for pair in pairs(case.settings)}
    assert every - covered == ILLEGAL
    assert not covered & ILLEGAL


@given(strategy(LAYOUT_FACTORS), strategy(MODEL_FACTORS))
def test_no_legal_case_of_the_models_has_a_pair_of_effects_that_is_not_covered(layout, model):
    nearest = min(
        layouts.models(),
        key=lambda known: sum(
            vars(known)[name] != value for name, value in zip(MODEL_FACTORS, model, strict=True)
        ),
    )
    case = Case(ComparedLayout(**dict(zip(LAYOUT_FACTORS, layout, strict=True))), nearest)
    if refusal(case, layouts.MOST_RANKS) is None:
        assert set(pairs(case.settings | case.effects)) <= held()


@pytest.mark.parametrize(
    ("effect", "setting"),
    [
        ("divided_sequence", ("dropout", True)),
        ("divided_sequence", ("recompute", "full")),
        ("scattered_boundary", ("schedule", "interleaved")),
        ("partitioned", ("dropout", True)),
        ("partitioned", ("documents", True)),
        ("uneven_stages", ("tied", True)),
        ("uneven_stages", ("virtual", 3)),
        ("padded_vocabulary", ("tied", True)),
        ("padded_vocabulary", ("masked", True)),
        ("copies", ("tied", True)),
        ("copies", ("pipeline", 2)),
        ("summed_by_microbatch", ("zero", 3)),
        ("summed_by_microbatch", ("recompute", "full")),
    ],
)
def test_settings_meet_where_they_have_an_effect(effect, setting):
    name, value = setting
    cases = layouts.covering_set()
    assert any(case.effects[effect] and case.settings[name] == value for case in cases)


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_every_case_can_be_trained(compute):
    for case in [*layouts.covering_set(), *layouts.reproducible_cases(), *mixture_cases()]:
        for layout in (case.layout, case.layout.base, case.layout.reference):
            config = configuration(TrainingTask(Case(layout, case.model), compute, 20))
            assert config.data_size == layout.data


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "ranks", [2, 4, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 3))]
)
def test_fewer_ranks_leave_out_what_needs_more(ranks):
    cases = layouts.covering_set(ranks)
    assert max(case.layout.ranks for case in cases) <= ranks
    missing = layouts.missing_pairs(cases, ranks)
    assert "" not in missing
    too_many = missing[f"more than {ranks} rank{'s' if ranks > 1 else ''}"]
    assert (("tensor", 4), ("pipeline", 4)) in too_many
    assert ((("tensor", 2), ("pipeline", 2)) in too_many) == (ranks < 4)


def test_all_pairs_of_a_model_occur_in_few_models():
    known = layouts.models()
    expected = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(MODEL_FACTORS, 2)
        for x, y in itertools.product(MODEL_FACTORS[a], MODEL_FACTORS[b])
    }
    factors = [{name: vars(model)[name] for name in MODEL_FACTORS} for model in known]
    assert {pair for values in factors for pair in pairs(values)} == expected
    assert len(known) <= 8


def test_missing_pairs_are_those_of_a_case_taken_out():
    cases = layouts.covering_set()
    assert "" not in layouts.missing_pairs(cases)
    without = cases[2:]
    lost = {pair for case in cases[:2] for pair in pairs(case.settings)}
    lost -= {pair for case in without for pair in pairs(case.settings)}
    assert lost
    assert set(layouts.missing_pairs(without)[""]) == lost


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "setting",
    [
        ("tensor", 2),
        ("pipeline", 2),
        ("virtual", 3),
        ("kind", "bert"),
        ("recompute", "full"),
        ("sequence_parallel", True),
        ("tied", True),
        ("dropout", True),
        ("documents", True),
    ],
)
def test_what_is_sharded_meets_all_else(zero, setting):
    name, value = setting
    cases = layouts.covering_set()
    assert any(case.effects["sharded"] == zero and case.settings[name] == value for case in cases)


@pytest.mark.parametrize(
    ("sharding", "same"),
    [
        # (zero, group, b) of d = 4, of 16 sequences; by what the sums' order follows from
        ((1, None, 1), (0, None)),
        ((2, None, 4), (0, None)),  # one microbatch
        ((2, None, 2), (2, None)),
        ((3, None, 2), (2, None)),
        ((1, 2, 2), (1, 2)),
        ((3, 2, 4), (1, 2)),
        ((3, 2, 2), (2, 2)),
    ],
)
def test_base_of_what_is_sharded(sharding, same):
    zero, group, size = sharding
    layout = ComparedLayout(data=4, micro_size=size, pipeline=2, zero=zero, shard_group=group)
    base = ComparedLayout(data=4, micro_size=size, zero=same[0], shard_group=same[1])
    assert layout.base == base
    assert ComparedLayout(micro_size=size, zero=zero).base == ComparedLayout(micro_size=size)


def test_base_keeps_what_decides_the_order_of_sums():
    layout = ComparedLayout(2, 2, 2, 3, 4, "interleaved", "full", True, True)
    assert layout.base == ComparedLayout(tensor=2, data=2, sequence_parallel=True, micro_size=4)
    reproducible = replace(layout, data=4, zero=1, shard_group=2, reproducible=True)
    assert (reproducible.base.data, reproducible.base.zero) == (1, 0)
    assert reproducible.base.reproducible


def test_tokens_are_perturbed_on_two_three_and_four_context_ranks():
    cases = probe.cases(ranks=4)
    assert {case.layout.context for case in cases} == {2, 3, 4}
    assert all(refusal(case, 4) is None for case in cases)
    assert any(
        token % (case.model.seq_length // (2 * case.layout.context)) == 0
        for case in cases
        for token in probe.TOKENS
        if case.layout.context == 3
    )
