"""The order of a ring's messages and products: each exchange is under way while a rank computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from ptdmpi.comm.communicator import Communicator
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.sequence.context import ContextAxis
from tests._layers import random_tensor
from tests.comm._wires import FastCommunicator
from tests.context.test_core import HEADS, B, Core, D, S
from tests.context.test_early_keys import Noted
from tests.parallel import parallel


@contextmanager
def diary(comm: Communicator) -> Iterator[list[str]]:
    """What happens when: exchanges, numbered as they begin, and products."""
    lines: list[str] = []
    begin, multiply = comm.all_to_all_begin, Kernels.wide_product

    def begins(*given):
        name = f"exchange {sum(line.endswith('begins') for line in lines)}"
        lines.append(f"{name} begins")
        result, handle = begin(*given)
        return result, Noted(handle, lines, name)

    def product(kernels, *operands):
        lines.append("product")
        return multiply(kernels, *operands)

    with (
        patch.object(comm, "all_to_all_begin", begins),
        patch.object(Kernels, "wide_product", product),
    ):
        yield lines


def during(lines: list[str], number: int) -> int:
    """The number of products while an exchange is under way."""
    first = lines.index(f"exchange {number} begins")
    return lines[first : lines.index(f"exchange {number} ends")].count("product")


@parallel(ranks=[2, pytest.param(3, marks=pytest.mark.long)])
def test_exchanges_are_under_way_during_products(comm):
    """All of c visits but the last send keys on. In the backward, gradients follow each visit, and
    only those of the last have no products left."""
    core = Core("grouped", ContextAxis(FastCommunicator(comm), "ring"), "fp64")
    passes = comm.size - 1
    with diary(core.axis.comm) as forward:
        y = core()
    assert forward[0] == "exchange 0 begins" and forward[-1] == "product"
    assert [during(forward, number) > 0 for number in range(passes)] == [True] * passes
    with diary(core.axis.comm) as backward:
        y.backward(core.axis.positions.of(random_tensor("dy", (S, B, HEADS * D), "fp64")))
    # keys, then gradients, of each visit; the last sends gradients alone
    exchanges = 2 * passes + 1
    found = [during(backward, number) > 0 for number in range(exchanges)]
    assert found == [True] * (exchanges - 1) + [False]
    assert backward[-1] == f"exchange {exchanges - 1} ends"
