"""The draft of a configuration for more ranks than a machine can have."""

from pathlib import Path

import pytest

from ptdmpi.config import InputError
from ptdmpi.preview.draft import draft
from ptdmpi.preview.wish import SMALL, Wish
from tests._runs import corpus


def test_more_ranks_than_a_machine_has_memory_for_are_refused(tmp_path):
    """The memory of this machine does not matter for a named cluster."""
    corpus(tmp_path)
    given = {"file": Path("x.toml"), "model": SMALL, "data": tmp_path / "train", "memory_bytes": 1}
    with pytest.raises(InputError, match="--ranks 7000: this machine has no memory left"):
        draft(Wish(ranks=7000, **given))
    assert "[parallel]" in draft(Wish(ranks=8, cluster="selene", **given))
