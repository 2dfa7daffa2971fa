"""Copies between the host and a device that run while the device computes. On a rank that computes
on the host, the functions of this module do nothing.

A device takes work from queues (CUDA streams), and runs the work of each queue in the order of the
calls. Copies have their own queue, so that they run at the same time as matrix multiplications.
Marks (events) order the work of the two queues: one queue waits for a mark in the other queue, and
the host need not wait. Only page-locked memory can be copied while the device computes; a copy of
pageable memory would make the host wait.
"""

import contextlib
import mmap
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class Passed(Protocol):
    """A mark in a queue. The mark is passed when all work before it in the queue is done."""

    def computing_waits(self) -> None:
        """Let all later work in the device's current queue wait for the mark."""

    def host_waits(self) -> None:
        """Return when the device has passed the mark."""


class Copies(Protocol):
    """The queue in which the copies of one device run."""

    def behind(self, place: Passed) -> contextlib.AbstractContextManager[None]:
        """Return a context in which copies go into this queue. The copies begin when the device has
        passed the mark `place`, which may be in the queue of computations or in the queue of
        copies."""

    def computed(self) -> Passed:
        """Return a mark after all computations that were issued so far."""

    def passed(self) -> Passed:
        """Return a mark after all copies that were issued so far."""

    def locked(self, size: int) -> Tensor:
        """Return `size` bytes of page-locked host memory, for tensors that are copied while the
        device computes."""


class _Nothing:
    """The queue of copies for a rank that computes on the host. Each copy is complete when its call
    returns."""

    def behind(self, place: Passed) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing, because copies on the host need not wait."""
        return contextlib.nullcontext()

    def passed(self) -> Passed:
        """Return a mark that is passed from the beginning, because copies on the host are complete
        when their calls return."""
        return self

    computed = passed

    def locked(self, size: int) -> Tensor:
        """Return `size` bytes of plain host memory, because no device copies them."""
        return torch.empty(size, dtype=torch.uint8)

    def computing_waits(self) -> None:
        """Do nothing, because every copy is already complete."""

    host_waits = computing_waits


class _DeviceCopies:
    """The CUDA stream in which the copies of a device run. It is separate from the stream in which
    the device computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    @contextlib.contextmanager
    def behind(self, place: Passed) -> Iterator[None]:
        """Make the copy stream the current stream, and let it wait for the mark `place`."""
        with self._module.stream(self._stream):
            place.computing_waits()  # in this context the copy stream is the current stream
            yield

    def computed(self) -> Passed:
        """Return a mark after the work issued so far in the current stream."""
        return self._end_of(self._module.current_stream(self._device))

    def passed(self) -> Passed:
        """Return a mark after the copies issued so far."""
        return self._end_of(self._stream)

    def _end_of(self, stream: Any) -> Passed:
        return _DevicePassed(self._module, self._device, stream.record_event())

    def locked(self, size: int) -> Tensor:
        """Return `size` bytes of page-locked host memory."""
        return locked(size)


class _DevicePassed:
    """An event in a device's queue, which other queues can wait for."""

    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module = module
        self._device = device
        self._event = event

    def computing_waits(self) -> None:
        """Let the current stream wait for the event."""
        self._module.current_stream(self._device).wait_event(self._event)

    def host_waits(self) -> None:
        """Make the host wait until the device has passed the event."""
        self._event.synchronize()


def belong_to(device: torch.device) -> None:
    """Make the calling thread use `device`, instead of the first device of the process."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def copies_of(device: torch.device) -> Copies:
    """Return the queue in which copies of a device run. For the host, return an object whose copies
    are complete when their calls return."""
    return _Nothing() if device.type == "cpu" else _DeviceCopies(device)


def locked(size: int) -> Tensor:
    """Return `size` bytes of page-locked host memory, which stays locked until it is freed. Raises
    MemoryError if the system does not provide the memory.

    The memory starts and ends at page boundaries, so that no page is locked twice. PyTorch's
    allocator would round the size up to a power of two: for 81 GB it would lock 128 GiB.
    """
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = torch.empty(whole + mmap.PAGESIZE, dtype=torch.uint8)
    begin = -room.data_ptr() % mmap.PAGESIZE
    if size:
        runtime = torch.cuda.cudart()
        address = room.data_ptr() + begin
        failed = int(runtime.cudaHostRegister(address, whole, 0))
        if failed:
            raise MemoryError(f"{whole} bytes of the host cannot be locked: error {failed}")
        weakref.finalize(room.untyped_storage(), runtime.cudaHostUnregister, address)
    return room[begin : begin + size]


def pinned_like(values: Tensor) -> Tensor:
    """Return a tensor in page-locked host memory with the shape and type of `values`. Use this
    function only for small tensors, because PyTorch's allocator keeps the memory for later calls.
    """
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)


def on_its_way(values: Tensor) -> Tensor:
    """Begin to copy `values` to the host, and return the host tensor. The values of the host tensor
    are valid only after `Clock.settle` has waited for the device. If `values` are already on the
    host, return `values` without a copy."""
    if values.device.type == "cpu":
        return values
    return pinned_like(values).copy_(values, non_blocking=True)
