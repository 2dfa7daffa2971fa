"""The places that an op passes in a stage, in order, and the places whose weights are gathered.

A place is a part of a stage whose parameters are used together: the embedding, a layer, the head.
If weights are sharded (`zero` = 3), a rank gathers those of the current place and of the next one.
The runtime (`ptdmpi.model.sharded`) and the planner's count of bytes both use this file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

EMBEDDING, HEAD = "embedding", "head"


def places_of(layers: range, model_layers: int) -> tuple[str, ...]:
    """Return the places of a stage that holds `layers`, in the order of its forward."""
    first = (EMBEDDING,) if layers.start == 0 else ()
    last = (HEAD,) if layers.stop == model_layers else ()
    return (*first, *map(str, layers), *last)


def place_of(name: str) -> str:
    """Return the place of the parameter with the logical name `name`."""
    first, _, rest = name.partition(".")
    if first == "layers":
        return rest.partition(".")[0]
    return EMBEDDING if first == EMBEDDING else HEAD


def at_hand(places: Sequence[str], place: str, step: int) -> tuple[str, ...]:
    """Return `place` and the next one, if any; `step` is +1 in a forward, -1 in a backward."""
    here = places.index(place)
    ahead = here + step
    return (place, places[ahead]) if 0 <= ahead < len(places) else (place,)


def gathers(
    passes: Iterable[tuple[Sequence[str], int]], uses: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the units that a rank gathers during its ops, in order.

    A unit is gathered if it was not in memory before. `uses` has the units of each place. `passes`
    has for each op its places, in the order of the forward, and its step (see `at_hand`). A
    backward omits an embedding that is only looked up, since that needs no weights.
    """
    there: set[str] = set()
    for places, step in passes:
        for place in places[::step]:
            now = [unit for near in at_hand(places, place, step) for unit in uses[near]]
            yield from dict.fromkeys(unit for unit in now if unit not in there)
            there = set(now)
