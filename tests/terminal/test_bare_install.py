"""Every command after a bare `pip install .`, without extras and without an MPI library."""

import os
import subprocess
import sys

import pytest

from tests.parallel import ROOT

# What extras alone bring, as if it were not installed: an import of it fails as Python's own does.
BARE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in {"tokenizers", "transformers", "zstandard", "pyarrow", "lm_eval", "rensa",
                       "sentencepiece", "tiktoken", "gigatoken", "tensorboardX", "wandb"}:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)

sys.meta_path.insert(0, Blocker())
from {module} import main
main()
"""
MPI = "no MPI library can be loaded: load the site's MPI module"
DATA = "is not installed: pip install 'ptdmpi[data]'"


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("ptdmpi train c.toml", MPI),
        ("ptdmpi train c.toml --layout auto", MPI),
        ("ptdmpi probe --output x.toml", MPI),
        ("ptdmpi doctor", MPI),
        ("ptdmpi doctor --parity", MPI),
        ("ptdmpi generate run", MPI),
        ("ptdmpi evaluate run --data d", MPI),
        ("ptdmpi plan --model gpt3-1.3b --cluster selene --ranks 8 --quiet", None),
        ("ptdmpi schedule -p 2 -m 2", None),
        ("ptdmpi report run", "is not a run directory"),
        ("ptdmpi watch run", ""),
        ("ptdmpi checkpoint inspect run", "run"),
        ("ptdmpi checkpoint verify run", "run"),
        ("ptdmpi checkpoint diff run run", "run"),
        ("ptdmpi checkpoint prune run --keep 1", "run"),
        ("ptdmpi convert from-hf hf ours", "hf"),
        ("ptdmpi convert to-hf ours hf", "ours"),
        ("ptdmpi-data train-tokenizer a.txt --vocab-size 300 --output t.json", DATA),
        ("ptdmpi-data tokenize a.txt --tokenizer bytes --output o", DATA),
        ("ptdmpi-data import-megatron a --tokenizer bytes --output o", ""),
        ("ptdmpi-data export-megatron o --output p", "o: no such directory"),
        ("ptdmpi-data inspect o", ""),  # verify reports on stdout
    ],
)
def test_every_command_says_what_is_missing(tmp_path, words, text):
    """A missing package gives one line and exit code 2; other commands work."""
    (tmp_path / "a.txt").write_text("some text\n")
    program, *arguments = words.split()
    code = BARE.replace("{module}", "ptdmpi.cli" if program == "ptdmpi" else "data_prep.cli")
    environment = {**os.environ, "MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    if text is None:
        assert done.returncode == 0, done.stderr
        return
    *before, line = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"{program}: error: ") and text in line
    assert all("loading MPI" in one for one in before)
