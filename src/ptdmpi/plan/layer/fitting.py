"""Checks of the operators of a sublayer: their fields and parts, and whether they fit each other.

The operators of a sublayer that a user has written may have any fields. Without these checks, the
planner or the model would fail later, far from the mistake.
"""

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from ptdmpi.base.errors import InputError
from ptdmpi.config.section import MOST
from ptdmpi.plan.layer.elementwise import Activate, AddResidual, Normalize
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.operator import Operator, OwnOperator
from ptdmpi.plan.layer.parts import Linear, LowRankPair, Norm, Part, Scale, Sees, Table
from ptdmpi.plan.layer.products import Multiply

RESIDUAL = "x"  # the name of the residual stream


@dataclass(frozen=True)
class FieldRule:
    """A rule for a field of a part: a function that returns True for a legal value, and a text that
    describes the legal values."""

    allows: Callable[[object], bool]
    legal: str


def is_size(value: object) -> bool:
    """Return True if `value` is a legal number of channels or rows."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    return 1 <= int(value) <= MOST


def _are_sizes(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(is_size(size) for size in value)


def is_std(value: object) -> bool:
    """Return True if `value` is a legal standard deviation of initial weights."""
    return isinstance(value, numbers.Real) and 0.0 <= float(value) < math.inf


SIZE = FieldRule(is_size, f"an integer from 1 to {MOST}")
SIZES = FieldRule(_are_sizes, "a tuple of integers from 1")
STD = FieldRule(is_std, "a finite number from 0")
BOOL = FieldRule(lambda value: isinstance(value, bool), "True or False")
SPLIT = FieldRule(lambda value: value in (None, "columns", "rows"), '"columns", "rows" or None')
# Kind of a part -> name of a field -> rule for the value of the field.
RULES: Mapping[type[Part], Mapping[str, FieldRule]] = {
    Linear: {
        "inputs": SIZE,
        "outputs": SIZES,
        "bias": BOOL,
        "init_std": STD,
        "split": SPLIT,
        "most": FieldRule(
            lambda value: value is None or _are_sizes(value), f"None, or {SIZES.legal}"
        ),
        "trains": BOOL,
    },
    Norm: {
        "size": SIZE,
        "shift": BOOL,
        "trains": BOOL,
        "sees": FieldRule(
            lambda value: value in get_args(Sees), "one of " + ", ".join(get_args(Sees))
        ),
    },
    Table: {"rows": SIZE, "hidden": SIZE, "init_std": STD, "split": BOOL, "trains": BOOL},
    LowRankPair: {"inputs": SIZE, "outputs": SIZE, "rank": SIZE, "split": SPLIT, "trains": BOOL},
    Scale: {
        "size": SIZE,
        "most": FieldRule(lambda value: value is None or is_size(value), f"None, or {SIZE.legal}"),
        "trains": BOOL,
    },
}


def require_fitting(name: str, rows: Sequence[Operator], hidden: int) -> None:
    """Raise InputError if an operator has a field or a part with an illegal value, or if the
    operators do not fit each other. `rows` are the operators of the sublayer `name`. `hidden` is
    the hidden size of the model."""
    for row in rows:
        for mistake in (*_in_fields(row), *_in_parts(row)):
            raise InputError(f"model.sublayers: {name}: the operator {row.name!r} {mistake}")
    for mistake in _in_values(rows, hidden):
        raise InputError(f"model.sublayers: {name}: the operator {mistake}")


def _in_fields(row: Operator) -> Iterator[str]:
    """Yield the mistakes in the names of an operator and of its inputs and outputs."""
    is_path = isinstance(row.name, str) and all(map(str.isidentifier, row.name.split(".")))
    if not is_path:
        yield "has an illegal name; legal: names as in Python, with dots between them"
    for field in ("inputs", "outputs"):
        names: object = getattr(row, field)
        if not isinstance(names, tuple) or {type(name) for name in names} != {str}:
            yield f'has {field} = {names!r}; legal: a tuple of names, such as ("y",)'


def _in_parts(row: Operator) -> Iterator[str]:
    """Yield the mistakes in the parts of an operator."""
    parts: object = row.parts()
    if not isinstance(parts, Mapping):
        yield f"has parts() of the type {type(parts).__name__}; legal: a dict"
        return
    for name, part in parts.items():
        rules = next((RULES[kind] for kind in RULES if isinstance(part, kind)), None)
        if rules is None:
            kinds = ", ".join(kind.__name__ for kind in RULES)
            yield f"has a part {name} of the type {type(part).__name__}; legal: {kinds}"
            return
        for field, rule in rules.items():
            value = getattr(part, field)
            if not rule.allows(value):
                kind = type(part).__name__
                yield f"has a {kind} {name} with {field} = {value!r}; legal: {rule.legal}"
        if isinstance(part, Linear) and part.most and len(part.most) != len(part.outputs):
            yield f"has a Linear {name} whose fields outputs and most have different lengths"


class Ends(NamedTuple):
    """The number of channels of each input and of each output of an operator, on all tensor ranks
    together. A number is None if the operator's description does not determine it."""

    reads: int | None = None
    writes: int | None = None


def ends_of(row: Operator, hidden: int) -> Ends:
    """Return the numbers of channels that an operator reads and writes, in a model with the hidden
    size `hidden`."""
    if isinstance(row, OwnOperator):
        return Ends()
    if isinstance(row, Multiply):
        return Ends(row.linear.inputs, sum(row.linear.outputs))
    if isinstance(row, Normalize):
        return Ends(row.norm.size, row.norm.size)
    if isinstance(row, Activate):
        return Ends(row.gates * row.width, row.width)
    if isinstance(row, AddResidual | MixExperts):
        return Ends(hidden, hidden)
    return Ends()


def _in_values(rows: Sequence[Operator], hidden: int) -> Iterator[str]:
    """Yield the mistakes in the values that operators read and write. Each text begins with the
    name of an operator."""
    widths: dict[str, int | None] = {RESIDUAL: hidden}
    for row in rows:
        reads, writes = ends_of(row, hidden)
        for name in row.inputs:
            if name not in widths:
                legal = ", ".join(sorted(widths))
                yield f"{row.name} reads {name!r}, which nothing before it writes; legal: {legal}"
                return
            width = widths[name]
            if reads is not None and width is not None and reads != width:
                yield (
                    f"{row.name} reads {name!r} with {reads} channels, but it has {width} channels "
                    f"(hidden size: {hidden})"
                )
                return
            # the output of a user's operator must have the channels that its first reader needs
            widths[name] = reads if width is None else width
        widths.update(dict.fromkeys(row.outputs, writes))
    if RESIDUAL not in rows[-1].outputs:
        yield f"{rows[-1].name} is the last and must write the residual stream, {RESIDUAL!r}"


def undivided_mistakes(rows: Sequence[Operator]) -> Iterator[str]:
    """Yield the reasons why the operators `rows` of a layer cannot be divided over several tensor
    ranks. A reason is an operator that reads all channels of a value although each rank has only
    some of them, or an operator that reads some channels although each rank has all."""
    divided: dict[str, bool | None] = {RESIDUAL: False}
    for row in rows:
        needs, gives = _divisions(row, divided.get(row.inputs[0]))
        for name in row.inputs:
            value = divided.get(name)
            if needs is None or value is None or needs == value:
                continue
            here = "a part of the channels" if value else "all channels"
            yield (
                f"{row.name}: it reads {name!r}, of which each tensor rank has {here}; legal: a "
                'linear split by "rows" after a linear split by "columns", or parallel.tensor = 1'
            )
            return
        divided.update(dict.fromkeys(row.outputs, gives))


def _divisions(row: Operator, given: bool | None) -> tuple[bool | None, bool | None]:
    """Return two values: whether the tensor ranks must have different channels of the input, and
    whether they have different channels of the output. A value is None if it is not known, or does
    not matter. `given` is True if the tensor ranks have different channels of the first input."""
    if isinstance(row, OwnOperator):
        return None, None
    if isinstance(row, Multiply):
        return row.linear.split == "rows", row.linear.split == "columns"
    if isinstance(row, Activate) or (isinstance(row, Normalize) and row.norm.sees == "heads"):
        return None, given
    if isinstance(row, AddResidual | MixExperts | Normalize):
        return False, False
    return None, None


def local_width(rows: Sequence[Operator], name: str, *, hidden: int, tensor: int) -> int | None:
    """Find the first operator of `rows` that reads the value `name`, and return the number of
    channels of this value that it needs on one of `tensor` tensor ranks. Return None if the number
    is not known."""
    for row in rows:
        if name in row.inputs:
            if isinstance(row, Multiply) and not isinstance(row, OwnOperator):
                return row.linear.local(tensor)[0]
            if isinstance(row, AddResidual | MixExperts | Normalize):
                return ends_of(row, hidden).reads
            return None
        if name in row.outputs:
            return None
    return None
