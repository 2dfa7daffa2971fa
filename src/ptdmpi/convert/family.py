"""What a family of Hugging Face models is, and where our parameters stand in its files."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ptdmpi.base.box import Box
from ptdmpi.config import InputError, ModelConfig
from ptdmpi.model.parameters import Declaration
from ptdmpi.model.stage import TIED_NAME

Json = Mapping[str, Any]
# What GPT-2, LLaMA and all that came of it are.
DECODER = {
    "attention": "causal",
    "block_norm": "pre",
    "embedding_norm": False,
    "output_head": "linear",
    "token_types": 0,
}
# What none had before the descendants of LLaMA.
PLAIN = {
    "qk_norm": False,
    "zero_centered_norm": False,
    "scale_embedding": False,
    "sliding_window": 0,
    "query_scalar": 0.0,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
}


@dataclass(frozen=True)
class Family:
    """`modules`: our module -> theirs, one for each part of ours that they keep apart (such as q, k
    and v). `prefix` stands before the names of the base model, which leaves it out when it is saved
    alone; the names of heads have none. `transposed`: their linears hold [inputs, outputs].
    `buffers`: tensors that no model here has, kept for the way back. `keys` makes [model] of a
    config.json, `config` the reverse. `again`: tensors that repeat another one in every model whose
    head is tied; where it is not, and they differ, these count and the other one is not used.
    `told_by`: keys of [model] that stand in no config.json, and the tensor which is there where
    they are true. `renamed`: how names end in old files, and in newer ones. `tasks`: what they call
    a model with a head for a kind of task, and the linear of that head."""

    model_type: str
    prefix: str
    modules: Mapping[str, tuple[str, ...]]
    transposed: bool
    buffers: re.Pattern[str]
    keys: Callable[["ConfigJson"], dict[str, Any]]
    config: Callable[[ModelConfig, int], dict[str, Any]]
    again: Mapping[str, str] = field(default_factory=dict)
    told_by: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """Their linear that makes logits, or the scores of a task."""
        (head,) = self.modules.get("sentence.classes") or self.modules["head"]
        return head

    def of_head(self, base: str) -> bool:
        """Whether a name, without prefix, is that of a head, not of the base model."""
        return base.partition(".")[0] == self.output.partition(".")[0]

    def full(self, base: str) -> str:
        """The name with its prefix, as whole models are saved."""
        return base if self.of_head(base) else self.prefix + base

    def base(self, name: str) -> str:
        """The name in any of their files without prefix, as newer files have it."""
        name = name.removeprefix(self.prefix)
        for old, new in self.renamed.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name


@dataclass(frozen=True)
class Counterpart:
    """One of their tensors: the box of our logical tensor `ours` that it holds, transposed or not.
    `theirs` is without prefix."""

    ours: str
    whole: tuple[int, ...]
    box: Box
    theirs: str
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of their tensor."""
        return self.box.size[::-1] if self.transposed else self.box.size

    def ours_of(self, part: Box) -> Box:
        """A box of their tensor, in the whole of our tensor."""
        return (part.transposed() if self.transposed else part).within(self.box)


class ConfigJson:
    """A config.json, read key by key; `name` stands in messages."""

    def __init__(self, values: Json, name: str) -> None:
        self.values, self.name = values, name

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise InputError(f"{self.name}: {key} is missing")
        return self.values[key]

    def only(self, key: str, *legal: Any) -> Any:
        """The value, the first of `legal` where there is none; InputError for any other."""
        value = self.get(key, legal[0])
        if value not in legal:
            shown = " or ".join(repr(one) for one in legal)
            raise InputError(f"{self.name}: {key} = {value!r} is not supported; legal: {shown}")
        return value


def counterparts(family: Family, needed: Mapping[str, Declaration]) -> Iterator[Counterpart]:
    """Where each parameter of the model stands in their files. Raises InputError for a parameter
    that the family has not."""
    for name, declaration in needed.items():
        module, _, kind = name.rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", module)
        general = module.replace(layer[0], "layers.{i}.", 1) if layer else module
        if general not in family.modules:
            raise InputError(f"a {family.model_type} of Hugging Face has nothing like {name}")
        theirs = family.modules[general]
        shape, split, start = declaration.shape, declaration.split, 0
        sizes = (shape[0],) if split is None or len(theirs) == 1 else split.parts
        transposed = family.transposed and layer is not None and len(shape) == 2
        for one, size in zip(theirs, sizes, strict=True):
            box = Box.whole(shape).along(0, start, start + size)
            base = f"{one.replace('{i}', layer[1]) if layer else one}.{kind}"
            yield Counterpart(name, shape, box, family.again.get(base, base), transposed)
            start += size


def tied_to(family: Family, model: ModelConfig) -> dict[str, str]:
    """Their tensor that holds another one's values again, where a file has both; without
    prefix."""
    found = dict(family.again)
    if model.tie_embeddings:
        (word,), (head,) = (family.modules[n] for n in (TIED_NAME.removesuffix(".weight"), "head"))
        found[f"{head}.weight"] = f"{word}.weight"
    return found


def require(model: ModelConfig, family: str, **needed: Any) -> None:
    """Raises InputError for the first key of [model] that is not as the family needs it."""
    for key, value in needed.items():
        if getattr(model, key) != value:
            raise InputError(
                f"model.{key} = {getattr(model, key)!r}: a {family} of Hugging Face has {value!r}"
            )
