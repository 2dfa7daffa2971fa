"""Ranks whose output cannot be written: one line on stderr, and no traceback."""

import subprocess
import sys

from tests._mpirun import mpi_environment

PROGRAM = """
import click
from ptdmpi.comm import launch
launch.prepare()
from ptdmpi.comm.world import World, fail_together
from ptdmpi.terminal.program import CommandGroup, run

program = CommandGroup("p")

@program.command()
def write():
    with fail_together(World()):
        print("x" * 100_000, flush=True)

run(program, "p")
"""


def started(output) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "write"],
        env=mpi_environment(),
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full, started(full) as program:
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 1
    assert errors == "p: error: No space left on device\n"


def test_a_reader_that_ends_is_no_error_of_the_program():
    with started(subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.close()
        assert program.stderr is not None
        errors = program.stderr.read()
        program.wait(timeout=60)
    assert program.returncode == 1
    assert errors == ""
