"""Starts of a run, one after the other: what is said, kept, reported, and left alone."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from ptdmpi import report
from ptdmpi.checkpoint.examine import newest
from ptdmpi.config import SharedInputError
from ptdmpi.inference.stored import open_model
from ptdmpi.lineage.attempts import History, attempts, that_trained
from tests._alarm import at_most
from tests._runs import after, log, loop, records, shard
from tests.parallel import parallel

SMALL = {"run.steps": 4, "batch.global_size": 4}


def _run(comm, folder, **changes):
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    with loop(comm, folder, {**SMALL, **keys}) as made:
        made.run()
        return made


def _contents(folder):
    names = ("config.toml", "done", "metrics.jsonl", "log.txt", "history.jsonl")
    return {name: (folder / "run" / name).read_bytes() for name in names}


@parallel(ranks=[1])
def test_nothing_to_do_means_nothing_written(comm, tmp_path):
    _run(comm, tmp_path)
    before = _contents(tmp_path)
    _run(comm, tmp_path)
    _run(comm, tmp_path, run__steps=2, batch__micro_size=2, optimizer__learning_rate=1.0)
    assert _contents(tmp_path) == before
    with pytest.raises(SharedInputError, match="skipped or seen twice"):
        _run(comm, tmp_path, batch__global_size=8)
    assert _contents(tmp_path) == before
    (tmp_path / "run/done").unlink()  # killed just before the end
    _run(comm, tmp_path)
    assert _contents(tmp_path) == before


@parallel(ranks=[2])
def test_a_validation_after_the_last_step_that_a_stop_interrupts_is_made_up(comm, tmp_path):
    whole, broken = (Path(tmp_path, name) for name in ("whole", "broken"))
    if comm.rank == 0:
        whole.mkdir(), broken.mkdir()
    comm.Barrier()
    changes = {**SMALL, "run.steps": 2, "log.validate_every_steps": 2, "checkpoint.keep_best": 1}

    def run(folder, disturb=lambda made: None):
        with loop(comm, folder, {**changes, "data.valid": f"{folder}/valid"}, disturb) as made:
            made.run()

    def signal_in_validation(made):
        if comm.rank == 1:
            stop = partial(os.kill, os.getpid(), signal.SIGUSR1)
            made.engine.evaluate = after(made.engine.evaluate, 1, stop)

    run(whole)
    for _ in range(2):  # the second start is stopped while it makes up for the validation
        with pytest.raises(SystemExit) as stopped:
            run(broken, signal_in_validation)
        assert stopped.value.code == 75
        assert not (broken / "run/done").exists()
        assert (broken / "run/checkpoints/latest").read_text() == "step-00000002\n"
    run(broken)
    names = ("done", "checkpoints/latest", "checkpoints/best")
    of = [
        {name: (folder / "run" / name).read_text() for name in names} for folder in (whole, broken)
    ]
    assert of[0] == of[1]
    (known,), (made_up,) = (_validation_losses(folder) for folder in (whole, broken))
    assert known == made_up


def _validation_losses(folder):
    made = records(folder / "run")
    return [record["validation_loss"] for record in made if "validation_loss" in record]


@parallel(ranks=[1])
def test_what_changed_is_said_in_log_records_and_report(comm, tmp_path):
    _run(comm, tmp_path)
    shard(tmp_path / "more", 900, 7)
    mixture = [
        {"path": str(tmp_path / "train"), "weight": "0.5"},
        {"path": str(tmp_path / "more"), "weight": "0.5"},
    ]
    changes = {"data__train": mixture, "run__steps": 8, "optimizer__learning_rate": 1e-5}
    with pytest.raises(SharedInputError, match=r"data\.train .*legal: .*data\.change"):
        _run(comm, tmp_path, **changes)
    changes |= {"data__change": "from here", "parallel__tensor": 1, "batch__micro_size": 2}
    _run(comm, tmp_path, **changes)
    text = log(tmp_path / "run")
    assert "resumed after step 4; changed since: data.train " in text
    assert "optimizer.learning_rate 0.003 -> 1e-05" in text and "run.steps 4 -> 8" in text
    assert "the samples have another order from step 5 (sample 16) on" in text
    kept = records(tmp_path / "run")
    (changed,) = [record for record in kept if "changed" in record]
    assert changed["step"] == 5 and changed["changed"][0].startswith("data.train ")
    steps = [record for record in kept if "loss" in record]
    assert [record["samples_drawn"] for record in steps][3:] == [
        [16],
        [18, 2],
        [20, 4],
        [22, 6],
        [24, 8],
    ]
    assert [record["tokens"] for record in steps] == [step * 4 * 16 for step in range(1, 9)]
    loaded = report.read(tmp_path / "run")
    numbers = report.summary(loaded)
    assert [(record["samples"], record["path"]) for record in numbers["drawn"]] == [
        (24, str(tmp_path / "train")),
        (8, str(tmp_path / "more")),
    ]
    spans = [
        (record["first_step"], record["last_step"], record["why"]) for record in numbers["attempts"]
    ]
    assert spans == [(1, 4, "done"), (5, 8, "done")]
    assert "changed at step 5" in report.table(numbers)
    assert loaded.config["batch"]["micro_size"] == 2
    # once more, with the same configuration: nothing is reported, and the data are the same
    _run(comm, tmp_path, **{**changes, "run__steps": 9})
    assert log(tmp_path / "run").rstrip().count("the samples have another order") == 1
    stored = open_model(tmp_path / "run")
    assert [record.step for record in stored.trained_on.stretches] == [0, 4]


@parallel(ranks=[1])
def test_a_run_directory_is_resumed_elsewhere(comm, tmp_path):
    _run(comm, tmp_path)
    source, other = str(tmp_path / "run"), str(tmp_path / "other")
    with pytest.raises(SharedInputError, match=r"nothing is left to do; legal: run\.steps above 4"):
        _run(comm, tmp_path, run__dir=other, checkpoint__resume=source)
    assert not (tmp_path / "other/done").exists() and not (tmp_path / "other/config.toml").exists()
    with pytest.raises(SharedInputError, match=r"batch\.global_size 4 -> 8: samples would be"):
        _run(
            comm,
            tmp_path,
            run__dir=other,
            checkpoint__resume=source,
            batch__global_size=8,
            run__steps=6,
        )
    named = {"run__dir": other, "checkpoint__resume": source, "data__change": "from here"}
    _run(comm, tmp_path, **named, batch__global_size=8, run__steps=6)
    steps = [record for record in records(tmp_path / "other") if "loss" in record]
    assert [(record["step"], record["tokens"] // 16) for record in steps] == [(5, 24), (6, 32)]
    assert [sum(record["samples_drawn"]) for record in steps] == [24, 32]
    # the same command resumes the run, although its source was trained further
    _run(comm, tmp_path, run__steps=7)
    _run(comm, tmp_path, **named, batch__global_size=8, run__steps=8)
    assert "an earlier start resumed from checkpoint.resume" in log(tmp_path / "other")
    assert newest(tmp_path / "other").name == "step-00000008"
    own = _run(comm, tmp_path, checkpoint__resume=source, run__steps=8)
    assert own.first == 7


def _begin(history, first, **more):
    values = {"how": "begins", "ranks": 1, "layout": "t=1", "changed": [], "config": {}, **more}
    history.begin(first=first, trained_on={}, **values)


def test_history_of_attempts_that_were_killed_or_rolled_back(tmp_path):
    first = History(tmp_path)
    _begin(first, 0)
    first.end(6, "stopped: file STOP")
    first.end(6, "told once")
    _begin(History(tmp_path), 6)  # killed at once
    _begin(History(tmp_path), 6)  # killed later
    with open(tmp_path / "history.jsonl", "a") as file:
        file.write('{"attempt": "3"}\n[]\n{"attempt": 3, "event": "e')  # spoilt, and torn
    last = History(tmp_path)
    _begin(last, 4)  # from an earlier checkpoint
    last.end(9, "done")
    starts = attempts(tmp_path)
    assert [(start.number, start.last, start.why) for start in starts] == [
        (1, 6, "stopped: file STOP"),
        (2, None, ""),
        (3, None, ""),
        (4, 9, "done"),
    ]
    owed = [(start.number, *ends) for start, *ends in that_trained(starts, range(1, 10))]
    assert owed == [(1, 1, 4), (4, 5, 9)]
    owed = [(start.number, *ends) for start, *ends in that_trained(starts[:3], range(1, 9))]
    assert owed == [(1, 1, 6), (3, 7, 8)]
    assert [json.loads(line)["event"] for line in first.path.read_text().splitlines()[:2]] == [
        "begin",
        "end",
    ]


@parallel(ranks=[1])
@pytest.mark.parametrize(
    ("supervised", "last"),
    [(False, {"done": "", "stopped": "file STOP", "failed": "ValueError: mine"}), (True, {})],
)
def test_each_start_sends_messages_about_its_beginning_and_its_end(
    comm, tmp_path, supervised, last
):
    """Under `ptdmpi run` the ranks send nothing."""
    sent: list[tuple[str, int, bool, str]] = []

    def send(self: object, event: str, step: int, loss: float | None, why: str) -> None:
        sent.append((event, step, loss is not None, why))

    def fail(step: object) -> None:
        raise ValueError("mine")

    environ = {"PTDMPI_COPIES": str(tmp_path / "copies")} if supervised else {}
    changes = {**SMALL, "run.steps": 3}
    stop = tmp_path / "run/STOP"
    with (
        mock.patch("ptdmpi.sinks.notices.Notices.send", send),
        mock.patch.dict(os.environ, environ),
    ):
        with loop(comm, tmp_path, changes) as made, pytest.raises(SystemExit):
            stop.touch()
            made.run()
        stop.unlink(missing_ok=True)
        with loop(comm, tmp_path, changes) as made, pytest.raises(ValueError, match="mine"):
            made.hooks.step_ended = fail
            made.run()
        with loop(comm, tmp_path, changes) as made:
            made.run()
    if supervised:
        assert sent == []
        return
    assert [event for event, *_ in sent[1::2]] == ["stopped", "failed", "done"]
    assert all(event == "begins" for event, *_ in sent[::2])
    assert sent[0][1:3] == (0, False) and sent[0][3] == "1 rank"
    assert sent[-1][1:3] == (3, True)
    for event, text in last.items():
        assert any(kind == event and text in why for kind, _, _, why in sent), event


def test_a_history_that_became_a_pipe_is_an_error(tmp_path):
    """The end of the attempt cannot be recorded, but the run does not wait for ever."""
    history = History(tmp_path)
    _begin(history, 0)
    (tmp_path / "history.jsonl").unlink()
    os.mkfifo(tmp_path / "history.jsonl")
    with at_most(5), pytest.raises(OSError, match="is a pipe or a device"):
        history.end(1, "done")


@parallel(ranks=[1])
def test_a_run_without_its_checkpoints_does_not_begin_anew(comm, tmp_path):
    """As if their file system were not mounted: its records say that it has saved."""
    _run(comm, tmp_path, checkpoint__every_steps=2)
    run = tmp_path / "run"
    (run / "checkpoints").rename(tmp_path / "away")
    before = records(run)
    for content in (None, "latest"):
        if content is not None:
            (run / "checkpoints").mkdir(exist_ok=True)
            (run / "checkpoints/latest").write_text("step-00000004\n")
        with pytest.raises(SharedInputError, match=r"checkpoints.*checkpoint\.resume = .never. "):
            _run(comm, tmp_path, run__steps=6)
        assert records(run) == before
    shutil.rmtree(run / "checkpoints")
    (tmp_path / "away").rename(run / "checkpoints")
    shutil.rmtree(run / "checkpoints/step-00000004")
    assert _run(comm, tmp_path, run__steps=6).first == 2
    assert "step-00000004: is missing, but " in log(run)


@parallel(ranks=[1])
def test_lost_records_are_warned_of(comm, tmp_path):
    _run(comm, tmp_path)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    _run(comm, tmp_path, run__steps=5)
    assert "has no record of step" not in log(tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text("".join(lines[:2]))
    _run(comm, tmp_path, run__steps=6)
    assert "metrics.jsonl has no record of step 5, the newest is that of step 2" in log(
        tmp_path / "run"
    )
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    left = [line for line in lines if json.loads(line)["step"] != 1]
    (tmp_path / "run/metrics.jsonl").write_text("".join(left))
    _run(comm, tmp_path, run__steps=7)
    assert "metrics.jsonl lacks the records of 4 steps (the first is step 1): " in log(
        tmp_path / "run"
    )
