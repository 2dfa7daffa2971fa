"""What Muon updates as wholes (`ptdmpi.engine.muon`): the linears of the layers, each of whose
outputs is a matrix of its own. How many elements that is, what the update needs beside, and the
products that it takes."""

import math
from collections.abc import Iterator

from ptdmpi.config import ModelConfig
from ptdmpi.plan.shape.parameters import Linear, layer

STEPS = 5  # of the iteration that makes a matrix orthogonal
HALF_BYTES, WIDE_BYTES = 2, 8  # of its type: bfloat16, and float64 for float64


def linears(model: ModelConfig) -> list[Linear]:
    """Those of a layer that train."""
    return [part for part in layer(model).values() if isinstance(part, Linear) and part.trains]


def matrix_elements(model: ModelConfig, tensor: int) -> int:
    """Elements of a layer's matrices on a tensor rank."""
    return sum(math.prod(one.local(tensor)) for one in linears(model))


def iteration_bytes(compute_bytes: int) -> int:
    """Bytes of an element in the iteration."""
    return WIDE_BYTES if compute_bytes == WIDE_BYTES else HALF_BYTES


def gathered_bytes(model: ModelConfig, tensor: int, compute_bytes: int) -> list[int]:
    """What each of a layer's matrices is gathered into from the tensor axis."""
    each = tensor * iteration_bytes(compute_bytes)
    return [each * math.prod(one.local(tensor)) for one in linears(model)] if tensor > 1 else []


def room_bytes(model: ModelConfig, tensor: int, compute_bytes: int) -> int:
    """The most that the update of a parameter needs beside what stands all the time."""
    element, wide = iteration_bytes(compute_bytes), max(4, compute_bytes)
    return max(_room_bytes(one, tensor, element, wide) for one in linears(model))


def _room_bytes(linear: Linear, tensor: int, element: int, wide: int) -> int:
    """At one of these times: this rank's slice is put into the iteration's type; all slices are
    gathered and put together; the whole stands beside the iterate, its successor and the products
    of rows, or beside the update and this rank's slice of that, widened."""
    slice_, whole = math.prod(linear.local(tensor)), linear.inputs * sum(linear.outputs)
    most = slice_ * (wide + element * (element < wide))
    if tensor > 1:
        most = max(most, element * ((tensor + 1) * slice_ + whole))
    for rows, columns in shapes(linear):
        matrix, short = rows * columns, min(rows, columns)
        iterates = element * (whole + 2 * matrix + short * short)
        own = -(-matrix * slice_ // whole)
        moves = element * (whole + matrix) + wide * own * (element < wide)
        most = max(most, iterates, moves)
    return most


def shapes(linear: Linear) -> Iterator[tuple[int, int]]:
    """(rows, columns) of each matrix."""
    return ((outputs, linear.inputs) for outputs in linear.outputs)


def products(model: ModelConfig) -> Iterator[tuple[int, int, int]]:
    """(m, n, k) of every product of a layer's update: of m x k and k x n."""
    for one in linears(model):
        for rows, columns in shapes(one):
            short, long = sorted((rows, columns))
            step = ((short, short, long), (short, short, short), (short, long, short))
            yield from step * STEPS
