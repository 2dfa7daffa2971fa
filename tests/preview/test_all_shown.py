"""Every field of the forecast is in the text of the dry run, or is listed here with the reason."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ptdmpi.preview.as_text import as_text
from ptdmpi.preview.forecast import preview
from ptdmpi.preview.ranks import RankCount
from tests._configs import tree
from tests._runs import corpus

# field -> why the text has no row for it
NOT_SHOWN = {
    "resume.step": "resume.says has it",
    "resume.path": "resume.says has it",
    "resume.changed": "resume.says has it",
    "memory.pipeline_rank": "parts of memory are those of one rank, and the layout is shown",
    "memory.fits": "the mistake says so",
    "checkpoint.fits": "the mistake says so",
    "checkpoint.free_bytes": "the mistake says so, if they are too few",
}


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in nested dicts and lists; of empty ones, their own."""
    items = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    if not items:
        yield path
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _another(value: Any) -> Any:
    """Return another value, so different that rounding does not hide it."""
    match value:
        case bool():
            return not value
        case int() | float():
            return 3 * value + 2**45
        case str() | None:
            return f"{value or ''}x"
        case list():
            return ["x"]
    raise AssertionError(f"teach `_another` values such as {value!r}")


def _with_another(forecast: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """Return a copy of the forecast with another value at `path`."""
    changed = copy.deepcopy(forecast)
    *parents, last = path
    place: Any = changed
    for key in parents:
        place = place[key]
    place[last] = _another(place[last])
    return changed


def test_every_field_of_the_forecast_is_in_the_text(tmp_path: Path):
    """Each field alone changes the text, except those of NOT_SHOWN, which do not."""
    corpus(tmp_path)
    run = {"run.dir": str(tmp_path / "run"), "data.valid": str(tmp_path / "valid")}
    run |= {"data.train": [{"path": str(tmp_path / "train")}]}
    more = {"parallel.tensor": 2, "parallel.context": 2, "checkpoint.memory_every_steps": 2}
    # intervals of 0 have no words
    more |= {"checkpoint.every_steps": 2, "checkpoint.every_minutes": 5}
    forecast = preview(tree({**run, **more}), RankCount(4, "given", 0), "selene")
    # this tokenizer is not installed, so there is no text
    forecast["batch"]["samples"][0]["text"] = "some text"
    text = as_text(forecast)
    hidden = set()
    for path in _leaves(forecast):
        name = ".".join(str(key) for key in path if isinstance(key, str))
        if as_text(_with_another(forecast, path)) == text:
            hidden.add(name)
    assert hidden == set(NOT_SHOWN)
