"""The transport `mpi` (see the key `comm.wire`): MPI sends host tensors as bytes.

MPI only sends bytes, and torch computes the sums. Therefore bfloat16 needs no MPI type. The terms
of every sum are added in ascending order of ranks, so the result does not depend on the MPI
library's choice of algorithm. Tensors on other devices are copied to the host before they are sent.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.communicator import DONE, Communicator, Exchanged, Handle, Neighbourhood
from ptdmpi.comm.sums import combine

# Up to this number of bytes, an all-reduce is faster if the ranks gather the full tensors of all
# ranks than if they use a reduce-scatter and an all-gather.
DIRECT_BYTES = 32 * 1024
# In a group of two ranks, tensors of up to this number of bytes are exchanged in full. The ranks
# then send as many bytes as in a reduce-scatter and an all-gather, but half as many messages.
PAIR_BYTES = 4 * 1024 * 1024
# Larger tensors are reduced in buckets of this number of bytes, so that temporary memory stays in
# the cache of the processor.
BUCKET_BYTES = 4 * 1024 * 1024


def _bytes(flat: Tensor) -> np.ndarray:
    # View the memory of the tensor as bytes, because numpy has no bfloat16. Detach the tensor,
    # because numpy refuses tensors that require gradients.
    return flat.detach().view(torch.uint8).numpy()


def _host_room(flat: Tensor) -> Tensor:
    """Return a host tensor that may be overwritten: `flat` itself, or a new tensor if `flat` is on
    a device."""
    return flat if flat.device.type == "cpu" else torch.empty_like(flat, device="cpu")


def _ranges(counts: Sequence[int], like: Tensor) -> tuple[Any, MPI.Datatype]:
    """Return the arguments that describe consecutive parts of a tensor to MPI: (sizes and offsets
    of the parts in bytes, MPI.BYTE). Part k has `counts[k]` elements of the type of the tensor
    `like`."""
    sizes = [count * like.element_size() for count in counts]
    places = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return (sizes, places), MPI.BYTE


class _Request:
    """An MPI request, and the host tensor `host` that it sends or receives. When a message has been
    received, `host` is copied to the tensor `target`, which may be on a device."""

    def __init__(
        self,
        request: MPI.Request,
        host: Tensor,
        target: Tensor | None = None,
        sent: Tensor | None = None,
    ) -> None:
        self._request = request
        self._host = host
        self._target = target
        self._sent = sent  # keep the tensor as long as MPI may read its memory

    def wait(self) -> None:
        """Wait for the message, and copy the received tensor to its target."""
        self._request.Wait()
        self._deliver()

    def done(self) -> bool:
        """Return True if the message is complete. If a received tensor is complete, copy it to its
        target."""
        # `Test` may be called again after it has returned True: MPI makes a completed request null,
        # and `Test` of a null request is always true
        finished = self._request.Test()
        if finished:
            self._deliver()
        return finished

    def _deliver(self) -> None:
        if self._target is not None and self._target is not self._host:
            self._target.copy_(self._host)
            self._target = None


class MpiCommunicator(Communicator):
    """A group whose tensors are sent by MPI. The call that begins a collective also completes the
    collective. MPI makes progress only inside its calls, so beginning a collective early and
    waiting for it later would save no time."""

    exact = True
    # MPI matches messages by their sender, so an early receive does not block other messages
    posts_early = True

    def neighbours(
        self, sources: Sequence[int], destinations: Sequence[int], lasting: bool = True
    ) -> Neighbourhood:
        """Return the neighbourhood of this rank. If `lasting` is True, the neighbourhood uses MPI's
        graph collectives, which suit many exchanges. Otherwise it uses sends and receives."""
        if lasting and self.size > 1:
            return MpiNeighbourhood(self, sources, destinations)
        return super().neighbours(sources, destinations, lasting)

    def _all_reduce(self, flat: Tensor, op: str) -> Handle:
        host = flat.cpu()
        if self.size == 2 and host.nbytes <= PAIR_BYTES:
            other = torch.empty_like(host)
            peer = 1 - self.rank
            # send and receive in one call: two blocking sends may deadlock (MPI 4.1, section 3.5)
            self.control.Sendrecv(_bytes(host), peer, recvbuf=_bytes(other), source=peer)
            # the sum and the maximum of two tensors do not depend on the order of the tensors
            combine((host, other), op, host)
        elif host.nbytes <= DIRECT_BYTES:
            pieces = host.new_empty((self.size, host.numel()))
            self.control.Allgather(_bytes(host), _bytes(pieces.view(-1)))
            combine(pieces, op, host)
        else:
            for bucket in host.split(BUCKET_BYTES // host.element_size()):
                self._all_reduce_bucket(bucket, op)
        if host is not flat:
            flat.copy_(host)
        return DONE

    def _all_reduce_bucket(self, bucket: Tensor, op: str) -> None:
        """All-reduce a bucket. Each rank receives its part of the bucket from all ranks and adds
        the received parts; then the sums are all-gathered. Each rank sends 2 (size-1)/size times
        the bytes of the bucket."""
        counts = [part.nbytes for part in bucket.tensor_split(self.size)]
        starts = [sum(counts[:rank]) for rank in range(self.size)]
        mine = bucket.tensor_split(self.size)[self.rank]
        pieces = bucket.new_empty((self.size, mine.numel()))
        data = _bytes(bucket)
        here = [mine.nbytes] * self.size
        there = [mine.nbytes * rank for rank in range(self.size)]
        self.control.Alltoallv(
            [data, (counts, starts), MPI.BYTE], [_bytes(pieces.view(-1)), (here, there), MPI.BYTE]
        )
        combine(pieces, op, mine)
        self.control.Allgatherv(MPI.IN_PLACE, [data, (counts, starts), MPI.BYTE])

    def _all_gather(self, result: Tensor, flat: Tensor) -> Handle:
        host = _host_room(result)
        own = host.view(self.size, -1)[self.rank]
        # MPI does not allow a send from the memory of the result, except with MPI.IN_PLACE
        inside = own.data_ptr() == flat.data_ptr() or host is not result
        if host is not result:
            own.copy_(flat)
        self.control.Allgather(MPI.IN_PLACE if inside else _bytes(flat), _bytes(host))
        if host is not result:
            result.copy_(host)
        return DONE

    def _reduce_scatter(self, result: Tensor, flat: Tensor) -> Handle:
        host = flat.cpu()
        data = _bytes(host)
        size = host.element_size()
        length = result.numel()
        most = max(1, BUCKET_BYTES // (size * self.size))
        pieces = host.new_empty((self.size, min(most, length)))
        for first in range(0, length, most):
            count = min(most, length - first)
            counts = [count * size] * self.size
            starts = [(rank * length + first) * size for rank in range(self.size)]
            there = [rank * count * size for rank in range(self.size)]
            arrived = pieces.view(-1)[: self.size * count].view(self.size, count)
            self.control.Alltoallv(
                [data, (counts, starts), MPI.BYTE],
                [_bytes(arrived.view(-1)), (counts, there), MPI.BYTE],
            )
            total = result[first : first + count]
            if host is flat:
                combine(arrived, "sum", total)
            else:
                combine(arrived, "sum", arrived[0])
                total.copy_(arrived[0])
        return DONE

    def _all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged) -> Handle:
        brought = flat.cpu()
        host = _host_room(result)
        self.control.Alltoallv(
            [_bytes(brought), *_ranges(parts.sent, flat)],
            [_bytes(host), *_ranges(parts.received, flat)],
        )
        if host is not result:
            result.copy_(host)
        return DONE

    def _broadcast(self, flat: Tensor, root: int) -> Handle:
        host = flat.cpu() if self.rank == root else _host_room(flat)
        self.control.Bcast(_bytes(host), root)
        if host is not flat:
            flat.copy_(host)
        return DONE

    def _isend(self, flat: Tensor, peer: int) -> Handle:
        # tags are not needed: messages of two ranks keep their order (MPI 4.1, section 3.5)
        host = flat.cpu()
        return _Request(self.control.Isend(_bytes(host), peer), host)

    def _irecv(self, flat: Tensor, peer: int) -> Handle:
        host = _host_room(flat)
        return _Request(self.control.Irecv(_bytes(host), peer), host, flat)


class MpiNeighbourhood(Neighbourhood):
    """A neighbourhood that uses MPI's distributed graphs and their nonblocking all-gather (MPI 4.1,
    sections 8.5.4 and 8.8). All messages of an exchange begin together; calls of `done` let the
    messages make progress."""

    def __init__(
        self, group: Communicator, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        super().__init__(group, sources, destinations)
        assert isinstance(group.control, MPI.Intracomm), "a group has an intracommunicator"
        # MPI must not reorder the ranks, because each rank has its own part of the state
        self._graph = group.control.Create_dist_graph_adjacent(
            self.sources, self.destinations, reorder=False
        )
        group.made.append(self._graph)
        # no rank may use the new communicator before this barrier; the docstring of `World` gives
        # the reason
        group.control.Barrier()

    def _gather(self, result: Tensor, flat: Tensor) -> Handle:
        sent = flat.cpu()
        host = _host_room(result)
        request = self._graph.Ineighbor_allgather(
            [_bytes(sent), flat.nbytes, MPI.BYTE], [_bytes(host), flat.nbytes, MPI.BYTE]
        )
        return _Request(request, host, result, sent)
