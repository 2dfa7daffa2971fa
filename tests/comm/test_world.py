"""The world: numbering, splitting into axes, the singleton trap, ending together."""

import gc
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from mpi4py import MPI

from ptdmpi.comm import launch
from ptdmpi.comm.world import World
from ptdmpi.commands import convert
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.plan.layout.grid import Grid, training_grid
from tests.parallel import ROOT, mpirun, parallel


class RoundRobin:
    """Two nodes, between which a launcher deals the ranks in turn."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm

    def Split_type(self, kind: int) -> MPI.Comm:
        assert kind == MPI.COMM_TYPE_SHARED
        return self.comm.Split(self.comm.rank % 2, key=self.comm.rank)

    def __getattr__(self, name: str):
        return getattr(self.comm, name)


def grids(size: int) -> list[Grid]:
    sizes = range(1, size + 1)
    return [
        training_grid(tensor=t, pipeline=p, data=size // (t * p))
        for t in sizes
        for p in sizes
        if size % (t * p) == 0
    ]


@parallel(ranks=[2, 4, 8])
def test_ranks_are_numbered_node_by_node(comm):
    world = World(RoundRobin(comm))
    order = [*range(0, comm.size, 2), *range(1, comm.size, 2)]
    assert world.control.allgather(comm.rank) == order
    assert (world.size, world.nodes, world.local_size) == (comm.size, 2, comm.size // 2)
    assert world.local_rank == comm.rank // 2
    assert world.rank == (comm.rank % 2) * world.local_size + world.local_rank
    for grid in grids(world.size):
        crosses = world.tensor_axis_crosses_nodes(grid)
        assert crosses == (grid.size_of("tensor") > world.local_size), grid


@parallel(ranks=[1, 4])
def test_one_node_keeps_the_launchers_order(comm):
    world = World(comm)
    assert (world.rank, world.local_rank, world.nodes) == (comm.rank, comm.rank, 1)
    assert not world.tensor_axis_crosses_nodes(training_grid(tensor=comm.size))


@parallel(ranks=[1, 2, 4, 8])
def test_split_into_axes(comm):
    world = World(comm)
    for grid in grids(world.size):
        axes = world.split(grid)
        here = axes.coordinates
        assert here == grid.coordinates(world.rank)
        for name in grid.axes:
            axis = axes[name]
            assert axis.all_gather_object(world.rank) == list(grid.group(world.rank, name))
            assert (axis.rank, axis.size) == (here[name], grid[name])
        line = grid.group(world.rank, "pipeline")
        assert ("ends" in axes.groups) == (len(line) > 1 and world.rank in (line[0], line[-1]))
        if "ends" in axes.groups:
            assert axes["ends"].all_gather_object(world.rank) == [line[0], line[-1]]
        assert axes.world.all_gather_object(world.rank) == list(range(world.size))


@parallel(ranks=[2])
def test_a_grid_of_another_size_is_refused(comm):
    with pytest.raises(InputError, match="a grid of 4 ranks on a world of 2"):
        World(comm).split(training_grid(tensor=2, pipeline=2))


@parallel(ranks=[4])
def test_first_ranks_are_a_world(comm):
    world = World(comm)
    for size in (1, 2, 3, 4):
        part = world.first(size)
        assert (part is not None) == (world.rank < size)
        if part is not None:
            assert (part.rank, part.size) == (world.rank, size)
            assert part.control.allgather(world.rank) == list(range(size))


@parallel(ranks=[1, 4])
def test_root_works_for_everyone(comm):
    world = World(comm)
    assert world.on_root(lambda: comm.rank + 5) == 5

    def fail():
        raise InputError("no such file")

    with pytest.raises(SharedInputError, match="no such file"):
        world.on_root(fail)


def test_a_rank_without_a_home_gets_one():
    environ = {}
    launch.prepare(environ)
    assert os.path.isdir(environ["HOME"])
    environ = {"HOME": "/given"}
    launch.prepare(environ)
    assert environ["HOME"] == "/given"


def test_modules_are_loaded_without_a_collection():
    """And what they made is looked through no more; where all were there, nothing changes."""
    frozen = gc.get_freeze_count()
    with launch.loading():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    with pytest.raises(ValueError, match="broken"), launch.loading():
        sys.modules["some.module"] = type(sys)("some.module")
        raise ValueError("broken")
    del sys.modules["some.module"]
    assert gc.isenabled() and gc.get_freeze_count() > frozen
    gc.unfreeze()


def test_a_current_directory_that_was_removed_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(InputError, match="the current directory is gone"):
        launch.prepare({})
    for verb in ("from-hf", "to-hf"):  # it loads PyTorch, too
        error = CliRunner().invoke(convert.command, [verb, "/x", "/y"]).exception
        assert isinstance(error, InputError) and "is gone" in str(error)


@pytest.mark.parametrize("variable", launch.SIZE_VARIABLES)
def test_singletons_are_noticed(variable):
    with pytest.raises(InputError, match=rf"world of 1 rank, but {variable} says 4.*--mpi"):
        launch.check_singleton(1, {variable: "4"})
    launch.check_singleton(4, {variable: "4"})
    launch.check_singleton(1, {variable: "1"})
    launch.check_singleton(1, {variable: "4(x2)"})
    launch.check_singleton(1, {})


def test_a_real_singleton_ends_with_the_reason():
    program = (
        "from ptdmpi.comm import launch; launch.prepare()\n"
        "from ptdmpi.config import InputError, SharedInputError\n"
        "from ptdmpi.comm.world import World\n"
        "try:\n    World()\nexcept InputError as error:\n    print(error); raise SystemExit(2)\n"
    )
    environment = {**os.environ, "SLURM_NTASKS": "4", "OMPI_COMM_WORLD_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "OMPI_COMM_WORLD_SIZE says 4" in done.stdout


def test_prepare_keeps_what_the_user_set():
    environment = {"HDF5_USE_FILE_LOCKING": "TRUE", "OMPI_COMM_WORLD_LOCAL_SIZE": "4096"}
    launch.prepare(environment)
    assert environment["HDF5_USE_FILE_LOCKING"] == "TRUE"
    assert environment["MPICH_GPU_SUPPORT_ENABLED"] == "0"
    assert environment["OMPI_MCA_mpi_yield_when_idle"] == "1"
    alone: dict[str, str] = {}
    launch.prepare(alone)
    assert alone["HDF5_USE_FILE_LOCKING"] == "FALSE"
    assert "OMPI_MCA_mpi_yield_when_idle" not in alone


def test_several_communicators_of_nccl_on_a_gpu_start_in_one_order():
    environment = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0", "PYTORCH_ALLOC_CONF": "backend:native"}
    launch.prepare(environment)
    assert environment["NCCL_LAUNCH_ORDER_IMPLICIT"] == "0"
    assert environment["PYTORCH_ALLOC_CONF"] == "backend:native"
    older = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    launch.prepare(older)
    assert "PYTORCH_ALLOC_CONF" not in older and older["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    alone: dict[str, str] = {}
    launch.prepare(alone)
    assert alone["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert alone["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert alone["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


START = """
import sys, time
from ptdmpi.commands import convert
from ptdmpi.comm import launch
launch.prepare()
from ptdmpi.comm.world import World, fail_together
from ptdmpi.config import InputError, SharedInputError
world = World()
with fail_together(world):
"""

ENGINE = (
    START
    + """
    from tests._configs import layout
    from tests._engines import build, steps_of
    engine = build(world, layout(p=2) | {"batch.micro_size": 1})
    def fail(microbatch, dy):
        raise RuntimeError("out of luck")
    if world.rank == 1:
        next(iter(engine.stages.values())).backward_microbatch = fail
    steps_of(engine, 1)
"""
)


@pytest.mark.long
def test_a_failure_on_one_rank_ends_all_and_shows_the_place():
    """The others wait for a message that never comes: without the abort this would hang."""
    import socket

    done = mpirun(
        2, ["-c", ENGINE], timeout_s=100, check=False, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode not in (0, 2)
    prefix = f"[rank 1 on {socket.gethostname()}] "
    told = [line[len(prefix) :] for line in done.stderr.splitlines() if line.startswith(prefix)]
    assert "RuntimeError: out of luck" in told
    assert "in op B1.0 of this rank's schedule:" in told
    assert [line for line in told if "<-- here" in line] == ["  B1.0   <-- here"]
    assert "[rank 0 on" not in done.stderr


@pytest.mark.long
def test_bad_input_that_all_ranks_know_is_one_line():
    program = START + "    world.on_root(lambda: open_nothing())\n"
    program = program.replace(
        "world = World()",
        "def open_nothing():\n    raise InputError('data.train: no shards in X')\nworld = World()",
    )
    done = mpirun(4, ["-c", program], timeout_s=100, check=False)
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if line.startswith("ptdmpi: error: ")]
    assert ours == ["ptdmpi: error: data.train: no shards in X"]
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_bad_input_of_one_process_is_one_line_and_no_word_of_mpi():
    program = START + "    raise InputError('shard 7 is truncated')\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=80, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ptdmpi: error: shard 7 is truncated\n"


def test_bad_input_that_one_rank_sees_ends_all():
    program = START + (
        "    if world.rank == 1:\n        raise InputError('shard 7 is truncated')\n"
        "    time.sleep(90)\n"
    )
    done = mpirun(2, ["-c", program], timeout_s=80, check=False)
    assert done.returncode == 2
    assert "ptdmpi: error: shard 7 is truncated" in done.stderr
    assert "Traceback" not in done.stderr
