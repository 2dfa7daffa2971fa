"""The places that an op passes in its stage, one after the other, and which are at hand there.

A place is a part of a stage whose parameters are used together: the embedding, a layer, the head.
Where weights are sharded (`zero` = 3) those of the place at hand and of the one ahead are gathered;
the runtime (`ptdmpi.model.sharded`) and the planner's account of bytes both ask here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

EMBEDDING, HEAD = "embedding", "head"


def places_of(layers: range, model_layers: int) -> tuple[str, ...]:
    """The places of a stage with these of the model's layers, in the order of its forward."""
    first = (EMBEDDING,) if layers.start == 0 else ()
    last = (HEAD,) if layers.stop == model_layers else ()
    return (*first, *map(str, layers), *last)


def place_of(name: str) -> str:
    """The place of a parameter, by its logical name."""
    first, _, rest = name.partition(".")
    if first == "layers":
        return rest.partition(".")[0]
    return EMBEDDING if first == EMBEDDING else HEAD


def at_hand(places: Sequence[str], place: str, step: int) -> tuple[str, ...]:
    """`place` and the one ahead of it, for `step` +1, forward, or -1, backward."""
    here = places.index(place)
    ahead = here + step
    return (place, places[ahead]) if 0 <= ahead < len(places) else (place,)


def gathers(
    passes: Iterable[tuple[Sequence[str], int]], uses: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """The units, of those that each place `uses`, that a rank gathers in its ops, in their order:
    those that were not at hand before. A pass has the places of an op, in the order of the forward,
    and its step as above; a backward leaves out an embedding that is only looked up, for that needs
    no weights then."""
    there: set[str] = set()
    for places, step in passes:
        for place in places[::step]:
            now = [unit for one in at_hand(places, place, step) for unit in uses[one]]
            yield from dict.fromkeys(unit for unit in now if unit not in there)
            there = set(now)
