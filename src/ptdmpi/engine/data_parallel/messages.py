"""The sum of all gradients by messages between pairs: the same bits as `all_reduce`, and what the
textbook's algorithms cost."""

from collections.abc import Iterator

from torch import Tensor

from ptdmpi.comm.communicator import Handle
from ptdmpi.engine.data_parallel.method import DataParallel
from ptdmpi.plan.layout.messages import MESSAGE_ELEMENTS


class Ring(DataParallel):
    """A reduction and a gather around a ring (Patarasuk and Yuan 2009), in 2 (n - 1) messages of
    each rank, each a part of 1 / (n - 1).

    The textbook's ring begins part c at rank c, and so adds each part in another order. Here every
    part begins at rank 0 and ends at rank n - 1, in ascending order, one behind the other; the sums
    go on from there to 0, 1, .., n - 2. All ranks together send as many bytes, 2 (n - 1) times the
    gradients; but a rank sends them twice, not 2 (n - 1) / n times, save ranks n - 2 and n - 1,
    which send them once. Of n = 3, parts a and b:

        0 -a0-> 1 -a01-> 2      0 -b0-> 1 -b01-> 2       then      2 -a-> 0 -a-> 1      2 -b-> ..

    The gather begins when all of the reduction is over. A rank then never waits for one that waits
    for it, even where a send ends no sooner than its receive begins.
    """

    def reduce(self) -> None:
        """Afterwards the gradients are the sum over data ranks."""
        if self.data.size > 1 and len(self.replica.buffer.gradients):
            for parts in self._rounds():
                self._reduce(parts)
                self._gather(parts)

    def _rounds(self) -> Iterator[tuple[Tensor, ...]]:
        """The gradients in rounds of at most n - 1 parts."""
        most = (self.data.size - 1) * MESSAGE_ELEMENTS
        for some in self.replica.buffer.gradients.split(most):
            yield some.split(-(-len(some) // (self.data.size - 1)))

    def _reduce(self, parts: tuple[Tensor, ...]) -> None:
        data = self.data
        sent = list[Handle]()
        room = parts[0].new_empty(len(parts[0]))
        for part in parts:
            if data.rank > 0:
                # what comes is the sum of all before this rank: the sum keeps ascending order
                part += data.recv(room[: len(part)], data.rank - 1)
            if data.rank < data.size - 1:
                sent.append(data.isend(part, data.rank + 1))
        for handle in sent:
            handle.wait()

    def _gather(self, parts: tuple[Tensor, ...]) -> None:
        data = self.data
        sent = list[Handle]()
        last = data.size - 1
        for part in parts:
            if data.rank != last:
                data.recv(part, (data.rank - 1) % data.size)
            if data.rank != last - 1:
                sent.append(data.isend(part, (data.rank + 1) % data.size))
        for handle in sent:
            handle.wait()


class ParameterServer(DataParallel):
    """Data rank 0 takes the gradients of all others, one after the other, adds them up in their
    order, and sends the sum to each of them (Li et al. 2014): n - 1 times the gradients in and out
    of one rank, where every other one sends and receives them once."""

    def reduce(self) -> None:
        """Afterwards the gradients are the sum over data ranks."""
        data = self.data
        gradients = self.replica.buffer.gradients
        for part in gradients.split(MESSAGE_ELEMENTS) if len(gradients) else ():
            if data.rank:
                data.send(part, 0)
                data.recv(part, 0)
                continue
            room = part.new_empty(len(part))
            for rank in range(1, data.size):
                part += data.recv(room, rank)
            for handle in [data.isend(part, rank) for rank in range(1, data.size)]:
                handle.wait()
