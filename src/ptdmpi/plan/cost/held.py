"""The parts of a model (its linear layers, norms and tables) on each rank of a layout, and the
units in which data-parallel ranks send them."""

from collections.abc import Iterator, Sequence

from ptdmpi.config import Layout
from ptdmpi.plan.layer.ahead.modules import TABLE
from ptdmpi.plan.layer.describe import WORD_TABLE
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layer.parts import ALIGNMENT, Linear, Part, Table, aligned, trained
from ptdmpi.plan.layout.stages import placement_of, split_model
from ptdmpi.plan.machine.cluster import Model
from ptdmpi.plan.schedule.ops import ACTIVATIONS, Op
from ptdmpi.plan.schedule.places import EMBEDDING, HEAD, places_of
from ptdmpi.plan.shape import parameters

TIED, SECOND = "tied", "second"
OF_EXPERTS = " experts"  # end of the name of a unit that consists of experts


class HeldParts:
    """The stages and parts (linear layers, norms and tables) of a model that each rank of a layout
    holds. A place is the embedding, a layer or the head. `ends` has the parts of the embedding and
    of the head by name, and `of_kind` has the parts of each kind of layer."""

    def __init__(self, model: Model, layout: Layout) -> None:
        self.model, self.tensor, self.expert = model.config, layout.tensor, layout.expert
        self.placed = placement_of(layout)
        first = layout.first_layers
        self.layers = split_model(self.model, model.vocab_size, self.placed, first=first)
        self.last = self.placed.stages - 1
        self.ends = {
            EMBEDDING: parameters.embedding(self.model, model.vocab_size),
            HEAD: parameters.head(self.model, model.vocab_size, layout.dealing),
        }
        self.of_kind = {
            run.kind: parameters.layer(self.model, run.kind, layout.dealing)
            for run in self.model.runs()
        }

    def _parts_of(self, place: str) -> dict[str, Part]:
        """Return the parts (linear layers, norms and tables) of a place (the embedding, a layer or
        the head)."""
        if place in self.ends:
            return self.ends[place]
        return self.of_kind[self.model.kind_of(int(place))]

    def _of_places(self, stage: int, trains: bool = True) -> Iterator[tuple[str, str, Part]]:
        """Yield (place, name of the part, part) for each trained part of a stage, or, if `trains`
        is False, for each frozen part. A place is the embedding, a layer or the head."""
        places = places_of(self.layers[stage], self.model.layers)
        for place in places:
            for name, part in self._parts_of(place).items():
                if part.trains == trains:
                    yield place, name, part

    def of_stage(self, stage: int) -> Iterator[tuple[str, Part]]:
        """Return an iterator over (name, part) for each trained part (linear layer, norm or table)
        of the pipeline stage `stage`."""
        return ((name, part) for _, name, part in self._of_places(stage))

    def of_rank(self, rank: int) -> list[tuple[str, Part]]:
        """Return (name, part) for each trained part (linear layer, norm or table) of the pipeline
        rank `rank`."""
        return [part for stage in self.placed.stages_of(rank) for part in self.of_stage(stage)]

    def counted(self, rank: int) -> int:
        """Return the number of norms that a rank contributes to the norm of the whole gradient: one
        norm for the gradient of each weight and of each bias. For a tied table, only the rank with
        the first stage contributes a norm."""
        weights = sum(len(list(part.weights(1))) for _, part in self.of_rank(rank))
        tied = self.tied > 0 and self._holds_last(rank)
        return weights - tied

    def elements(self, rank: int) -> int:
        """Return the number of elements of the trained parameters of the pipeline rank `rank`. A
        tied table that the rank uses twice is counted once."""
        every = sum(sum(part.weights(self.tensor)) for _, part in self.of_rank(rank))
        both = self._holds_last(rank) and self.placed.rank_of(0) == rank
        return every - self.tied * both

    def _holds_last(self, rank: int) -> bool:
        return self.placed.rank_of(self.last) == rank

    def units(
        self, rank: int, apart: bool, shards: int, trains: bool = True
    ) -> tuple[dict[str, int], dict[str, list[str]]]:
        """Return two dicts for the pipeline rank `rank`: the number of elements of each unit, and
        the names of the units that each place uses. A unit is a set of parameters that
        data-parallel ranks send in one message.

        The number of elements of a unit is rounded up, so that the unit can be divided into
        `shards` equal shards. If `apart` is True (for ZeRO 2 and 3, and for exchanges that overlap
        with the forward), each layer, the embedding and the head are separate units. If `apart` is
        False, all parts form one unit. In both cases, the following parts are exceptions. A tied
        table is a separate unit if there are several shards. If a rank uses a tied table both as
        embedding and as head, the table's gradient from the head is always a separate unit without
        weights (`SECOND`). If experts are distributed over ranks, they are in separate units (see
        `of_experts`). If `trains` is False, the units contain the frozen weights that ZeRO 3
        gathers, and their names begin with "frozen". Quantized weights are in no unit.
        """
        units: dict[str, int] = {}
        uses: dict[str, list[str]] = {}
        both = self._holds_last(rank) and self.placed.rank_of(0) == rank
        for stage in self.placed.stages_of(rank):
            uses |= {place: [] for place in places_of(self.layers[stage], self.model.layers)}
            for place, name, part in self._of_places(stage, trains):
                sizes = list(enumerate(part.weights(self.tensor)))
                for number, size in sizes[self._is_packed(place, part) :]:
                    tied = number == 0 and self._is_tied(place, name)
                    unit = _unit_name(place, tied=tied and shards > 1, apart=apart)
                    if self.expert > 1 and parameters.is_of_expert(name):
                        unit += OF_EXPERTS
                    if not trains:
                        unit = f"frozen {unit}"
                    uses[place].append(unit)
                    # the weights of a tied head are counted in the embedding
                    if tied and place == HEAD and both:
                        if not trains:
                            continue
                        unit = SECOND
                    units[unit] = units.get(unit, 0) + aligned(size)
        grain = ALIGNMENT * shards
        return {unit: -(-size // grain) * grain for unit, size in units.items()}, uses

    def _is_packed(self, place: str, part: Part) -> bool:
        """Return True if `part` has a quantized matrix. `place` is the embedding, the layer or the
        head to which the part belongs."""
        low_bit = LowBit.of(self.model.quantize)
        layers = place not in (EMBEDDING, HEAD)
        return low_bit is not None and not part.trains and layers and isinstance(part, Linear)

    def passes(self, rank: int, order: Sequence[Op]) -> Iterator[tuple[Sequence[str], int]]:
        """Yield a pair for each op in `order`, the ops of a rank: the places (embedding, layers and
        head) that the op computes, and 1 for a forward or -1 for a backward. The function
        `places.gathers` reads these pairs."""
        for op in order:
            places = places_of(self.layers[op.stage], self.model.layers)
            if op.row.keeps == ACTIVATIONS:
                yield places, 1
            else:
                yield places[self._skipped(places) :], -1

    def _skipped(self, places: Sequence[str]) -> int:
        """Return the number of places (embedding, layers or head) at the beginning of a stage whose
        backward needs no weights. The backward of an embedding that only looks up rows needs no
        weights. Places before the first trained weight have no backward."""
        count = 0
        for place in places:
            parts = self._parts_of(place).values()
            looked_up = place == EMBEDDING and all(isinstance(part, Table) for part in parts)
            if not looked_up and trained(parts):
                break
            count += 1
        return count

    def crossings(self, rank: int) -> int:
        """Return the number of pairs (stage of this rank, previous or next stage of the model) in
        which the other stage is on another rank.

        For each microbatch and each such pair, the rank sends one tensor and receives one: an
        activation in one direction, and its gradient in the other.
        """
        stages = range(self.placed.stages)
        return sum(
            neighbour in stages and self.placed.rank_of(neighbour) != rank
            for stage in self.placed.stages_of(rank)
            for neighbour in (stage - 1, stage + 1)
        )

    def _is_tied(self, place: str, name: str) -> bool:
        """Return True if the part `name` of a place (the embedding, a layer or the head) is the
        table that embedding and head share."""
        if not self.model.shares_table:
            return False
        last = "head" if self.model.tie_embeddings else TABLE
        return (place, name) in ((EMBEDDING, WORD_TABLE), (HEAD, last))

    @property
    def tied(self) -> int:
        """Return the number of elements on one tensor-parallel rank of the trained table that
        embedding and head share; 0 if there is no such table."""
        word = self.ends[EMBEDDING][WORD_TABLE]
        if not self.model.shares_table or not word.trains:
            return 0
        return sum(word.weights(self.tensor))


def of_experts(unit: str) -> bool:
    """Return True if the unit named `unit` consists of experts that are distributed over ranks. (A
    unit is a set of parameters that are sent in one message.)"""
    return unit.endswith(OF_EXPERTS)


def _unit_name(place: str, *, tied: bool, apart: bool) -> str:
    """Return the name of the unit (a set of parameters that are sent in one message) to which a
    part of `place` belongs. A tied table (`tied`) is a unit of its own. If `apart` is True, each
    place is a unit."""
    if tied:
        return TIED
    if apart:
        return place
    return ""
