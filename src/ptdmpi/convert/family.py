"""Families of models in `transformers`: the names of their parameters, and the keys of their
config.json.

In this folder, names such as `ours` refer to ptdmpi's format of a model, and names such as `theirs`
to the format of `transformers`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ptdmpi.base.box import Box
from ptdmpi.config import InputError, ModelConfig
from ptdmpi.model.parameters import Declaration
from ptdmpi.model.stage import TIED_NAME
from ptdmpi.plan.layer.ahead.modules import MODULES

Json = Mapping[str, Any]
# The key of config.json with the number of modules for multi-token prediction.
AHEAD = "num_nextn_predict_layers"
# The values of [model] that all decoder families share: GPT-2, LLaMA and related models.
DECODER = {
    "attention": "causal",
    "block_norm": "pre",
    "embedding_norm": False,
    "output_head": "linear",
    "token_types": 0,
}
# The values of [model] that all families share, except some decoders related to LLaMA.
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

    `modules` maps each module of ptdmpi to the modules of `transformers`. A linear layer of ptdmpi
    has several counterparts if `transformers` computes its outputs, such as q, k and v, by separate
    layers. {i} is the number of a layer, or of a module for multi-token prediction, and {e} is the
    number of an expert. `prefix` is the beginning of the parameter names of the base model. The
    parameter names of heads do not have the prefix, and neither do the names in a file that
    contains only the base model. `transposed` is True if the weights of linear layers in
    `transformers` are [inputs, outputs]. `buffers` is a pattern for the names of tensors that are
    not parameters in ptdmpi. These tensors are stored unchanged, because the conversion back to
    `transformers` needs them. `keys` is a function that makes the keys of [model] from a
    config.json. `config` is a function that makes a config.json from [model] and the size of the
    vocabulary. Files may contain the same values in two tensors, for example in a tied head and the
    embedding. `again` maps the repeating tensor to the tensor that it repeats. If the head is not
    tied and the two tensors differ, only the repeating tensor is used. `told_by` is for keys of
    [model] that no config.json has. Such a key is true if the files contain a certain tensor, and
    `told_by` maps the key to this tensor. `renamed` maps the ends of names in old files to the ends
    in newer files. `parameters` maps the last part of a parameter's name (such as "weight") to the
    last part of the name in `transformers`, if the two parts differ. `copies` is for tensors that
    the files repeat in every module for multi-token prediction. `copies` maps each of these tensors
    to the tensor of the model with the same values. `copies` is empty if the files of the family
    have no such modules. `tasks` maps a kind of task to the class in `transformers` that has a head
    for the task, and to the linear layer of that head.
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
    parameters: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """Return the name in `transformers` of the linear layer that computes the logits, or the
        scores of a task."""
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
        """Return the parameter name `name` of a file that `transformers` has written, without the
        family's prefix. If the name has an ending that only older files use, replace the ending by
        that of newer files."""
        name = name.removeprefix(self.prefix)
        for old, new in self.renamed.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name


@dataclass(frozen=True)
class Counterpart:
    """A tensor in the files of `transformers`, and the slice of a parameter of ptdmpi with the same
    values. `theirs` is the name of the tensor, without prefix. `ours` is the name of ptdmpi's
    parameter, `whole` is the full shape of this parameter, and `box` is the slice. The tensor in
    the files may be transposed."""

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
        """Return the slice of ptdmpi's parameter that corresponds to the slice `part` of the tensor
        in the files."""
        return (part.transposed() if self.transposed else part).within(self.box)


class ConfigJson:
    """The content of a config.json, with methods that read one key and report an illegal value.
    `name` is the file's name in error messages."""

    def __init__(self, values: Json, name: str) -> None:
        self.values = values
        self.name = name

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of config.json, or `default` if the key is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """Return the value of a key of config.json. Raise InputError if the key is missing or
        null."""
        if self.values.get(key) is None:
            raise InputError(f"{self.name}: {key} is missing")
        return self.values[key]

    def only(self, key: str, *legal: Any) -> Any:
        """Return the value of a key of config.json, or the first value in `legal` if the key is
        missing or null. Raise InputError if the value is not in `legal`."""
        value = self.get(key, legal[0])
        if value not in legal:
            shown = " or ".join(map(repr, legal))
            raise InputError(f"{self.name}: {key} = {value!r} is not supported; legal: {shown}")
        return value


class NumberedName(NamedTuple):
    """The name of a module of ptdmpi, written like the keys of `Family.modules`: with {i} in place
    of the number of a layer or of a module for multi-token prediction, and {e} in place of the
    expert's number. `numbers` maps each letter to the number that the letter replaces."""

    name: str
    numbers: Mapping[str, str]

    @classmethod
    def of(cls, module: str) -> "NumberedName":
        """Return the `NumberedName` of the module whose full name is `module`."""
        numbers = {}
        layer = re.match(rf"(?:layers|{MODULES})\.(\d+)\.", module)
        for letter, match in (("{i}", layer), ("{e}", re.search(r"experts\.(\d+)\.", module))):
            if match:
                numbers[letter] = match[1]
                module = module.replace(match[0], match[0].replace(match[1], letter), 1)
        return cls(module, numbers)

    def in_files(self, layers: int) -> "NumberedName":
        """Return the name with the numbers of the files of `transformers`. In these files, modules
        for multi-token prediction have layer numbers: module k has the number `layers` + k."""
        if not self.name.startswith(f"{MODULES}."):
            return self
        number = layers + int(self.numbers["{i}"])
        return self._replace(numbers={**self.numbers, "{i}": str(number)})

    def filled(self, text: str) -> str:
        """Return `text` after replacing the letters {i} and {e} by the numbers of this module."""
        for letter, number in self.numbers.items():
            text = text.replace(letter, number)
        return text


def counterparts(
    family: Family, layers: int, needed: Mapping[str, Declaration]
) -> Iterator[Counterpart]:
    """Yield the counterparts in `transformers` of all parameters of ptdmpi's model, which has
    `layers` layers. Raise InputError for a parameter that the family does not have."""
    for name, declaration in needed.items():
        module, _, kind = name.rpartition(".")
        numbered = NumberedName.of(module).in_files(layers)
        if numbered.name not in family.modules:
            raise InputError(f"a {family.model_type} of Hugging Face has no {name}")
        modules = family.modules[numbered.name]
        shape = declaration.shape
        sizes: Sequence[int] = (shape[0],)
        if len(modules) > 1:
            split = declaration.split
            sizes = declaration.parts if split is None else split.parts
        transposed = family.transposed and "{i}" in numbered.numbers and len(shape) == 2
        start = 0
        for theirs, size in zip(modules, sizes, strict=True):
            box = Box.whole(shape).along(0, start, start + size)
            base = numbered.filled(f"{theirs}.{family.parameters.get(kind, kind)}")
            yield Counterpart(
                ours=name,
                whole=shape,
                box=box,
                theirs=family.again.get(base, base),
                transposed=transposed,
            )
            start += size


def tied_to(family: Family, model: ModelConfig) -> dict[str, str]:
    """Return a table of tensors that the files contain twice. The table maps each repeating tensor
    to the tensor that it repeats. Names have no prefix."""
    tied = dict(family.again)
    if model.tie_embeddings:
        (word,) = family.modules[TIED_NAME.removesuffix(".weight")]
        (head,) = family.modules["head"]
        tied[f"{head}.weight"] = f"{word}.weight"
    return tied


def copies_of(family: Family, model: ModelConfig) -> dict[str, str]:
    """Return a table of the tensors that the files repeat in every module for multi-token
    prediction. The table maps each copy to the tensor of the model that it repeats. Names have no
    prefix. A copy of a tied head repeats the table of the embedding."""
    tied = tied_to(family, model)
    return {
        copy.replace("{i}", str(model.layers + number)): tied.get(original, original)
        for number in range(model.mtp_modules)
        for copy, original in family.copies.items()
    }


def require(model: ModelConfig, family: str, **needed: Any) -> None:
    """Raise InputError for the first key of [model] that does not have the needed value."""
    for key, value in needed.items():
        if getattr(model, key) != value:
            raise InputError(
                f"model.{key} = {getattr(model, key)!r}: a {family} of Hugging Face has {value!r}"
            )
