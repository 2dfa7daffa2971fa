"""Rows with experts: which bits they must have, and choices of experts that differ."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
from torch import Tensor

from ptdmpi.comm.world import World
from ptdmpi.model.experts.exchange import SentDispatch
from ptdmpi.model.experts.tokens import TensorTokens
from ptdmpi.parity import mixtures, suite
from ptdmpi.parity.layouts import GLOBAL_SIZE, SEQ_LENGTH, Case
from ptdmpi.parity.mixtures import EXPERTS, Chooser, mixture_cases
from ptdmpi.parity.suite import Comparison, Verdict
from tests.parallel import parallel

STEPS = 2
LAYERS = 2


def small(number: int) -> Case:
    """A case of the table with fewer layers, so that it takes less time."""
    case = mixture_cases()[number]
    return replace(case, model=replace(case.model, layers=LAYERS))


def compared(comm, case: Case) -> Verdict | None:
    """The verdict on one case, on the first rank."""
    comparison = Comparison(suite.EXPERTS, case, replace(case, layout=case.layout.base))
    return next(iter(suite.run(World(comm), [comparison], STEPS)), None)


def test_only_one_microbatch_a_rank_has_the_bits_of_experts_on_each_rank():
    cases = mixture_cases()
    alone = [number for number, case in enumerate(cases) if case.layout.base.expert == 1]
    assert alone == [0, 4]
    others = [case for number, case in enumerate(cases) if number not in alone]
    assert all(case.layout.base.dealing == case.layout.dealing for case in others)
    assert all(case.layout.base.context == case.layout.context for case in cases)
    first = cases[0]
    two = replace(first.layout, micro_size=GLOBAL_SIZE // 4)
    assert two.base.expert == 2


def test_fewer_ranks_have_fewer_rows():
    assert [len(mixture_cases(ranks)) for ranks in (1, 2, 4)] == [0, 1, 6]


@pytest.mark.long
@parallel(ranks=[2])
def test_no_row_is_red_without_a_fault(comm):
    verdict = compared(comm, small(0))
    if comm.rank == 0:
        assert verdict.red() == [] and verdict.flips["fp64"] == 0
        assert verdict.bits == {"fp32": None, "bf16": None}


@pytest.mark.long
@parallel(ranks=[4], limit_s=180.0)
@pytest.mark.parametrize("number", range(1, 6))
def test_no_row_of_four_ranks_is_red_without_a_fault(comm, number):
    case = small(number)
    verdict = compared(comm, replace(case, model=replace(case.model, layers=4)))
    if comm.rank == 0:
        assert verdict.red() == []


@contextlib.contextmanager
def other_choices() -> Iterator[None]:
    """Every layout but one rank alone gives the first token of each microbatch other experts."""
    right = Chooser.choice

    def wrong(chooser: Chooser, layer: int, own: Tensor, tokens: TensorTokens) -> Tensor:
        if chooser.expected is not None:
            own = own.clone()
            own[0] = (own[0] + 1) % EXPERTS
        return right(chooser, layer, own, tokens)

    with patch.object(Chooser, "choice", wrong):
        yield


@parallel(ranks=[2])
def test_other_choices_are_replaced_and_counted_in_float32(comm):
    with other_choices():
        verdict = compared(comm, small(0))
    if comm.rank == 0:
        # the expert that follows each of two experts: another pair of experts in any case
        changed = STEPS * LAYERS * 2  # microbatches of both ranks
        assert verdict.flips["fp32"] == changed < STEPS * LAYERS * GLOBAL_SIZE * SEQ_LENGTH
        assert not [line for line in verdict.red() if line.startswith("fp32")]
        assert f"fp64: {verdict.flips['fp64']} choices of experts differ" in verdict.red()
        assert verdict.flips["fp64"] >= changed


@pytest.mark.long
@parallel(ranks=[2])
def test_without_replacement_other_choices_are_red_in_float32(comm):
    init = Chooser.__init__

    def keeps(chooser: Chooser, *given, replaces: bool) -> None:
        init(chooser, *given, replaces=False)

    with other_choices(), patch.object(Chooser, "__init__", keeps):
        verdict = compared(comm, small(0))
    if comm.rank == 0:
        assert any(line.startswith("fp32 loss") for line in verdict.red())


@pytest.mark.long
@parallel(ranks=[2])
def test_weights_that_do_not_come_back_turn_the_row_red(comm):
    right = SentDispatch.pairs_back
    with patch.object(SentDispatch, "pairs_back", lambda *given: right(*given).zero_()):
        verdict = compared(comm, small(0))
    if comm.rank == 0:
        assert any(line.startswith("fp64 gradients") for line in verdict.red())


def test_the_coefficients_are_those_of_all_methods():
    assert {case.model.balance for case in mixture_cases()} == set(mixtures.COEFFICIENTS)
