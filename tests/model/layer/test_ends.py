"""The rows of embedding and head do what their accounts say."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.stage import TIED_NAME
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer.elementwise import Activate, Normalize
from ptdmpi.plan.layer.ends import (
    CrossEntropy,
    DropEmbedding,
    LookUp,
    Predict,
    SelectPositions,
    Tanh,
)
from ptdmpi.plan.layer.parts import Linear, Norm, Table
from ptdmpi.plan.layer.products import Multiply
from tests._ends import ENDS, ends_of, wrong, wrong_ends, wrong_parameters, wrong_rows
from tests._layers import tensor_axis
from tests.parallel import parallel


@pytest.mark.cases(24)
@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ENDS)
def test_every_row_does_what_it_says(comm, name):
    """With and without sequence parallelism, which is nothing on one rank."""
    mistakes = {
        divides: wrong(name, tensor_axis(comm, divides)) for divides in {False, comm.size > 1}
    }
    assert not any(mistakes.values()), mistakes


@pytest.mark.cases(12)
@parallel(ranks=[1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ENDS)
def test_every_row_does_so_in_every_precision(comm, name):
    """Half types as this processor multiplies them, and widened."""
    axis = tensor_axis(comm, sequence_parallel=True)
    mistakes = {
        (precision, widens): wrong(name, axis, precision, widens=widens)
        for precision, widens in (("fp32", False), ("bf16", False), ("bf16", True))
    }
    assert not any(mistakes.values()), mistakes


@pytest.mark.cases(12)
@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [name for name in ENDS if "task.kind" not in ENDS[name]])
def test_every_row_does_so_at_some_positions(comm, name):
    """A context axis cuts the sequence; its method does not matter outside of attention. A task is
    refused there. Labels at positions of other ranks have weights, hence not in fp64: see above."""
    context = ContextAxis(MpiCommunicator(comm), "all_gather")
    assert wrong(name, TensorAxis(OneRank()), "fp32", context=context) == []


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ENDS)
def test_parameters_are_those_of_the_rows(comm, name):
    assert wrong_parameters(ends_of(name, tensor_axis(comm, False))) == []


def nothing(self, *given: object) -> Iterator[Any]:
    """Return the account of a row that does nothing."""
    return iter(())


PLANTED = {  # in rows that "untied bert" has
    "a look-up": (LookUp, "kept", 2),
    "a look-up's sum": (LookUp, "messages", 2),
    "a norm": (Normalize, "kept", 1),
    "dropout": (DropEmbedding, "kept", 1),
    "a selection": (SelectPositions, "kept", 1),
    "a selection's gather": (SelectPositions, "messages", 2),
    "a product's forward": (Multiply, "forward", 1),
    "a product's input gradient": (Multiply, "backward", 1),
    "a product's weight gradient": (Multiply, "weights", 1),
    "an activation": (Activate, "kept", 1),
    "a pooler": (Tanh, "kept", 1),
    "a head's input": (Predict, "kept", 1),
    "a head's product": (Predict, "forward", 1),
    "a head's input gradient": (Predict, "backward", 1),
    "a head's weight gradient": (Predict, "weights", 1),
    "a head's sum": (Predict, "messages", 2),
    "a loss": (CrossEntropy, "kept", 1),
    "a loss's sums": (CrossEntropy, "messages", 2),
}


def found_errors(comm, ranks: int) -> dict[str, tuple[set[str], set[str]]]:
    """Return for each planted error of so many ranks (rows that were found, rows that have it)."""
    axis, found = tensor_axis(comm, sequence_parallel=True), {}
    for error, (kind, method, least) in PLANTED.items():
        if least != ranks:
            continue
        ends = ends_of("untied bert", axis)
        rows = [row for end in ends.descriptions().values() for row in end]
        with mock.patch.object(kind, method, nothing):
            mistakes = {text.split()[0] for text in wrong_rows(ends)}
            assert list(wrong_ends(ends)), error
        found[error] = (mistakes, {row.name for row in rows if isinstance(row, kind)})
    return found


@parallel(ranks=[1, 2])
def test_a_planted_error_is_found(comm):
    """In every row that has it, and in no other."""
    found = found_errors(comm, comm.size)
    if comm.size == 2:  # only the loss of tokens sends
        found["a loss's sums"][1].remove("sentence.loss")
    assert found
    for error, (mistakes, rows) in found.items():
        assert mistakes == rows, error


def test_what_a_graph_holds_outside_of_autograd_is_found():
    """The positions of a selection are an attribute of its Function."""
    from mpi4py import MPI

    with mock.patch("tests._ends.held", lambda node: iter(())):
        ends = ends_of("bert", tensor_axis(MPI.COMM_SELF, False))
        assert [text.split()[0] for text in wrong_rows(ends)] == ["head.select"]


@pytest.mark.parametrize("owner", [Linear, Norm])
def test_a_part_without_a_bias_in_its_account_is_found(owner):
    from mpi4py import MPI

    ends = ends_of("untied bert", tensor_axis(MPI.COMM_SELF, False))
    whole = owner.weights
    with mock.patch.object(owner, "weights", lambda self, tensor: [next(whole(self, tensor))]):
        assert all(name.endswith(".bias") for name, *_ in wrong_parameters(ends))
        assert wrong_parameters(ends)


@parallel(ranks=[2])
def test_a_table_that_says_it_is_whole_is_found(comm):
    ends = ends_of("bert", tensor_axis(comm, False))
    with mock.patch.object(Table, "weights", lambda self, tensor: [self.rows * self.hidden]):
        assert {name for name, *_ in wrong_parameters(ends)} == {TIED_NAME}
