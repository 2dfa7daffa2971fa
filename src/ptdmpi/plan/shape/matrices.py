"""The parameters that Muon updates as whole matrices (`ptdmpi.engine.muon`).

These parameters are the weights of all linear layers inside the model's layers, and the two
matrices of each low-rank adapter. The weight of a linear layer with several outputs (such as
queries, keys and values) counts as one matrix for each output. This module counts the elements of
these matrices, and the working memory and the matrix products of their update.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ptdmpi.config import ModelConfig
from ptdmpi.config.kinds import LayerKind
from ptdmpi.config.layout import ON_ONE_RANK, Dealing
from ptdmpi.config.precision import BFLOAT16, FLOAT32, FLOAT64
from ptdmpi.plan.layer.parts import Linear, LowRankPair, Part
from ptdmpi.plan.shape.parameters import layer

STEPS = 5  # number of steps of the iteration that orthogonalizes a matrix


class Whole(NamedTuple):
    """A parameter that consists of one or several matrices, each of which Muon updates as a whole.
    `shapes` has (rows, columns) for each matrix of the parameter. `local` is the number of elements
    of the parameter on one tensor-parallel rank. `divided` is False if every tensor-parallel rank
    has the whole parameter."""

    shapes: tuple[tuple[int, int], ...]
    local: int
    divided: bool

    @property
    def elements(self) -> int:
        """Return the number of elements of all matrices of the parameter, over all tensor-parallel
        ranks."""
        return sum(map(math.prod, self.shapes))


def wholes(
    model: ModelConfig,
    tensor: int,
    dealing: Dealing = ON_ONE_RANK,
    kind: LayerKind | None = None,
) -> list[Whole]:
    """Return the trained matrices of a layer of kind `kind`, in order. If `kind` is None, the
    result is for the last layer. If `dealing` distributes experts over ranks, the result has only
    the experts of the first rank."""
    return wholes_of(layer(model, kind, dealing).values(), tensor)


def wholes_of(parts: Iterable[Part], tensor: int) -> list[Whole]:
    """Return the trained matrices of the parts `parts` (such as linear layers), in order, on one of
    `tensor` tensor-parallel ranks."""
    matrices = list[Whole]()
    for part in parts:
        if isinstance(part, Linear) and part.trains:
            shapes = tuple((outputs, part.inputs) for outputs in part.outputs)
            matrices.append(Whole(shapes, math.prod(part.local(tensor)), part.split is not None))
        elif isinstance(part, LowRankPair):
            shapes = (part.rank, part.inputs), (part.outputs, part.rank)
            divided = part.split == "rows", part.split == "columns"
            for shape, local, cut in zip(shapes, part.weights(tensor), divided, strict=True):
                matrices.append(Whole((shape,), local, cut))
    return matrices


def matrix_elements(model: ModelConfig) -> int:
    """Return the number of elements in all matrices of the model that Muon updates, summed over the
    layers."""
    return sum(
        count * sum(matrix.local for matrix in wholes(model, 1, kind=kind))
        for kind, count in model.runs()
    )


def iteration_bytes(compute_bytes: int) -> int:
    """Return the number of bytes of one element in the type in which Muon orthogonalizes matrices:
    float64 if the compute type is float64 (`compute_bytes` is 8), otherwise bfloat16."""
    return FLOAT64.bytes if compute_bytes == FLOAT64.bytes else BFLOAT16.bytes


def gathered_bytes(whole: Whole, tensor: int, compute_bytes: int) -> int:
    """Return the bytes of the whole parameter if Muon must gather its slices from all
    tensor-parallel ranks; 0 if no gather is needed."""
    gathers = tensor > 1 and whole.divided
    return tensor * iteration_bytes(compute_bytes) * whole.local * gathers


def room_bytes(whole: Whole, own: int, tensor: int, *, compute_bytes: int, widens: bool) -> int:
    """Return the maximum working memory, in bytes, of Muon's update of a parameter on the rank that
    owns the parameter.

    The owner stores `own` elements of its tensor-parallel slice of the parameter. The memory is
    largest at one of three points of the update. At the first point, the stored elements are
    converted to the type in which Muon iterates. If other ranks have the rest of the slice, there
    is also a buffer for the whole slice. At the second point, the slices of all tensor-parallel
    ranks are gathered and joined into the whole parameter. At the third point, memory holds the
    whole parameter and one of two sets of tensors. The first set is the iterate, the next iterate,
    and the product of the iterate with its own transpose. The second set is the update, and this
    rank's slice of the update in float32. If `widens` is True, matrices in fp16 and bf16 are
    multiplied in float32, so float32 copies of both operands and of the result are in memory.
    """
    element, wide = iteration_bytes(compute_bytes), max(FLOAT32.bytes, compute_bytes)
    slice_, elements = whole.local, whole.elements
    most = given_bytes(own, compute_bytes) + element * slice_ * (own < slice_)
    if gathered_bytes(whole, tensor, compute_bytes):
        most = max(most, element * ((tensor + 1) * slice_ + elements))
    for rows, columns in whole.shapes:
        matrix, short = rows * columns, min(rows, columns)
        iterates = element * (elements + 2 * matrix + short * short)
        if widens and element == BFLOAT16.bytes:
            iterates = element * (elements + matrix + short * short) + 4 * (2 * matrix + short**2)
        part = min(own, -(-matrix * slice_ // elements))
        moves = element * (elements + matrix) + wide * part * (element < wide)
        most = max(most, iterates, moves)
    return most


def given_bytes(own: int, compute_bytes: int) -> int:
    """Return the bytes of working memory that are needed to convert `own` elements of the momentum
    to the type in which Muon iterates."""
    element, wide = iteration_bytes(compute_bytes), max(FLOAT32.bytes, compute_bytes)
    return own * (wide + element * (element < wide))


def effort(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the number of multiplications in one step of Muon's iteration for matrices with the
    shapes (rows, columns) in `shapes`."""
    pairs = (sorted(shape) for shape in shapes)
    return sum(short * short * (2 * long + short) for short, long in pairs)


def products(whole: Whole) -> Iterator[tuple[int, int, int]]:
    """Yield (m, n, k) for every matrix product (m, k) x (k, n) in Muon's update of a parameter."""
    for shape in whole.shapes:
        short, long = sorted(shape)
        step = ((short, short, long), (short, short, short), (short, long, short))
        yield from step * STEPS
