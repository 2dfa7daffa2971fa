"""Decentralized SGD: each replica averages its weights only with the weights of its neighbours in a
graph, not with those of all replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ptdmpi.comm.communicator import Handle, Neighbourhood
from ptdmpi.engine.data_parallel.method import DataParallel, Replica
from ptdmpi.model.batch import MicrobatchPass
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.sharded import Walk
from ptdmpi.plan.layout.run_method import BUCKET_ELEMENTS
from ptdmpi.plan.layout.topology import check, topology_of
from ptdmpi.plan.schedule.ops import Op


@dataclass(frozen=True)
class _Exchange:
    """An unfinished exchange of values with the neighbours in the graph. The tensor `own` is a
    slice of this rank's state; it belongs to the shard unit (a group of parameters, such as those
    of a layer) with the number `number`. `terms` has a pair (index, weight) for this rank, and one
    for each neighbour that sends to this rank: the index of the rank's values in `arrived` (None
    for this rank), and the rank's weight in the weighted sum.
    """

    number: int
    own: Tensor
    arrived: Tensor
    handle: Handle
    terms: Sequence[tuple[int | None, float]]

    def finish(self) -> None:
        """Wait for the neighbours' values x_j, and replace `own` by the weighted sum sum_j w_ij x_j
        over this rank and its neighbours, added in ascending order of ranks."""
        self.handle.wait()
        # Multiply the tensors by their weights in one kernel, and add the products in another. A
        # single kernel may fuse multiplication and addition for only some elements of a tensor;
        # then the bits of the result would depend on how the state is cut into tensors. The
        # exchange is complete, so `own` may be changed.
        terms = [
            (self.own if place is None else self.arrived[place]).mul_(weight)
            for place, weight in self.terms
        ]
        total = terms[0]
        for term in terms[1:]:
            total.add_(term)
        if total is not self.own:
            self.own.copy_(total)


class Decentralized(DataParallel):
    """Decentralized SGD in the form "adapt, then combine" (diffusion): x_i <- sum_j w_ij (x_j -
    rate * update_j). Here x_i are the model weights of replica i, and rate is the learning rate.
    The averaging weights w_ij come from a `topology` over the replicas, which may change from step
    to step (Lopes and Sayed 2008, IEEE Trans. Signal Process. 56; Chen and Sayed 2012, 60). Each
    replica keeps its own moments. If `average_moments` is True, the moments are averaged in the
    same way as the weights. After a skipped step nothing is averaged.

    If `average_every` = H > 0, each H-th step averages over all replicas instead: Gossip-PGA (Chen
    et al. 2021, arXiv 2105.09080, algorithm 1). Steps are counted from step 0 of the run, even
    after a resume.

    If `overlap` is True, the exchange of step k continues during the forward of step k + 1. Before
    the forward computes a module (embedding, layer or head), the method waits for the neighbours'
    weights of this module and averages them. The results are bitwise equal with and without
    `overlap`. Code that reads the state between steps calls `settle` first, which finishes the
    exchange.

    Every operation of this method works element by element, and adds the values of the replicas in
    ascending order. If the gradients are bitwise equal for every tensor-parallel size,
    pipeline-parallel size and schedule, the weights are therefore bitwise equal, too.
    """

    differs = ("replicate",)

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        config = replica.config
        self.settings = config.data_parallel
        self.topology = topology_of(config)
        check(self.topology)
        self._graphs: list[Neighbourhood] = []
        # if `period` is None, the graphs of the steps do not repeat, so each step makes its own
        # graph
        if self.topology.period is not None:
            self._graphs = [self._graph(step, True) for step in range(self.topology.period)]
        self._under_way: list[_Exchange] = []
        if self.settings.overlap:
            for stage in replica.stages.values():
                stage.walk = _Arriving(stage.parameters_by_place(), self)

    def _graph(self, step: int, lasting: bool) -> Neighbourhood:
        graph = self.topology
        rank = self.data.rank
        return self.data.neighbours(
            graph.sources(step, rank), graph.destinations(step, rank), lasting
        )

    def reduce(self) -> None:
        """Multiply the gradients by the number of replicas. After this multiplication, the mean
        over the replicas is the gradient of the global batch, in which each token has the same
        weight."""
        self.settle()
        self.replica.buffer.gradients.mul_(self.data.size)

    def begin_step(self) -> None:
        """Finish the exchange with the neighbours before the step begins, unless `overlap` is
        set."""
        if not self.settings.overlap:
            self.settle()

    def begin(self, op: Op) -> None:
        """Let the exchanges make progress. MPI makes progress only while one of its functions is
        called. This method therefore asks MPI whether the exchanges are complete; only the call
        matters, not the answer."""
        for exchange in self._under_way:
            exchange.handle.done()

    def end(self, op: Op, microbatch: MicrobatchPass) -> None:
        """Let MPI make progress again, after the op (a forward or a backward), as in `begin`."""
        super().end(op, microbatch)
        self.begin(op)

    def after_update(self, step: int, skipped: bool) -> None:
        """Begin the exchange with the neighbours. If `overlap` is not set, also finish it. In each
        `average_every`-th step, average over all replicas, not only over the neighbours."""
        if skipped:
            return
        every = self.settings.average_every
        if every and (step + 1) % every == 0:
            for _, part in self._averaged_parts():
                self.data.all_reduce(part)
                part /= self.data.size
            return
        graphs = self._graphs
        graph = graphs[step % len(graphs)] if graphs else self._graph(step, False)
        row = self.topology.row(step, self.data.rank)
        places: dict[int, int | None] = {peer: n for n, peer in enumerate(graph.sources)}
        terms = [(places.get(peer), float(weight)) for peer, weight in row.items()]
        for number, part in self._averaged_parts():
            # The weights of all modules are views of one flat tensor, and share its version
            # counter. If this loop changed the weights of a later module, autograd would report a
            # change of the earlier modules' weights, which are saved for the backward. `.data`
            # avoids this, because its result has a separate version counter.
            for own in part.data.split(BUCKET_ELEMENTS):
                exchange = _Exchange(number, own, *graph.gather_begin(own), terms)
                self._under_way.append(exchange)
                if not self.settings.overlap and len(self._under_way) > 1:
                    self._under_way.pop(0).finish()
        if not self.settings.overlap:
            self.settle()

    def _averaged_parts(self) -> list[tuple[int, Tensor]]:
        """Return the tensors of the state that are averaged, each with the number of its shard
        unit."""
        names = ["weights"]
        if self.settings.average_moments:
            names += self.replica.config.optimizer.moments
        kinds = [self.state.kinds[name] for name in names]
        return [(number, part) for kind in kinds for number, part in enumerate(kind.parts)]

    @property
    def settled(self) -> bool:
        """Return True if all exchanges are complete."""
        return not self._under_way

    def settle(self) -> None:
        """Finish all exchanges, and update the weights from the master weights."""
        self.arrive(range(len(self.replica.buffer.units)))

    def arrive(self, units: Sequence[int]) -> None:
        """Finish the exchanges of the shard units `units`, and update their weights from the master
        weights."""
        if not self._under_way:
            return
        wanted = set(units)
        here = [exchange for exchange in self._under_way if exchange.number in wanted]
        for exchange in here:
            exchange.finish()
        self._under_way = [
            exchange for exchange in self._under_way if exchange.number not in wanted
        ]
        buffer = self.replica.buffer
        if not buffer.one_type:
            for number in {exchange.number for exchange in here}:
                buffer.weight_parts[number].data.copy_(buffer.masters[number])


class _Arriving(Walk):
    """A pass through the modules of a stage. Before the forward of each module, the pass waits
    until the averaged weights of the module have arrived.
    """

    def __init__(self, parameters: dict[str, list[Parameter]], method: Decentralized) -> None:
        super().__init__(parameters, None, None, method.replica.buffer)
        self._method = method

    def forward(self, place: str) -> None:
        """Wait for the weights of the module `place`."""
        self._method.arrive(self._uses[place])

    def backward(self, place: str | None) -> None:
        """Do nothing, because the forward has already waited for the weights of every module."""

    def enter(self, place: str, x: Tensor) -> Tensor:
        """Wait for the weights of the module `place`, and return the module's input `x`
        unchanged."""
        self.forward(place)
        return x
