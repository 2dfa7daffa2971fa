"""Memory of the host that a device copies from and to beside what it computes."""

import gc
import mmap
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ptdmpi.comm.queues import belong_to, copies_of, locked


class Runtime:
    """What is asked of CUDA's."""

    def __init__(self, answer: int = 0) -> None:
        self.answer, self.held = answer, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.answer:
            self.held[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:
        del self.held[address]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "size",
    [
        mmap.PAGESIZE,
        3 * mmap.PAGESIZE + 8,
        *(pytest.param(size, marks=pytest.mark.long) for size in (1, 5000)),
    ],
)
def test_whole_pages_are_locked_which_nobody_else_has(size):
    runtime = Runtime()
    with mock.patch.object(torch.cuda, "cudart", lambda: runtime):
        several = [locked(size) for _ in range(3)]
        for one in several:
            assert one.dtype == torch.uint8 and one.numel() == size
            assert one.data_ptr() % mmap.PAGESIZE == 0
            length = runtime.held[one.data_ptr()]
            assert length % mmap.PAGESIZE == 0 and size <= length < size + mmap.PAGESIZE
        assert len(runtime.held) == 3
        view = several.pop()[:1]
        several.clear()
        gc.collect()
        assert list(runtime.held) == [view.data_ptr()]
        del one, view
        gc.collect()
    assert not runtime.held


def test_memory_that_cannot_be_locked():
    with mock.patch.object(torch.cuda, "cudart", lambda: Runtime(answer=2)):
        with pytest.raises(MemoryError, match=f"{mmap.PAGESIZE} bytes .* error 2"):
            locked(10)
        assert locked(0).numel() == 0


def test_a_thread_of_a_device_calls_that_one():
    chosen = []
    module = SimpleNamespace(set_device=chosen.append)
    with mock.patch.object(torch, "get_device_module", lambda device: module):
        belong_to(torch.device("cuda", 3))
        belong_to(torch.device("cpu"))
    assert chosen == [torch.device("cuda", 3)]


def test_the_host_copies_at_once():
    copies = copies_of(torch.device("cpu"))
    with copies.behind(copies.computed()):
        assert copies.locked(7).numel() == 7
    copies.passed().host_waits()
