"""`ptdmpi watch`: the status of a run directory from its start to its end."""

import io
import json
import math
import os
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

from ptdmpi.commands.watch import command
from ptdmpi.config import InputError
from ptdmpi.report import live
from ptdmpi.report.status import Tail, Watched, binned
from tests.report._made import append, made, record


def test_a_run_from_its_start_to_its_end(tmp_path):
    run = made(tmp_path / "r")
    watched = Watched(run)
    assert watched.status()["state"] == "starting"
    append(run, record(1, 4.0), record(2, 3.0, step_time_s=4.0))
    append(run, {"step": 2, "validation_loss": 3.5})
    status = watched.status()
    assert (status["state"], status["step"], status["loss"]) == ("running", 2, 3.0)
    assert status["left_s"] == 8 * 3.0  # eight steps at the median of 2 and 4 s
    assert (status["validation_loss"], status["validation_step"]) == (3.5, 2)
    append(run, record(3, 2.0), {"step": 3, "validation_loss": 3.75})
    saved = run / "checkpoints" / "step-00000003"
    saved.mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("step-00000003\n")
    status = watched.status()
    assert status["losses"] == [4.0, 3.0, 2.0]
    assert (status["best_validation_step"], status["validation_step"]) == (2, 3)
    assert status["checkpoint"]["step"] == 3
    (run / "log.txt").write_text("SIGUSR1 on rank 0: stopped on request after step 3; the same\n")
    assert watched.status()["state"] == "stopped"
    (run / "done").write_text('{"steps": 10}\n')
    assert watched.status()["state"] == "done"


def test_records_that_a_new_start_drops_are_dropped(tmp_path):
    run = made(tmp_path / "r", 10, record(1, 4.0), record(2, 3.0), record(3, 2.0))
    watched = Watched(run)
    assert watched.status()["losses"] == [4.0, 3.0, 2.0]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "new").write_text(lines[0])
    os.replace(run / "new", run / "metrics.jsonl")
    append(run, record(2, 9.0))
    assert watched.status()["losses"] == [4.0, 9.0]


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path):
    path = tmp_path / "f"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_text("one\ntw")
    assert tail.lines() == ["one"] and tail.begun_anew
    with path.open("a") as file:
        file.write("o\n")
    assert tail.lines() == ["two"] and not tail.begun_anew
    path.write_text("x\n")
    assert tail.lines() == ["x"] and tail.begun_anew


def test_silence_slow_ranks_and_warnings(tmp_path):
    run = made(
        tmp_path / "r", 1000, record(20, 4.0, slow_ranks=[{"rank": 3, "host": "n7", "factor": 1.5}])
    )
    slow = "slow compared with ranks that do the same work: rank 3 (n7) 1.50 times\n"
    (run / "log.txt").write_text(f"saved x\nwarning: disk is full\n{slow}")  # told by its record
    watched = Watched(run)
    status = watched.status()
    assert status["slow_ranks"][0]["rank"] == 3 and status["remarks"] == ["warning: disk is full"]
    for name in ("metrics.jsonl", "log.txt", "config.toml"):
        os.utime(run / name, (0, time.time() - 500))
    assert watched.status()["state"] == "silent"
    append(run, *(record(step, 4.0) for step in range(21, 80)))
    status = watched.status()
    assert status["state"] == "running" and status["slow_ranks"] == []


def text_of(picture: object) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(picture)
    return capture.get()


def test_the_block_and_the_table_say_it_all(tmp_path):
    slow = [{"rank": 3, "host": "n7", "factor": 1.5}]
    first = made(tmp_path / "first", 10, record(1, 4.0), record(2, math.nan, slow_ranks=slow))
    second = made(tmp_path / "second")
    statuses = [Watched(path).status() for path in (first, second)]
    text = text_of(live.picture(statuses[:1]))
    wanted = [
        "first",
        "running",
        "step 2/10",
        "loss nan",
        "64 tokens/s",
        "mfu 25.0%",
        "left 16.0 s",
    ]
    for words in (*wanted, "rank 3 (n7) 1.50 times", "checkpoint none yet"):
        assert words in text, words
    text = text_of(live.picture(statuses))
    assert "first" in text and "second" in text and "starting" in text and "2/10" in text
    assert "first: slow ranks: rank 3 (n7)" in text


def test_small_pieces():
    assert live.sparkline([1.0, 2.0, math.nan, math.inf, 8.0]) == "▁▂  █"
    assert live.sparkline([math.nan]) == "" and live.sparkline([2.0, 2.0]) == "▁▁"
    assert binned([1.0, 2.0, 3.0, 4.0], 2) == [1.5, 3.5] and binned([1.0], 2) == [1.0]
    times = {0.25: "250 ms", 5.0: "5.0 s", 65: "1:05", 3725: "1:02:05", 200_000: "2 d 7 h"}
    assert {seconds: live.duration(seconds) for seconds in times} == times


def test_the_command_prints_once_where_there_is_no_terminal(tmp_path):
    run = made(tmp_path / "r", 10, record(1, 4.0))
    plain = CliRunner().invoke(command, [str(run)])
    assert plain.exit_code == 0 and "step 1/10" in plain.stdout and "\x1b" not in plain.stdout
    status = json.loads(CliRunner().invoke(command, [str(run), str(run), "--json"]).stdout)
    assert [run_status["step"] for run_status in status["runs"]] == [1, 1]
    with pytest.raises(InputError, match="is not a run directory"):
        CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False)


def test_watching_needs_no_torch_and_no_mpi(tmp_path):
    run = made(tmp_path / "r", 10, record(1, 4.0))
    code = (
        "import sys\n"
        "for name in ('torch', 'mpi4py', 'h5py', 'matplotlib'): sys.modules[name] = None\n"
        f"from ptdmpi.commands.watch import command; command(['--once', {str(run)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "step 1/10" in done.stdout, done.stderr


DAMAGED = {
    "a text for a number": {"loss": "4.0"},
    "no number of tokens": {"tokens_per_s": None},
    "a time that is none": {"step_time_s": float("inf")},
    "a huge time": {"step_time_s": 1e300},
    "a huge integer": {"grad_norm": 10**400},
    "a step that is none": {"step": "2"},
    "a flipped bit in a key": {"step_time_s": 2.0, "layout": 3},
    "slow ranks that are none": {"slow_ranks": [{"rank": 1}]},
    "a validation without a number": {"validation_loss": {}},
    "tasks without a score": {"tasks": {"a": {"items": 3}}},
    "tasks that are none": {"tasks": []},
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_stepped_over(tmp_path, damage):
    run = made(tmp_path / "r", 10, record(1, 4.0))
    watched = Watched(run)
    append(run, record(2, 3.0) | damage)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    status = watched.status()
    assert (status["step"], status["losses"]) == (1, [4.0])
    Console(file=io.StringIO()).print(live.picture([status]))


@pytest.mark.long
@pytest.mark.parametrize("bit", [0, 4, 6])
def test_one_flipped_bit_of_a_record_raises_nothing(tmp_path, bit):
    line = json.dumps(record(1, 4.0, slow_ranks=[{"rank": 1, "host": "a", "factor": 2.0}])) + "\n"
    run = made(tmp_path / "r")
    for place in range(len(line)):
        damaged = bytearray(line.encode())
        damaged[place] ^= 1 << bit
        (run / "metrics.jsonl").write_bytes(bytes(damaged))
        Console(file=io.StringIO()).print(live.picture([Watched(run).status()]))


def test_escape_sequences_do_not_reach_the_terminal(tmp_path):
    run = made(tmp_path / "r", 10, record(1, 4.0))
    (run / "log.txt").write_text("warning: \x1b]0;title\x07 \x1b[2J\n")
    drawn = io.StringIO()
    Console(file=drawn, width=200).print(live.picture([Watched(run).status()]))
    assert "\x1b" not in drawn.getvalue() and "\\x1b[2J" in drawn.getvalue()
