"""The protocols of a library with queues, and NCCL as such a library, through NVIDIA's `nccl4py`.

All decisions of the wire (which rank makes ids, in which order ranks connect, which queue waits for
which mark) are in the callers of these four protocols, and work with any library that implements
them.
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

PAIR_CTAS = 4  # thread blocks of a message between two ranks; more would slow down computations


class Event(Protocol):
    """A mark in a stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Return True if all work before it is done. Never waits."""


class DeviceQueue(Protocol):
    """A queue of a device, as torch.cuda.Stream."""

    def record_event(self) -> Event:
        """Return a new mark after all work that is in the queue so far."""

    def wait_event(self, event: Any) -> None:
        """Let all later work of the queue begin after `event`. The host does not wait."""


class Connection(Protocol):
    """One communicator of the library. An operation works on flat contiguous tensors and is put
    into `stream`. All ranks put the same operations into their streams, in the same order."""

    def all_reduce(self, flat: Tensor, op: str, stream: Any) -> None:
        """Replace `flat` by its sum or "max" over the ranks."""

    def all_gather(self, result: Tensor, flat: Tensor, stream: Any) -> None:
        """Fill `result` with the `flat` of every rank, in rank order."""

    def reduce_scatter(self, result: Tensor, flat: Tensor, stream: Any) -> None:
        """Fill `result` with this rank's part of the sum."""

    def all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged, stream: Any) -> None:
        """Exchange the parts of `flat` for those of `result`, all at once."""

    def broadcast(self, flat: Tensor, root: int, stream: Any) -> None:
        """Replace `flat` by the root's."""

    def send(self, flat: Tensor, peer: int, stream: Any) -> None:
        """Send `flat` to a rank. Send and receive wait for each other."""

    def receive(self, flat: Tensor, peer: int, stream: Any) -> None:
        """Receive `flat` from a rank."""

    def error(self) -> str:
        """Return the error of the device, for which the host gets no exception, or ""."""

    def abort(self) -> None:
        """End all operations under way on this rank; no other one can begin."""


@dataclass(frozen=True)
class Described:
    """The version and path that ranks must agree on, and the device, which no two may share."""

    version: str
    path: str
    device: str
    shares_devices: bool = False


class Library(Protocol):
    """A library that connects ranks, on the device of this one."""

    def describe(self) -> Described:
        """Return what ranks must agree on."""

    def unique_id(self) -> bytes:
        """Return a new id. Call it right before this rank connects with it: until then the library
        listens on a socket."""

    def connect(self, unique_id: bytes, size: int, rank: int, name: str) -> Connection:
        """Return the connection of rank `rank`; wait for all `size` ranks."""

    def stream(self) -> DeviceQueue:
        """Return a new stream, for one connection."""

    def computes_in(self) -> DeviceQueue:
        """Return the stream in which this thread computes."""

    def reaches(self, flat: Tensor) -> bool:
        """Return True if the library can send this tensor."""


class Nccl:
    """NCCL on one GPU. Raises ImportError without `nccl4py`, ValueError where it cannot serve."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"NCCL connects NVIDIA's GPUs; this rank computes on {device.type}")
        self.device = device
        # after torch, whose wheels contain libnccl: it uses the one that is loaded
        self.core: Any = importlib.import_module("nccl.core")

    def describe(self) -> Described:
        """Return version and path of libnccl, and the GPU."""
        version, path = loaded()
        gpu = torch.cuda.get_device_properties(self.device)
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        shares = numbers >= (2, 30) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        return Described(version, path, str(gpu.uuid), shares)

    def unique_id(self) -> bytes:
        """Return a new id."""
        return unique_id()

    def connect(self, unique_id: bytes, size: int, rank: int, name: str) -> Connection:
        """Return a communicator of NCCL once all ranks have called."""
        core = self.core
        torch.cuda.set_device(self.device)
        few = PAIR_CTAS if name.startswith("pair") else None
        config = core.NCCLConfig(comm_name=name, max_ctas=few)
        made = core.UniqueId.from_bytes(unique_id)
        return NcclConnection(core, core.Communicator.init(size, rank, made, config))

    def stream(self) -> DeviceQueue:
        """Return a new stream with a higher priority than computations."""
        # messages are short, and long computations may wait for them: so messages run first
        return torch.cuda.Stream(self.device, priority=-1)

    def computes_in(self) -> DeviceQueue:
        """Return the current stream of this thread."""
        return torch.cuda.current_stream(self.device)

    def reaches(self, flat: Tensor) -> bool:
        """Return True for tensors of a GPU."""
        return flat.device.type == "cuda"


class NcclConnection:
    """One communicator of NCCL. It is never destroyed, because all ranks would have to do this
    together. It is freed by the end of the process, or by `abort` after an error."""

    def __init__(self, core: Any, communicator: Any) -> None:
        self.core = core
        self.communicator = communicator
        self.ops = {"sum": core.SUM, "max": core.MAX}
        self._aborted = False
        self._asking = threading.Lock()  # another thread may ask for the error during an abort

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
        """Put a group of sends and receives into the stream."""
        # messages of a group run at once; one after the other, ranks could wait in a circle
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
        """Return the name of the error that NCCL has met; empty without one."""
        with self._asking:
            if self._aborted:
                return "aborted"
            state = _name(self.communicator.get_async_error())
        return "" if state in ("Success", "InProgress") else state

    def abort(self) -> None:
        """Abort the communicator, once."""
        with self._asking:
            before = self._aborted
            self._aborted = True
        if not before:
            self.communicator.abort()


def _name(state: int) -> str:
    """Return the name of a result: it is a number, whatever nccl4py's annotation says."""
    kinds = importlib.import_module("nccl.bindings.nccl").Result
    try:
        return str(kinds(int(state)).name)
    except ValueError:  # libnccl is newer than the package
        return f"error {int(state)}"


def unique_id() -> bytes:
    """Return a new id; this needs no GPU."""
    return bytes(importlib.import_module("nccl.core").get_unique_id().as_bytes)


def installed() -> bool:
    """Return True if the extra `nccl` is installed; nothing is loaded."""
    try:
        return importlib.util.find_spec("nccl.core") is not None
    except ModuleNotFoundError:
        return False


def told() -> str:
    """Return a description of this rank's NCCL."""
    if not installed():
        return "no nccl4py"
    try:
        version, path = loaded()
    except Exception as error:  # no libnccl, or one that raises some exception when it is loaded
        return f"nccl4py, but {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return f"libnccl {version} ({path})"


def loaded() -> tuple[str, str]:
    """Return version and path of the libnccl of this process. Raises ValueError if there is none,
    or more than one, because torch and this wire would use different ones."""
    library = importlib.import_module("nccl.core").get_version().libnccl
    if library is None:
        raise ValueError("no libnccl: PyTorch's CUDA wheels bring it, or nvidia-nccl-cu13")
    several = libraries(Path("/proc/self/maps").read_text().splitlines())
    if len(several) > 1:
        raise ValueError(f"this process has loaded several libnccl: {', '.join(several)}")
    return str(library.version), str(library.path)


def libraries(maps: Iterable[str]) -> list[str]:
    """Return the different libnccl files that are mapped, from the lines of /proc/PID/maps."""
    paths = (line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6)
    return sorted({path for path in paths if Path(path).name.startswith("libnccl.so")})
