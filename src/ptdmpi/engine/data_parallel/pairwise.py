"""Methods that sum all gradients by messages between pairs of ranks. The sums are bitwise equal to
the sums of the method `all_reduce`. The number of bytes that are sent is about the same as in the
textbook algorithms."""

from collections.abc import Iterator

from torch import Tensor

from ptdmpi.comm.communicator import Handle
from ptdmpi.engine.data_parallel.method import DataParallel
from ptdmpi.plan.layout.run_method import MESSAGE_ELEMENTS


class Ring(DataParallel):
    """A method that reduces the gradients around a ring of n ranks, and then gathers the sums
    around the ring (Patarasuk and Yuan 2009). The gradients are cut into groups of n - 1 parts,
    each part with at most MESSAGE_ELEMENTS elements. For each group, a rank sends at most 2 (n - 1)
    messages, each with one part.

    In the textbook algorithm, the sum of part c of the gradients begins at rank c, so the ranks are
    added in a different order for each part. In ptdmpi's ring the sum of every part begins at
    rank 0 and ends at rank n - 1, so that all parts are added in ascending order of ranks. After
    the reduction, rank n - 1 sends the sums along the ring to ranks 0, 1, .., n - 2.

    All ranks together send as many bytes as in the textbook algorithm: 2 (n - 1) times the size of
    the gradients. In the textbook algorithm each rank sends 2 (n - 1) / n times this size. In
    ptdmpi's ring, ranks n - 2 and n - 1 send the gradients once, and all other ranks send them
    twice. For n = 3 ranks and two parts a and b (a01 is the sum of a over ranks 0 and 1):

        0 -a0-> 1 -a01-> 2      0 -b0-> 1 -b01-> 2       then      2 -a-> 0 -a-> 1      2 -b-> ..

    The gather begins when the reduction is complete, so no deadlock is possible, even if a send
    completes only when its receive begins.
    """

    def reduce(self) -> None:
        """Replace the gradients by their sum over data ranks."""
        if self.data.size > 1 and len(self.replica.buffer.gradients):
            for parts in self._rounds():
                self._reduce(parts)
                self._gather(parts)

    def _rounds(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the gradients as tuples of at most n - 1 parts. The parts of a tuple travel around
        the ring together: first all are reduced, then all are gathered."""
        most = (self.data.size - 1) * MESSAGE_ELEMENTS
        for some in self.replica.buffer.gradients.split(most):
            yield some.split(-(-len(some) // (self.data.size - 1)))

    def _reduce(self, parts: tuple[Tensor, ...]) -> None:
        data = self.data
        sent = list[Handle]()
        room = parts[0].new_empty(len(parts[0]))
        for part in parts:
            if data.rank > 0:
                # the received part is the sum over all lower ranks, added in ascending order
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
    """A parameter server on data rank 0 of n ranks. Rank 0 receives the gradients of the other
    ranks, one after the other, adds them in ascending order of ranks, and sends the sum to each
    rank (Li et al. 2014). Rank 0 sends and receives n - 1 times the size of the gradients; each
    other rank sends and receives the gradients once."""

    def reduce(self) -> None:
        """Replace the gradients by their sum over data ranks."""
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
