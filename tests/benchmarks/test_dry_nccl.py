"""The stand-in for NCCL in `make gpu-dry`: its counts, the calls that it refuses, and the rows of
the table. It is compiled here without CUDA."""

import ctypes
import shutil
import subprocess
from functools import partial
from unittest import mock

import pytest

from benchmarks.dry import build, messages
from benchmarks.dry.bounds import OFF_PLAN, missed
from benchmarks.dry.messages import NullNccl, Sent, by_calls, check, row_of
from ptdmpi.base.traffic import Tally

FINE, INVALID_ARGUMENT, INVALID_USAGE = 0, 4, 5
FLOAT32, FLOAT64, BFLOAT16, TYPES = 7, 8, 9, 12
SUM, OPERATIONS = 0, 6
RANKS, RANK, PEER = 4, 1, 2
COUNT = 300
LAUNCH = 0  # the number of NULL_LAUNCH in `enum null_event`

Address = ctypes.c_void_p


class UniqueId(ctypes.Structure):
    """The type ncclUniqueId, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class Rank:
    """The functions of the stand-in, one communicator, and a tensor on the device."""

    def __init__(self, file: str) -> None:
        self.library = ctypes.CDLL(file)
        self.library.null_reserve.restype = Address
        self.tensor = Address(self.library.null_reserve(ctypes.c_size_t(8 * COUNT)))
        self.counter = NullNccl(file)
        self.communicator = Address()
        made = ctypes.byref(self.communicator)
        assert self.library.ncclCommInitRank(made, RANKS, UniqueId(), RANK) == FINE

    def counts(self) -> dict[str, Sent]:
        """Return the counts of the communicator, without kinds that were not called."""
        ((ranks, calls),) = self.counter.counts()
        assert ranks == RANKS
        return {kind: sent for kind, sent in calls.items() if sent.calls}

    def launched(self) -> int:
        """Return the number of launches so far."""
        return int(self.library.null_count(LAUNCH))

    def reduce(self, tensor=None, count=COUNT, number=FLOAT32, operation=SUM, of=None) -> int:
        """Call ncclAllReduce, and return its result."""
        tensor, of = tensor or self.tensor, of or self.communicator
        size = ctypes.c_size_t(count)
        return self.library.ncclAllReduce(tensor, tensor, size, number, operation, of, None)

    def pair(self, name: str, peer: int = PEER, count: int = COUNT) -> int:
        """Call ncclSend or ncclRecv, and return its result."""
        size = ctypes.c_size_t(count)
        function = getattr(self.library, name)
        return function(self.tensor, size, BFLOAT16, peer, self.communicator, None)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Compile the stand-in, and return its file."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    file = tmp_path_factory.mktemp("null") / build.NCCL
    sources = [str(build.SOURCES / name) for name in ("state.c", "nccl.c")]
    command = [*build.COMPILE, "-shared", *sources, "-o", str(file), "-lpthread"]
    subprocess.run(command, check=True)
    return str(file)


@pytest.fixture
def rank(stand_in, tmp_path):
    """A copy of the library has counters of its own."""
    made = Rank(shutil.copy(stand_in, tmp_path))
    yield made
    assert made.counter.open_groups() == 0


def test_calls_and_bytes_are_counted_by_kind(rank):
    """The bytes are the number of elements that the caller gives, times the size of an element."""
    tensor, of, library = rank.tensor, rank.communicator, rank.library
    size = ctypes.c_size_t(COUNT)
    assert rank.reduce() == rank.reduce(number=FLOAT64) == FINE
    assert library.ncclAllGather(tensor, tensor, size, BFLOAT16, of, None) == FINE
    assert library.ncclReduceScatter(tensor, tensor, size, FLOAT32, SUM, of, None) == FINE
    assert library.ncclAlltoAll(tensor, tensor, size, FLOAT32, of, None) == FINE
    assert library.ncclBroadcast(tensor, tensor, size, FLOAT32, 3, of, None) == FINE
    assert library.ncclBcast(tensor, size, FLOAT32, 3, of, None) == FINE
    assert library.ncclReduce(tensor, tensor, size, FLOAT32, SUM, 0, of, None) == FINE
    assert rank.pair("ncclSend") == rank.pair("ncclRecv") == rank.pair("ncclSend", RANK) == FINE
    assert rank.counts() == {
        "all_reduce": Sent(2, COUNT * (4 + 8)),
        "all_gather": Sent(1, COUNT * 2),
        "reduce_scatter": Sent(1, COUNT * 4),
        "all_to_all": Sent(1, COUNT * 4),
        "broadcast": Sent(2, 2 * COUNT * 4),
        "reduce": Sent(1, COUNT * 4),
        "send": Sent(1, COUNT * 2),
        "receive": Sent(1, COUNT * 2),
        "to itself": Sent(1, COUNT * 2),
    }
    assert rank.launched() == 11


def test_an_empty_collective_is_discarded(rank):
    """NCCL accepts it and launches nothing (taskAppend in its enqueue.cc); an empty send is sent.
    Neither needs memory."""
    assert rank.reduce(Address(64), count=0) == FINE
    assert rank.launched() == 0
    assert rank.pair("ncclSend", count=0) == FINE
    assert rank.counts() == {"empty": Sent(1, 0), "send": Sent(1, 0)}
    assert rank.launched() == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: rank.library.ncclAllReduce(
            rank.tensor, rank.tensor, ctypes.c_size_t(COUNT), FLOAT32, SUM, None, None
        ),
        lambda rank: rank.reduce(of=Address(64)),
        lambda rank: rank.reduce(number=TYPES),
        lambda rank: rank.reduce(number=-1),
        lambda rank: rank.reduce(operation=OPERATIONS),
        lambda rank: rank.reduce(Address(64)),  # no memory of the device
        lambda rank: rank.pair("ncclSend", RANKS),
        lambda rank: rank.pair("ncclRecv", -1),
        lambda rank: rank.library.ncclCommInitRank(ctypes.byref(Address()), 2, UniqueId(), 2),
    ],
)
def test_wrong_arguments_are_refused_and_not_counted(rank, call):
    assert call(rank) == INVALID_ARGUMENT
    assert rank.counts() == {} and rank.launched() == 0


@pytest.mark.parametrize("end", ["ncclCommDestroy", "ncclCommAbort"])
def test_a_communicator_that_was_destroyed_is_refused(rank, end):
    """Its calls so far stay counted. NCCL accepts to destroy no communicator."""
    destroy = getattr(rank.library, end)
    assert rank.reduce() == destroy(rank.communicator) == FINE
    assert rank.reduce() == rank.pair("ncclSend") == destroy(rank.communicator) == INVALID_ARGUMENT
    assert rank.counts() == {"all_reduce": Sent(1, COUNT * 4)}
    assert destroy(None) == FINE


def test_a_group_is_one_launch_and_ends_as_often_as_it_begins(rank):
    begin, end = rank.library.ncclGroupStart, rank.library.ncclGroupEnd
    assert end() == INVALID_USAGE
    assert begin() == rank.pair("ncclSend") == begin() == rank.pair("ncclRecv") == end() == FINE
    assert rank.launched() == 0
    with pytest.raises(ValueError, match="1 groups of NCCL's calls have begun and not ended"):
        rank.counter.tallies()
    assert end() == FINE and rank.launched() == 1
    assert end() == INVALID_USAGE
    assert begin() == end() == FINE and rank.launched() == 1


def test_a_refused_call_ends_its_group_with_the_error(rank):
    """The next group is not concerned."""
    begin, end = rank.library.ncclGroupStart, rank.library.ncclGroupEnd
    assert begin() == rank.pair("ncclSend") == FINE
    assert rank.pair("ncclSend", RANKS) == INVALID_ARGUMENT
    assert end() == INVALID_ARGUMENT and rank.launched() == 0
    assert begin() == rank.pair("ncclSend") == end() == FINE and rank.launched() == 1


def test_tallies_have_the_convention_of_the_traffic(rank):
    """A rank's part is counted by NCCL, and the parts of all ranks by a tally."""
    tensor, of, size = rank.tensor, rank.communicator, ctypes.c_size_t(COUNT)
    rank.reduce()
    rank.library.ncclAllGather(tensor, tensor, size, BFLOAT16, of, None)
    rank.pair("ncclSend")
    rank.pair("ncclSend", RANK)
    rank.pair("ncclRecv")
    tallies, received = rank.counter.tallies()
    assert by_calls(tallies) == {
        "all_reduce": Sent(1, 2 * COUNT * 4 * (RANKS - 1) // RANKS),
        "all_gather": Sent(1, COUNT * 2 * (RANKS - 1)),
        "send": Sent(1, COUNT * 2),
    }
    assert received == Sent(1, COUNT * 2)


def test_calls_that_no_layout_plans_are_an_error(rank):
    size = ctypes.c_size_t(COUNT)
    rank.library.ncclReduce(
        rank.tensor, rank.tensor, size, FLOAT32, SUM, 0, rank.communicator, None
    )
    with pytest.raises(ValueError, match="1 calls of reduce, which no layout plans"):
        rank.counter.tallies()


def test_messages_of_the_planner_are_calls_of_nccl():
    """An all-to-all of three ranks is two sends."""
    tensor, data = Tally(3), Tally(2)
    tensor.add("all_to_all", 50, 2)
    tensor.add("all_reduce", 30)
    data.add("neighbours", 7)
    data.add("all_reduce", 10, 4)
    calls = {"send": Sent(2 * 2 + 1, 107), "all_reduce": Sent(5, 2 * 30 * 2 // 3 + 40)}
    assert by_calls([tensor, data]) == calls


def test_ranks_receive_what_is_sent_and_send_only_what_is_planned():
    first, second = {"send": Sent(2, 20)}, {"all_reduce": Sent(1, 5)}
    check([(first, Sent(), first), (second, Sent(2, 20), second)])
    with pytest.raises(ValueError, match="send 20 bytes in 2 calls, and receive 19 in 2"):
        check([(first, Sent(), first), (second, Sent(2, 19), second)])
    with pytest.raises(ValueError, match="rank 1 has calls that are not planned: all_reduce"):
        check([(first, Sent(2, 20), first), (second, Sent(), first)])


def test_a_row_has_the_numbers_of_all_ranks_and_exact_bytes_are_required():
    same, more = Sent(3, 2_000_000), Sent(4, 3_000_000)
    row = row_of([(same, same), (same, same)])
    assert row["calls"] == row["planned calls"] == "3" and row["MB sent"] == "2"
    assert row[OFF_PLAN] == 0.0 and missed({"d 2: send": row}) == {}
    row = row_of([(same, same), (more, same)])
    assert row["calls"] == "3, 4" and row["MB sent"] == "2, 3" and row["planned MB"] == "2"
    off = "the bytes that NCCL sends differ by +50 % from the plan"
    assert missed({"d 2: send": row}) == {"d 2: send": off}
    assert row_of([(None, same)])[OFF_PLAN] == -100.0


def test_every_layout_has_a_row_for_each_planned_kind():
    with mock.patch.object(messages, "counted", lambda name: [({}, {})]):
        rows = dict(messages.rows())
    assert all(isinstance(count, partial) for count in rows.values())
    assert {name.partition(": ")[0] for name in rows} == {*messages.LAYOUTS}
    assert "p 2: send" in rows and "d 2, ZeRO 3: all_gather" in rows


def test_the_packages_that_call_nccl_have_the_versions_of_the_lock_file():
    requirements = build.pinned(build.PINNED.read_text(encoding="utf-8"))
    assert sorted(line.partition("==")[0] for line in requirements) == sorted(build.OF_BINDINGS)
