"""Families of Hugging Face's models: the names of their parameters, and their config.json.

In the identifiers of this folder `ours` means ptdmpi's form of a model, and `theirs` means the form
of `transformers`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptdmpi.base.box import Box
from ptdmpi.config import InputError, ModelConfig
from ptdmpi.model.parameters import Declaration
from ptdmpi.model.stage import TIED_NAME

Json = Mapping[str, Any]
# The values of [model] that GPT-2, LLaMA and LLaMA's descendants share.
DECODER = {
    "attention": "causal",
    "block_norm": "pre",
    "embedding_norm": False,
    "output_head": "linear",
    "token_types": 0,
}
# The values of [model] that all families have, except some descendants of LLaMA.
PLAIN = {
    "qk_norm": False,
    "zero_centered_norm": False,
    "scale_embedding": False,
    "sliding_window": 0,
    "query_scalar": 0.0,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "experts": 0,
}


@dataclass(frozen=True)
class Family:
    """A family of models in `transformers`, such as GPT-2.

    `modules`: ptdmpi's module -> the modules of `transformers`. There are several of them if
    `transformers` stores parts of ptdmpi's module separately (such as q, k and v). {i} stands for
    the number of a layer, and {e} for the number of an expert. `prefix`: the beginning of the names
    of the base model. The names of heads do not have it, and neither do the names in a file that
    contains only the base model. `transposed`: True if the weights of the linears of `transformers`
    are [inputs, outputs]. `buffers`: tensors that are no parameters in ptdmpi; they are stored for
    the conversion back. `keys`: a function that makes the keys of [model] from a config.json.
    `config`: a function that makes a config.json from [model] and the size of the vocabulary.
    `again`: tensors that repeat another tensor in every model with a tied head. If the head is not
    tied and the two tensors differ, the repetition is used, and the other tensor is not. `told_by`:
    keys of [model] that no config.json has -> the tensor that exists if they are true. `renamed`:
    ends of names in old files -> ends in newer files. `tasks`: kind of task -> the name in
    `transformers` of a model with a head for it, and the linear of that head.
    """

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
        """Return the name in `transformers` of the linear that makes the logits, or the scores of a
        task."""
        (head,) = self.modules.get("sentence.classes") or self.modules["head"]
        return head

    def of_head(self, base: str) -> bool:
        """Return True if a parameter name, without prefix, belongs to a head and not to the base
        model."""
        return base.partition(".")[0] == self.output.partition(".")[0]

    def full(self, base: str) -> str:
        """Return a parameter name with its prefix, as in files that contain the base model and a
        head."""
        return base if self.of_head(base) else self.prefix + base

    def base(self, name: str) -> str:
        """Return a name in the files of `transformers` without its prefix, and with its end as in
        newer files."""
        name = name.removeprefix(self.prefix)
        for old, new in self.renamed.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name


@dataclass(frozen=True)
class Counterpart:
    """A tensor in the files of `transformers`, named `theirs` (without prefix), and the part of a
    parameter of ptdmpi that it contains: the slice `box` of the logical tensor `ours`, whose full
    shape is `whole`. The tensor may be transposed."""

    ours: str
    whole: tuple[int, ...]
    box: Box
    theirs: str
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor in the files of `transformers`."""
        return self.box.size[::-1] if self.transposed else self.box.size

    def ours_of(self, part: Box) -> Box:
        """Return the slice of ptdmpi's logical tensor that corresponds to the slice `part` of the
        tensor of `transformers`."""
        return (part.transposed() if self.transposed else part).within(self.box)


class ConfigJson:
    """The content of a config.json, which is read key by key. Error messages call the file
    `name`."""

    def __init__(self, values: Json, name: str) -> None:
        self.values = values
        self.name = name

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; `default` if it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """Return the value of a key. Raise InputError if the key is missing or null."""
        if self.values.get(key) is None:
            raise InputError(f"{self.name}: {key} is missing")
        return self.values[key]

    def only(self, key: str, *legal: Any) -> Any:
        """Return the value of a key; the first of `legal` if it is missing or null. Raise
        InputError if the value is not in `legal`."""
        value = self.get(key, legal[0])
        if value not in legal:
            shown = " or ".join(map(repr, legal))
            raise InputError(f"{self.name}: {key} = {value!r} is not supported; legal: {shown}")
        return value


def counterparts(family: Family, needed: Mapping[str, Declaration]) -> Iterator[Counterpart]:
    """Yield the counterparts in `transformers` of all parameters of ptdmpi's model. Raise
    InputError for a parameter that the family does not have."""
    for name, declaration in needed.items():
        module, _, kind = name.rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", module)
        numbers = {}
        for letter, match in (("{i}", layer), ("{e}", re.search(r"experts\.(\d+)\.", module))):
            if match:
                numbers[letter] = match[1]
                module = module.replace(match[0], match[0].replace(match[1], letter), 1)
        if module not in family.modules:
            raise InputError(f"a {family.model_type} of Hugging Face has nothing like {name}")
        modules = family.modules[module]
        shape = declaration.shape
        sizes: Sequence[int] = (shape[0],)
        if declaration.split is not None and len(modules) > 1:
            sizes = declaration.split.parts
        transposed = family.transposed and layer is not None and len(shape) == 2
        start = 0
        for theirs, size in zip(modules, sizes, strict=True):
            box = Box.whole(shape).along(0, start, start + size)
            base = f"{theirs}.{kind}"
            for letter, number in numbers.items():
                base = base.replace(letter, number)
            yield Counterpart(
                ours=name,
                whole=shape,
                box=box,
                theirs=family.again.get(base, base),
                transposed=transposed,
            )
            start += size


def tied_to(family: Family, model: ModelConfig) -> dict[str, str]:
    """Return (repetition -> repeated tensor) for files that contain both; names are without
    prefix."""
    tied = dict(family.again)
    if model.tie_embeddings:
        (word,) = family.modules[TIED_NAME.removesuffix(".weight")]
        (head,) = family.modules["head"]
        tied[f"{head}.weight"] = f"{word}.weight"
    return tied


def require(model: ModelConfig, family: str, **needed: Any) -> None:
    """Raise InputError for the first key of [model] that does not have the needed value."""
    for key, value in needed.items():
        if getattr(model, key) != value:
            raise InputError(
                f"model.{key} = {getattr(model, key)!r}: a {family} of Hugging Face has {value!r}"
            )
