"""A sublayer of a transformer layer, and the checks of sublayers that a user has written."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import plugin, users_code
from ptdmpi.plan.layer.elementwise import AddResidual
from ptdmpi.plan.layer.operator import Operator

# Number of a dropout mask in a layer -> name of the tensor to which dropout is applied, for all
# masks except those before residual sums (`AddResidual.place`). `RandomStream.at` computes a mask
# from its number, so each mask of a layer needs its own number.
OTHER_MASKS = {2: "attention's weights", 3: "the adapters"}

MOST_MASKS = 2**31 - 1  # the largest number of a dropout mask


@dataclass(frozen=True)
class Sublayer:
    """A list of operators, in order. The first operator reads the residual stream "x", and the last
    operator writes the new residual stream "x"."""

    name: str
    operators: tuple[Operator, ...]


def made(name: str, build: object) -> Sublayer:
    """Return the sublayer that the function with the name `name` makes. Raise InputError if the
    result is not a sublayer."""
    function = plugin("sublayers", name)
    with users_code(f"model.sublayers: {name}"):
        sublayer = function(build)
    if not isinstance(sublayer, Sublayer):
        raise InputError(
            f"model.sublayers: {name} returned {type(sublayer).__name__}, not a Sublayer"
        )
    if not isinstance(sublayer.name, str):
        raise InputError(f"model.sublayers: {name} has the name {sublayer.name!r}; legal: a text")
    if isinstance(sublayer.operators, list):
        sublayer = replace(sublayer, operators=tuple(sublayer.operators))
    require_operators(name, sublayer.operators)
    return sublayer


def require_operators(name: str, rows: object) -> None:
    """Raise InputError unless `rows`, the operators of the sublayer `name`, are a tuple of one or
    more operators."""
    if not (isinstance(rows, tuple) and rows):
        raise InputError(f"model.sublayers: {name} has no operators")
    for row in rows:
        if not isinstance(row, Operator):
            kind = type(row).__name__
            raise InputError(f"model.sublayers: {name} has an operator of the type {kind}")


def require_own_names(sublayers: Iterable[Sublayer]) -> None:
    """Raise InputError if two operators of a layer have the same name, because the names of a
    layer's parameters begin with the names of their operators."""
    users: dict[str, str] = {}
    for sublayer in sublayers:
        names = [row.name for row in sublayer.operators]
        for name in names:
            if name in users or names.count(name) > 1:
                raise InputError(
                    f"model.sublayers: two operators have the name {name}, in the sublayers "
                    f"{users.get(name, sublayer.name)} and {sublayer.name}; legal: different names"
                )
        users.update(dict.fromkeys(names, sublayer.name))
    for earlier, later in itertools.combinations(users, 2):
        if earlier.startswith(f"{later}."):
            raise InputError(
                f"model.sublayers: the operator {earlier} of {users[earlier]} is named as a part "
                f"of the operator {later}, which follows it; legal: a name that does not begin "
                f"with {later}."
            )


def require_own_masks(sublayers: Iterable[Sublayer]) -> None:
    """Raise InputError if two dropout masks of a layer have the same number, because masks with the
    same number have the same values."""
    users = dict(OTHER_MASKS)
    for sublayer in sublayers:
        for row in sublayer.operators:
            if not isinstance(row, AddResidual):
                continue
            if type(row.place) is not int or not 0 <= row.place <= MOST_MASKS:
                raise InputError(
                    f"model.sublayers: the dropout mask of {row.name} has the number "
                    f"{row.place!r}; legal: an integer from 4 to {MOST_MASKS}"
                )
            if users.setdefault(row.place, row.name) != row.name:
                raise InputError(
                    f"model.sublayers: the dropout mask of {row.name} has the number {row.place} "
                    f"of {users[row.place]}: give its sublayer another `place`"
                )
