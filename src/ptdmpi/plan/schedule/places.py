"""The order in which an op (a forward or backward of one microbatch) computes the places of a
stage, and the order in which weights are gathered. A place is one module of a stage: the embedding,
a layer or the head. If weights are sharded (`zero` = 3), a rank gathers the weights of the current
place and, in advance, of the next place. The model (`ptdmpi.model.sharded`) uses the functions of
this file to gather weights, and the planner uses them to count bytes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

EMBEDDING, HEAD = "embedding", "head"


def places_of(layers: range, model_layers: int) -> tuple[str, ...]:
    """Return the places (the embedding, layers and the head) of a stage that holds the layers
    `layers`, in the order of its forward. The model has `model_layers` layers."""
    places = [*map(str, layers)]
    if layers.start == 0:
        places.insert(0, EMBEDDING)
    if layers.stop == model_layers:
        places.append(HEAD)
    return tuple(places)


def place_of(name: str) -> str:
    """Return the place (the embedding, a layer or the head) to which the parameter `name`
    belongs."""
    first, _, rest = name.partition(".")
    if first == "layers":
        return rest.partition(".")[0]
    if first == EMBEDDING:
        return EMBEDDING
    return HEAD


def at_hand(places: Sequence[str], place: str, step: int) -> tuple[str, ...]:
    """Return `place` and the next place. The weights of both must be in memory while `place` is
    computed. If `place` is the last one, return only `place`. `step` is +1 in a forward and -1 in a
    backward."""
    here = places.index(place)
    ahead = here + step
    if 0 <= ahead < len(places):
        return place, places[ahead]
    return (place,)


def gathers(
    passes: Iterable[tuple[Sequence[str], int]], uses: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the units that a rank gathers during its ops, in order.

    A unit (parameters that are sent in one message) is gathered if its weights are not yet in
    memory. `uses` has the units of each place. `passes` has a pair for each op: its places in the
    order of the forward, and its `step`, as in `at_hand`. The places of a backward do not include
    an embedding that only looks up rows, because the backward of such an embedding needs no
    weights.
    """
    there: set[str] = set()
    for places, step in passes:
        for place in places[::step]:
            now = [unit for near in at_hand(places, place, step) for unit in uses[near]]
            yield from dict.fromkeys(unit for unit in now if unit not in there)
            there = set(now)
