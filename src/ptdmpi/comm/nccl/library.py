"""The interfaces to a communication library that uses streams, and their implementation for NCCL
with NVIDIA's package `nccl4py`.

The implementation only calls the library. Its callers decide which rank makes unique ids, in which
order ranks connect, and which stream waits for which event. The callers therefore work with every
library that implements the interfaces.
"""

import importlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Exchanged

# NCCL uses this number of thread blocks (CTAs) for a message between two ranks; more blocks would
# slow down computations
PAIR_CTAS = 4


class Event(Protocol):
    """A mark in a stream, like torch.cuda.Event."""

    def query(self) -> bool:
        """Return True if all work before the mark is done. This method never waits."""


class DeviceQueue(Protocol):
    """A stream of a device, like torch.cuda.Stream."""

    def record_event(self) -> Event:
        """Return a new mark after all work that is in the stream so far."""

    def wait_event(self, event: Any) -> None:
        """Let all later work of the stream begin after `event`. The host does not wait."""


class Connection(Protocol):
    """One communicator of the library. Each method puts an operation on flat contiguous tensors
    into `stream`. All ranks put the same operations into their streams, in the same order."""

    def all_reduce(self, flat: Tensor, op: str, stream: Any) -> None:
        """Replace `flat` by its sum (`op` is "sum") or maximum ("max") over the ranks of the
        communicator."""

    def all_gather(self, result: Tensor, flat: Tensor, stream: Any) -> None:
        """Fill `result` with the tensors `flat` of all ranks, in rank order."""

    def reduce_scatter(self, result: Tensor, flat: Tensor, stream: Any) -> None:
        """Fill `result` with this rank's part of the sum of `flat` over the ranks."""

    def all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged, stream: Any) -> None:
        """Send one part of `flat` to each rank, and receive one part of `result` from each rank,
        all at the same time. `parts` has the numbers of elements."""

    def broadcast(self, flat: Tensor, root: int, stream: Any) -> None:
        """Replace `flat` by the tensor of rank `root`."""

    def send(self, flat: Tensor, peer: int, stream: Any) -> None:
        """Send `flat` to rank `peer`. The operation ends only after `peer` has begun to receive."""

    def receive(self, flat: Tensor, peer: int, stream: Any) -> None:
        """Receive `flat` from rank `peer`."""

    def error(self) -> str:
        """Return the error of an operation on the device, or "". An error on the device raises no
        exception on the host."""

    def abort(self) -> None:
        """End all operations of this rank that have begun; no other operation can begin
        afterwards."""


@dataclass(frozen=True)
class Described:
    """A communication library as one rank has loaded it, and the device that the rank uses. All
    ranks must have the same version of the library. No two ranks may use the same device, unless
    `shares_devices` is True."""

    version: str
    path: str
    device: str
    shares_devices: bool = False


class Library(Protocol):
    """The communication library (NCCL or RCCL) that this rank has loaded for its device. It
    creates communicators."""

    def describe(self) -> Described:
        """Return the library's version and path, and the device."""

    def unique_id(self) -> bytes:
        """Return a new unique id, by which the ranks of one communicator find each other. Call this
        method right before this rank connects with the id, because the library listens on a socket
        until then."""

    def connect(self, unique_id: bytes, size: int, rank: int, name: str) -> Connection:
        """Connect as rank `rank`, wait for all `size` ranks, and return the connection."""

    def stream(self) -> DeviceQueue:
        """Return a new stream, for one connection."""

    def computes_in(self) -> DeviceQueue:
        """Return the stream of the calling thread's computations."""

    def reaches(self, flat: Tensor) -> bool:
        """Return True if the tensor is on a device from which the library can send."""


class Nccl:
    """The calls of the NCCL library for this rank's GPU. Raises ImportError without `nccl4py`, and
    ValueError if the device is not an NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"NCCL connects NVIDIA's GPUs; this rank computes on {device.type}")
        self.device = device
        # import this after torch, because nccl4py uses the libnccl that is already loaded, and
        # torch's wheels contain libnccl
        self.core: Any = importlib.import_module("nccl.core")

    def describe(self) -> Described:
        """Return the version and the path of libnccl, the UUID of the GPU, and whether several
        ranks may use the same GPU."""
        version, path = loaded()
        gpu = torch.cuda.get_device_properties(self.device)
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        shares = numbers >= (2, 30) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return Described(version, path, str(gpu.uuid), shares)

    def unique_id(self) -> bytes:
        """Return a new unique id of NCCL."""
        return unique_id()

    def connect(self, unique_id: bytes, size: int, rank: int, name: str) -> Connection:
        """Return an NCCL communicator when all ranks of the group have called this method."""
        core = self.core
        torch.cuda.set_device(self.device)
        few = PAIR_CTAS if name.startswith("pair") else None
        config = core.NCCLConfig(comm_name=name, max_ctas=few)
        made = core.UniqueId.from_bytes(unique_id)
        return NcclConnection(core, core.Communicator.init(size, rank, made, config))

    def stream(self) -> DeviceQueue:
        """Return a new stream whose operations have a higher priority than computations."""
        # Messages take little time, but long computations may wait for them, so messages get
        # priority.
        return torch.cuda.Stream(self.device, priority=-1)

    def computes_in(self) -> DeviceQueue:
        """Return the current stream of this thread."""
        return torch.cuda.current_stream(self.device)

    def reaches(self, flat: Tensor) -> bool:
        """Return True if the tensor is on a GPU."""
        return flat.device.type == "cuda"


class NcclConnection:
    """One communicator of NCCL. No call destroys the communicator, because all ranks would have to
    destroy it together. `abort` frees the communicator after an error; otherwise it is freed at the
    end of the process."""

    def __init__(self, core: Any, communicator: Any) -> None:
        self.core = core
        self.communicator = communicator
        self.ops = {"sum": core.SUM, "max": core.MAX}
        self._aborted = False
        # another thread may call `error` while this thread calls `abort`
        self._asking = threading.Lock()

    def all_reduce(self, flat: Tensor, op: str, stream: Any) -> None:
        """Put an all-reduce, in place, into the stream."""
        self.communicator.allreduce(flat, flat, self.ops[op], stream=stream)

    def all_gather(self, result: Tensor, flat: Tensor, stream: Any) -> None:
        """Put an all-gather into the stream."""
        self.communicator.allgather(flat, result, stream=stream)

    def reduce_scatter(self, result: Tensor, flat: Tensor, stream: Any) -> None:
        """Put a reduce-scatter into the stream."""
        self.communicator.reduce_scatter(flat, result, self.core.SUM, stream=stream)

    def all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged, stream: Any) -> None:
        """Put all sends and receives into the stream, as one group."""
        # the messages of an NCCL group run at the same time; if they ran one after the other, ranks
        # could deadlock
        with self.core.group():
            for peer, (leaving, arriving) in enumerate(parts.pieces(result, flat)):
                if leaving.numel():
                    self.communicator.send(leaving, peer, stream=stream)
                if arriving.numel():
                    self.communicator.recv(arriving, peer, stream=stream)

    def broadcast(self, flat: Tensor, root: int, stream: Any) -> None:
        """Put a broadcast, in place, into the stream."""
        self.communicator.broadcast(flat, flat, root, stream=stream)

    def send(self, flat: Tensor, peer: int, stream: Any) -> None:
        """Put a send into the stream."""
        self.communicator.send(flat, peer, stream=stream)

    def receive(self, flat: Tensor, peer: int, stream: Any) -> None:
        """Put a receive into the stream."""
        self.communicator.recv(flat, peer, stream=stream)

    def error(self) -> str:
        """Return the name of the error that NCCL has reported, or "" if there is none."""
        with self._asking:
            if self._aborted:
                return "aborted"
            state = _name(self.communicator.get_async_error())
        return "" if state in ("Success", "InProgress") else state

    def abort(self) -> None:
        """Abort the communicator. Do nothing if the communicator is already aborted."""
        with self._asking:
            before = self._aborted
            self._aborted = True
        if not before:
            self.communicator.abort()


def _name(state: int) -> str:
    """Return the name of a result code of NCCL. `state` is a number, although nccl4py declares
    another type."""
    kinds = importlib.import_module("nccl.bindings.nccl").Result
    try:
        return str(kinds(int(state)).name)
    except ValueError:  # libnccl is newer than the package nccl4py
        return f"error {int(state)}"


def unique_id() -> bytes:
    """Return a new unique id of NCCL. The call needs no GPU."""
    return bytes(importlib.import_module("nccl.core").get_unique_id().as_bytes)


def installed() -> bool:
    """Return True if the package `nccl4py` (the extra `nccl`) is installed. This function does not
    import the package."""
    try:
        return importlib.util.find_spec("nccl.core") is not None
    except ModuleNotFoundError:
        return False


def description() -> str:
    """Return a line with the version and path of this rank's NCCL library, or with the reason why
    the library cannot be used."""
    if not installed():
        return "no nccl4py"
    try:
        version, path = loaded()
    # if libnccl is missing or cannot be loaded, nccl4py may raise exceptions of any class
    except Exception as error:
        return f"nccl4py, but {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return f"libnccl {version} ({path})"


def loaded() -> tuple[str, str]:
    """Return the version and path of the libnccl that this process has loaded. Raises ValueError if
    no libnccl is loaded. Raises ValueError also if several are loaded, because torch and ptdmpi
    might then use different ones."""
    library = importlib.import_module("nccl.core").get_version().libnccl
    if library is None:
        raise ValueError("no libnccl: it comes with PyTorch's CUDA wheels or nvidia-nccl-cu13")
    several = libraries(Path("/proc/self/maps").read_text().splitlines())
    if len(several) > 1:
        raise ValueError(f"this process has loaded several libnccl: {', '.join(several)}")
    return str(library.version), str(library.path)


def libraries(maps: Iterable[str]) -> list[str]:
    """Return the different libnccl files that are mapped into the process, from the lines of
    /proc/PID/maps."""
    paths = (line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6)
    return sorted({path for path in paths if Path(path).name.startswith("libnccl.so")})
