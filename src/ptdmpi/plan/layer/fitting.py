"""Checks of the operators of a sublayer: their fields and parts, and whether they fit each other.

The operators of a sublayer that a user has written may have any fields. Without these checks, the
planner or the model would fail later, far from the mistake.
"""

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from ptdmpi.base.errors import InputError
from ptdmpi.config.section import MOST
from ptdmpi.plan.layer.elementwise import Activate, AddResidual, Normalize
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.operator import Operator, OwnOperator
from ptdmpi.plan.layer.parts import Linear, Part
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
    return _is_integer(value, 1)


def _is_integer(value: object, least: int) -> bool:
    """Return True if `value` is an integer from `least` to MOST."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    return least <= int(value) <= MOST


def _are_sizes(value: object) -> bool:
    """Return True if `value` is a tuple of sizes that is not empty."""
    return isinstance(value, tuple) and bool(value) and all(map(is_size, value))


def is_std(value: object) -> bool:
    """Return True if `value` is a legal standard deviation of initial weights."""
    return isinstance(value, numbers.Real) and 0.0 <= float(value) < math.inf


def _least(least: int) -> FieldRule:
    """Return the rule for an integer that is at least `least`."""
    return FieldRule(lambda value: _is_integer(value, least), f"an integer from {least} to {MOST}")


SIZES = FieldRule(_are_sizes, "a tuple of integers from 1")
STD = FieldRule(is_std, "a finite number from 0")
BOOL = FieldRule(lambda value: isinstance(value, bool), "True or False")


@cache
def rules_of(kind: type[Part]) -> Mapping[str, FieldRule]:
    """Return the rules for the fields of a kind of part: name of the field -> rule. The rules
    follow from the types of the fields."""
    return {name: _rule(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _rule(hint: Any) -> FieldRule:
    """Return the rule for a field with the type `hint`."""
    if get_origin(hint) is Literal:
        values = get_args(hint)
        return FieldRule(lambda value: value in values, " or ".join(map(repr, values)))
    if get_origin(hint) is Annotated:
        return _least(hint.__metadata__[0])
    options = get_args(hint)
    if type(None) in options:
        (other,) = (option for option in options if option is not type(None))
        rule = _rule(other)
        return FieldRule(
            lambda value: value is None or rule.allows(value), f"None, or {rule.legal}"
        )
    return {int: _least(1), tuple[int, ...]: SIZES, float: STD, bool: BOOL}[hint]


def require_fitting(
    name: str, rows: Sequence[Operator], hidden: int, widths: dict[str, int | None]
) -> None:
    """Raise InputError if an operator has a field or a part with an illegal value, or if the
    operators do not fit each other. `rows` are the operators of the sublayer `name`. `hidden` is
    the hidden size of the model. `widths` has the numbers of channels of the values that earlier
    sublayers of the layer have written; the values of this sublayer are added to it."""
    for row in rows:
        for mistake in (*_in_fields(row), *_in_parts(row)):
            raise InputError(f"model.sublayers: {name}: the operator {row.name!r} {mistake}")
    for mistake in _in_values(rows, hidden, widths):
        raise InputError(f"model.sublayers: {name}: the operator {mistake}")


def _in_fields(row: Operator) -> Iterator[str]:
    """Yield the mistakes in the names of an operator and of its inputs and outputs."""
    is_path = isinstance(row.name, str) and all(map(str.isidentifier, row.name.split(".")))
    if not is_path:
        yield "has an illegal name; legal: names as in Python, with dots between them"
    for field in ("inputs", "outputs"):
        names: object = getattr(row, field)
        may_be_empty = field == "outputs" and isinstance(row, OwnOperator)
        if names == () and may_be_empty:  # an operator that only looks at its inputs
            continue
        if not isinstance(names, tuple) or {type(name) for name in names} != {str}:
            yield f'has {field} = {names!r}; legal: a tuple of names, such as ("y",)'


def _in_parts(row: Operator) -> Iterator[str]:
    """Yield the mistakes in the parts of an operator."""
    parts: object = row.parts()
    if not isinstance(parts, Mapping):
        yield f"has parts() of the type {type(parts).__name__}; legal: a dict"
        return
    for name, part in parts.items():
        kind = next((kind for kind in get_args(Part) if isinstance(part, kind)), None)
        if kind is None:
            legal = ", ".join(kind.__name__ for kind in get_args(Part))
            yield f"has a part {name} of the type {type(part).__name__}; legal: {legal}"
            return
        for field, rule in rules_of(kind).items():
            value = getattr(part, field)
            if not rule.allows(value):
                yield f"has a {kind.__name__} {name} with {field} = {value!r}; legal: {rule.legal}"
        if isinstance(part, Linear) and part.most and len(part.most) != len(part.outputs):
            yield f"has a Linear {name} whose fields outputs and most have different lengths"


class Channels(NamedTuple):
    """The channels of a value that an operator reads or writes. `number` is their number on all
    tensor ranks together. `divided` is True if each tensor rank has only some of the channels. If
    `divided` is None, the operator reads both divided and undivided values, and its outputs are
    divided if its first input is."""

    number: int
    divided: bool | None = False


def _channels_of(row: Operator, hidden: int) -> tuple[Channels | None, Channels | None]:
    """Return the channels of the inputs and of the outputs of an operator, in a model with the
    hidden size `hidden`. A result is None if the operator's description does not determine the
    channels; such an operator is not checked here."""
    if isinstance(row, OwnOperator):
        return None, None
    if isinstance(row, Multiply):
        linear = row.linear
        reads = Channels(linear.inputs, linear.split == "rows")
        return reads, Channels(sum(linear.outputs), linear.split == "columns")
    if isinstance(row, Normalize):
        channels = Channels(row.norm.size, None if row.norm.sees == "heads" else False)
        return channels, channels
    if isinstance(row, Activate):
        return Channels(row.gates * row.width, None), Channels(row.width, None)
    if isinstance(row, AddResidual | MixExperts):
        return Channels(hidden), Channels(hidden)
    return None, None


def _in_values(
    rows: Sequence[Operator], hidden: int, widths: dict[str, int | None]
) -> Iterator[str]:
    """Yield the mistakes in the values that operators read and write. Each text begins with the
    name of an operator. For `widths` see `require_fitting`."""
    for row in rows:
        reads, writes = _channels_of(row, hidden)
        for name in row.inputs:
            if name not in widths:
                legal = ", ".join(sorted(widths))
                yield f"{row.name} reads {name!r}, which nothing before it writes; legal: {legal}"
                return
            width = widths[name]
            if reads is not None and width is not None and reads.number != width:
                yield (
                    f"{row.name} reads {name!r} with {reads.number} channels, but it has {width} "
                    f"channels (hidden size: {hidden})"
                )
                return
            if width is None and reads is not None:
                # A user's operator wrote the value, which must have the channels that its first
                # reader needs.
                widths[name] = reads.number
        widths.update(dict.fromkeys(row.outputs, writes.number if writes else None))
    if RESIDUAL not in rows[-1].outputs:
        yield f"{rows[-1].name} is the last and must write the residual stream, {RESIDUAL!r}"


def undivided_mistakes(rows: Sequence[Operator], hidden: int) -> Iterator[str]:
    """Yield the reason why the operators `rows` of a layer cannot be divided over several tensor
    ranks, if there is one. The reason is an operator that reads all channels of a value although
    each rank has only some of them, or an operator that reads only some channels although each rank
    has all."""
    divided: dict[str, bool | None] = {RESIDUAL: False}
    for row in rows:
        reads, writes = _channels_of(row, hidden)
        needs = reads.divided if reads else None
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
        gives = writes.divided if writes else None
        if writes and gives is None:
            gives = divided.get(row.inputs[0])
        divided.update(dict.fromkeys(row.outputs, gives))


def local_width(rows: Sequence[Operator], name: str, *, hidden: int, tensor: int) -> int | None:
    """Find the first operator of `rows` that reads the value `name`, and return the number of
    channels of this value that it needs on one of `tensor` tensor ranks. Return None if the number
    is not known."""
    if name == RESIDUAL:
        return hidden
    for row in rows:
        if name in row.inputs:
            if isinstance(row, Multiply) and not isinstance(row, OwnOperator):
                return row.linear.local(tensor)[0]
            reads, _ = _channels_of(row, hidden)
            return reads.number if reads and reads.divided is False else None
        if name in row.outputs:
            return None
    return None
