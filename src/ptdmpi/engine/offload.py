"""Offloading of the optimizer's state from the device to the host's memory, or to a file of each
rank.

The host does the update, chunk by chunk: gradients are copied to the host, and the updated weights
are copied back to the device (Ren et al. 2021, arXiv 2101.06840, section 4). The host waits only
once per step, for the gradients, the loss and the norm together. The length of a chunk is a
multiple of ALIGNMENT, so that the result does not depend on the length. With a file, the next chunk
is read and the previous chunk is written while the host updates a chunk (Rajbhandari et al. 2021,
arXiv 2104.07857, section 5.2.2).
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ptdmpi.comm import queues
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config, SharedInputError
from ptdmpi.model.buffer import Storage
from ptdmpi.plan.cost.memory import CHUNK_BYTES
from ptdmpi.plan.layer.parts import ALIGNMENT

T = TypeVar("T")
HOST = torch.device("cpu")


class Alike(NamedTuple):
    """Flat tensors whose elements are all updated by the same rule: the master weights, the
    gradients, the optimizer's moments, and the weights that are copied from the master weights.
    `weights` is empty if the model computes with the master weights themselves. `decay` is the
    weight decay. The learning rate is multiplied by `share`."""

    masters: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]
    moments: tuple[list[Tensor], ...]
    decay: float
    share: float = 1.0

    def chunks(self) -> Iterator["Alike"]:
        """Cut the tensors into chunks. Yield the chunks in the order of the elements, each as an
        `Alike` object whose lists have one tensor."""
        for number, masters in enumerate(self.masters):
            # bytes of state per element: a master weight, and one number of each moment
            each_bytes = masters.element_size() * (1 + len(self.moments))
            length = max(1, CHUNK_BYTES // each_bytes // ALIGNMENT) * ALIGNMENT
            for start in range(0, len(masters), length):
                some = slice(start, start + length)
                yield Alike(
                    masters=[masters[some]],
                    weights=[part[some] for part in self.weights[number : number + 1]],
                    gradients=[self.gradients[number][some]],
                    moments=tuple([parts[number][some]] for parts in self.moments),
                    decay=self.decay,
                    share=self.share,
                )


class HostUpdate:
    """The update of a training state whose tensors are in a `storage` outside the device. The host
    computes this update.

    If gradients are on a device, the host has page-locked memory for every gradient that this rank
    uses. If the model computes with the master weights themselves, the master weights are on the
    device, and the host also has page-locked memory for them. The copies of a step can therefore
    begin before the host waits for the loss and the norm, and are complete when this wait is over.
    If weights are fp16 or bf16, the host rounds the new weights before it sends them, which halves
    the bytes on the link between host and device. The rounded weights overwrite their gradients in
    page-locked memory, and are sent from there.
    """

    def __init__(self, storage: Storage, groups: Sequence[Alike]) -> None:
        self.storage = storage
        self.chunks = [chunk for group in groups for chunk in group.chunks()]
        self._rows = [
            [*(chunk.masters if chunk.weights else ()), *(kind[0] for kind in chunk.moments)]
            for chunk in self.chunks
        ]
        # for each chunk, one buffer of page-locked memory for its gradient, and one for its master
        # weights if they are on the device
        self._rooms = [
            (room_for(chunk.gradients[0]), None if chunk.weights else room_for(chunk.masters[0]))
            for chunk in self.chunks
        ]

    def expect(self) -> None:
        """Begin to copy the inputs of the update from the device. The copies are complete after
        `Clock.settle` has waited for the device."""
        for chunk, rooms in zip(self.chunks, self._rooms, strict=True):
            for kept, room in zip((*chunk.gradients, *chunk.masters), rooms, strict=True):
                if room is not None:
                    room.copy_(kept, non_blocking=True)

    def parts(self, factor: float) -> Iterator[Alike]:
        """Yield each chunk as tensors on the host, with its gradient multiplied by `factor`. The
        caller updates a chunk before it requests the next one. When the caller requests the next
        chunk, the new weights of the updated chunk are sent to the device, and its new state is
        stored."""
        for number, row in enumerate(self.storage.ahead(self._rows)):
            chunk = self.chunks[number]
            (arrived, room) = self._rooms[number]
            (kept,) = chunk.masters
            gradient = chunk.gradients[0] if arrived is None else arrived
            master = row[0] if chunk.weights else kept if room is None else room
            if factor != 1.0:
                gradient.mul_(factor)
            moments = tuple([kind] for kind in row[len(row) - len(chunk.moments) :])
            yield chunk._replace(
                masters=[master], weights=[], gradients=[gradient], moments=moments
            )
            for weights in chunk.weights:
                if arrived is None:
                    weights.copy_(master)
                else:
                    # the next step's gradient is copied into the memory of `arrived` only after the
                    # following two copies are complete
                    leaving = arrived.view(weights.dtype)[: len(weights)].copy_(master)
                    weights.copy_(leaving, non_blocking=True)
            if room is not None:
                kept.copy_(room, non_blocking=True)


def room_for(tensor: Tensor) -> Tensor | None:
    """Return page-locked host memory for a copy of a tensor on a device; None for a tensor on the
    host. Raise MemoryError if the system does not provide the memory."""
    if tensor.device.type == "cpu":
        return None
    return queues.locked(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


class _Mapping(NamedTuple):
    """A part of a storage's file that is mapped into memory: its address in memory, its offset in
    the file, and the mapping object."""

    address: int
    place: int
    memory: mmap.mmap


class FileStorage(Storage):
    """A storage of tensors in one unnamed file in `directory`. Disk space is allocated when tensors
    are made.

    The tensors are memory mappings of the file. Checkpoints and the recovery after a loss of ranks
    read these tensors slice by slice, like tensors in memory; `let_go` frees the memory that such
    reading occupies. The update reads and writes the file by system calls, so that a disk error
    raises an exception. With a memory mapping, a disk error would send a signal that ends the
    process.
    """

    def __init__(self, directory: Path) -> None:
        """Make the storage's file in `directory`. Raise OSError if the file cannot be made."""
        super().__init__(HOST, apart=True)
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=directory)
        # remove the name of the open file, so that the file disappears when this process ends, even
        # if the process is killed
        os.unlink(name)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self._mappings: list[_Mapping] = []
        self._rooms: list[Tensor] = []
        # a single thread, so that reads and writes are done in the order in which they were
        # submitted
        self._thread = ThreadPoolExecutor(1, "offload")

    def zeros(self, lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Extend the storage's file, and return tensors of the given `lengths`, filled with zeros.
        These tensors are mappings of the new part of the file. Raise OSError if the disk has no
        space."""
        size = sum(lengths) * dtype.itemsize
        if size == 0:
            return super().zeros(lengths, dtype)
        descriptor = self._file.fileno()
        place = os.fstat(self._file.fileno()).st_size
        # allocate disk space immediately, so that a full disk raises an error before the run begins
        os.posix_fallocate(descriptor, place, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        mapping = mmap.mmap(descriptor, size, offset=place)
        flat = torch.frombuffer(mapping, dtype=dtype)
        self._mappings.append(_Mapping(flat.data_ptr(), place, mapping))
        return list(flat.split(list(lengths)))

    def let_go(self) -> None:
        """Free the memory that the mapped parts of the storage's file occupy. No change of the
        tensors is lost, because the mappings are shared with the file."""
        for mapping in self._mappings:
            mapping.memory.madvise(mmap.MADV_DONTNEED)

    def ahead(self, rows: Sequence[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
        """Read stored tensors from the file into memory. Each of `rows` is a list of stored
        tensors. For each row, yield a list with the same tensors in memory. When the caller
        requests the next row, the tensors of the previous row are written to the file. The next row
        is read in the background while the caller uses a row. Raise OSError if the disk fails; the
        contents of the file are then undefined.
        """
        self.let_go()
        stored: list[Future[None]] = []
        coming = [self._coming(rows, 0)] if rows else []
        for number, row in enumerate(rows):
            # let the thread read the next row now; the thread works in the order of submission, so
            # it first writes the earlier row that used the same memory
            if number + 1 < len(rows):
                coming.append(self._coming(rows, number + 1))
            here = coming.pop(0).result()
            yield here
            stored.append(self._thread.submit(self._write, row, here))
            if len(stored) > 1:
                stored.pop(0).result()
        for last in stored:
            last.result()

    def _coming(self, rows: Sequence[Sequence[Tensor]], number: int) -> "Future[list[Tensor]]":
        if not self._rooms:
            most = max(sum(map(len, row)) for row in rows)
            self._rooms = [torch.empty(most, dtype=rows[0][0].dtype) for _ in range(2)]
        return self._thread.submit(self._read, rows[number], self._rooms[number % 2])

    def _read(self, row: Sequence[Tensor], room: Tensor) -> list[Tensor]:
        lengths = [len(kept) for kept in row]
        targets = list(room[: sum(lengths)].split(lengths))
        for kept, target in zip(row, targets, strict=True):
            self._pass(os.preadv, kept, target)
        return targets

    def _write(self, row: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
        for kept, source in zip(row, changed, strict=True):
            self._pass(os.pwritev, kept, source)

    def _pass(
        self, call: Callable[[int, list[memoryview], int], int], kept: Tensor, memory: Tensor
    ) -> None:
        """Read all bytes of `kept` from the storage's file into `memory`, or write `memory` to the
        file. `call` is the system call to use. The offset in the file is computed from the address
        of `kept`."""
        address = kept.data_ptr()
        before = (mapping for mapping in self._mappings if mapping.address <= address)
        mapping = max(before, key=lambda mapping: mapping.address)
        offset = mapping.place + address - mapping.address
        data = memory.numpy().data.cast("B")
        done = 0
        while done < len(data):
            count = call(self._file.fileno(), [data[done:]], offset + done)
            if count == 0:
                raise OSError(f"file of the optimizer's state ends at {offset + done}")
            done += count


def storage_of(config: Config, device: torch.device) -> Storage:
    """Return the storage for the optimizer's state that `parallel.offload` names. Raise OSError if
    the storage's file cannot be made."""
    if config.parallel.offload == "disk":
        return FileStorage(Path(config.run.dir))
    apart = config.parallel.offload != "none"
    return Storage(HOST if apart else device, apart)


def with_room(world: Communicator, config: Config, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return its result. With `parallel.offload = "disk"`, raise
    SharedInputError on all ranks if `work` raises OSError on any rank, for example because the disk
    is full."""
    if config.parallel.offload != "disk":
        return work()
    made: list[T] = []
    text = None
    try:
        made.append(work())
    except OSError as error:
        text = f"rank {world.rank}: {error.strerror or error}"
    failure = next((failed for failed in world.all_gather_object(text) if failed), None)
    if failure is not None:
        raise SharedInputError(
            f'parallel.offload = "disk" needs a file in {config.run.dir}: {failure}; legal: a '
            'run.dir on a disk with room for the optimizer\'s state, or offload = "optimizer"'
        )
    return made[0]
