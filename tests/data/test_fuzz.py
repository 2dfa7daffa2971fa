"""A short form of `make fuzz`."""

import pytest

from tests import fuzz


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_damaged_files_give_only_the_documented_error(name):
    assert 0 < fuzz.run(name, range(150), 1) <= 150
