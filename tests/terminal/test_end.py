"""The end of a command after bad input waits for nobody for ever."""

import signal
import subprocess
import sys

import pytest

# Python has ended when it calls what is registered so, as MPI_Finalize by mpi4py.
PROGRAM = """
import ctypes, sys
from ptdmpi import cli
cli.END_S = 1.0
if sys.argv.pop() == "hangs":
    pause = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
    ctypes.pythonapi.Py_AtExit(pause)
cli.main()
"""


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize(("end", "code"), [("hangs", -signal.SIGALRM), ("ends", 2)])
def test_an_end_that_waits_is_ended(tmp_path, end, code):
    command = [sys.executable, "-c", PROGRAM, "train", "nope.toml", end]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == code
    assert "ptdmpi: error: configuration nope.toml: No such file or directory" in done.stderr
