"""The contract of a communicator, kept by every wire, at any number of ranks.

What is bound to `each_wire` is the contract; what follows is of the `mpi` wire's own algorithms.
"""

import math
import time

import pytest
import torch
from torch import Tensor

from ptdmpi.base.traffic import KINDS
from ptdmpi.comm import mpi
from ptdmpi.comm.clock import Total
from ptdmpi.comm.communicator import DONE
from ptdmpi.comm.mpi import BUCKET_BYTES, DIRECT_BYTES, PAIR_BYTES, MpiCommunicator
from ptdmpi.comm.sums import combine
from ptdmpi.config import wires
from tests.comm._wires import WIRES, connect
from tests.parallel import parallel

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
SIZES = [1, 3, 7, 1000, 4099]
# The whole contract on wires that work off queues in threads takes long on few cores: in
# `make test-long`; the short suite has what is bound to `core_wire`.
THREADED = ("stand_in", "torch")
PROCESS = "threaded wires"  # threads of theirs stay, hundreds of them, and slow what comes after
core_wire = pytest.mark.parametrize("wire", sorted(WIRES))
each_wire = pytest.mark.parametrize(
    "wire",
    [pytest.param(one, marks=pytest.mark.long if one in THREADED else []) for one in sorted(WIRES)],
)


def unbound() -> set[str]:
    """Wires that can be named and are not held to the contract here."""
    # of a wire that needs a device a class on a stand-in for it
    classes = [one for kind in WIRES.values() for one in kind.__mro__]
    bound = {f"{kind.__module__}:{kind.__qualname__}" for kind in classes}
    return set(wires.WIRES.values()) - bound


def test_every_wire_that_can_be_named_is_held_to_the_contract():
    """An entry in `config/wires.py` asks for one in `tests/comm/_wires.py`."""
    assert unbound() == set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(wires.WIRES, "dummy", "tests.comm.dummy:DummyCommunicator")
        assert unbound() == {"tests.comm.dummy:DummyCommunicator"}
        patch.setitem(wires.WIRES, "dummy", "tests.comm._wires:FastCommunicator")
        assert unbound() == set()


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What `rank` brings: numbers of very different magnitudes, whose sum depends on its order."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**60), 2**60, (size,), generator=generator) * (rank + 1)
    numbers = torch.randn(size, generator=generator)
    return (numbers * 10.0 ** (rank % 4 - 2)).to(dtype)


def ascending_sum(comm, size: int, dtype: torch.dtype) -> Tensor:
    """The sum from rank 0 upwards, in float32 at least."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = values(0, size, dtype).to(wide)
    for rank in range(1, comm.size):
        total = total + values(rank, size, dtype).to(wide)
    return total.to(dtype)


def same_sum(axis, found: Tensor, ascending: Tensor) -> bool:
    """To the bit on a wire that says so; else as near as another order of the sum may be."""
    if axis.exact or found.dtype == torch.int64:
        return torch.equal(found, ascending)
    wide = found.double(), ascending.double()
    return torch.allclose(*wide, rtol=0, atol=8 * torch.finfo(found.dtype).eps * 100)


@parallel(ranks=[1, 2, 4, 8])
@each_dtype
@each_wire
def test_all_reduce_sums(comm, wire, dtype):
    axis = connect(wire, comm)
    around = DIRECT_BYTES // dtype.itemsize
    for size in [*SIZES, around - 1, around, around + 1]:
        mine = values(comm.rank, size, dtype)
        result = axis.all_reduce(mine)
        assert result is mine
        assert same_sum(axis, result, ascending_sum(comm, size, dtype)), size


@parallel(ranks=[1, 2, 4])
@each_wire
def test_what_is_sent_is_counted(comm, wire):
    """Each collective by what it is about, whole; what one rank keeps to itself is not sent."""
    axis, n = connect(wire, comm), comm.size
    axis.all_reduce(torch.ones(5, 2))
    axis.all_reduce(torch.ones(3, dtype=torch.bfloat16), "max")
    axis.all_reduce(torch.ones(0))
    axis.all_gather(torch.ones(2, 3))
    axis.reduce_scatter(torch.ones(n, 3))
    axis.all_to_all(torch.ones(2 * n, 5))
    axis.all_to_all(
        torch.ones(3 * n, dtype=torch.bfloat16),
        [3 * n * (peer == 0) for peer in range(n)],
        [3 * n * (comm.rank == 0)] * n,
    )
    axis.broadcast(torch.ones(7), n - 1)
    axis.barrier()
    axis.greatest([1])
    axis.all_gather_object(1)
    none = dict.fromkeys(KINDS, 0)
    shared = {"all_reduce": 46, "all_gather": n * 24, "reduce_scatter": n * 12, "broadcast": 28}
    # what a rank sends to itself does not leave it
    shared["all_to_all"] = (n - 1) * 40 + (comm.rank != 0) * 3 * n * 2
    assert axis.tally.whole_bytes == ({**none, **shared} if n > 1 else none)
    assert axis.tally.messages["all_reduce"] == (2 if n > 1 else 0)
    if n > 1:
        here, there = torch.empty(4), torch.ones(4)
        if comm.rank == 0:
            axis.send(there, 1)
        elif comm.rank == 1:
            axis.recv(here, 0)
        assert axis.tally.sent_bytes["send"] == (16 if comm.rank == 0 else 0)


@parallel(ranks=[2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bound", sorted({PAIR_BYTES, BUCKET_BYTES}))
def test_all_reduce_around_the_sizes_where_its_algorithm_changes(comm, dtype, bound):
    axis = MpiCommunicator(comm)
    around = bound // dtype.itemsize
    for size in (around - 1, around, around + 1, around + 12345):
        result = axis.all_reduce(values(comm.rank, size, dtype))
        assert torch.equal(result, ascending_sum(comm, size, dtype)), size


@parallel(ranks=[2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_does_not_depend_on_messages(comm, dtype):
    """Whole, cut into buckets of any size, or tensor by tensor: the same bits."""
    axis = MpiCommunicator(comm)
    size = 20011
    whole = axis.all_reduce(values(comm.rank, size, dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi, "DIRECT_BYTES", 0)
        patch.setattr(mpi, "PAIR_BYTES", 0)
        for bucket_bytes in (999 * dtype.itemsize, 4096 * dtype.itemsize, 10**9):
            patch.setattr(mpi, "BUCKET_BYTES", bucket_bytes)
            assert torch.equal(axis.all_reduce(values(comm.rank, size, dtype)), whole)
    parts = values(comm.rank, size, dtype).tensor_split(3)
    assert torch.equal(torch.cat([axis.all_reduce(part) for part in parts]), whole)


@parallel(ranks=[1, 2, 4, 8])
@each_dtype
@each_wire
def test_all_reduce_max(comm, wire, dtype):
    axis = connect(wire, comm)
    for size in (5, DIRECT_BYTES // dtype.itemsize + 9):
        everyone = torch.stack([values(rank, size, dtype) for rank in range(comm.size)])
        result = axis.all_reduce(values(comm.rank, size, dtype), "max")
        assert torch.equal(result, everyone.amax(0))


@parallel(ranks=[2])
@each_wire
def test_unknown_reduction_is_refused(comm, wire):
    with pytest.raises(ValueError, match="sum or max"):
        connect(wire, comm).all_reduce(torch.ones(2), "mean")


@parallel(ranks=[1, 2, 4, 8])
@each_dtype
@each_wire
def test_all_gather_and_reduce_scatter_in_place(comm, wire, dtype):
    axis = connect(wire, comm)
    for size in SIZES:
        parts = [values(rank, size, dtype) for rank in range(comm.size)]
        whole = torch.zeros(comm.size * size, dtype=dtype)
        own = slice(comm.rank * size, (comm.rank + 1) * size)
        whole[own] = parts[comm.rank]
        axis.all_gather_in_place(whole).wait()
        assert torch.equal(whole, torch.cat(parts)), size

        whole = values(comm.rank, comm.size * size, dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mpi, "BUCKET_BYTES", 4096)  # the largest in several messages, one short
            axis.reduce_scatter_in_place(whole).wait()
        total = ascending_sum(comm, comm.size * size, dtype)
        assert same_sum(axis, whole[own], total[own]), size
    if comm.size > 1:
        with pytest.raises(ValueError, match="cannot share dim 0"):
            axis.all_gather_in_place(torch.zeros(comm.size + 1, dtype=dtype))


@parallel(ranks=[1, 2, 4, 8])
@each_dtype
@each_wire
def test_all_gather_and_reduce_scatter(comm, wire, dtype):
    axis = connect(wire, comm)
    for size in SIZES:
        gathered = axis.all_gather(values(comm.rank, size * 2, dtype).view(size, 2))
        everyone = [values(rank, size * 2, dtype) for rank in range(comm.size)]
        assert torch.equal(gathered, torch.cat(everyone).view(-1, 2))

        whole = values(comm.rank, size * 2 * comm.size, dtype).view(-1, 2)
        kept = whole.clone()
        part = axis.reduce_scatter(whole)
        total = ascending_sum(comm, size * 2 * comm.size, dtype).view(-1, 2)
        assert same_sum(axis, part, total.chunk(comm.size)[comm.rank])
        assert torch.equal(whole, kept), "the input belongs to autograd"


# Rows that rank a sends to rank b: the same for all, different for all, none at all from some ranks
# or to some, and none anywhere.
SPLITS = {
    "equal": lambda a, b: 3,
    "uneven": lambda a, b: (2 * a + 3 * b) % 5,
    "one way": lambda a, b: 700 * (a < b),
    "nothing": lambda a, b: 0,
}


def numbered(a: int, b: int, rows: int, dtype: torch.dtype) -> Tensor:
    """The rows that rank a sends to rank b, [rows, 2]."""
    return values(10 * a + b, 2 * rows, dtype).view(rows, 2)


@parallel(ranks=[1, 2, 3, pytest.param(4, marks=pytest.mark.long), 8])
@each_dtype
@each_wire
def test_all_to_all(comm, wire, dtype):
    axis, me, everyone = connect(wire, comm), comm.rank, range(comm.size)
    for name, rows in SPLITS.items():
        brought = torch.cat([numbered(me, b, rows(me, b), dtype) for b in everyone])
        kept = brought.clone()
        sent, received = [rows(me, b) for b in everyone], [rows(a, me) for a in everyone]
        result = axis.all_to_all(brought, sent, received)
        expected = torch.cat([numbered(a, me, rows(a, me), dtype) for a in everyone])
        assert torch.equal(result, expected), name
        assert torch.equal(brought, kept), "the input belongs to autograd"
        if name == "equal":
            assert torch.equal(axis.all_to_all(brought), expected)


@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@core_wire
def test_all_to_all_refuses_rows_that_do_not_fit(comm, wire):
    axis, n = connect(wire, comm), comm.size
    rows = torch.ones(n, 2)
    with pytest.raises(ValueError, match="cannot share dim 0"):
        axis.all_to_all(torch.ones(n + 1, 2))
    with pytest.raises(ValueError, match="needs both `sent` and `received`"):
        axis.all_to_all(rows, [1] * n)
    for sent in ([1] * (n + 1), [-1, *[1] * (n - 2), 2]):
        with pytest.raises(ValueError, match="numbers of rows >= 0"):
            axis.all_to_all(rows, sent, [1] * n)
    with pytest.raises(ValueError, match=r"cannot send .* rows of"):
        axis.all_to_all(rows, [2] * n, [2] * n)
    with pytest.raises(ValueError, match=r"cannot send .* and receive"):
        axis.all_to_all(rows, [1] * n, [2] * n)


@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@each_wire
def test_reduce_scatter_needs_a_multiple_of_the_ranks(comm, wire):
    with pytest.raises(ValueError, match="cannot share dim 0"):
        connect(wire, comm).reduce_scatter(torch.ones(comm.size + 1, 2))


@parallel(ranks=[1, 2, 4, 8])
@each_dtype
@each_wire
def test_broadcast(comm, wire, dtype):
    axis = connect(wire, comm)
    for root in {0, comm.size - 1}:
        result = axis.broadcast(values(comm.rank, 77, dtype), root)
        assert torch.equal(result, values(root, 77, dtype))


@parallel(ranks=[2, 3, pytest.param(4, marks=pytest.mark.long), 8])
@each_dtype
@each_wire
def test_messages_arrive_in_order(comm, wire, dtype):
    """Several sends and receives in flight in both directions of a ring, awaited in any order."""
    axis = connect(wire, comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sizes = [1, 5, 4099, 3, 20000]
    received = [torch.empty(size, dtype=dtype) for size in sizes]
    receives = [axis.irecv(tensor, left) for tensor in received]
    sent = [values(comm.rank * 10 + i, size, dtype) for i, size in enumerate(sizes)]
    sends = [axis.isend(tensor, right) for tensor in sent]
    for handle in (*reversed(receives), *sends):
        handle.wait()
    for i, (tensor, size) in enumerate(zip(received, sizes, strict=True)):
        assert torch.equal(tensor, values(left * 10 + i, size, dtype))
    assert all(handle.done() for handle in (*sends, *receives))


@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@core_wire
def test_done_turns_true_when_the_message_is_here(comm, wire):
    axis = connect(wire, comm)
    if comm.rank == 0:
        handle = axis.irecv(tensor := torch.zeros(3, 2), 1)
        assert not handle.done()
        axis.barrier()
        while not handle.done():
            pass
        assert torch.equal(tensor, torch.arange(6.0).view(3, 2))
    else:
        axis.barrier()
        if comm.rank == 1:
            axis.send(torch.arange(6.0).view(3, 2), 0)


@parallel(ranks=[1, 2, 4])
@core_wire
def test_collectives_are_begun_and_waited_for(comm, wire):
    """Several at once, awaited in another order; what they leave is that of the blocking ones."""
    axis = connect(wire, comm)
    brought = [values(comm.rank, 4 * comm.size, torch.float32) * (i + 1) for i in range(4)]
    expected = [
        axis.all_reduce(brought[0].clone()),
        axis.all_gather(brought[1].clone()),
        axis.reduce_scatter(brought[2].clone()),
        axis.all_to_all(brought[3].clone()),
    ]
    summed = axis.all_reduce_begin(brought[0])
    gathered, arrived = axis.all_gather_begin(brought[1])
    part, scattered = axis.reduce_scatter_begin(brought[2])
    dealt, exchanged = axis.all_to_all_begin(brought[3])
    if comm.size > 1 and wire == "mpi":
        assert all(handle is DONE for handle in (summed, arrived, scattered, exchanged))
    for handle in (exchanged, scattered, summed, arrived):
        handle.wait()
        assert handle.done()
    for found, known in zip((brought[0], gathered, part, dealt), expected, strict=True):
        assert torch.equal(found, known)


@parallel(ranks=[2])
@each_wire
def test_time_in_collectives_is_counted_where_it_is_asked_for(comm, wire):
    """Rank 0 waits for rank 1: in a blocking one, and for a handle."""
    axis = connect(wire, comm)
    axis.barrier()
    inside = Total()
    for _ in range(2):
        comm.Barrier()
        if comm.rank == 1:
            time.sleep(0.2)
        axis.count(inside)
        handle = axis.all_reduce_begin(torch.ones(3))
        handle.wait()
        axis.count(None)
        axis.all_reduce(torch.ones(3))
    assert axis.busy == ""
    waits, comes_late = comm.allgather(inside.seconds)  # of a busy machine both have a share
    assert waits > comes_late + 0.2 and comes_late > 0.0


@parallel(ranks=[2])
@core_wire
def test_send_and_recv(comm, wire):
    axis = connect(wire, comm)
    if comm.rank == 0:
        axis.send(torch.arange(6.0), 1)
    else:
        result = axis.recv(torch.zeros(2, 3), 0)
        assert torch.equal(result, torch.arange(6.0).view(2, 3))


@parallel(ranks=[1, 2])
@core_wire
def test_tensors_that_are_not_contiguous_are_refused(comm, wire):
    axis = connect(wire, comm)
    crossed = torch.zeros(4, 6).t()
    calls = [axis.all_reduce, axis.all_gather, axis.reduce_scatter, axis.broadcast]
    calls.append(axis.all_to_all)
    calls += [lambda x: axis.isend(x, 0), lambda x: axis.irecv(x, 0)]
    for call in calls:
        with pytest.raises(ValueError, match="must be contiguous"):
            call(crossed)


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@each_wire
def test_empty_tensors_and_objects(comm, wire):
    axis = connect(wire, comm)
    assert axis.all_reduce(torch.empty(0)).shape == (0,)
    assert axis.all_gather(torch.empty(0, 3)).shape == (0, 3)
    assert axis.all_to_all(torch.empty(0, 3)).shape == (0, 3)
    assert axis.all_gather_object({"rank": comm.rank}) == [{"rank": r} for r in range(comm.size)]
    assert axis.broadcast_object((comm.rank, "x"), comm.size - 1) == (comm.size - 1, "x")
    every = axis.all_gather_numbers([comm.rank, 0.1, math.inf])
    assert every == [[r, 0.1, math.inf] for r in range(comm.size)]
    assert axis.all_gather_numbers([]) == [[]] * comm.size
    assert axis.broadcast_numbers([comm.rank, 0.1], comm.size - 1) == [comm.size - 1, 0.1]
    axis.barrier()


@parallel(ranks=[1])
@core_wire
def test_one_rank_hands_the_tensor_back(comm, wire):
    axis = connect(wire, comm)
    x = torch.arange(4.0)
    for call in (axis.all_reduce, axis.all_gather, axis.reduce_scatter, axis.broadcast):
        assert call(x) is x
    assert axis.all_to_all(x) is x and axis.all_to_all(x, [4], [4]) is x
    assert torch.equal(x, torch.arange(4.0))


OPERATIONS = {
    "all_reduce": test_all_reduce_sums,
    "all_reduce max": test_all_reduce_max,
    "gathers and scatters": test_all_gather_and_reduce_scatter,
    "in place": test_all_gather_and_reduce_scatter_in_place,
    "all_to_all": test_all_to_all,
    "broadcast": test_broadcast,
    "messages": test_messages_arrive_in_order,
}


@parallel(ranks=[2])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_on_torchs_own_groups(comm, operation):
    """One case of each operation of what is long on this wire: gloo, started through MPI."""
    OPERATIONS[operation].parallel_body(comm, "torch", torch.float32)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int32])
def test_mpi_works_on_the_memory_of_the_tensor(dtype):
    tensor = torch.zeros(6, dtype=dtype)
    buffer = mpi._bytes(tensor)
    assert buffer.ctypes.data == tensor.data_ptr()
    assert buffer.nbytes == tensor.nbytes


def test_half_types_are_rounded_once():
    ones = torch.ones(1, dtype=torch.bfloat16)
    pieces = [256 * ones, ones, ones]  # in bfloat16, 256 + 1 is 256
    combine(pieces, "sum", result := torch.empty_like(ones))
    assert result.item() == 258
