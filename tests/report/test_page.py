"""A comparison of several runs, and a run as one page."""

import base64
import hashlib
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from ptdmpi import report
from ptdmpi.commands.report import command
from ptdmpi.report import several
from ptdmpi.report.live import block
from ptdmpi.report.page.curves import thinned
from ptdmpi.report.status import Watched
from tests.report._made import append, made, record


class Elements(HTMLParser):
    """The elements of a page, with a check that it is well formed. `data` is the text of the
    element that holds the page's data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and self.found[-1][1].get("id") == "data":
            self.data += data


def _data(run: Path) -> dict[str, Any]:
    """Write the report of a run, and return the data of its page."""
    done = CliRunner().invoke(command, [str(run)])
    assert done.exit_code == 0 and "report.html" in done.stdout, (done.output, done.exception)
    return json.loads(Elements((run / "report.html").read_text()).data)


def _chart(data: dict[str, Any], key: str) -> dict[str, Any]:
    (chart,) = [chart for chart in data["content"]["charts"] if chart["key"] == key]
    return chart


EVIL = "</script><script>alert(1)</script><!--<script> \u2028 &amp;"


def test_the_page_is_one_file_without_a_network(tmp_path):
    run = made(tmp_path / "a<b", 3, record(1, 4.0), record(2, math.nan), record(3, 2.0))
    line = f"warning: {EVIL}".replace("\u2028", "")  # which would end the line
    (run / "log.txt").write_text(f"{line}\n")
    append(run, record(3, 1.5, **{EVIL: EVIL}))
    data = _data(run)
    text = (run / "report.html").read_text()
    elements = Elements(text)
    assert elements.open == []
    assert [tag for tag, _ in elements.found].count("script") == 2  # the data and the page's own
    addresses = [values.get("src") or values.get("href") for _, values in elements.found]
    assert {address for address in addresses if address} == {"data:,"}
    policy = next(v["content"] for _, v in elements.found if "http-equiv" in v)
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "unsafe" not in policy
    assert text.count("http") == text.count("http-equiv") + text.count("http://www.w3.org/2000/svg")
    assert "a&lt;b" in text and "alert(1)</script>" not in text
    # the texts arrive whole
    assert data["head"]["name"] == "a<b" and data["head"]["warnings"] == [line]
    assert [f"newest {EVIL}", EVIL] in data["content"]["rows"]
    assert ["steps", "3"] in data["content"]["rows"]


def test_the_policy_names_the_hash_of_the_script(tmp_path):
    run = made(tmp_path / "run", 3, record(1, 4.0))
    _data(run)
    text = (run / "report.html").read_text()
    for tag in ("script", "style"):
        body = text.rpartition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in text


def test_the_curves_have_what_was_recorded(tmp_path):
    steps = [
        record(n, float(n), fullest_expert=[0.5, n / 4], dead_experts=[0, n]) for n in (1, 2, 3)
    ]
    validation = {"step": 2, "validation_loss": 2.5, "validation_perplexity": 9.0}
    more = {"bigram_validation_loss": 2.75}
    run = made(tmp_path / "run", 3, *steps, validation | more, record(4, math.inf, mfu=None))
    data = _data(run)
    loss = {series["name"]: series for series in _chart(data, "loss")["series"]}
    assert (loss["training"]["x"], loss["training"]["y"]) == ([1, 2, 3], [1.0, 2.0, 3.0])
    assert (loss["validation"]["x"], loss["validation"]["y"]) == ([2], [2.5])
    assert loss["bigram model"]["kind"] == "level" and loss["bigram model"]["y"] == [2.75]
    _, second = _chart(data, "fullest_expert")["series"]
    assert second["y"] == [0.25, 0.5, 0.75] and second["name"].startswith("layer")
    assert _chart(data, "peak_memory_bytes")["series"][0]["y"] == [2.0**20] * 4
    assert _chart(data, "mfu")["series"][0]["x"] == [1, 2, 3]
    assert ["MFU", "25.0%"] in data["head"]["tiles"] and data["every_s"] is None


def test_a_long_curve_keeps_its_spikes():
    line = [(float(step), 1.0) for step in range(100_000)]
    line[54_321] = (54_321.0, 9.0)
    line[77_777] = (77_777.0, -9.0)
    kept = thinned(line, 1000)
    assert len(kept) <= 1000 and {line[54_321], line[77_777]} <= set(kept)
    assert kept == sorted(kept) and set(kept) <= set(line)
    assert thinned(line[:10], 1000) == line[:10]


DAMAGED = {
    "a text for a number": {"tokens_per_s": "fast"},
    "a list for a number": {"peak_memory_bytes": [1]},
    "a huge integer": {"grad_norm": 10**400},
    "texts for loads": {"fullest_expert": ["x"]},
    "no samples": {"samples_drawn": [0], "epochs": [0.0]},
    "epochs of another number of datasets": {"samples_drawn": [1, 2], "epochs": [0.0]},
    "a layout that is none": {"layout": 3},
    "bytes without kinds": {"wire_bytes": {"data": 3}},
    "noise that is none": {"gradient_noise": [1]},
    "tasks without a score": {"tasks": {"a": {"items": 3}}},
    "a step that is none": {"step": True},
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_not_on_the_page(tmp_path, damage):
    run = made(tmp_path / "run", 10, record(1, 4.0), record(2, 3.0) | damage)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n{\n")
    data = _data(run)
    assert _chart(data, "loss")["series"][0]["x"] == [1]


def test_tasks_have_rows_and_a_picture(tmp_path):
    first = {"kind": "choice", "items": 4, "accuracy": 0.25, "standard_error": 0.2}
    second = {"kind": "answers", "items": 9, "exact_match": 0.5, "standard_error": 0.1}
    asked = [{"step": n, "tasks": {"q/a.jsonl": first, "b.jsonl": second}} for n in (2, 3)]
    records = [record(1, 4.0), record(2, 3.0), asked[0], record(3, 2.0), asked[1]]
    run = made(tmp_path / "run", 3, *records)
    done = CliRunner().invoke(command, [str(run)])
    assert done.exit_code == 0, done.output
    assert "accuracy 25.0% +- 20.0% of 4 items, step 3" in done.stdout
    assert (run / "tasks.png").is_file()
    scores = _chart(_data(run), "tasks")["series"]
    assert [(series["name"], series["y"]) for series in scores] == [
        ("b.jsonl", [0.5, 0.5]),
        ("a.jsonl", [0.25, 0.25]),
    ]
    numbers = json.loads(CliRunner().invoke(command, [str(run), "--json"]).stdout)["tasks"]
    assert numbers == {"step": 3, "scores": asked[1]["tasks"]}
    status = Watched(run).status()
    assert status["tasks_step"] == 3 and status["step"] == 3
    shown = Console(width=200, record=True)
    shown.print(block(status))
    assert (
        "tasks q/a.jsonl accuracy 25.0%, b.jsonl exact match 50.0% (step 3)" in shown.export_text()
    )


def test_several_runs_share_a_table_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = made(tmp_path / "first", 3, record(1, 4.0), record(2, 3.0))
    second = made(tmp_path / "second", 3, record(1, 4.0), record(2, 3.5), record(3, 3.0))
    with (second / "metrics.jsonl").open("a") as file:
        more = {"step": 3, "validation_loss": 3.25, "validation_perplexity": 25.0}
        file.write(json.dumps(more) + "\n")
    done = CliRunner().invoke(command, [str(first), str(second)])
    assert done.exit_code == 0, done.output
    rows = {line[:17].strip(): line[17:].split() for line in done.stdout.splitlines()}
    assert rows["steps"][-2:] == ["2", "3"] and rows["last loss"] == ["3.0000", "3.0000"]
    assert rows["validation loss"] == ["-", "3.2500"]
    assert "loss over 2 common steps: 0.25 apart on average, 0.5 at step 2" in done.stdout
    assert (tmp_path / "comparison.png").stat().st_size > 1000
    numbers = json.loads(CliRunner().invoke(command, [str(first), str(second), "--json"]).stdout)
    assert [run_numbers["steps"] for run_numbers in numbers["runs"]] == [2, 3] and numbers["gap"][
        "at_step"
    ] == 2
    assert numbers["settings"] == {} and "setting" not in done.stdout


def test_settings_that_differ_are_told_and_a_picture_may_fail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [made(tmp_path / name, steps, record(1, 4.0)) for name, steps in (("x", 3), ("y", 5))]
    (tmp_path / "comparison.png").mkdir()  # as little to be written as in a folder of others
    done = CliRunner().invoke(command, [*map(str, runs)])
    assert done.exit_code == 0 and "no picture: comparison.png" in done.stderr
    assert done.stdout.splitlines()[-1].split() == ["run.steps", "3", "5"]
    numbers = json.loads(CliRunner().invoke(command, [*map(str, runs), "--json"]).stdout)
    assert numbers["settings"] == {"run.steps": [3, 5]} and numbers["files"] == []


def test_a_page_that_cannot_be_written_leaves_the_table(tmp_path):
    run = made(tmp_path / "run", 3, record(1, 4.0))
    (run / "report.html").mkdir()
    done = CliRunner().invoke(command, [str(run)])
    assert done.exit_code == 0 and "last loss" in done.stdout, done.output
    assert "loss.png" in done.stdout and "report.html" not in done.stdout
    assert done.stderr.count("\n") == 1 and "no page: " in done.stderr


def test_runs_of_one_name_are_told_apart_by_their_directories(tmp_path):
    runs = [report.read(made(tmp_path / name, 3, record(1, 4.0))) for name in ("x", "y")]
    assert several.labels(runs) == ["x", "y"]
    for run in runs:
        run.config["run"]["name"] = "same"
    assert several.labels(runs) == [str(tmp_path / "x"), str(tmp_path / "y")]
