"""A plan that maps each tensor of a Hugging Face model to a slice of a parameter of ptdmpi's model.
The plan is checked before the conversion begins."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.family import Counterpart, Family, copies_of, counterparts, tied_to
from ptdmpi.convert.tensors import TYPES, Stored
from ptdmpi.model.parameters import Declaration


@dataclass(frozen=True)
class Plan:
    """A plan that says how each tensor in the files of a Hugging Face model is used. Tensors are
    named as in the files.

    `by_name` maps each tensor to the slice of ptdmpi's parameter that the tensor contains. `again`
    maps each repeating tensor (a tied head, or the copy of a table) to the tensor that it repeats.
    `buffers` has the names of the tensors that are not parameters.
    """

    by_name: dict[str, Counterpart]
    again: dict[str, str]
    buffers: list[str]

    def unused(self, name: str) -> "Plan":
        """Return a changed plan: the tensor `name` becomes a buffer, and the tensor that repeats
        `name` becomes the parameter in its place."""
        return replace(
            self,
            by_name={key: tensor for key, tensor in self.by_name.items() if key != name},
            again={key: repeated for key, repeated in self.again.items() if repeated != name},
            buffers=[*self.buffers, name],
        )


def make_plan(
    family: Family,
    model: ModelConfig,
    needed: Mapping[str, Declaration],
    tensors: Mapping[str, Stored],
    *,
    where: str,
) -> Plan:
    """Assign the tensors of a model's files to the parameters that ptdmpi's model needs (`needed`).

    `where` names the files in error messages. Raise InputError for a tensor that is missing,
    unexpected, or of a wrong shape or data type.
    """
    full = {family.base(name): name for name in tensors}
    if len(full) < len(tensors):
        twice = next(name for name in tensors if full[family.base(name)] != name)
        raise InputError(f"{where}: {twice} and {full[family.base(twice)]} are one parameter")
    aliases = tied_to(family, model)
    alone = {word: head for head, word in aliases.items()}
    by_name: dict[str, Counterpart] = {}
    for tensor in counterparts(family, model.layers, needed):
        held = tensor.theirs if tensor.theirs in full else alone.get(tensor.theirs)
        if held not in full:
            message = f"{where}: tensor {family.full(tensor.theirs)} is missing"
            if family.of_head(tensor.theirs) and not any(map(family.of_head, full)):
                message += ": this is a base model, without a head"
            raise InputError(message)
        _require(where, full[held], tensors[full[held]], tensor)
        by_name[full[held]] = tensor
    again = {}
    for repeating, repeated in {**aliases, **copies_of(family, model)}.items():
        first = repeated if repeated in full else alone.get(repeated)
        if repeating in full and first in full and repeating != first:
            by_name[full[repeating]] = by_name[full[first]]
            again[full[repeating]] = full[first]
            _require(where, full[repeating], tensors[full[repeating]], by_name[full[first]])
    rest = {base: name for base, name in full.items() if name not in by_name}
    buffers = [name for base, name in rest.items() if family.buffers.fullmatch(base)]
    unexpected = sorted(set(rest.values()) - set(buffers))
    if unexpected:
        raise InputError(
            f"{where}: unexpected tensor {unexpected[0]}: a {family.model_type} of this config.json"
            f" has no tensor of that name ({len(unexpected)} unexpected tensors in all)"
        )
    return Plan(by_name, again, buffers)


def _require(where: str, name: str, stored: Stored, wanted: Counterpart) -> None:
    """Raise InputError if a tensor does not have the shape of its counterpart, or has an unknown
    type."""
    if stored.shape != wanted.shape:
        raise InputError(
            f"{where}: tensor {name} has shape {list(stored.shape)}, config.json makes it "
            f"{list(wanted.shape)}"
        )
    if stored.dtype not in TYPES:
        raise InputError(
            f"{where}: tensor {name} has type {stored.dtype}; legal: {', '.join(TYPES)}"
        )
