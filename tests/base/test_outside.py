"""Errors whose cause is outside the program: which ones they are, and their one line."""

import pytest

from ptdmpi.base.errors import InputError
from ptdmpi.base.outside import explained, mendable_paths, missing


def test_mistakes_of_our_own_keep_their_traceback():
    for error in (ValueError("x"), OSError("x"), ModuleNotFoundError("no", name="ptdmpi.nothing")):
        assert explained(error) is None


def test_too_little_memory_is_one_line():
    text, code = explained(ImportError("libtorch.so: failed to map segment from shared object"))
    assert text.startswith("out of memory: libtorch.so") and code == 1
    assert explained(MemoryError()) == ("out of memory: MemoryError", 1)


def test_a_loop_of_links_is_one_line(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="Symlink loop from"), mendable_paths():
        (tmp_path / "loop").resolve()


def test_what_to_install():
    assert missing("tokenizers").endswith("pip install 'ptdmpi[data]'")
    assert missing("lm_eval").endswith("pip install 'ptdmpi[eval]'")
    assert missing("torch").endswith("pip install torch")


def test_paths_that_can_be_mended(tmp_path):
    with pytest.raises(InputError, match=r"nothing: No such file"), mendable_paths():
        (tmp_path / "nothing").read_text()
    with pytest.raises(OSError, match="full"), mendable_paths():
        raise OSError(28, "full", "x")
