"""The part of the training state that a rank writes to a checkpoint: either views of the state's
tensors, or a copy of them on the host."""

import contextlib
import itertools
from functools import partial

from torch import Tensor

from ptdmpi.checkpoint.boxes import Array, Outgoing
from ptdmpi.checkpoint.share import share
from ptdmpi.comm.queues import copies_of, on_its_way
from ptdmpi.comm.world import Axes
from ptdmpi.model.state import State


class OutgoingState:
    """The part of the state that this rank writes to the disk.

    `parts` are slices of the state, as views of its tensors. Every save writes the same slices,
    because neither the layout nor the assignment of slices to ranks changes during a run.
    """

    def __init__(self, state: State, axes: Axes, *, mean: bool, copied: bool) -> None:
        """Prepare the slices that this rank writes. If `mean` is True and replicas differ, the mean
        of the replicas is written. If `copied` is True, the state is copied first, so that training
        may change the state while the copy is written."""
        self.state = state
        self.mean = mean
        self.copied = copied
        self.parts = list(share(state, axes, mean))
        mine = sum(part.values.nbytes for part in self.parts)
        # the number of bytes that all ranks together write to a checkpoint
        self.total_bytes = sum(axes.world.all_gather_object(mine))
        self._copies = copies_of(state.buffer.device)
        self._host: Tensor | None = None

    def take(self) -> list[Outgoing]:
        """Return the slices that this rank writes, with the present values of the state.

        If the mean of replicas is written, or training may change the state during the save, the
        slices are copied to a host buffer, which all saves use. Otherwise the slices are views of
        the state itself. If the state is on a device, the copy runs while the device computes. The
        next update of the state waits for the mark `State.read`, which the device passes when the
        copy is complete.
        """
        self.state.settle()  # wait until all operations that change the state are complete
        views = [part.values for part in self.parts]
        if self.copied or self.mean:
            views = self._copy()
        outgoing = []
        for part, view in zip(self.parts, views, strict=True):
            dtype = str(view.dtype).removeprefix("torch.")
            values = partial(self._on_host, view)
            outgoing.append(
                Outgoing(
                    tensor=part.key, shape=part.shape, box=part.box, dtype=dtype, values=values
                )
            )
        return outgoing

    def _copy(self) -> list[Tensor]:
        """Copy this rank's slices to host memory, and return the copies."""
        ends = list(itertools.accumulate(part.values.numel() for part in self.parts))
        # one buffer for all slices that this rank writes; it is allocated at the first save
        if self._host is None:
            dtype = self.state.buffer.precision.master
            size = ends[-1] if ends else 0
            self._host = self._copies.locked(size * dtype.itemsize).view(dtype)
        host = [
            self._host[end - part.values.numel() : end].view(part.values.shape)
            for part, end in zip(self.parts, ends, strict=True)
        ]
        for kind in self.state.kinds:
            with self.state.averaged(kind) if self.mean else contextlib.nullcontext():
                with self._copies.behind(self._copies.computed()):
                    for part, room in zip(self.parts, host, strict=True):
                        if part.kind == kind:
                            room.copy_(part.values, non_blocking=True)
                            self.state.let_go()
                self.state.read = self._copies.passed()
        return host

    def _on_host(self, values: Tensor) -> Array:
        """Return the slice `values` as an array on the host. A slice on a device is copied into
        page-locked memory. The writer requests one slice after the other, so this memory can be
        used again once the slice is written."""
        self.state.let_go()
        # if the slice is already on the host, do not wait for the device
        if values.device.type == "cpu":
            return values.numpy()
        with self._copies.behind(self._copies.computed()):
            host = on_its_way(values)
        self._copies.passed().host_waits()
        return host.numpy()
