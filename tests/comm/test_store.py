"""The store of torch.distributed over MPI: what torch asks of one, from ranks and threads."""

import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ptdmpi.comm.mailbox import Mailbox
from ptdmpi.comm.store import MpiStore
from ptdmpi.comm.torch_dist import Session, TorchCommunicator
from ptdmpi.comm.wires import CPU
from ptdmpi.config import InputError
from tests.parallel import parallel


@parallel(ranks=[1, 3])
def test_what_one_rank_sets_all_read(comm):
    before = set(threading.enumerate())  # stores of other tests may be open in this process
    store = MpiStore(comm)
    try:
        store.set(f"name{comm.rank}", f"rank {comm.rank}")
        store.wait([f"name{rank}" for rank in range(comm.size)])
        assert [store.get(f"name{rank}") for rank in range(comm.size)] == [
            f"rank {rank}".encode() for rank in range(comm.size)
        ]
        totals = comm.allgather([store.add("count", 1) for _ in range(5)])
        assert sorted(one for of_rank in totals for one in of_rank) == [
            *range(1, 5 * comm.size + 1)
        ]
        assert store.check(["count"]) and not store.check(["count", "nothing"])
        swapped = comm.allgather(store.compare_set("first", "", str(comm.rank)))
        assert len(set(swapped)) == 1  # whoever came first stays
        comm.Barrier()
        assert store.num_keys() == comm.size + 2
        comm.Barrier()
        assert sum(comm.allgather(store.delete_key("first"))) == 1
        assert not store.check(["first"])
    finally:
        store.leave()
        store.join()
    assert not set(threading.enumerate()) - before


@parallel(ranks=[2])
def test_who_waits_is_answered_when_the_key_comes_or_told_that_it_does_not(comm):
    """Two threads of a rank wait for different keys, and each gets its own."""
    store = MpiStore(comm)
    found = {}
    if comm.rank == 1:
        threads = [
            threading.Thread(target=lambda key=key: found.update({key: store.get(key)}))
            for key in ("a", "b")
        ]
        for thread in threads:
            thread.start()
    comm.Barrier()
    if comm.rank == 0:
        store.set("b", "B")
        store.set("a", "A")
    else:
        for thread in threads:
            thread.join()
        assert found == {"a": b"A", "b": b"B"}
    with pytest.raises(dist.DistStoreError, match=r"no never within 0\.05 s"):
        store.wait(["never"], timedelta(seconds=0.05))
    store.leave()
    store.join()


@parallel(ranks=[2])
def test_a_request_that_cannot_be_answered_does_not_end_the_store(comm):
    """A key that another rank deletes between the wait and the answer is waited for again."""
    store = MpiStore(comm)
    ask, answers = store._ask, []

    def late(what, *arguments):
        if what == "get" and not answers:
            ask("delete", *arguments)
            answers.append(ask("get", *arguments))
            ask("set", *arguments, b"again")
            return answers[0]
        return ask(what, *arguments)

    if comm.rank == 1:
        store.set("word", "text")
        with pytest.raises(dist.DistStoreError, match="the value of word is not a number: b'text'"):
            store.add("word", 1)
        with mock.patch.object(store, "_ask", late):
            assert store.get("word") == b"again" and answers == [None]
    store.leave()
    store.join()


def test_the_wire_needs_an_mpi_of_many_threads(monkeypatch):
    monkeypatch.setattr(Mailbox, "works_in_a_thread", lambda: False)
    with pytest.raises(InputError, match=r'no MPI_THREAD_MULTIPLE; legal: .* "mpi"'):
        TorchCommunicator.open(SimpleNamespace(Get_size=lambda: 2), CPU)


def test_groups_of_a_device_are_made_by_their_own_ranks_alone():
    """A default group that is bound to a device would have the whole world take part in each."""
    session = object.__new__(Session)
    session.device, session.made = torch.device("cuda", 1), 0
    with (
        mock.patch.object(dist, "init_process_group") as begun,
        mock.patch("ptdmpi.comm.torch_dist.MpiStore"),
    ):
        everyone = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 3)
        Session.__init__(session, everyone, session.device)
    assert begun.call_args.args == ("nccl",) and "device_id" not in begun.call_args.kwargs
    with mock.patch.object(dist, "new_group") as made:
        made.return_value = mock.Mock(spec=dist.ProcessGroup)
        session._new([0, 1])
        session._new([1])  # nobody to connect to
    assert [(one.args, one.kwargs) for one in made.call_args_list] == [
        (([0, 1],), {"use_local_synchronization": True, "device_id": session.device}),
        (([1],), {"use_local_synchronization": True, "device_id": None}),
    ]
