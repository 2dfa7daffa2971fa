"""A topology (a graph over data ranks) that is read from a file with one edge in each line."""

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from ptdmpi.base.disk import read_file
from ptdmpi.config import InputError
from ptdmpi.plan.layout.graphs import Edges, Topology, Undirected

FORM = 'legal: "0 1" (ranks from 0, both directions), or "0 1 0.25" with the weight of the edge'


def read_edges(path: str, size: int, names: str) -> Topology:
    """Return the graph over `size` data ranks whose edges are in a file.

    Each line has an edge: two ranks, and optionally a weight. Each of the two ranks multiplies the
    other's values by this weight. Either all lines have weights, or no line has one. If no line has
    a weight, the edges have Metropolis-Hastings weights (see `Undirected`). "#" begins a comment;
    blanks or a comma separate columns. An edge may be given in both directions.

    Raises InputError with the file, the line and the legal values if the file is not valid. `names`
    has the legal names of topologies for the error message.
    """
    where = f"data_parallel.topology = {path}"
    edges: dict[tuple[int, int], Fraction | None] = {}
    for place, line, fields in _lines(path, names):
        edge, weight = _edge(f"{where}, line {place}", line, fields, size)
        if edges.setdefault(edge, weight) != weight:
            raise InputError(
                f"{where}, line {place}: {line!r} gives the edge another weight than an earlier "
                "line"
            )
        if (weight is None) != (next(iter(edges.values())) is None):
            raise InputError(
                f"{where}, line {place}: {line!r}: legal: weights of all edges, or of none"
            )
    alone = set(range(size)) - {rank for edge in edges for rank in edge}
    if size > 1 and alone:
        raise InputError(
            f"{where}: rank {min(alone)} of the {size} data ranks has no edge; legal: every rank "
            f"from 0 to {size - 1} in at least one line"
        )
    weights: list[dict[int, Fraction]] = [{} for _ in range(size)]
    for (rank, peer), weight in edges.items():
        weights[rank][peer] = weights[peer][rank] = weight or Fraction(0)
    if not any(edges.values()):
        return Undirected(path, size, lambda rank: set(weights[rank]))
    for rank, row in enumerate(weights):
        if (total := sum(row.values())) >= 1:
            raise InputError(
                f"{where}: the weights of the edges of rank {rank} sum to {float(total):g}; "
                "legal: less than 1; the rest is the weight of its own values"
            )
    return Edges(path, weights)


def ranks_of(path: str, names: str) -> int:
    """Return the number of ranks of the graph whose edges are in the file `path`: the greatest rank
    in the file plus 1.

    Raises InputError if the file cannot be read. `names` has the legal names of topologies for the
    error message.
    """
    greatest = 0
    for _, _, fields in _lines(path, names):
        greatest = max([greatest, *(int(field) for field in fields[:2] if field.isdecimal())])
    return greatest + 1


def sha256_of(path: str, names: str) -> str:
    """Return the SHA-256 of the edges and weights in a file.

    The SHA-256 does not depend on the order of the lines or on comments. Raises InputError if the
    file cannot be read, or if a line is not an edge.
    """
    edges = {_edge(path, line, fields, 2**31) for _, line, fields in _lines(path, names)}
    text = "\n".join(sorted(f"{first} {second} {weight}" for (first, second), weight in edges))
    return hashlib.sha256(text.encode()).hexdigest()


def _lines(path: str, names: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (line number, text, columns) for each line of the file `path` that has an edge. `names`
    has the legal names of topologies for the error message."""
    try:
        text = read_file(Path(path)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise InputError(
            f'data_parallel.topology = "{path}": neither the name of a topology nor a file of '
            f"edges ({why}); legal: {names}, or the path of an edge list"
        ) from None
    for place, line in enumerate(text.splitlines(), 1):
        bare = line.partition("#")[0].strip()
        if bare:
            yield place, bare, bare.replace(",", " ").split()


def _edge(
    where: str, line: str, fields: list[str], size: int
) -> tuple[tuple[int, int], Fraction | None]:
    """Return the two ranks of a line with the columns `fields`, in ascending order, and the weight
    of the edge, or None if the line has no weight. `size` is the number of data ranks. Raises
    InputError if the line is not valid; the error message begins with `where`."""
    try:
        first, second = (int(field) for field in fields[:2])
        weight = Fraction(fields[2]) if len(fields) > 2 else None
    except (ValueError, ZeroDivisionError):
        raise InputError(f"{where}: {line!r} is not an edge; {FORM}") from None
    if len(fields) > 3:
        raise InputError(f"{where}: {line!r} has {len(fields)} columns; {FORM}")
    for rank in (first, second):
        if not 0 <= rank < size:
            raise InputError(
                f"{where}: {line!r}: there is no data rank {rank} of d = {size}; legal: 0 to "
                f"{size - 1}, or another parallel.data"
            )
    if first == second:
        raise InputError(f"{where}: {line!r}: a rank has no edge to itself; {FORM}")
    if weight is not None and not 0 < weight < 1:
        raise InputError(f"{where}: {line!r}: legal: a weight above 0 and below 1")
    return (min(first, second), max(first, second)), weight
