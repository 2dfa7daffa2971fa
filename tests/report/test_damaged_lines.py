"""Unreadable lines of a run's files: reports name the file and the first line, and go on."""

import json

import pytest
from click.testing import CliRunner

from ptdmpi import report
from ptdmpi.commands.report import command as report_command
from ptdmpi.commands.watch import command as watch_command
from ptdmpi.config import InputError
from ptdmpi.lineage.attempts import History, attempts, unreadable_lines
from ptdmpi.report.page.serve import Followed
from ptdmpi.report.status import Watched
from tests.report._made import append, made, record


@pytest.fixture
def run(tmp_path):
    return made(tmp_path / "run", 3, record(1, 4.0), record(2, 3.0))


def _append(path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _watched(run) -> tuple[dict, str]:
    """Return the status of a run, and what `watch --once` prints."""
    done = CliRunner().invoke(watch_command, [str(run), "--once"])
    assert done.exit_code == 0, done.exception
    return Watched(run).status(), done.stdout


def test_a_file_of_garbage_is_named(run):
    (run / "metrics.jsonl").write_text("garbage\n")
    said = "metrics.jsonl: 1 line cannot be read: line 1"
    status, drawn = _watched(run)
    assert status["problems"] == [said] and said in drawn
    with pytest.raises(InputError, match=f"contains no readable step; {said}"):
        report.summary(report.read(run))


def test_garbage_between_records_is_counted_and_the_records_are_used(run):
    _append(run / "metrics.jsonl", '\n{"step": "x"}\n\x0bgarbage\u2028\n')
    append(run, record(3, 2.0))
    said = "metrics.jsonl: 2 lines cannot be read: the first is line 4"
    status, drawn = _watched(run)
    assert status["problems"] == [said] and said in drawn and status["step"] == 3
    loaded = report.read(run)
    assert loaded.problems == [said] and len(loaded.steps) == 3
    assert Followed(run).news()["head"]["warnings"] == [said]
    two = CliRunner().invoke(watch_command, [str(run), str(run), "--once"]).stdout
    assert said in two
    assert "cannot be read" not in report.table(report.summary(loaded))


def test_the_report_prints_a_warning_on_stderr(run):
    _append(run / "metrics.jsonl", "garbage\n")
    done = CliRunner().invoke(report_command, [str(run), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["files"]
    assert f"warning: {run}/metrics.jsonl: 1 line cannot be read: line 3\n" in done.stderr
    assert "1 line cannot be read" in (run / "report.html").read_text()
    done = CliRunner().invoke(report_command, [str(run), str(run), "--output", str(run)])
    assert done.exit_code == 0 and done.stderr.count("cannot be read") == 1


def test_a_key_of_a_record_does_not_control_the_terminal(run):
    append(run, {**record(3, 2.0), "red\x1b[31m": 1})
    for runs in ([str(run)], [str(run), str(run)]):
        done = CliRunner().invoke(report_command, [*runs, "--output", str(run)])
        assert done.exit_code == 0 and "\x1b" not in done.stdout
        assert len(runs) > 1 or "red\\x1b[31m" in done.stdout


def test_a_line_that_is_not_complete_yet_is_no_damage(run):
    _append(run / "metrics.jsonl", '{"step": 3, "lo')
    _append(run / "history.jsonl", '{"attempt": 1, "ev')
    assert _watched(run)[0]["problems"] == [] == report.read(run).problems


def test_a_replaced_file_is_counted_anew(run):
    watched = Watched(run)
    _append(run / "metrics.jsonl", "garbage\n")
    assert watched.status()["problems"]
    (run / "metrics.jsonl").write_text(json.dumps(record(1, 4.0)) + "\n")
    assert watched.status()["problems"] == []


def test_garbage_in_the_history_is_named(run):
    history = History(run)
    values = {"how": "began", "first": 0, "ranks": 1, "layout": "t=1", "changed": []}
    history.begin(**values, trained_on={}, config={"run": {}})
    _append(history.path, 'garbage\n{"attempt": 2, "event": "begin"}\n[1]\n\n')
    history.end(2, "done")
    assert unreadable_lines(run) == [2, 3, 4] and len(attempts(run)) == 1
    assert report.read(run).problems == [
        "history.jsonl: 3 lines cannot be read: the first is line 2"
    ]


@pytest.mark.parametrize("content", ["null", "", "step-00000099", "\0", "../run"])
def test_a_latest_that_names_nothing_is_named(run, content):
    assert "checkpoint none yet" in _watched(run)[1]
    (run / "checkpoints").mkdir()
    (run / "checkpoints/latest").write_text(content)
    status, drawn = _watched(run)
    assert status["checkpoint"] is None and "checkpoint unknown" in drawn
    assert "checkpoints/latest: names no checkpoint of this run" in drawn
    two = CliRunner().invoke(watch_command, [str(run), str(run), "--once"]).stdout
    assert "unknown" in two and "names no checkpoint" in two


TIMELINES = {
    "{": "this is not a timeline: not JSON, truncated or damaged",
    "{}": "a key or a value is missing, or has the wrong type",
    "null": "a key or a value is missing, or has the wrong type",
    '{"columns": [], "spans": [[1]]}': "its columns are []",
}


@pytest.mark.parametrize("content", TIMELINES)
def test_a_damaged_timeline_is_one_plain_line(run, content):
    (run / "timeline").mkdir()
    (run / "timeline/step-00000002.json").write_text(content)
    loaded = report.read(run)
    (said,) = loaded.problems
    assert loaded.measured is None and said.startswith("timeline/step-00000002.json: this is not")
    assert TIMELINES[content] in said and "(" not in said
