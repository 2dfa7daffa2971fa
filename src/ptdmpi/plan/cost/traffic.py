"""The bytes that a rank sends in a step, computed from closed forms whose results equal the
trainer's counts to the byte.

Let S be the bytes of one microbatch's activation between two layers. For each microbatch, a
tensor-parallel rank sums 2 S bytes per layer in the forward, and 2 S in the backward (Shoeybi et
al. 2019, arXiv 1909.08053, section 3). With sequence parallelism, each sum is replaced by a
reduce-scatter and a gather. A linear layer may keep only this rank's slice of its input for the
backward. In this case, the input is gathered once more in the backward (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2). For each microbatch, a stage sends S bytes in each direction, or
S/t if messages are scattered over t tensor-parallel ranks (Narayanan et al. 2021, arXiv 2104.04473,
section 4.1). Data-parallel ranks sum their gradients once in a step. `_data` has the closed forms
of ZeRO's stages, and `ptdmpi.plan.layout.run_method` has the closed forms of
communication-efficient methods.
"""

from collections.abc import Iterable, Iterator, Sequence

from ptdmpi.base.traffic import Tally, Traffic
from ptdmpi.config import Config, Layout
from ptdmpi.config.methods import encodes
from ptdmpi.plan.cost.held import SECOND, HeldParts, of_experts
from ptdmpi.plan.cost.methods import code_messages, told_of
from ptdmpi.plan.cost.tree import nodes_of
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.account import Message, Phase
from ptdmpi.plan.layer.ahead import modules
from ptdmpi.plan.layer.folds import messages, operators, recomputed
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import ALIGNMENT, elements
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.layout.grid import (
    CONTEXT,
    DATA,
    ENDS,
    EXPERT_AXES,
    EXPERTS,
    LOSSES,
    PARAMETERS,
    SAME_EXPERTS,
    SHARD_AXES,
    SHARDS,
    layout_grid,
)
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.machine.cluster import Model
from ptdmpi.plan.schedule.orders import KINDS, build
from ptdmpi.plan.schedule.places import gathers
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.dealt import Dealt, dealt
from ptdmpi.plan.shape.matrices import gathered_bytes, iteration_bytes
from ptdmpi.plan.shape.parameters import ModelPart, stage_parts

LOAD_BYTES = 8  # bytes of one value: the number of tokens of an expert, or a router's loss


class StepTraffic:
    """The traffic of one step, for a model, a layout, a global batch and a compute type.

    `predictions` is the number of masked positions of a sample. If `predictions` is None, the
    number follows from the default fraction of masked positions. `method` describes the messages of
    data-parallel ranks; by default they sum the gradients once.

    The counts are exact, except in these cases:
    - Codes (compressed gradients): their length depends on random draws and on the division of
      parameters.
    - Tokens that are sent to experts: their number depends on the router.
    - Sums of gradients over the tensor axis, if the state is sharded (see `of` and
      `_same_experts`).
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        batch: int,
        precision: str,
        *,
        predictions: int | None = None,
        method: RunMethod | None = None,
    ) -> None:
        self.model, self.layout = model.config, layout
        self.method, self.vocab_size = method or RunMethod(), model.vocab_size
        self.sizes = Sizes(self.model, layout, precision, predictions=predictions)
        self.whole = self.sizes.tokens * self.model.hidden * self.sizes.compute_bytes
        self.microbatches = layout.microbatches(batch)
        self.held = HeldParts(model, layout)
        self.placed = self.held.placed

    @classmethod
    def of_config(cls, config: Config, vocab_size: int) -> "StepTraffic":
        """Return the traffic of one step of a complete configuration (a result of `resolve`)."""
        return cls(
            Model(config.run.name, config.model, vocab_size),
            config.layout,
            config.batch.global_size,
            config.precision.compute,
            predictions=config.model.predictions(config.data.mask_fraction),
            method=RunMethod.of(config),
        )

    @property
    def is_exact(self) -> bool:
        """Return False if the run sends codes, if experts are distributed over ranks, or if tensor
        ranks sum gradients that are sharded. The number of tokens that a rank sends to experts
        depends on the router, and the counts assume that all experts get equally many tokens.
        Otherwise return True; the counts then equal those of a run."""
        codes, deals = encodes(self.method.section), self.layout.expert > 1
        return not codes and not deals and not self._sums_shards

    @property
    def _sums_shards(self) -> bool:
        """Return True if tensor ranks sum the gradients of some parameters while the state is
        sharded, so that a rank sums only its own shard of these gradients."""
        ranks = range(self.layout.pipeline)
        return self.layout.shards > 1 and any(self._summed(rank) for rank in ranks)

    def assumption(self, group: str, kind: str) -> str:
        """Return the assumption under which the messages of the kind `kind` in the group of ranks
        `group` are counted. Return "" if their count is exact."""
        if group == DATA and encodes(self.method.section):
            return "matrices are large"
        grid = layout_grid(self.layout)
        deals = self.layout.expert > 1 and group == grid.called(grid.same_as(EXPERTS))
        if deals and kind == "all_to_all":
            return "all experts get equally many tokens"
        if group == "tensor" and kind == "all_reduce" and self._sums_shards:
            return "all shards have equal parts of the summed gradients"
        return ""

    def of(self, rank: int, shard: int = 0, data: int = 0, step: int = 0) -> Traffic:
        """Return the bytes and messages that one rank sends in step `step` (counted from 0), by
        group of ranks. Groups that have the same ranks are counted together, because they share a
        communicator.

        `rank`, `shard` and `data` are the coordinates of the rank on the pipeline axis, in its
        shard group (ranks that divide one copy of the state) and on the data axis.

        For some parameters, each tensor rank computes only a summand of the gradient, and the
        tensor ranks sum these summands. If the state is sharded, a rank sums only its own shard of
        such a gradient, and the result assumes that all shards have equally many elements of these
        gradients.
        """
        norms = self.method.norms(step)
        tallies = {
            "tensor": self._tensor(rank, shard, norms),
            CONTEXT: self._over(CONTEXT, rank),
            EXPERTS: self._over(EXPERTS, rank),
            **self._data(rank, shard, data, step),
            "pipeline": self._pipeline(rank),
            PARAMETERS: self._norms(norms),
            ENDS: self._ends(rank, shard),
            SAME_EXPERTS: self._same_experts(rank),
        }
        if self.model.experts:
            self._add_loads(tallies)
        grid, named = layout_grid(self.layout), dict[str, Tally]()
        for group, tally in tallies.items():
            if tally.ranks > 1:
                named.setdefault(grid.called(grid.same_as(group)), Tally(tally.ranks)).join(tally)
        return Traffic(named)

    def _add_loads(self, tallies: dict[str, Tally]) -> None:
        """Add to `tallies` the messages with the loads of experts: for each layer, ranks sum the
        number of tokens of each expert, and the router's losses."""
        layout, losses = self.layout, len(self.model.router_losses)
        size = len(self.model.routing_layers) * (self.model.experts + losses) * LOAD_BYTES
        tallies.setdefault(LOSSES, Tally(layout.token_ranks)).add("all_reduce", size)
        tallies["pipeline"].add("all_reduce", size)
        if layout.dealing.whole:  # each tensor-parallel rank routes other tokens
            tallies["tensor"].add("all_reduce", size)

    def _same_experts(self, rank: int) -> Tally:
        """Return the traffic in which tensor-parallel ranks sum the gradients of experts that the
        tensor axis does not divide, so that several tensor-parallel ranks have copies of them. If
        gradients are sharded, the count assumes that all ranks have equal shards of the experts'
        gradients."""
        dealing = self.layout.dealing
        tally = Tally(dealing.same)
        parts = [part for name, part in self.held.of_rank(rank) if parameters.is_of_expert(name)]
        if size := elements(parts) // self.layout.shards:
            tally.add("all_reduce", size * self.sizes.wide_bytes)
        return tally

    def _tensor(self, rank: int, shard: int, norms: int) -> Tally:
        """Return the traffic over the tensor axis: activations, summands of gradients, norms, and,
        if Muon updates whole matrices, the slices of these matrices. `norms` is the number of norms
        that the step computes."""
        tally, layout = Tally(self.layout.tensor), self.layout
        for stage in self.placed.stages_of(rank):
            for message in self._messages(stage):
                if message.axis != "tensor":
                    continue
                tally.add(message.collective, message.whole_bytes, self.microbatches)
        if self._is_scattered:
            tally.add("all_gather", self.whole, self.held.crossings(rank) * self.microbatches)
        element = self.sizes.wide_bytes
        for size in self._summed(rank):
            tally.add("all_reduce", size // layout.shards * element)
        if counted := self.held.counted(rank):
            # the ranks sum the squares of the norms
            tally.add("all_reduce", counted * element, norms)
        for (whole, _), count in _dealt(self, rank, shard).makes.items():
            if size := gathered_bytes(whole, layout.tensor, self.sizes.compute_bytes):
                tally.add("all_gather", size, count)
        return tally

    def _summed(self, rank: int) -> list[int]:
        """Return the number of elements in each all-reduce of parameters' gradients over the tensor
        axis. If the state is sharded, each rank sums only its own shard of these elements. The
        result counts the elements of all shards, and `_tensor` divides the result by the number of
        shards."""
        if self.layout.tensor == 1:
            return []
        parts = [part for _, part in self.held.of_rank(rank)]
        partial = sum(part.partial(self.layout.sequence_parallel) for part in parts)
        copied = [size for part in parts for size in part.copied(self.layout.tensor)]
        return [partial, *copied] if partial else copied

    def _over(self, group: str, rank: int) -> Tally:
        """Return the traffic inside layers over the context axis (keys, values and their
        gradients), or between ranks with different experts (tokens and their gradients). `group` is
        CONTEXT or EXPERTS."""
        tally = Tally(layout_grid(self.layout).size_of(group))
        for stage in self.placed.stages_of(rank):
            for message in self._messages(stage):
                if message.axis == group:
                    tally.add(message.collective, message.whole_bytes, self.microbatches)
        return tally

    def _messages(self, stage: int) -> Iterator[Message]:
        """Yield the messages of one microbatch inside the layers of a stage: over the tensor axis,
        over the context axis, and to ranks with other experts."""
        config, first = self.model, self.model.adapt.first_layer
        if stage == 0:
            yield from self._passes(describe.embedding(config, self.vocab_size), False)
        for layer in self.held.layers[stage]:
            rows = operators(describe.layer(config, layer))
            if layer < first:  # layers before the first layer with adapters have no backward
                yield from messages(rows, self.sizes, "forward")
                continue
            if self.layout.recomputed(layer) == "full":
                yield from messages(recomputed(rows, self.sizes), self.sizes, "forward")
            yield from self._passes(rows, layer > first or not config.adapt.adapts)
        if stage == self.held.last:
            yield from self._passes(modules.head(config, self.vocab_size), True)

    def _passes(self, rows: Sequence[Operator], input_trains: bool) -> Iterator[Message]:
        """Yield the messages of the operators `rows` in their forward and in their backward. If the
        schedule splits backwards, the backward is a split one. `input_trains` is True if the first
        operator's input has a gradient."""
        yield from messages(rows, self.sizes, "forward")
        phases: Sequence[Phase] = ("backward",)
        if KINDS[self.layout.schedule].splits:
            phases = ("inputs", "weights")
        for phase in phases:
            yield from messages(rows, self.sizes, phase, input_trains)

    @property
    def _is_scattered(self) -> bool:
        """Return True if each tensor-parallel rank sends only its slice of the activations to the
        next stage. All tensor-parallel ranks hold the same activations, so the next stage still
        receives every element if each rank sends a different slice."""
        layout, elements = self.layout, self.sizes.tokens * self.model.hidden
        return (
            layout.scatter_gather
            and not layout.sequence_parallel
            and layout.tensor > 1
            and elements % layout.tensor == 0
        )

    def _norms(self, norms: int) -> Tally:
        """Return the traffic of gathering norms among ranks that have different parameters. In a
        gather, all ranks send equally many numbers: as many as the rank with the most norms has.
        `norms` is the number of gathers in a step: one for the norm of the gradient, and more if,
        for example, the step measures the consensus distance."""
        ranks = layout_grid(self.layout).size_of(PARAMETERS)
        longest = max(map(self.held.counted, range(self.layout.pipeline)))
        tally = Tally(ranks)
        tally.add("all_gather", ranks * longest * self.sizes.wide_bytes, norms)
        return tally

    def _pipeline(self, rank: int) -> Tally:
        """Return the traffic of activations and their gradients over the pipeline axis."""
        tally, layout = Tally(self.layout.pipeline), self.layout
        shares = layout.tensor if self._is_scattered or layout.sequence_parallel else 1
        tally.add("send", self.whole // shares, self.held.crossings(rank) * self.microbatches)
        return tally

    def _data(self, rank: int, shard: int, data: int, step: int) -> dict[str, Tally]:
        """Return the traffic of gradients and weights, by group. `rank`, `shard` and `data` are the
        coordinates of a rank on the pipeline axis, in its shard group and on the data axis. `step`
        is counted from 0.

        Each rank has psi gradients and psi weights. The last column of the following table is the
        number of elements that a rank sends in a step of one microbatch if there are many ranks
        (Rajbhandari et al. 2020, arXiv 1910.02054, section 7):

            ZeRO 0   a sum of the gradients                                          2 psi
            ZeRO 1   gradients are scattered, updated weights are gathered           2 psi
            ZeRO 2   like ZeRO 1, but gradients are scattered in each microbatch     2 psi
            ZeRO 3   weights, including frozen weights, are gathered for each        3 psi
                     forward and each backward of a microbatch, unless they are
                     still in memory; recomputation needs no further gather

        If several shard groups have copies of the same shards, each shard of the gradients is also
        summed over these groups. If experts are distributed over ranks, the gradients of all other
        parameters are also summed over ranks with different experts. To compute the norm of all
        gradients, the ranks gather one norm for each `ALIGNMENT` gradients. If the optimizer
        updates whole matrices, the slices of a matrix are sent to the rank that updates the matrix,
        and the updated slices are sent back.
        """
        layout, m, shards = self.layout, self.microbatches, self.layout.shards
        if self.method.reproducible:
            return {DATA: self._tree(rank)}
        element = self.sizes.wide_bytes
        grid = layout_grid(layout)
        if shards == 1 and max(layout.context, layout.expert) > 1:
            return self._whole_sums(rank)
        if shards == 1:
            return {DATA: _told(self, rank, data, step)}
        units, uses = self.held.units(rank, layout.shards_gradients, shards)
        sharing = Tally(shards)
        copying = {axis: Tally(grid[axis]) for axis in grid.along(LOSSES) if axis not in SHARD_AXES}
        for unit, size in units.items():
            sharing.add("reduce_scatter", size * element, m if layout.shards_gradients else 1)
            for axis, tally in copying.items():
                if not (of_experts(unit) and axis in EXPERT_AXES):
                    tally.add("all_reduce", size // shards * element)
        units.pop(SECOND, None)
        gathered: Iterable[str] = list(units)
        rows = sum(units.values()) // ALIGNMENT
        if layout.shards_weights:
            frozen, more = self.held.units(rank, True, shards, trains=False)
            units |= frozen
            uses = {place: [*some, *more[place]] for place, some in uses.items()}
            order = build(layout.schedule, layout.pipeline, layout.virtual, m).orders[rank]
            gathered = gathers(self.held.passes(rank, order), uses)
        for unit in gathered:
            sharing.add("all_gather", units[unit] * self.sizes.compute_bytes)
        if rows:
            sharing.add("all_gather", rows * element)
        own = _dealt(self, rank, shard)
        for size in (*own.gives.values(), *own.takes.values()):
            sharing.add("send", size * iteration_bytes(self.sizes.compute_bytes))
        return {SHARDS: sharing, **copying}

    def _whole_sums(self, rank: int) -> dict[str, Tally]:
        """Return the traffic of gradients that are not sharded. The gradients of all parameters
        outside distributed experts are summed over all ranks that have different tokens. The
        gradients of distributed experts are summed only over ranks with the same experts, along one
        axis after the other. If experts are distributed, the second gradient of a tied table (from
        the head) is summed in a separate message, because in the buffer of gradients it comes after
        the gradients of experts."""
        grid, units = layout_grid(self.layout), self.held.units(rank, False, 1)[0]
        element = self.sizes.wide_bytes
        apart = sum(size for unit, size in units.items() if of_experts(unit))
        second = units.get(SECOND, 0) if apart else 0
        tallies = {LOSSES: Tally(self.layout.token_ranks)}
        for size in (sum(units.values()) - apart - second, second):
            if size:
                tallies[LOSSES].add("all_reduce", size * element)
        if apart:
            others = [axis for axis in grid.along(LOSSES) if axis not in EXPERT_AXES]
            tallies |= {axis: Tally(grid[axis]) for axis in others}
            for axis in others:
                tallies[axis].add("all_reduce", apart * element)
        return tallies

    def _tree(self, rank: int) -> Tally:
        """Return the traffic of a reproducible sum along a binary tree over all microbatches. Each
        data rank computes the sums of the largest subtrees that contain only its own microbatches,
        and broadcasts these sums to all other data ranks, stage by stage."""
        m, d = self.microbatches, self.layout.data
        tally = Tally(d)
        nodes = sum(nodes_of(m * d, r * m, (r + 1) * m) for r in range(d))
        for stage in self.placed.stages_of(rank):
            sizes = (sum(part.weights(self.layout.tensor)) for _, part in self.held.of_stage(stage))
            if elements := sum(sizes):
                tally.add("broadcast", elements * self.sizes.wide_bytes, nodes)
        return tally

    def _ends(self, rank: int, shard: int) -> Tally:
        """Return the traffic in which the first and the last stage sum the two gradients of a tied
        table, one from the embedding and one from the head. If the state is sharded, each rank sums
        only its shard of these gradients. If one rank has both stages, there is no traffic."""
        first, last = (self.placed.rank_of(stage) for stage in (0, self.held.last))
        if not self.held.tied or first == last or rank not in (first, last):
            return Tally(1)
        tally = Tally(2)
        part = -(-self.held.tied // (ALIGNMENT * self.layout.shards)) * ALIGNMENT
        if own := min(part, self.held.tied - shard * part):
            tally.add("all_reduce", own * self.sizes.wide_bytes)
        return tally


def _dealt(of: StepTraffic, rank: int, shard: int) -> Dealt:
    """Return the matrices that a rank updates with Muon, and the slices of matrices that ranks
    exchange for these updates. `shard` is the rank's number in its shard group."""
    if not of.method.matrices:
        return Dealt()
    layout = of.layout
    runs = [of.model.runs(own) for own in of.held.layers]
    parts = stage_parts(runs, tensor=layout.tensor, dealing=layout.dealing)
    held = ModelPart.joined([parts[stage] for stage in of.placed.stages_of(rank)])
    return dealt(of.model, of.vocab_size, held, layout.sharing)[shard]


def _told(of: StepTraffic, rank: int, data: int, step: int) -> Tally:
    """Return the traffic of the run's data-parallel method over the data axis in step `step`
    (counted from 0), for a rank that does not shard its state. `rank` and `data` are the rank's
    coordinates on the pipeline axis and the data axis."""
    tally, element = Tally(of.layout.data), of.sizes.wide_bytes
    section = of.method.section
    units, _ = of.held.units(rank, section.overlap, 1)
    weights = [size for unit, size in units.items() if unit != SECOND]
    if of.method.tells_codes(step):
        coded = of.held.elements(rank)
        sizes = told_of(
            of.model, of.vocab_size, coded, gradient_bytes=element, master_bytes=element
        )
        gossip = section.method == "decentralized"
        times = of.method.neighbours(tally.ranks, data, step) if gossip else 1
        for kind, size in code_messages(section, sizes, tally.ranks).items():
            tally.add(kind, round(size), times)
    if tally.ranks > 1:
        of.method.tell(
            tally,
            data,
            step,
            gradients=sum(units.values()),
            weights=weights,
            element_bytes=element,
        )
    return tally
