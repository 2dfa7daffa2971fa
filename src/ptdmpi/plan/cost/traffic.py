"""Bytes that a rank sends in a step, by closed forms: what the trainer counts, to the byte.

Of activations, with S = s b h bytes of one microbatch's activation and m microbatches, a rank of
the tensor axis sums, forwards and backwards, 2 S each per layer (Shoeybi et al. 2019, arXiv
1909.08053, section 3); with sequence parallelism a reduce-scatter and a gather stand for each sum,
and what a linear has not kept whole is gathered once more (Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2). Between stages S travels for each microbatch and direction, or 1/t of it
(Narayanan et al. 2021, arXiv 2104.04473, section 4.1). Over the data axis the gradients are summed
once in a step, psi of them on a rank; for ZeRO's stages see `_data`.
"""

from collections.abc import Iterable, Iterator, Sequence

from ptdmpi.base.traffic import Tally, Traffic
from ptdmpi.config import Layout
from ptdmpi.plan.cost.activations import Sizes
from ptdmpi.plan.layout.grid import DATA, ENDS
from ptdmpi.plan.layout.stages import placement_of, split_model
from ptdmpi.plan.machine.cluster import Model
from ptdmpi.plan.schedule.ops import ACTIVATIONS, Op
from ptdmpi.plan.schedule.orders import KINDS, build
from ptdmpi.plan.schedule.places import EMBEDDING, HEAD, gathers, places_of
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import ALIGNMENT, Linear, Norm, Part, Table, aligned

TIED, SECOND = "tied", "second"
OF_HEADS = ("attention.query_norm", "attention.key_norm")  # each rank sees its own heads
OF_ALL_POSITIONS = ("mlm.norm",)  # each rank sees all of them, whatever is divided


class HeldParts:
    """What each rank of a layout holds of a model: stages and their trained parts, by the names of
    the table."""

    def __init__(self, model: Model, layout: Layout) -> None:
        self.model, self.tensor = model.config, layout.tensor
        self.placed = placement_of(layout)
        first = layout.first_layers
        self.layers = split_model(self.model, model.vocab_size, self.placed, first=first)
        self.last = self.placed.stages - 1
        self.table = {
            "layer": parameters.layer(self.model),
            "embedding": parameters.embedding(self.model, model.vocab_size),
            "head": parameters.head(self.model, model.vocab_size),
        }

    def _of_places(self, stage: int) -> Iterator[tuple[str, str, Part]]:
        """The trained parts of a stage, each with its place and its name in the table."""
        places = places_of(self.layers[stage], self.model.layers)
        for place in places:
            table = self.table[place if place in (EMBEDDING, HEAD) else "layer"]
            yield from ((place, name, part) for name, part in table.items() if part.trains)

    def of_stage(self, stage: int) -> Iterator[tuple[str, Part]]:
        """The trained parts of a stage, with the names of the table."""
        return ((name, part) for _, name, part in self._of_places(stage))

    def of_rank(self, rank: int) -> list[tuple[str, Part]]:
        return [part for stage in self.placed.stages_of(rank) for part in self.of_stage(stage)]

    def counted(self, rank: int) -> int:
        """Parameters whose norm a rank counts: a tied table is the first stage's."""
        weights = sum(len(list(part.weights(1))) for _, part in self.of_rank(rank))
        tied = self.model.tie_embeddings and self._holds_last(rank)
        return weights - tied

    def _holds_last(self, rank: int) -> bool:
        return self.placed.rank_of(self.last) == rank

    def units(
        self, rank: int, zero: int, shards: int
    ) -> tuple[dict[str, int], dict[str, list[str]]]:
        """Elements of the units that travel as one over the data axis, up to where they can be cut
        into equal shards: all together, or, of which each rank keeps a share only (ZeRO 2 and 3),
        of each layer, the embedding and the head. A tied table is a unit where units are cut, and
        its `SECOND` gradient always, which has no weights. And the units that each place uses."""
        units: dict[str, int] = {}
        uses: dict[str, list[str]] = {}
        both = self._holds_last(rank) and self.placed.rank_of(0) == rank
        for stage in self.placed.stages_of(rank):
            for place, name, part in self._of_places(stage):
                for number, size in enumerate(part.weights(self.tensor)):
                    tied = self.tied and number == 0 and self._is_tied(place, name)
                    unit = place if zero > 1 and shards > 1 else ""
                    if tied and shards > 1:
                        unit = TIED
                    uses.setdefault(place, []).append(unit)
                    if tied and place == HEAD and both:
                        unit = SECOND
                    units[unit] = units.get(unit, 0) + aligned(size)
        grain = ALIGNMENT * shards
        return {unit: -(-size // grain) * grain for unit, size in units.items()}, uses

    def passes(self, rank: int, order: Sequence[Op]) -> Iterator[tuple[Sequence[str], int]]:
        """The places of a rank's ops, as `places.gathers` reads them."""
        looked_up = all(isinstance(part, Table) for part in self.table["embedding"].values())
        for op in order:
            places = places_of(self.layers[op.stage], self.model.layers)
            if op.row.keeps == ACTIVATIONS:
                yield places, 1
            else:
                yield places[looked_up and places[0] == EMBEDDING :], -1

    def crossings(self, rank: int) -> int:
        """Neighbours of a rank's stages that stand on other ranks: to each of them one activation,
        or gradient of one, is sent for each microbatch, and one comes from it."""
        stages = range(self.placed.stages)
        return sum(
            neighbour in stages and self.placed.rank_of(neighbour) != rank
            for stage in self.placed.stages_of(rank)
            for neighbour in (stage - 1, stage + 1)
        )

    @staticmethod
    def _is_tied(place: str, name: str) -> bool:
        return (place, name) in ((EMBEDDING, parameters.WORD_TABLE), (HEAD, "head"))

    @property
    def tied(self) -> int:
        """Elements of a trained table that embedding and head share, on a tensor rank; or 0."""
        word = self.table["embedding"][parameters.WORD_TABLE]
        shared = self.model.tie_embeddings and word.trains
        return sum(word.weights(self.tensor)) if shared else 0


class StepTraffic:
    """The traffic of one step of a model, layout, global batch and compute type.

    `predictions`: masked positions of a sample, where not those of the default fraction.
    `reproducible`: gradients are summed along the tree of `run.reproducible`.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        batch: int,
        precision: str,
        *,
        predictions: int | None = None,
        reproducible: bool = False,
    ) -> None:
        self.model, self.layout, self.reproducible = model.config, layout, reproducible
        self.sizes = Sizes(self.model, layout, precision)
        self.whole = self.sizes.tokens * self.model.hidden * self.sizes.compute_bytes
        self.predicted = layout.micro_size * (
            self.model.predictions() if predictions is None else predictions
        )
        self.microbatches = layout.microbatches(batch)
        self.held = HeldParts(model, layout)
        self.placed = self.held.placed

    def of(self, rank: int, shard: int = 0) -> Traffic:
        """What each rank at place `rank` of the pipeline axis, and `shard` of its shard group,
        sends, by group. Sums over the tensor axis of partial gradients, which with shards are of a
        rank's part of them, count as if whole."""
        tallies = {
            "tensor": self._tensor(rank),
            **self._data(rank),
            "pipeline": self._pipeline(rank),
            ENDS: self._ends(rank, shard),
        }
        return Traffic({group: tally for group, tally in tallies.items() if tally.ranks > 1})

    def _tensor(self, rank: int) -> Tally:
        tally, layout = Tally(self.layout.tensor), self.layout
        for stage in self.placed.stages_of(rank):
            self._layers(tally, stage)
            if stage == 0:
                self._activations(tally, sums=1, gathers=1)
            if stage == self.held.last:
                self._head(tally)
        if self._is_scattered:
            tally.add("all_gather", self.whole, self.held.crossings(rank) * self.microbatches)
        element, parts = self.sizes.wide_bytes, self.held.of_rank(rank)
        if summed := sum(self._partial(name, part) for name, part in parts):
            tally.add("all_reduce", summed * element)
        for _, part in parts:
            for size in _copied(part, layout.tensor):
                tally.add("all_reduce", size * element)
        if counted := self.held.counted(rank):
            tally.add("all_reduce", counted * element)  # squares of norms
        return tally

    def _activations(self, tally: Tally, sums: int, gathers: int) -> None:
        """So many sums of an activation over the tensor axis for each microbatch; with sequence
        parallelism reduce-scatters, and `gathers` beside them."""
        if self.layout.sequence_parallel:
            tally.add("reduce_scatter", self.whole, sums * self.microbatches)
            tally.add("all_gather", self.whole, gathers * self.microbatches)
        else:
            tally.add("all_reduce", self.whole, sums * self.microbatches)

    def _layers(self, tally: Tally, stage: int) -> None:
        """Forwards: into each half of a layer a gather, out of it a sum. Backwards the other way
        round, and the two inputs that were not kept whole are gathered once more; of a split
        backward, also the two outputs' gradients. Full recomputation does the forward again."""
        split = KINDS[self.layout.schedule].splits
        for layer in self.held.layers[stage]:
            forwards = 2 if self.layout.recomputed(layer) == "full" else 1
            self._activations(tally, 2 * forwards + 2, 2 * forwards + (6 if split else 4))

    def _head(self, tally: Tally) -> None:
        """Its input and the sum of that one's gradient; then the loss: of each predicted token the
        greatest logit, and in one message the sum of exponentials and the label's logit. A masked
        model's head sees the predicted positions, whole on each rank."""
        m, token = self.microbatches, self.model.hidden * self.sizes.compute_bytes
        if not self.model.masked:
            self._activations(tally, sums=1, gathers=2)
        else:
            self._activations(tally, sums=0, gathers=1)
            tally.add("all_reduce", self.predicted * token, m)
        for numbers in (1, 2):
            tally.add("all_reduce", numbers * self.predicted * self.sizes.wide_bytes, m)

    def _partial(self, name: str, part: Part) -> int:
        """Elements of a part of whose gradient each tensor rank has seen a part only."""
        if isinstance(part, Norm):
            divided = self.layout.sequence_parallel and name not in OF_ALL_POSITIONS
            return sum(part.weights(1)) if divided or name in OF_HEADS else 0
        if not self.layout.sequence_parallel:
            return 0
        if isinstance(part, Table):
            return 0 if part.split else sum(part.weights(1))
        return sum(part.outputs) if part.split == "rows" and part.bias else 0

    @property
    def _is_scattered(self) -> bool:
        """Whether tensor ranks, which hold equal activations, send a share each."""
        layout, elements = self.layout, self.sizes.tokens * self.model.hidden
        return (
            layout.scatter_gather
            and not layout.sequence_parallel
            and layout.tensor > 1
            and elements % layout.tensor == 0
        )

    def _pipeline(self, rank: int) -> Tally:
        """Activations and their gradients; then all ranks' norms of parameters, which are unequally
        many, in rows of the longest."""
        tally, layout = Tally(self.layout.pipeline), self.layout
        shares = layout.tensor if self._is_scattered or layout.sequence_parallel else 1
        tally.add("send", self.whole // shares, self.held.crossings(rank) * self.microbatches)
        longest = max(self.held.counted(one) for one in range(layout.pipeline))
        tally.add("all_gather", layout.pipeline * longest * self.sizes.wide_bytes)
        return tally

    def _data(self, rank: int) -> dict[str, Tally]:
        """Gradients and weights, psi elements of each on this rank (Rajbhandari et al. 2020, arXiv
        1910.02054, section 7; volumes in the limit of many ranks, of m = 1 and equal types):

            ZeRO 0   a sum of the gradients                                          2 psi
            ZeRO 1   they are scattered, and the updated weights gathered            2 psi
            ZeRO 2   so, and the gradients of each microbatch on their own           2 psi
            ZeRO 3   weights are gathered for each forward and each backward of a
                     microbatch, which recomputes with the weights that it has       3 psi
                     (less what is still there from the op before)

        Where shards have copies, each part of the gradients is summed over these at last. The norms
        of rows of gradients are gathered.
        """
        layout, m = self.layout, self.microbatches
        shards, copies = layout.shards, layout.data // layout.shards
        if self.reproducible:
            return {DATA: self._tree(rank)}
        element = self.sizes.wide_bytes
        units, uses = self.held.units(rank, layout.zero, shards)
        if shards == 1:
            tally = Tally(layout.data)
            tally.add("all_reduce", sum(units.values()) * element)
            return {DATA: tally}
        sharing, copying = Tally(shards), Tally(copies)
        for size in units.values():
            sharing.add("reduce_scatter", size * element, 1 if layout.zero == 1 else m)
            if copies > 1:
                copying.add("all_reduce", size // shards * element)
        units.pop(SECOND, None)
        gathered: Iterable[str] = units
        if layout.zero == 3:
            order = build(layout.schedule, layout.pipeline, layout.virtual, m).orders[rank]
            gathered = gathers(self.held.passes(rank, order), uses)
        for unit in gathered:
            sharing.add("all_gather", units[unit] * self.sizes.compute_bytes)
        sharing.add("all_gather", sum(units.values()) // ALIGNMENT * element)
        return {DATA: sharing} if copies == 1 else {"shard": sharing, "replicate": copying}

    def _tree(self, rank: int) -> Tally:
        """Each data rank's nodes of the tree of microbatches, to all others, stage by stage."""
        m, d = self.microbatches, self.layout.data
        tally = Tally(d)
        nodes = sum(tree_nodes(m * d, r * m, (r + 1) * m) for r in range(d))
        for stage in self.placed.stages_of(rank):
            sizes = (sum(part.weights(self.layout.tensor)) for _, part in self.held.of_stage(stage))
            if elements := sum(sizes):
                tally.add("broadcast", elements * self.sizes.wide_bytes, nodes)
        return tally

    def _ends(self, rank: int, shard: int) -> Tally:
        """The gradients of a tied table's two uses, where they stand on two ranks: this rank's
        part of them."""
        first, last = (self.placed.rank_of(stage) for stage in (0, self.held.last))
        if not self.held.tied or first == last or rank not in (first, last):
            return Tally(1)
        tally = Tally(2)
        part = -(-self.held.tied // (ALIGNMENT * self.layout.shards)) * ALIGNMENT
        if own := min(part, self.held.tied - shard * part):
            tally.add("all_reduce", own * self.sizes.wide_bytes)
        return tally


def _copied(part: Part, tensor: int) -> Iterator[int]:
    """Elements of each weight, whole, of which neighbours on the tensor axis hold copies of a
    share: key heads that serve several ranks' queries."""
    if isinstance(part, Linear) and part.most is not None:
        for outputs, most in zip(part.outputs, part.most, strict=True):
            if tensor > most:
                yield from (outputs * part.inputs, *([outputs] * part.bias))


def tree_nodes(leaves: int, first: int, end: int) -> int:
    """How many nodes of the binary tree over `leaves` the leaves `first` to `end` - 1 join to; a
    node without a sibling counts as its parent."""
    nodes = 0
    while first < end:
        span = 1
        while first % (2 * span) == 0 and min(first + 2 * span, leaves) <= end and span < leaves:
            span *= 2
        first, nodes = first + span, nodes + 1
    return nodes
