"""The covering set: every legal pair stands in it, and it holds nothing that cannot be trained."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.parity import layouts
from ptdmpi.parity.layouts import (
    LAYOUT_FACTORS,
    MODEL_FACTORS,
    Case,
    ComparedLayout,
    pairs,
    refusal,
)
from ptdmpi.parity.run import TrainingTask, configuration

COVERING = layouts.covering_set()
HELD = {pair for case in COVERING for pair in pairs(case.settings | case.effects)}

# by hand: 1f1b and zb-h1 have one chunk per rank, zb-v two; all else can be trained on 16 ranks
ILLEGAL = {
    frozenset({("virtual", virtual), ("schedule", schedule)})
    for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2))
    for virtual in {1, 2, 3} - {chunks}
}


def strategy(factors: dict[str, tuple]) -> st.SearchStrategy[tuple]:
    return st.tuples(*(st.sampled_from(values) for values in factors.values()))


def test_every_legal_pair_of_settings_is_covered():
    values = [(name, v) for name, of in (LAYOUT_FACTORS | MODEL_FACTORS).items() for v in of]
    every = {frozenset(pair) for pair in itertools.combinations(values, 2) if len(dict(pair)) == 2}
    covered = {frozenset(pair) for case in COVERING for pair in pairs(case.settings)}
    assert every - covered == ILLEGAL
    assert not covered & ILLEGAL


@given(strategy(LAYOUT_FACTORS), strategy(MODEL_FACTORS))
def test_no_legal_case_of_the_models_has_a_pair_of_effects_that_is_not_covered(layout, model):
    nearest = min(
        layouts.models(),
        key=lambda known: sum(a != b for a, b in zip(vars(known).values(), model, strict=True)),
    )
    case = Case(ComparedLayout(**dict(zip(LAYOUT_FACTORS, layout, strict=True))), nearest)
    if refusal(case, layouts.MOST_RANKS) is None:
        assert set(pairs(case.settings | case.effects)) <= HELD


@pytest.mark.parametrize(
    ("effect", "setting"),
    [
        ("divided_sequence", ("dropout", True)),
        ("divided_sequence", ("recompute", "full")),
        ("scattered_boundary", ("schedule", "interleaved")),
        ("uneven_stages", ("tied", True)),
        ("uneven_stages", ("virtual", 3)),
        ("padded_vocabulary", ("tied", True)),
        ("padded_vocabulary", ("masked", True)),
    ],
)
def test_settings_meet_where_they_have_an_effect(effect, setting):
    name, value = setting
    assert any(case.effects[effect] and case.settings[name] == value for case in COVERING)


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_every_case_can_be_trained(compute):
    for case in [*COVERING, *layouts.reproducible_cases()]:
        for layout in (case.layout, case.layout.base, case.layout.reference):
            config = configuration(TrainingTask(Case(layout, case.model), compute, 20))
            assert config.data_size == layout.data


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
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
    assert {pair for model in known for pair in pairs(vars(model))} == expected
    assert len(known) <= 8


def test_missing_pairs_are_those_of_a_case_taken_out():
    assert "" not in layouts.missing_pairs(COVERING)
    without = COVERING[2:]
    lost = {pair for case in COVERING[:2] for pair in pairs(case.settings)}
    lost -= {pair for case in without for pair in pairs(case.settings)}
    assert lost
    assert set(layouts.missing_pairs(without)[""]) == lost


def test_base_keeps_what_decides_the_order_of_sums():
    layout = ComparedLayout(2, 2, 2, 3, 4, "interleaved", "full", True, True)
    assert layout.base == ComparedLayout(tensor=2, data=2, sequence_parallel=True, micro_size=4)
    reproducible = replace(layout, reproducible=True)
    assert reproducible.base.data == 1
    assert reproducible.base.reproducible
