"""Survivors of a lost rank: who is missing, what they agree on, and who wakes whom."""

import pytest

from ptdmpi.comm import ulfm
from ptdmpi.config import InputError
from tests.parallel import mpirun

# Rank 3 of a 2 x 2 grid dies. Rank 0 waits for rank 1, which waits for rank 3: the axis of
# ranks 0 and 1 has no dead member. Rank 2 sleeps through it all.
PROGRAM = """
import os, signal, time
from ptdmpi.comm import launch
launch.prepare()
from mpi4py import MPI
from ptdmpi.comm import ulfm
from ptdmpi.comm.world import World
from ptdmpi.plan.layout.grid import training_grid
world = World()
axes = world.split(training_grid(tensor=2, data=2))
assert not ulfm.rank_lost(world, patience_s=0.1)
assert ulfm.agree(world, [7, 6, 5, 4][world.rank]) == 4
crew = world.first(3)
if world.rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
if world.rank == 2:
    time.sleep(1.0)
else:
    try:
        (axes["tensor"] if world.rank == 0 else axes["data"]).barrier()
    except MPI.Exception:
        assert ulfm.rank_lost(world)
        ulfm.revoke(world)
    else:
        raise SystemExit("a barrier without all its ranks")
assert ulfm.agree(world, 3 if world.rank else 2, poll_s=0.01 * (world.rank == 2)) == 2
world, lost = ulfm.shrink(world)
assert [process.number for process in lost] == [3]
numbers = [process.number for process in world.processes]
assert numbers == [0, 1, 2] == world.control.allgather(world.rank)
turned = world.part([2, 0])
if turned is not None:
    assert turned.control.allgather(turned.process.number) == [2, 0]
assert not ulfm.rank_lost(world, patience_s=0.0)
print(f"survivor {world.rank}")
ulfm.leave(world, 75)
"""


@pytest.mark.long
def test_survivors_wake_each_other_agree_and_shrink():
    done = mpirun(4, ["-c", PROGRAM], options=("--with-ft", "ulfm"), check=False, timeout_s=60)
    assert done.returncode == 75, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == ["survivor 0", "survivor 1", "survivor 2"]


def test_a_launcher_must_have_been_asked_to_go_on():
    ulfm.require({"OMPI_MCA_mpi_ft_enable": "1"})
    for environ in ({}, {"OMPI_MCA_mpi_ft_enable": "0"}):
        with pytest.raises(InputError, match="legal: mpirun --with-ft ulfm"):
            ulfm.require(environ)
