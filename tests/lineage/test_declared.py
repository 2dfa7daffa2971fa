"""Every key of every section declares what its change on resume means, and a resumption does that.

The tests walk over all keys of `Config`: a new key, or a new section, is tested with no
line here.
"""

from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest

from ptdmpi.config import Config, InputError, RateGroup, TrainDataConfig, resolve
from ptdmpi.config.section import Bound, Free, OnResume, Section
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.judge import settings
from ptdmpi.lineage.trained_on import begun

KEYS = [(name, key) for name, section in Config.sections().items() for key in section.model_fields]


def _start() -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"steps": 12},
        # with rotary positions, because the keys for them have no effect otherwise
        "model": {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8, "positions": "rope"},
        "batch": {"global_size": 4},
        "optimizer": {"groups": [{"names": ["*.bias"], "learning_rate_factor": 0.5}]},
        "data": {"train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 2}]},
    }
    return resolve(tree, 2)


def _course(config: Config) -> Course:
    data = [
        SimpleNamespace(tokenizer="t", tokenizer_sha256="0" * 64, sha256=sha, samples=lambda _: 50)
        for sha in ("1" * 64, "2" * 64)
    ]
    return Course(config, begun(config, data))


def _manifest(course: Course) -> dict[str, Any]:
    progress = {"step": 5, "samples": course.samples(5), "seed": course.config.run.seed}
    model = course.config.model.model_dump(mode="json")
    return {"progress": progress, "model": model, **course.in_manifest()}


def _literals(kind: Any) -> list[Any]:
    """The values of all Literals inside an annotation."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for part in get_args(kind) for value in _literals(part)]


def another(section: type[Section], key: str, value: Any) -> Any:
    """A value of the key that is not `value`."""
    others = [text for text in _literals(section.model_fields[key].annotation) if text != value]
    if others:
        return others[0]
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case None:
            return "x"
        case tuple():
            return (*value, "x")
    raise AssertionError(f"{section.__name__}.{key} = {value!r}: teach `another` this kind")


def _changed(config: Config, name: str, key: str) -> Config:
    """The configuration with another value of one key; of the mixture, with another weight."""
    section = getattr(config, name)
    if (name, key) == ("data", "train"):
        return _with_first(config, "data", "train", {"weight": Decimal(3)})
    if (name, key) == ("optimizer", "groups"):
        return _with_first(config, "optimizer", "groups", {"learning_rate_factor": 0.25})
    return config.replace(name, **{key: another(type(section), key, getattr(section, key))})


def _with_first(config: Config, name: str, key: str, values: dict[str, Any]) -> Config:
    first, *rest = getattr(getattr(config, name), key)
    return config.replace(name, **{key: (first.model_copy(update=values), *rest)})


def _judge(change: Config) -> tuple[str, ...]:
    """What a resumption with this configuration reports. Raises InputError if it is refused."""
    course = _course(change)
    course.judge("resume", Path("step-5"), _manifest(_course(_start())))
    assert course.answer.note == ""
    return course.answer.changed


def _does(means: OnResume, full: str, change: Config) -> None:
    if means is OnResume.FREE:
        assert _judge(change) == ()
    elif means is OnResume.REPORTED:
        (text,) = _judge(change)
        assert text.startswith(f"{full} ") and " -> " in text
    else:
        with pytest.raises(InputError, match=rf"{full}\b.*legal: "):
            _judge(change)
        allowed = change.replace("data", change="from here")
        if means is OnResume.BOUND_ORDER:
            assert any(full in text for text in _judge(allowed))
        else:
            with pytest.raises(InputError, match=full):
                _judge(allowed)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(("name", "key"), KEYS, ids=[".".join(pair) for pair in KEYS])
def test_a_key_does_what_it_declares(name, key):
    _does(Config.sections()[name].on_resume(key), f"{name}.{key}", _changed(_start(), name, key))


@pytest.mark.parametrize("table", [TrainDataConfig, RateGroup])
def test_a_key_of_a_nested_table_does_what_it_declares(table):
    name, key = ("data", "train") if table is TrainDataConfig else ("optimizer", "groups")
    others = {"names": ("*.weight",), "weight": Decimal(3), "epochs": Decimal(2), "path": "moved"}
    for nested in table.model_fields:
        change = _with_first(_start(), name, key, {nested: others.get(nested, 0.125)})
        _does(table.on_resume(nested), f"{name}.{key}", change)


def test_nothing_is_reported_where_nothing_changed():
    assert _judge(_start()) == ()


def test_a_checkpoint_records_every_key_that_it_is_asked_for():
    recorded = settings(_start())
    for name, section in Config.sections().items():
        for key in section.model_fields:
            asked = section.on_resume(key) in (OnResume.BOUND, OnResume.REPORTED)
            assert (f"{name}.{key}" in recorded) is asked, f"{name}.{key}"


def test_a_key_without_a_declaration_or_with_two_does_not_import():
    with pytest.raises(TypeError, match=r"Undeclared\.size declares 0 effects"):

        class Undeclared(Section):
            size: int = 1

    with pytest.raises(TypeError, match=r"Twice\.size declares 2 effects"):

        class Twice(Section):
            size: Bound[Free[int]] = 1
