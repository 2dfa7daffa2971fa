"""Process groups of torch.distributed whose messages are sent by ptdmpi's transports."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ptdmpi.comm.communicator import Communicator, Handle

BACKEND = "ptdmpi"  # the name of the backend in torch.distributed
Kind: Any = dist.ReduceOp.RedOpType
# Functions by which torch computes the reductions that the transports do not support, such as
# PRODUCT, or the SUM of bool tensors. Each function takes the tensors of all ranks, stacked in rank
# order, and returns their reduction.
REDUCED: dict[Any, Callable[[Tensor], Tensor]] = {
    Kind.SUM: lambda every: reduce(torch.add, every),
    Kind.PRODUCT: lambda every: every.prod(0),
    Kind.MIN: lambda every: every.amin(0),
    Kind.MAX: lambda every: every.amax(0),
    Kind.BAND: lambda every: reduce(torch.bitwise_and, every),
    Kind.BOR: lambda every: reduce(torch.bitwise_or, every),
    Kind.BXOR: lambda every: reduce(torch.bitwise_xor, every),
}


# Type checkers see this class instead of torch's own class, because torch's type stubs describe
# only the methods that a user calls, and not the methods that a subclass implements.
if TYPE_CHECKING:

    class ProcessGroup:
        """A process group of torch.distributed."""

        def __init__(self, rank: int, size: int) -> None: ...

    _create_work_from_future: Callable[[Future[list[Tensor]]], dist.Work]
else:
    from torch._C._distributed_c10d import ProcessGroup, _create_work_from_future


class TransportGroup(ProcessGroup):
    """A process group whose messages are sent by one of ptdmpi's communicators.

    On the host every operation is complete when the call returns. On a device the call returns
    earlier, but later work in the current stream waits for the operation. The group does not
    support receives from an arbitrary source, tags other than 0, or sparse tensors.
    """

    def __init__(self, comm: Communicator, name: str) -> None:
        ProcessGroup.__init__(self, comm.rank, comm.size)
        self.comm = comm
        self._name = name

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    @property
    def pg_name(self) -> str:
        """Return the name of the group in torch.distributed."""
        return self._name

    @property
    def group_name(self) -> str:
        """Return the name of the group in torch.distributed."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    # -- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Replace each tensor by its reduction over the ranks. `opts.reduceOp` is the kind of
        reduction; without `opts` the kind is SUM."""
        op = _op(opts)
        for tensor in _listed(tensors):
            self._reduced(tensor, op)
        return _done(_listed(tensors))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Replace each of several tensors by its reduction over the ranks."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce each tensor over the ranks, and write the result to the root's tensor. The tensors
        of other ranks do not change."""
        for tensor in _listed(tensors):
            total = tensor.clone(memory_format=torch.contiguous_format)
            self._reduced(total, _op(opts))
            if self.comm.rank == opts.rootRank:
                tensor.copy_(total)
        return _done(_listed(tensors))

    def _reduced(self, tensor: Tensor, op: Any) -> None:
        """Replace `tensor` by its reduction over the ranks. `op` is the kind of reduction, such as
        SUM."""
        kind, factor = _kind(op, self.comm.size)
        with torch.no_grad():
            whole = _contiguous(tensor)
            if factor is not None and kind == Kind.PREMUL_SUM:
                whole.mul_(factor)
            sums = kind in (Kind.SUM, Kind.AVG, Kind.PREMUL_SUM)
            if sums and whole.dtype is not torch.bool:
                self.comm.all_reduce(whole)
            elif kind == Kind.MAX and whole.dtype is not torch.bool:
                self.comm.all_reduce(whole, "max")
            else:
                every = self.comm.all_gather(whole[None].contiguous())
                whole.copy_(REDUCED[kind](every))
            if kind == Kind.AVG:
                _divide(whole, self.comm.size)
            if whole is not tensor:
                tensor.copy_(whole)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce the k-th tensor of each list in `inputs` over the ranks, for every k. Rank k
        writes the result to its tensor in `outputs`, which has one tensor for each list."""
        for output, parts in zip(outputs, inputs, strict=True):
            sizes = {part.shape for part in parts}
            if len(sizes) == 1:
                self._scattered(output, torch.stack(tuple(parts)), _op(opts))
                continue
            # the parts of the ranks have unequal sizes, so reduce all parts on every rank
            flat = torch.cat([part.reshape(-1) for part in parts])
            self._reduced(flat, _op(opts))
            here = sum(part.numel() for part in parts[: self.comm.rank])
            output.copy_(flat[here : here + output.numel()].view(output.shape))
        return _done(list(outputs))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Reduce the tensor `given` over the ranks. Each rank receives one part of the result in
        `output`; all parts have the same size."""
        self._scattered(output, given, _op(opts))
        return _done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Call `reduce_scatter_single` for each of several tensors."""
        for output, given in zip(outputs, inputs, strict=True):
            self._scattered(output, given, _op(opts))
        return _done(list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scattered(self, output: Tensor, given: Tensor, op: Any) -> None:
        """Reduce `given` over the ranks, and write this rank's part of the result to `output`."""
        kind, factor = _kind(op, self.comm.size)
        with torch.no_grad():
            flat = given.reshape(self.comm.size, -1).contiguous()
            if factor is not None and kind == Kind.PREMUL_SUM:
                flat = flat * factor
            if kind in (Kind.SUM, Kind.AVG, Kind.PREMUL_SUM) and flat.dtype is not torch.bool:
                part = self.comm.reduce_scatter(flat)
            else:
                # [size, n]: row k comes from rank k, and this rank reduces the rows
                swapped = self.comm.all_to_all(flat)
                part = REDUCED[kind](swapped)
            if kind == Kind.AVG:
                part = _divide(part.clone(), self.comm.size)
            output.copy_(part.reshape(output.shape))

    # -- gathers ---------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather the tensor of every rank into a list of tensors, in rank order."""
        for parts, given in zip(outputs, inputs, strict=True):
            if all(part.shape == given.shape for part in parts):
                every = self.comm.all_gather(_contiguous(given)[None])
                for part, arrived in zip(parts, every, strict=True):
                    part.copy_(arrived)
                continue
            # if shapes are unequal, each rank broadcasts its tensor
            for rank, part in enumerate(parts):
                if rank == self.comm.rank:
                    part.copy_(given)
                self._broadcast(part, rank)
        return _done([part for parts in outputs for part in parts])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather several tensors of every rank. `outputs` has one list of tensors for each rank."""
        for number, given in enumerate(inputs):
            every = self.comm.all_gather(_contiguous(given)[None])
            for parts, arrived in zip(outputs, every, strict=True):
                parts[number].copy_(arrived)
        return _done([part for parts in outputs for part in parts])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Gather the tensors of all ranks into one tensor, in rank order."""
        every = self.comm.all_gather(_contiguous(given).view(1, -1))
        output.copy_(every.view(output.shape))
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Call `all_gather_single` for each of several tensors."""
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given)
        return _done(list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather the tensor of every rank into a list of tensors on the root rank."""
        (given,) = inputs
        if self.comm.rank != opts.rootRank:
            self.comm.send(_contiguous(given), opts.rootRank)
            return _done([given])
        for rank, part in enumerate(outputs[0]):
            if rank == self.comm.rank:
                part.copy_(given)
            else:
                self._received(part, rank)
        return _done(outputs[0])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Send the k-th tensor of the root's list to rank k, for every rank k."""
        (output,) = outputs
        if self.comm.rank != opts.rootRank:
            self._received(output, opts.rootRank)
            return _done([output])
        for rank, part in enumerate(inputs[0]):
            if rank == self.comm.rank:
                output.copy_(part)
            else:
                self.comm.send(_contiguous(part), rank)
        return _done([output])

    # -- exchanges and messages ------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Exchange rows of a tensor between all ranks. `sent[k]` rows go to rank k, and
        `received[k]` rows come from rank k. If a list is empty or None, every rank sends the same
        number of rows to each rank.
        """
        uneven = [list(sent), list(received)] if sent and received else []
        output.copy_(self.comm.all_to_all(_contiguous(given), *uneven).view(output.shape))
        return _done([output])

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Send `inputs[k]` to each rank k, and receive `outputs[k]` from rank k."""
        flat = torch.cat([part.reshape(-1) for part in inputs])
        sent = [part.numel() for part in inputs]
        received = [part.numel() for part in outputs]
        arrived = self.comm.all_to_all(flat, sent, received).split(received)
        for output, part in zip(outputs, arrived, strict=True):
            output.copy_(part.view(output.shape))
        return _done(list(outputs))

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Replace each tensor by the root's tensor."""
        for tensor in _listed(tensors):
            self._broadcast(tensor, opts.rootRank)
        return _done(_listed(tensors))

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        whole = _contiguous(tensor)
        self.comm.broadcast(whole, root)
        if whole is not tensor:
            tensor.copy_(whole)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return when every rank of the group has called `barrier`."""
        self.comm.barrier()
        return _done([])

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Begin to send the only tensor in `tensors` to rank `peer`."""
        _require_no_tag(tag)
        (tensor,) = tensors
        whole = _contiguous(tensor)
        return _Begun(self.comm.isend(whole, peer), [tensor])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Begin to receive the only tensor in `tensors` from rank `peer`."""
        _require_no_tag(tag)
        (tensor,) = tensors
        whole = _contiguous(tensor)
        return _Begun(self.comm.irecv(whole, peer), [tensor], whole)

    def _received(self, tensor: Tensor, peer: int) -> None:
        whole = _contiguous(tensor)
        self.comm.recv(whole, peer)
        if whole is not tensor:
            tensor.copy_(whole)


class _Begun(dist.Work):
    """A send or receive of torch.distributed that has begun. A receive writes to the contiguous
    tensor `into`. If the caller's tensor is contiguous, `into` is the caller's tensor. Otherwise
    `into` is copied to the caller's tensor when the message has arrived."""

    def __init__(self, handle: Handle, tensors: list[Tensor], into: Tensor | None = None) -> None:
        super().__init__()
        self._handle = handle
        self._tensors = tensors
        self._into = into
        self._over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message. On a device only the current stream waits, not the host."""
        if not self._over:
            self._handle.wait()
            self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return True if the message is complete."""
        if not self._over and self._handle.done():
            self._deliver()
        return self._over

    def result(self) -> list[Tensor]:
        """Return the tensors of the message."""
        return self._tensors

    def _deliver(self) -> None:
        self._over = True
        if self._into is not None and self._into is not self._tensors[0]:
            self._tensors[0].copy_(self._into)


def _done(tensors: list[Tensor]) -> dist.Work:
    """Return the `Work` object of torch.distributed for an operation that is complete."""
    future: Future[list[Tensor]] = Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()


def _divide(tensor: Tensor, size: int) -> Tensor:
    """Divide the sum `tensor` by `size`, the number of ranks, in place. Quotients of integers are
    rounded towards zero. Return `tensor`."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.div_(size)
    return tensor.div_(size, rounding_mode="trunc")


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _kind(op: Any, size: int) -> tuple[Any, Any]:
    """Return the kind of the reduction `op` (such as SUM), and a factor. For the kind PREMUL_SUM,
    each tensor is multiplied by this factor before the sum; for all other kinds, the factor is
    None. Raises ValueError for a kind that the backend does not support."""
    for kind in (*REDUCED, Kind.AVG):
        if op == kind:
            return kind, None
    if op == Kind.PREMUL_SUM:
        # no public Python interface of torch returns the factor of PREMUL_SUM
        factor = op.__getstate__()[1]
        return Kind.PREMUL_SUM, factor
    raise ValueError(f"the backend {BACKEND} has no reduction {op}")


def _require_no_tag(tag: int) -> None:
    if tag:
        raise ValueError(f"the backend {BACKEND} sends messages without tags; legal: tag = 0")
