"""The best checkpoint by name, for every command that takes a checkpoint."""

import pytest

from ptdmpi.checkpoint import directory, examine
from ptdmpi.config import InputError
from ptdmpi.inference.stored import open_model
from tests import _stored


def test_best_is_a_name_of_a_run(tmp_path):
    run = _stored.stored(tmp_path / "run", 50, **_stored.LLAMA)
    path = run / "checkpoints/step-00000007"
    for name in (run / "best", run / "checkpoints/best"):
        for ask in (open_model, examine.newest, examine.checkpoints):
            with pytest.raises(InputError, match=r"none is the best; legal: checkpoint.keep_best"):
                ask(name)
    (run / "checkpoints/best").write_text("step-00000007\n")
    for name in (run / "best", run / "checkpoints/best"):
        assert open_model(name).checkpoint == path and examine.checkpoints(name) == [path]
        assert examine.newest(name) == path and directory.named(name) == path
