"""Which of their tensors is which box of ours: checked before a byte is converted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.family import Counterpart, Family, counterparts, tied_to
from ptdmpi.convert.tensors import TYPES, Stored
from ptdmpi.model.parameters import Declaration


@dataclass(frozen=True)
class Plan:
    """`by_name`: their tensor, by the name in the file -> what it is of ours; `again`: those that
    repeat another one (a tied head); `buffers`: tensors that are no parameters."""

    by_name: dict[str, Counterpart]
    again: dict[str, str]
    buffers: list[str]

    def unused(self, name: str) -> "Plan":
        """With the tensor `name` as a buffer: what repeats it is the parameter, not it."""
        return replace(
            self,
            by_name={key: one for key, one in self.by_name.items() if key != name},
            again={key: one for key, one in self.again.items() if one != name},
            buffers=[*self.buffers, name],
        )


def make_plan(
    family: Family,
    model: ModelConfig,
    needed: Mapping[str, Declaration],
    tensors: Mapping[str, Stored],
    where: str,
) -> Plan:
    """Raises InputError where a tensor is missing, unexpected, or of another shape or type."""
    full = {family.base(name): name for name in tensors}
    if len(full) < len(tensors):
        twice = next(name for name in tensors if full[family.base(name)] != name)
        raise InputError(f"{where}: {twice} and {full[family.base(twice)]} are one parameter")
    aliases = tied_to(family, model)
    alone = {word: head for head, word in aliases.items()}
    by_name: dict[str, Counterpart] = {}
    for tensor in counterparts(family, needed):
        held = tensor.theirs if tensor.theirs in full else alone.get(tensor.theirs)
        if held not in full:
            headless = family.of_head(tensor.theirs) and not any(map(family.of_head, full))
            bare = ": a base model, without a head" if headless else ""
            raise InputError(f"{where}: tensor {family.full(tensor.theirs)} is missing{bare}")
        _require(where, full[held], tensors[full[held]], tensor)
        by_name[full[held]] = tensor
    again = {}
    for head, word in aliases.items():
        if head in full and word in full:
            by_name[full[head]] = by_name[full[word]]
            again[full[head]] = full[word]
            _require(where, full[head], tensors[full[head]], by_name[full[word]])
    rest = {base: name for base, name in full.items() if name not in by_name}
    buffers = [name for base, name in rest.items() if family.buffers.fullmatch(base)]
    unexpected = sorted(set(rest.values()) - set(buffers))
    if unexpected:
        raise InputError(
            f"{where}: unexpected tensor {unexpected[0]}: a {family.model_type} of this config.json"
            f" has none of that name ({len(unexpected)} such in all)"
        )
    return Plan(by_name, again, buffers)


def _require(where: str, name: str, stored: Stored, wanted: Counterpart) -> None:
    if stored.shape != wanted.shape:
        raise InputError(
            f"{where}: tensor {name} has shape {list(stored.shape)}, config.json makes it "
            f"{list(wanted.shape)}"
        )
    if stored.dtype not in TYPES:
        raise InputError(
            f"{where}: tensor {name} has type {stored.dtype}; legal: {', '.join(TYPES)}"
        )
