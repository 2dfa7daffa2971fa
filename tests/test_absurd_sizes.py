"""Sizes that are slips of the pen: refused at once, each with what is legal."""

import re

import pytest

from ptdmpi.config import InputError, resolve
from tests._configs import small, tree


def mistakes(changes):
    with pytest.raises(InputError) as caught:
        resolve(tree(changes), 1)
    return str(caught.value).splitlines()


def test_no_count_is_beyond_all_bounds():
    for key, value, most in (
        ("model.hidden", 10**24 + 7, 10**12),
        ("model.layers", 20_000, 10**4),
        ("model.experts", 20_000, 10**4),
        ("run.steps", 10**23, 10**12),
        ("batch.micro_size", 10**13, 10**12),
        ("batch.global_size", 10**12, 10**9),
    ):
        (found,) = mistakes({key: value})
        assert found == f"{key} = {value}: Input should be less than or equal to {most}"


def test_a_step_that_cannot_be_listed_says_what_can():
    (found,) = mistakes({"batch.global_size": 10**9})
    legal = r"legal: a global_size of at most 500000, or a micro_size of at least 4000$"
    assert re.search(f"gives a step 500000000 microbatches.* {legal}", found)
    assert small({"batch.global_size": 500_000}).microbatches == 250_000
    assert small({"batch.global_size": 10**9, "batch.micro_size": 4_000})
    (found,) = mistakes({"run.steps": 10**12, "batch.global_size": 10**8, "batch.micro_size": 1000})
    assert found.endswith(f"legal: at most {(2**63 - 1) // 10**8} steps")
