"""TOML that cannot be read is a ValueError, whatever is wrong with it."""

import pytest

from ptdmpi.base.toml import tables_of


def test_tables():
    assert tables_of(b"[a]\nb = [1]\n") == {"a": {"b": [1]}}


@pytest.mark.parametrize(
    "content",
    [b"a = ", b"\xff", b"a = " + b"[" * 100_000, b"a = " + b"9" * 5000],
    ids=["syntax", "text", "nesting", "digits"],
)
def test_what_is_no_toml(content):
    with pytest.raises(ValueError, match=r"\w"):
        tables_of(content)
