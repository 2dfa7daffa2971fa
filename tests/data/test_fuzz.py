"""A short form of `make fuzz`."""

import pytest

from tests import fuzz


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_damaged_files_give_only_the_documented_error(name):
    tried, refused = fuzz.run(name, 150, 1)
    assert tried >= 150 and 0 < refused < tried
