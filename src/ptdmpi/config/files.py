"""Reading a configuration from TOML and `--set`, checking it, and writing it back as TOML."""

import contextlib
import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from ptdmpi.base.disk import open_file
from ptdmpi.base.errors import InputError
from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.configuration import Config, Sections
from ptdmpi.config.layout import Layout
from ptdmpi.config.legality import shards_of_a_node
from ptdmpi.config.presets import model_presets, nearest_presets, own_sizes, with_preset
from ptdmpi.config.rules import rules
from ptdmpi.config.section import Section
from ptdmpi.config.sections import RateGroup, TrainDataConfig

# Name of a section -> the class of the repeated tables in this section, such as [[data.train]].
TABLES: Mapping[str, type[Section]] = {"data": TrainDataConfig, "optimizer": RateGroup}


MOST_BYTES = 1 << 24  # maximum size of a TOML file in bytes.
# The maximum nesting of tables and lists. The deepest legal key, data.train.path, has 3 levels.
MOST_DEPTH = 8


def load(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the content of the TOML file `path` as nested dicts and lists (a tree), changed by the
    `overrides`: "section.key=value" sets a key, and "section.key=" removes a key.

    Raise InputError if the file is missing, too large, nested too deeply or not TOML, or if an
    override is malformed.
    """
    try:
        with open_file(Path(path), "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise InputError(f"configuration {path} has more than {MOST_BYTES} bytes")
        tree = tomllib.loads(content.decode("utf-8-sig").replace("\r\n", "\n"))
    except OSError as error:
        raise InputError(f"configuration {path}: {error.strerror}; give a TOML file") from None
    # if a number has too many digits, the parser raises a plain ValueError
    except (ValueError, RecursionError) as error:
        raise InputError(f"configuration {path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(tree, override)
    if _deeper(tree, MOST_DEPTH):
        raise InputError(f"configuration {path} nests tables deeper than {MOST_DEPTH} levels")
    return tree


def _deeper(value: Any, levels: int) -> bool:
    """Return True if tables and lists in `value` are nested deeper than `levels` levels."""
    if not isinstance(value, dict | list):
        return False
    items: Iterable[Any] = value
    if isinstance(value, dict):
        items = value.values()
    return not levels or any(_deeper(item, levels - 1) for item in items)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise InputError(f"--set {override}: write section.key=value, for example run.steps=100")
    try:
        override.encode()
    except UnicodeEncodeError:
        raise InputError(f"--set {override}: the value is not UTF-8") from None
    if not text.strip():
        target = tree.get(section)
        if isinstance(target, dict):
            target.pop(name, None)
        return
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    target = tree.setdefault(section, {})
    if not isinstance(target, dict):
        raise InputError(f"--set {override}: [{section}] of the file is not a section")
    target[name] = value


def with_values(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration with some values replaced. `values` maps the full name of
    a key, such as "run.steps", to its new value. The value None removes a key.

    Raise InputError for a name that does not have the form SECTION.KEY.
    """
    sections = {
        name: dict(section) if isinstance(section, Mapping) else section
        for name, section in tree.items()
    }
    for key, value in values.items():
        name, dot, leaf = key.partition(".")
        section = sections.setdefault(name, {})
        if not (dot and leaf and isinstance(section, dict)):
            raise InputError(f"{key} is not a key; write SECTION.KEY, such as run.steps")
        if value is None:
            section.pop(leaf, None)
        else:
            section[leaf] = str(value) if isinstance(value, Path) else value
    return sections


def resolve(tree: Mapping[str, Any], ranks: int, node_ranks: int | None = None) -> Config:
    """Return the complete configuration that `tree` describes, for `ranks` ranks including spare
    ranks. A node has `node_ranks` ranks. If `node_ranks` is None, all ranks are assumed to be on
    one node. If the configuration has mistakes, raise one InputError, whose message has one line
    for each mistake.
    """
    sections, mistakes, wrong = parsed(tree)
    for line in rules(sections, ranks):
        if not any(re.search(rf"\b{key}\b", line) for key in wrong):
            mistakes.append(line)
    if mistakes:
        raise InputError("\n".join(_with_owners(line, tree) for line in mistakes))
    config = _begun(sections.whole()).with_head().adapted()
    parallel, working = config.parallel, ranks - config.run.spare_ranks
    data = working // parallel.model_ranks
    layout = Layout.of(parallel, config.batch, config.recompute, data)
    group = parallel.shard_group
    if group == "node":
        # `near` is the number of ranks on a node that compute with the same weights. Tensor ranks,
        # and ranks with different experts, have neighbouring rank numbers (`plan.layout.grid`), so
        # they are assumed to be on one node. Only one of `parallel.tensor * layout.expert_tokens`
        # ranks of a node therefore has the same weights as this rank.
        near = (node_ranks or ranks) // (parallel.tensor * layout.expert_tokens)
        group = shards_of_a_node(
            data // layout.expert_data, near, context=layout.context // layout.expert_context
        )
    everybody = group == layout.copies
    return config.replace("parallel", data=data, shard_group="all" if everybody else group)


def _begun(config: Config) -> Config:
    """Replace `adapt.method = "full"` by the keys of an ordinary run that trains all weights and
    begins from `adapt.base`. Return the new configuration."""
    if config.adapt.method != "full":
        return config
    begun = config.replace("checkpoint", initial=config.adapt.base)
    return begun.model_copy(update={"adapt": AdaptConfig()})


class Parsed(NamedTuple):
    """The content of a configuration file: its sections, the mistakes in the sections (one line
    each), and the names of the keys with mistakes. If a key is wrong, mistakes in combinations that
    include this key are not reported.
    """

    sections: Sections
    mistakes: list[str]
    wrong: set[str]


def parsed(tree: Mapping[str, Any]) -> Parsed:
    """Return the sections of `tree`, each read separately, and their mistakes. If a section has
    wrong keys, the section is read without the wrong keys if possible.
    """
    mistakes: list[str] = []
    wrong: set[str] = set()
    sections: dict[str, Section] = {}
    tree = _with_model(tree, mistakes)
    for name in tree:
        if name not in Config.model_fields:
            mistakes.append(f"[{name}] is not a section{_did_you_mean(name, Config.model_fields)}")
    for name, kind in Config.sections().items():
        try:
            sections[name] = kind.model_validate(tree.get(name, {}))
        except ValidationError as error:
            mistakes.extend(_explain(name, kind, error))
            keys = _meant(kind, error)
            wrong |= keys
            rest = tree.get(name, {})
            with contextlib.suppress(ValidationError, AttributeError):
                known = {key: value for key, value in rest.items() if key not in keys}
                sections[name] = kind.model_validate(known)
    return Parsed(Sections.of(sections), mistakes, wrong)


def synthetic_config(
    layout: Layout,
    model: Mapping[str, Any],
    ranks: int | None = None,
    **sections: Mapping[str, Any],
) -> Config:
    """Return a checked configuration for a program that reads no training data, such as parity
    checks, probes, benchmarks and inference.

    `model` has the keys of [model]; `sections` gives keys of other sections, as section -> key ->
    value. By default the run has one step with one microbatch per data rank, on as many ranks as
    the layout has. Raise the same errors as `resolve`.
    """
    tree: dict[str, dict[str, Any]] = {"run": {"steps": 1}, "model": dict(model)}
    tree["data"] = {"train": [{"path": "synthetic"}]}
    tree["batch"] = {"global_size": layout.data * layout.micro_size}
    for given in (layout.sections(), sections):
        for name, keys in given.items():
            tree[name] = {**tree.get(name, {}), **keys}
    return resolve(tree, layout.ranks if ranks is None else ranks)


def _meant(section: type[Section], error: ValidationError) -> set[str]:
    """Return the names of the keys that `error` reports. If such a key is unknown, also return the
    known key that the user probably meant.
    """
    keys = {str(mistake["loc"][0]) for mistake in error.errors() if mistake["loc"]}
    known = list(section.model_fields)
    near = (difflib.get_close_matches(key, known, n=1, cutoff=0.5) for key in keys - {*known})
    return keys.union(*near)


def _with_model(tree: Mapping[str, Any], mistakes: list[str]) -> Mapping[str, Any]:
    """Return the tree with the keys of a preset in place of the key `model.preset`, which names the
    preset. If the preset is unknown, add a mistake to `mistakes`, and use the keys of another
    preset, so that keys of the model are not reported as missing."""
    model = tree.get("model")
    if not isinstance(model, Mapping) or "preset" not in model:
        return tree
    known = model_presets()
    name = model["preset"]
    if not isinstance(name, str) or name not in known:
        near = " or ".join(nearest_presets(str(name)))
        mistakes.append(f"model.preset = {name!r} is unknown; did you mean {near}?")
        name = next(iter(known))
    return with_preset(tree, name)


def _with_owners(line: str, tree: Mapping[str, Any]) -> str:
    """Return the error message `line`. If the user has replaced a size of the preset, and the line
    names this size, the returned line also says which sizes come from the user and which from the
    preset.
    """
    own = own_sizes(tree)
    named = dict.fromkeys(re.findall(r"\bmodel\.(\w+) = ", line))
    replaced = [f"model.{key}" for key in named if key in own]
    kept = [f"model.{key}" for key in named if key not in own]
    if not replaced or "preset" in named:
        return line
    whose = f"{' and '.join(replaced)} of the configuration"
    preset = f"preset {tree['model']['preset']}"
    if kept:
        return f"{line} ({whose}, {' and '.join(kept)} of {preset})"
    return f"{line} ({whose}, in place of {preset}'s)"


def _explain(section: str, model: type[Section], error: ValidationError) -> Iterator[str]:
    mistakes = error.errors()
    values: dict[str, tuple[Any, list[str]]] = {}
    for mistake in mistakes:
        if mistake["type"] == "too_short" and len(mistakes) > 1:
            # pydantic reports the list as too short only because an item of the list has a mistake
            continue
        path = [str(part) for part in mistake["loc"]]
        # pydantic appends the tried type of a union (such as 'int') to the location of a mistake,
        # so drop this type
        nested = TABLES.get(section, model)
        keys = {*model.model_fields, *nested.model_fields}
        known = [part for part in path if part in keys or part.isdigit()]
        key = ".".join([section, *(path if mistake["type"] == "extra_forbidden" else known)])
        if mistake["type"] == "extra_forbidden":
            owner = nested if len(path) > 1 else model
            yield f"{key} is not a key{_did_you_mean(path[-1], owner.model_fields)}"
        elif mistake["type"] == "missing":
            yield f"{section}.{'.'.join(path)} is missing; it has no default"
        elif key == "data.train":
            yield 'data.train: write a table [[data.train]] with path = "DIRECTORY" per dataset'
        else:  # if a key may have several types, pydantic reports one mistake for each type
            text = mistake["msg"].removeprefix("Value error, ")
            values.setdefault(key, (mistake["input"], []))[1].append(text)
    for key, (value, messages) in values.items():
        first, *others = dict.fromkeys(messages)
        text = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
        yield f"{key} = {_cut(repr(value))}: {_cut(text)}"


def _cut(text: str, length: int = 200) -> str:
    """Return `text`, shortened to at most `length` characters."""
    return text if len(text) <= length else f"{text[: length - 4]} ..."


# Keys that other trainers have and ptdmpi does not have. Part of the name of such a key -> a key of
# the section in which users would look for it, and the reason why ptdmpi has no such key.
ABSENT = {
    "capacity": (
        "experts",
        "an expert has no capacity: it computes all tokens that are routed to it, and no token is "
        "dropped; legal: no such key (model.balance makes the loads of experts equal)",
    ),
}


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(known)
    for part, (beside, why) in ABSENT.items():
        if part in name and beside in known:
            return f": {why}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; legal are {', '.join(known)}"


def to_toml(config: Config) -> str:
    """Return the complete configuration as TOML text. `load` and `resolve` read the text back as
    the same configuration."""
    import tomlkit

    tree = config.model_dump(exclude_none=True)
    for dataset in tree["data"]["train"]:
        dataset.update({k: str(v) for k, v in dataset.items() if isinstance(v, Decimal)})
    tree["data"]["train"] = list(tree["data"]["train"])
    tree["optimizer"]["groups"] = list(tree["optimizer"]["groups"])
    if not isinstance(config.adapt.targets, str):
        tree["adapt"]["targets"] = list(config.adapt.targets)
    tree["task"]["labels"] = list(config.task.labels)
    if config.data.valid is not None and not isinstance(config.data.valid, str):
        tree["data"]["valid"] = list(config.data.valid)
    return tomlkit.dumps(tree)
