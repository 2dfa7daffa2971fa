"""A comparison of several runs, and a run as one page."""

import json
import math
from html.parser import HTMLParser

from click.testing import CliRunner
from rich.console import Console

from ptdmpi import report
from ptdmpi.commands.report import command
from ptdmpi.report import page, several
from ptdmpi.report.live import block
from ptdmpi.report.status import Watched
from tests.report._made import made, record


class Tags(HTMLParser):
    """The elements of a page, with a check that it is well formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_without_a_network(tmp_path):
    run = made(tmp_path / "a<b", 3, record(1, 4.0), record(2, math.nan), record(3, 2.0))
    (run / "log.txt").write_text("a <script>alert(1)</script> line\n")
    done = CliRunner().invoke(command, [str(run)])
    assert done.exit_code == 0 and "report.html" in done.stdout
    text = (run / "report.html").read_text()
    tags = Tags(text)
    assert tags.open == []
    names = [tag for tag, _ in tags.tags]
    assert "script" not in names and "link" not in names and names.count("svg") == 6
    sources = [attrs["src"] for tag, attrs in tags.tags if tag == "img"]
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in text.replace("&lt;", "") and "a&lt;b" in text and "<td>3</td>" in text
    assert "nan" not in text.partition("<h2>Files")[0].partition("<svg")[2].lower()


def test_tasks_have_rows_and_a_picture(tmp_path):
    first = {"kind": "choice", "items": 4, "accuracy": 0.25, "standard_error": 0.2}
    second = {"kind": "answers", "items": 9, "exact_match": 0.5, "standard_error": 0.1}
    asked = [{"step": n, "tasks": {"q/a.jsonl": first, "b.jsonl": second}} for n in (2, 3)]
    records = [record(1, 4.0), record(2, 3.0), asked[0], record(3, 2.0), asked[1]]
    run = made(tmp_path / "run", 3, *records)
    done = CliRunner().invoke(command, [str(run)])
    assert done.exit_code == 0, done.output
    assert "accuracy 25.0% +- 20.0% of 4 items, step 3" in done.stdout
    assert (run / "tasks.png").is_file() and "exact match 50.0%" in (
        run / "report.html"
    ).read_text()
    assert 'alt="tasks"' in (run / "report.html").read_text()
    numbers = json.loads(CliRunner().invoke(command, [str(run), "--json"]).stdout)["tasks"]
    assert numbers == {"step": 3, "scores": asked[1]["tasks"]}
    status = Watched(run).status()
    assert status["tasks_step"] == 3 and status["step"] == 3
    shown = Console(width=200, record=True)
    shown.print(block(status))
    assert (
        "tasks q/a.jsonl accuracy 25.0%, b.jsonl exact match 50.0% (step 3)" in shown.export_text()
    )


def test_a_curve_keeps_its_ends_and_what_is_finite():
    drawn = page.svg([(1, 2.0), (2, math.inf), (3, 4.0)], [(3, 5.0)])
    assert ">5<" in drawn and ">2<" in drawn and drawn.count("<circle") == 1
    points = drawn.partition('points="')[2].partition('"')[0].split()
    assert len(points) == 2
    assert "no numbers" in page.svg([(1, math.nan)])
    assert len(page.svg([(i, 1.0) for i in range(10_000)]).split()) < 500


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
