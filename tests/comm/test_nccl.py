"""The `nccl` wire: its own class on a stand-in for the library, and the library as far as it goes
without a GPU."""

import inspect
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from ptdmpi.comm.communicator import Exchanged
from ptdmpi.comm.nccl import library as real
from ptdmpi.comm.nccl.wire import NcclCommunicator
from ptdmpi.comm.traits import WireError
from ptdmpi.comm.wires import Wire, preferred, wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.engine.engine import Engine
from ptdmpi.engine.runner import OpHook
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.schedule.ops import Op
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, steps_of
from tests.comm._stand_in import Pauses, StandIn, StandInCommunicator, Stuck
from tests.parallel import mpirun, parallel

STAND_IN = Wire(StandInCommunicator)
INTERLEAVED = {**layout(p=2, v=2), "model.layers": 4, "parallel.schedule": "interleaved"}
LAYOUTS = {
    "interleaved": INTERLEAVED,
    "zb-v": {**layout(p=2, v=2), "model.layers": 4, "parallel.schedule": "zb-v"},
    "tensor": {**layout(t=2), "parallel.sequence_parallel": True},
    "zero": {**layout(d=2), "parallel.zero": 3},
}
# with each kind of group, and with pauses and without them; the others in `make test-long`
SHORT = [("interleaved", True), ("zero", False)]
SOME_OR_ALL = [
    pytest.param(name, pauses, marks=[] if (name, pauses) in SHORT else pytest.mark.long)
    for name in LAYOUTS
    for pauses in (False, True)
]


def engine_on(comm, changes: dict, wire: Wire | None = None) -> Engine:
    """With as many replicas as it takes to fill all ranks."""
    world = World(comm)
    fixed = changes["parallel.tensor"] * changes["parallel.pipeline"]
    config = small({**changes, "parallel.data": world.size // fixed}, world.size)
    return Engine(config, world.split(grid_of(config), wire), VOCAB_SIZE)


def curve(engine: Engine, steps: int = 2) -> list[tuple[float, float]]:
    return [(one.loss, one.grad_norm) for one in steps_of(engine, steps)]


@parallel(ranks=[2, 4])
@pytest.mark.parametrize(("name", "pauses"), SOME_OR_ALL)
def test_the_engine_on_it_has_the_bits_of_mpi(comm, name, pauses):
    """With random delays on every stream, and with a device that is synchronised inside of every
    compute: no hang. (The stand-in sums in ascending order, which NCCL does not.)"""
    expected = curve(engine_on(comm, LAYOUTS[name]))
    engine = engine_on(comm, LAYOUTS[name], STAND_IN)
    groups = [group for group in engine.axes.groups.values() if group.group != "world"]
    assert all(type(group) is StandInCommunicator for group in groups)
    assert not engine.axes.exact
    if pauses:
        engine.runner.hooks.insert(0, Pauses(StandInCommunicator.library))
    assert curve(engine) == expected


@contextmanager
def early():
    """Receives begun early, as only MPI can bear; and nobody waits long."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StandInCommunicator, "posts_early", True)
        patched.setattr(StandInCommunicator, "load", lambda everyone, device: StandIn(everyone))
        yield


@parallel(ranks=[2])
def test_early_receives_hang_where_a_device_pauses(comm):
    """So the stand-in can hang, and says at what; behind it the library is ended by an abort."""
    with early():
        engine = engine_on(comm, INTERLEAVED, STAND_IN)
        stand_in = StandInCommunicator.library
        stand_in.limit_s = 1.0
        engine.runner.hooks.insert(0, Pauses(stand_in))
        with pytest.raises(Stuck, match=r"inside of a compute: .*receive on pair \d->\d"):
            curve(engine, 1)
    engine.axes.abort()
    assert stand_in.ended
    with pytest.raises(WireError, match=r"all_reduce of 12 bytes on \w+: aborted"):
        StandInCommunicator.library = stand_in
        engine.axes["pipeline"].all_reduce(torch.ones(3))


class Lost(OpHook):
    """The last rank is lost in the midst of a step; the others' watch ends what is under way."""

    def __init__(self, world: World) -> None:
        self.world, self.ops = world, 0

    def begin(self, op: Op) -> None:
        self.ops += 1
        if self.ops == 3 and self.world.rank == self.world.size - 1:
            raise RuntimeError("lost")
        if self.ops == 3:
            threading.Timer(0.2, self.world.abort_wires).start()


@parallel(ranks=[4])
def test_survivors_connect_anew_by_ids_of_their_own(comm):
    """What was under way ends with an error, nothing can be begun on it, and fewer ranks train on
    connections that nothing of the old ones is in."""
    changes = {**layout(p=2), "model.layers": 4}
    world = World(comm)
    config = small({**changes, "parallel.data": 2}, 4)
    engine = Engine(config, world.split(grid_of(config), STAND_IN), VOCAB_SIZE)
    old = StandInCommunicator.library
    engine.runner.hooks.insert(0, Lost(world))
    with pytest.raises((WireError, Stuck, RuntimeError)):
        curve(engine)
    comm.Barrier()
    world.abort_wires()
    with pytest.raises(WireError, match="aborted"):
        StandInCommunicator.library = old
        engine.axes["pipeline"].all_reduce(torch.ones(3))
    crew = world.part([0, 2])
    if crew is not None:
        config = small(changes, 2)
        with patch.object(
            StandIn, "unique_id", autospec=True, side_effect=StandIn.unique_id
        ) as made:
            fewer = Engine(config, crew.split(grid_of(config), STAND_IN), VOCAB_SIZE)
        assert StandInCommunicator.library is not old and made.call_count > 0
        assert all(call.args[0] is StandInCommunicator.library for call in made.call_args_list)
        found = curve(fewer)
        assert found == curve(Engine(config, crew.split(grid_of(config)), VOCAB_SIZE))
    comm.Barrier()


@parallel(ranks=[2, 3])
def test_tensors_of_the_host_go_through_mpi(comm):
    StandInCommunicator.open(comm, torch.device("cpu"))
    group = StandInCommunicator(comm, group="pipeline")
    stand_in = StandInCommunicator.library
    mine = torch.full((3,), float(comm.rank + 1))
    stand_in.elsewhere.add(mine.data_ptr())
    with patch.object(type(group._carrier), "all_reduce", None):
        total = comm.size * (comm.size + 1) / 2
        assert torch.equal(group.all_reduce(mine), torch.full((3,), total))
    stand_in.elsewhere.clear()
    with patch.object(type(group.host), "_all_reduce", None):
        group.all_reduce(mine)


@parallel(ranks=[2])
def test_nothing_goes_into_a_stream_that_is_not_ours(comm):
    """Each connection has one of its own, and no message between neighbours goes by the group's."""
    StandInCommunicator.open(comm, torch.device("cpu"))
    group = StandInCommunicator(comm, group="pipeline")
    carrier = group._carrier
    lines = [carrier.whole, *carrier.pairs.values()]
    assert list(carrier.pairs) == [(0, 1), (1, 0)]
    assert len({id(line.stream) for line in lines}) == len(lines) == 3
    with patch.object(type(carrier.whole), "begin", autospec=True) as begin:
        group.irecv(torch.ones(2), 1 - comm.rank)
        group.isend(torch.ones(2), 1 - comm.rank)
    assert [call.args[0].name for call in begin.call_args_list] == [
        f"pair {1 - comm.rank}->{comm.rank}",
        f"pair {comm.rank}->{1 - comm.rank}",
    ]


class Unlucky(StandIn):
    """Ranks with this number in the world make no ids."""

    maker = 0

    def unique_id(self) -> bytes:
        if self.rank == self.maker:
            raise RuntimeError("no socket")
        return super().unique_id()


@parallel(ranks=[2, 4])
@pytest.mark.parametrize("maker", [0, 1])
def test_an_exception_of_who_makes_an_id_reaches_all(comm, maker):
    with patch.object(Unlucky, "maker", maker):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(StandInCommunicator, "load", lambda everyone, device: Unlucky(everyone))
            StandInCommunicator.open(comm, torch.device("cpu"))
        with pytest.raises(InputError) as refused:
            StandInCommunicator(comm, group="pipeline")
    StandInCommunicator.library = None
    assert str(refused.value) == (
        f'comm.wire = "nccl": rank {maker} of the pipeline axis has no id for the others: no socket'
    )


@parallel(ranks=[3])
def test_all_ranks_hear_why_the_library_cannot_serve(comm):
    cpu = torch.device("cpu")
    for shown, words in (
        ({"version": f"2.{comm.rank // 2}"}, "ranks have libnccl 2.0, 2.1"),
        ({"device": f"GPU {comm.rank % 2}"}, "ranks 0 and 2 are on the same GPU, GPU 0"),
    ):
        described = {"version": "2", "path": "", "device": f"GPU {comm.rank}", **shown}
        said = real.Described(**described)
        with (
            patch.object(StandIn, "describe", lambda _, said=said: said),
            pytest.raises(SharedInputError, match=words),
        ):
            StandInCommunicator.open(comm, cpu)
    with pytest.raises(SharedInputError, match="rank 0: NCCL connects NVIDIA's GPUs; this rank"):
        NcclCommunicator.open(comm, cpu)


def test_what_auto_chooses():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert preferred(cpu) == ("mpi", "")
    with patch("ptdmpi.comm.wires.installed", lambda: True):
        assert preferred(cuda) == ("nccl", "")
        with patch.object(torch.version, "hip", "6.4"):
            assert preferred(cuda) == ("torch", "")
    with patch("ptdmpi.comm.wires.installed", lambda: False):
        name, said = preferred(cuda)
        assert name == "mpi" and "staged on the host: no nccl4py" in said
    assert wire_named("nccl").kind is NcclCommunicator


def test_one_libnccl_in_a_process():
    line = "7f00-7f01 r-xp 00000000 08:01 42   /opt/{}/lib/libnccl.so.2"
    once = [line.format("a"), line.format("a"), "7f02-7f03 rw-p 0 0:0 0", line.format("b")[:-14]]
    assert real.libraries(once) == ["/opt/a/lib/libnccl.so.2"]
    assert len(real.libraries([*once, line.format("b")])) == 2


NCCL4PY = pytest.mark.skipif(not real.installed(), reason="the extra nccl is not installed")


@NCCL4PY
def test_without_libnccl_the_reason_is_clear():
    core = real.importlib.import_module("nccl.core")
    nothing = SimpleNamespace(libnccl=None)
    words = r"no libnccl: it comes with PyTorch's CUDA wheels or nvidia-nccl-cu13"
    with patch.object(core, "get_version", lambda: nothing):
        with pytest.raises(ValueError, match=words):
            real.loaded()
        assert real.description().startswith("nccl4py, but no libnccl: ")


NAMES = ("NCCLConfig", "UniqueId", "SUM", "MAX")  # of nccl.core, besides its communicator


class Signed:
    """A communicator of nccl4py that takes what its own methods take, and does nothing."""

    def __init__(self, core):
        self.kind, self.called, self.state = core.Communicator, [], "Success"

    def init(self, *given):
        inspect.signature(self.kind.init).bind(*given)
        self.called.append(given)
        return self

    def get_async_error(self):
        """A bare number, as the compiled part of nccl4py gives it."""
        bindings = real.importlib.import_module("nccl.bindings.nccl")
        return int(bindings.Result[self.state]) if isinstance(self.state, str) else self.state

    def __getattr__(self, name):
        signature = inspect.signature(getattr(self.kind, name))

        def call(*given, **named):
            signature.bind(self, *given, **named)
            self.called.append(name)

        return call


class Grouped:
    """`nccl.core.group`, as a context that counts how often it is entered."""

    entered = 0

    def __call__(self):
        return self

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *raised):
        return False


@NCCL4PY
def test_every_call_is_one_that_nccl4py_takes():
    core = real.importlib.import_module("nccl.core")
    signed, flat, stream = Signed(core), torch.ones(2), object()
    known = {name: getattr(core, name) for name in NAMES}
    library = object.__new__(real.Nccl)
    assert list(inspect.signature(core.group).parameters) == []
    known["group"] = group = Grouped()
    library.device, library.core = "cuda:0", SimpleNamespace(Communicator=signed, **known)
    with patch.object(torch.cuda, "set_device"):
        for name in ("tensor", "pair 0->1"):
            connection = library.connect(bytes(range(128)), 2, 1, name)
    whole, pair = signed.called
    assert whole[2].as_bytes == bytes(range(128)) and whole[:2] == (2, 1)
    assert (whole[3].comm_name, whole[3].max_ctas) == ("tensor", None)
    assert (pair[3].comm_name, pair[3].max_ctas) == ("pair 0->1", real.PAIR_CTAS)
    signed.called.clear()
    for op in ("sum", "max"):
        connection.all_reduce(flat, op, stream)
    connection.all_gather(flat, flat, stream)
    connection.reduce_scatter(flat, flat, stream)
    connection.all_to_all(flat, flat, Exchanged([2, 0], [0, 2]), stream)
    assert signed.called[-2:] == ["send", "recv"], "empty parts do not travel"
    assert group.entered == 1, "all at once, or two ranks may wait in a circle"
    connection.broadcast(flat, 1, stream)
    connection.send(flat, 1, stream)
    connection.receive(flat, 1, stream)
    for signed.state, said in (
        ("Success", ""),
        ("InProgress", ""),
        ("RemoteError", "RemoteError"),
        (99, "error 99"),
    ):
        assert connection.error() == said
    connection.abort()
    connection.abort()
    assert connection.error() == "aborted" and signed.called.count("abort") == 1
    assert len(set(signed.called)) == 7
    signed.state = "Success"  # and a method that is not there is told
    with pytest.raises(AttributeError):
        signed.all_reduce(flat)


IDS = """
import sys
from mpi4py import MPI
import torch
from ptdmpi.comm.nccl import library
from ptdmpi.comm.nccl.wire import agreed_ids
comm = MPI.COMM_WORLD
class NoGpu(library.Nccl):
    def __init__(self): self.core = __import__("nccl.core").core
    def unique_id(self):
        if sys.argv[1:] == ["bad"] and comm.rank == 0: raise OSError("no interface")
        return super().unique_id()
real = NoGpu()
whole, pairs = agreed_ids(real, comm, "pipeline", [(0, 1), (1, 0)])
assert len(whole) == 128 and len(set(comm.allgather(whole))) == 1
assert len({whole, *pairs.values()}) == 3
try:
    real.core.Communicator.init(comm.size, comm.rank, real.core.UniqueId.from_bytes(whole))
except Exception as error:
    print("refused:", type(error).__name__, flush=True)
print(library.loaded()[0], flush=True)
"""


@pytest.mark.long
@NCCL4PY
def test_ids_of_nccl_itself():
    """nccl4py makes ids without a driver, MPI hands them on, and without a driver a connection is
    refused at once; where rank 0 has none, all ranks say so."""
    if not real.description().startswith("libnccl"):
        pytest.skip(
            f"{real.description()}: PyTorch's CUDA wheels bring libnccl, or nvidia-nccl-cu13"
        )
    found = mpirun(2, ["-c", IDS], timeout_s=60)
    assert found.stdout.count("refused: NCCLError") == 2, found.stdout + found.stderr
    assert "2." in found.stdout
    found = mpirun(2, ["-c", IDS, "bad"], timeout_s=60, check=False)
    words = "rank 0 of the pipeline axis has no id for the others: no interface"
    assert found.returncode != 0 and found.stderr.count(words) >= 1
