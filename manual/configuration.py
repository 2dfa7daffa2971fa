"""Generate the configuration reference from the pydantic models of `ptdmpi.config`.

Types, defaults and limits come from these models. Error messages about combinations of keys come
from the source of `ptdmpi.config`. The meaning of each key comes from `keys.toml`. A test compares
the keys in `keys.toml` with the models.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ptdmpi.config import Config, RateGroup, TrainDataConfig
from ptdmpi.config.model import MODEL_KINDS
from ptdmpi.config.section import MOST, OnResume

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "src" / "ptdmpi" / "config"
TYPE_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
TYPE_NAMES |= {"Decimal": "number"}
# Sections that are arrays of tables in TOML.
TABLES: dict[str, type[BaseModel]] = {
    "optimizer.groups": RateGroup,
    "data.train": TrainDataConfig,
}
# Matches the beginning of the list of legal values at the end of an error message.
LEGAL = re.compile(r"; legal(\b| nearby)")
# Words for the column "on resume": the effect of a changed key when a run resumes.
RESUME_WORDS = {
    OnResume.BOUND: "refused",
    OnResume.BOUND_ORDER: "refused \\*",
    OnResume.REPORTED: "reported",
    OnResume.FREE: "free",
}
# Keys that the program replaces before the pydantic models validate the configuration.
RESOLVED_EARLY = {("model", "preset")}


def sections() -> dict[str, type[BaseModel]]:
    """Return the pydantic model of each section of a configuration, in the order of a configuration
    file."""
    models: dict[str, type[BaseModel]] = {}
    for name, field in Config.model_fields.items():
        models[name] = field.annotation
        for table, model in TABLES.items():
            if table.startswith(f"{name}."):
                models[table] = model
    return models


def words() -> dict[str, dict[str, dict[str, str]]]:
    """Return the entries of `keys.toml`, by section and key."""
    return tomllib.loads((HERE / "keys.toml").read_text(encoding="utf-8"))


def page() -> str:
    """Return the generated part of docs/reference/configuration.md."""
    texts = words()
    refusals = list(refused())
    parts = []
    for name, model in sections().items():
        heading = f"[[{name}]]" if name in TABLES else f"[{name}]"
        parts.append(f"## `{heading}` {{ #{name} }}\n")
        parts.append(_table(name, model, texts[name]))
        if name == "model":
            parts.append(_kinds())
        parts.append(_refusals_of(name, model, refusals))
    return "\n".join(parts)


def _table(section: str, model: type[BaseModel], texts: dict[str, dict[str, str]]) -> str:
    lines = ["| key | type | default | unit | on resume | meaning |", "|---|---|---|---|---|---|"]
    for key, text in texts.items():
        field = model.model_fields.get(key)
        kind = text.get("type") or type_of(field)
        default = text.get("default") or default_of(field)
        anchor = f'<span id="{section}.{key}"></span>'
        cells = (
            f"{anchor}`{key}`",
            kind,
            default,
            text.get("unit", ""),
            resume_of(model, key),
            text["meaning"],
        )
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def type_of(field: FieldInfo) -> str:
    """Return the type of a field in words, with its limits."""
    return _type(field.annotation, field.metadata)


def _type(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _type(inner, [*metadata, *more])
    if origin is Literal:
        return ", ".join(_shown(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        parts = [_type(part, metadata) for part in get_args(annotation) if part is not NoneType]
        return ", or ".join(parts)
    if origin is tuple:
        return f"list of: {_type(get_args(annotation)[0], [])}"
    name = TYPE_NAMES[annotation.__name__]
    return f"{name}{_limits(metadata)}"


def _limits(metadata: list[Any]) -> str:
    """Return the limits that pydantic checks, such as ", at least 1". The general limit MOST of all
    numbers is left out."""
    shown = []
    words_of = {"ge": "at least", "gt": "above", "lt": "below", "le": "at most"}
    words_of |= {"multiple_of": "a multiple of"}
    for entry in metadata:
        for constraint in getattr(entry, "metadata", None) or [entry]:
            for name, word in words_of.items():
                limit = getattr(constraint, name, None)
                if limit is not None and limit != MOST:
                    shown.append(f"{word} {limit:,}")
            if getattr(constraint, "min_length", None):
                shown.append("not empty")
    return "".join(f", {text}" for text in dict.fromkeys(shown))


def default_of(field: FieldInfo) -> str:
    """Return the default as TOML writes it, or "required"."""
    if field.default is PydanticUndefined:
        return "**required**"
    return "none" if field.default in (None, "") else _shown(field.default)


def resume_of(model: type[BaseModel], key: str) -> str:
    """Return a word for the effect of a change of the key when a run resumes; "" if the model
    declares no effect."""
    declared = getattr(model, "on_resume", None)
    if declared is None or key not in model.model_fields:
        return ""
    return RESUME_WORDS[declared(key)]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value:g}`" if isinstance(value, float) and value < 1000 else f"`{value}`"


def _kinds() -> str:
    """Return the table of the defaults that each value of the key `model.kind` sets."""
    keys = dict.fromkeys(key for table in MODEL_KINDS.values() for key in table)
    lines = ["### Kinds of model\n", "| key | " + " | ".join(MODEL_KINDS) + " |"]
    lines.append("|---" * (len(MODEL_KINDS) + 1) + "|")
    fields = sections()["model"].model_fields
    for key in keys:
        cells = [
            _shown(table[key]) if key in table else default_of(fields[key])
            for table in MODEL_KINDS.values()
        ]
        lines.append(f"| `{key}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def refused() -> Iterator[str]:
    """Yield each error message in `ptdmpi.config` about a combination of keys, with "…" in place of
    values."""
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Yield | ast.Lambda):
                value = node.value if isinstance(node, ast.Yield) else node.body
                if isinstance(value, ast.JoinedStr | ast.Constant | ast.BinOp):
                    yield literal(value)
            elif isinstance(node, ast.JoinedStr) and LEGAL.search(literal(node)):
                yield literal(node)


def literal(node: ast.expr) -> str:
    """Return the text of a string expression, with "…" in place of each formatted value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return "…"


def _refusals_of(section: str, model: type[BaseModel], texts: list[str]) -> str:
    """Return a collapsible list of the error messages that name a key of the section."""
    keys = "|".join(map(re.escape, model.model_fields))
    named = re.compile(rf"(?<![\w.]){re.escape(section)}\.({keys})\b")
    lines = [text for text in dict.fromkeys(texts) if named.search(text)]
    if not lines:
        return ""
    items = "\n".join(f"    - {_escaped(text)}" for text in lines)
    return f'??? note "What the program refuses"\n\n{items}\n'


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>|\[\]])", r"\\\1", text)
