"""Decentralized training with compressed messages: each replica sends the compressed difference
between its weights and its public weights, an approximation of its weights that its neighbours also
have."""

from torch import Tensor

from ptdmpi.engine.data_parallel.decentralized import Decentralized
from ptdmpi.engine.data_parallel.feedback import Compression, kinds_of
from ptdmpi.engine.data_parallel.method import Replica
from ptdmpi.model.state import WEIGHTS
from ptdmpi.plan.layout.run_method import BUCKET_ELEMENTS

PUBLIC = "public"


class Choco(Decentralized):
    """CHOCO-SGD (Koloskova, Stich, Jaggi 2019, arXiv 1902.00340, algorithm 2). Replica i has the
    weights x_i. The replica and its neighbours also have an approximation of these weights: the
    public weights `public`_i. After each update, replica i computes

        q_i = C(x_i - public_i) is sent to the neighbours;  public_j += q_j for j = i and neighbours
        x_i += rate sum_j w_ij (public_j - public_i)

    In these formulas C is a compressor that contracts, w_ij are the averaging weights of the graph,
    and rate is `consensus_rate` (gamma in the paper). The matrix w is symmetric and the same in
    every step. The values that C leaves out of one difference are part of the next difference x_i -
    public_i. So a change of the weights that is not sent in one step is sent in a later step.

    Each replica has a copy of the public weights of each neighbour. The copy is bitwise equal to
    the public weights on the neighbour itself, because both replicas add the same decoded numbers.
    The copies are not saved: after a start, the public weights are sent once, uncompressed, before
    the first exchange. A run may therefore resume on another graph, or continue with fewer
    replicas.

    The initial values of the public weights are the initial weights, which are the same on all
    replicas; in the paper they are zero.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.kinds = kinds_of(self.settings)
        self.compression = Compression(replica)
        self._copies: Tensor | None = None  # [neighbours, elements of the flat buffer]

    def after_update(self, step: int, skipped: bool) -> None:
        """Send the compressed difference between this replica's weights and its public weights to
        the neighbours. Then move the weights of this replica towards the public weights of its
        neighbours."""
        # a rank that trains no parameter has no public weights, so it exchanges nothing
        if skipped or not self.state.kinds[PUBLIC].parts:
            return
        (graph,) = self._graphs
        row = self.topology.row(step, self.data.rank)
        weights = [float(row[peer]) for peer in graph.sources]
        if self._copies is None:
            own = self.state.kinds[PUBLIC].parts[0]
            self._copies = own.new_empty((len(graph.sources), len(own)))
            rooms = self._copies.split(BUCKET_ELEMENTS, dim=1)
            for part, room in zip(own.split(BUCKET_ELEMENTS), rooms, strict=True):
                room.copy_(graph.gather(part))
        for place in self.compression.places(self.state):
            x = place.read(WEIGHTS)
            public = place.read(PUBLIC)
            batch = place.batch
            code, own = place.coder.encode(x - public, self.data.rank)
            arrived = graph.gather(code)
            public += own
            place.write(PUBLIC, public)
            pulled = x.new_zeros(x.shape)
            # multiply each difference by its weight in one kernel, and add the products in another
            # kernel, in ascending order of ranks; `decentralized._Exchange.finish` gives the reason
            for peer, weight, code, known in zip(
                graph.sources, weights, arrived, self._copies, strict=True
            ):
                other = batch.read(known).add_(place.coder.decode(code, peer, x.dtype))
                batch.write(known, other)
                pulled.add_(other.sub_(public).mul_(weight))
            place.write(WEIGHTS, x.add_(pulled.mul_(self.settings.consensus_rate)))
        self.bits_per_element = self.compression.bits_per_element
