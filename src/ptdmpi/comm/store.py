"""A key-value store for torch.distributed that works over MPI, without a port, a MASTER_ADDR or a
file.

The keys are stored on rank 0, where a thread answers the requests of all ranks on a separate
communicator.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mpi4py import MPI
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

ASK = 1  # the MPI tag of all requests; each request contains the MPI tag for its answer.
# MPI guarantees tags up to 32767 (MPI 4.1, section 9.1.2)
FIRST_ANSWER = 2
ANSWERS = 30_000
SHORTEST_NAP_S = 0.0002
LONGEST_NAP_S = 0.05
LIMIT = timedelta(minutes=5)


class MpiStore(Store):
    """A key-value store that all ranks of a communicator share. All ranks make the store together.
    The store needs MPI_THREAD_MULTIPLE. Each rank calls `leave` and `join` before MPI is finalized.

    Process groups that were made with the store still use it, but torch does not keep a reference
    to the store. Keep a reference yourself as long as such groups exist.
    """

    def __init__(self, everyone: MPI.Comm) -> None:
        super().__init__()
        self._comm = everyone.Dup()
        self._lock = threading.Lock()
        self._asked = 0
        self._limit = LIMIT
        self._server: _Server | None = None
        if self._comm.Get_rank() == 0:
            self._server = _Server(self._comm)

    def leave(self) -> None:
        """Announce that this rank sends no more requests."""
        self._comm.send(("leave", (), 0), 0, ASK)

    def join(self) -> None:
        """Return when the store's thread has ended. On rank 0 the thread ends after all ranks have
        called `leave`; other ranks have no thread."""
        if self._server is not None:
            self._server.thread.join()

    # -- methods that torch calls, from any thread ---------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value under a key."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of `key`; wait until the key exists. Raises DistStoreError after the
        time limit."""
        self.wait([key])
        value = self._ask("get", key)
        while value is None:  # another rank has deleted the key in the meantime
            self.wait([key])
            value = self._ask("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number under a key, and return the sum. Raises DistStoreError if the
        value is not a number."""
        return self._ask("add", key, amount)

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Store `value` if the present value of the key is `expected`. Return the value of the key
        after the call. A missing key counts as a key with an empty value. If the key is missing and
        `expected` is not empty, store nothing and return `expected`."""
        return self._ask("compare_set", key, _bytes(expected), _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if every key exists."""
        return self._ask("check", tuple(keys))

    def delete_key(self, key: str) -> bool:
        """Delete a key. Return True if the key existed."""
        return self._ask("delete", key)

    def num_keys(self) -> int:
        """Return the number of keys in the store."""
        return self._ask("count")

    def set_timeout(self, limit: timedelta) -> None:
        """Set how long `get` and `wait` wait for a key."""
        self._limit = limit

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        """Return when all keys exist. Raises DistStoreError after the time limit."""
        seconds = (limit or self._limit).total_seconds()
        if not self._ask("wait", tuple(keys), seconds):
            raise DistStoreError(f"no {', '.join(keys)} within {seconds:g} s")

    def _ask(self, what: str, *arguments: Any) -> Any:
        with self._lock:  # each request has its own tag, so that threads do not mix up answers
            self._asked += 1
            tag = FIRST_ANSWER + self._asked % ANSWERS
        self._comm.send((what, arguments, tag), 0, ASK)
        answer = self._comm.recv(source=0, tag=tag)
        if isinstance(answer, DistStoreError):
            raise answer
        return answer


class _Server:
    """The thread on rank 0 that answers requests until all ranks have called `MpiStore.leave`, or a
    rank is lost."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self.values: dict[str, bytes] = {}
        # (keys, deadline, rank, tag) of each request that waits
        self.waiting: list[tuple[tuple[str, ...], float, int, int]] = []
        self.thread = threading.Thread(target=self._run, name="store", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        here = self.comm.Get_size()
        nap_s = SHORTEST_NAP_S
        status = MPI.Status()
        try:
            while here:
                message = self.comm.improbe(tag=ASK, status=status)
                self._release()
                if message is None:
                    # Requests are rare once all groups are made, so the thread sleeps longer each
                    # time it finds no request.
                    time.sleep(nap_s)
                    nap_s = min(2 * nap_s, LONGEST_NAP_S)
                    continue
                nap_s = SHORTEST_NAP_S
                what, arguments, tag = message.recv()
                here -= what == "leave"
                if what != "leave":
                    self._answer(what, arguments, status.Get_source(), tag)
        except MPI.Exception:
            return  # a rank is lost; if the other ranks continue, they make a new store

    def _answer(self, what: str, arguments: tuple[Any, ...], rank: int, tag: int) -> None:
        if what == "wait":
            keys, seconds = arguments
            self.waiting.append((keys, time.monotonic() + seconds, rank, tag))
        else:
            self._reply(getattr(self, f"_{what}")(*arguments), rank, tag)
        self._release()

    def _release(self) -> None:
        """Answer the waiting ranks whose keys exist now, and the waiting ranks whose time limit has
        passed."""
        still = []
        for keys, deadline, rank, tag in self.waiting:
            there = self._check(keys)
            if there or time.monotonic() > deadline:
                self._reply(there, rank, tag)
            else:
                still.append((keys, deadline, rank, tag))
        self.waiting = still

    def _reply(self, value: Any, rank: int, tag: int) -> None:
        self.comm.send(value, rank, tag)

    def _set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def _get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def _add(self, key: str, amount: int) -> int | DistStoreError:
        value = self.values.get(key, b"0")
        try:
            total = int(value) + amount
        except ValueError:
            return DistStoreError(f"the value of {key} is not a number: {value!r}")
        self.values[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        # as in torch's own stores, a missing key has an empty value, so the key is set if
        # `expected` is empty
        if self.values.get(key, b"") == expected:
            self.values[key] = value
        return self.values.get(key, expected)

    def _check(self, keys: tuple[str, ...]) -> bool:
        return all(key in self.values for key in keys)

    def _delete(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def _count(self) -> int:
        return len(self.values)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
