"""Names of runs, which are directories."""

import pytest

from ptdmpi.config import InputError
from tests._configs import small


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "\u00fc/../x", "/x", "a//b", "a\n"])
def test_a_run_is_below_runs(name):
    with pytest.raises(InputError, match=r"run\.name = .*without \. and \.\. as parts") as caught:
        small({"run.name": name})
    assert "\n" not in str(caught.value)
    assert small({"run.name": "\u00fc/x"}).run.dir == "runs/\u00fc/x"
