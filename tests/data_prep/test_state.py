"""Two commands at one output, and state files that are damaged."""

import json
import os
import signal
import subprocess
import sys
import time

import h5py
import pytest

from data_prep import cli
from data_prep.state import RunState
from ptdmpi.config import InputError
from ptdmpi.data.header import SUMMARY


@pytest.fixture
def words(tmp_path):
    lines = [json.dumps({"text": f"document {number} " * 20}) for number in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    return [
        *("tokenize", str(tmp_path / "in.jsonl"), "--tokenizer", "bytes", "--workers", "1"),
        *("--output", str(tmp_path / "o"), "--shard-tokens", "9000", "--quiet"),
    ]


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", *words])
    cli.main()


def refused(monkeypatch, capsys, *words):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *words)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1
    return error


IDENTITY = {"tokenizer": "t"}


def test_a_second_command_is_told_who_is_at_work(tmp_path):
    outputs = [tmp_path / "t", tmp_path / "v"]
    first = RunState(outputs, IDENTITY)
    first.begin(False)
    for force in (False, True):
        for others in (outputs, [tmp_path / "t2", tmp_path / "t"]):
            with pytest.raises(InputError, match=f"t: process {os.getpid()} on .* is writing"):
                RunState(others, IDENTITY).begin(force)
    first.clean()
    assert not any(output.exists() for output in outputs)
    other = RunState(outputs, IDENTITY)
    other.begin(False)
    other.release()
    other.begin(True)  # which removes and makes again the folder of the lock
    with pytest.raises(InputError, match="is writing"):
        RunState(outputs, IDENTITY).begin(False)
    other.release()
    RunState(outputs, IDENTITY).begin(False)


def test_a_killed_command_leaves_no_lock(tmp_path, words, monkeypatch, capsys):
    monkeypatch.setattr("os.fsync", lambda file: None)
    code = (
        "import time; from data_prep import cli, group_writer\n"
        "add = group_writer.GroupWriter.add\n"
        "group_writer.GroupWriter.add = lambda *words: (add(*words), time.sleep(60))\n"
        "cli.main()"
    )
    with subprocess.Popen([sys.executable, "-c", code, *words]) as process:
        shards = tmp_path / "o"
        while not any(shards.glob("*.h5")) and process.poll() is None:
            time.sleep(0.02)
        assert f"o: process {process.pid} on " in refused(monkeypatch, capsys, *words)
        process.send_signal(signal.SIGKILL)
    run(monkeypatch, *words)
    assert not (shards / ".unfinished").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", "5", '{"shards": 5}', "[" * 100_000])
def test_a_damaged_summary(tmp_path, words, monkeypatch, capsys, content):
    run(monkeypatch, *words)
    capsys.readouterr()
    (tmp_path / "o" / SUMMARY).write_text(content)
    assert "--force to start again" in refused(monkeypatch, capsys, *words)
    run(monkeypatch, *words, "--force")


def test_finished_shards_are_opened(tmp_path, words, monkeypatch, capsys):
    run(monkeypatch, *words)
    shards = sorted((tmp_path / "o").glob("*.h5"))
    assert len(shards) > 2
    run(monkeypatch, *words)
    capsys.readouterr()
    sound = shards[-1].read_bytes()
    with h5py.File(shards[-1], "r+") as file:
        file.attrs["eod_id"] = 300
    error = refused(monkeypatch, capsys, *words)
    assert f"{shards[-1]}: has eod_id 300" in error and "--force to start again" in error
    with h5py.File(shards[-1], "r+") as file:
        file.attrs["eod_id"] = 255
    assert f"{shards[-1]} has eod_id 255, but" in refused(monkeypatch, capsys, *words)
    shards[-1].write_bytes(sound[:-100])
    assert "truncated" in refused(monkeypatch, capsys, *words)
    shards[-1].write_bytes(sound)
    run(monkeypatch, *words)
    # an older version listed only the names of the shards
    summary = json.loads((tmp_path / "o" / SUMMARY).read_text())
    summary["shards"] = [shard.name for shard in shards]
    (tmp_path / "o" / SUMMARY).write_text(json.dumps(summary))
    run(monkeypatch, *words)
    capsys.readouterr()
    shards[1].write_bytes(b"")
    assert f"{shards[1]}: " in refused(monkeypatch, capsys, *words)
    run(monkeypatch, *words, "--force")
    assert shards[-1].read_bytes() == sound


@pytest.mark.parametrize("change", [{"shards": "x"}, {"counters": {}}, {"more": 1}, None])
def test_damaged_progress(tmp_path, words, monkeypatch, capsys, change):
    done = RunState.finish
    monkeypatch.setattr(RunState, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit):
        run(monkeypatch, *words)
    capsys.readouterr()
    monkeypatch.setattr(RunState, "finish", done)
    path = tmp_path / "o" / ".unfinished" / "group-00000.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps([] if change is None else {**known, **change}))
    error = refused(monkeypatch, capsys, *words)
    assert "group-00000.json: is not a file of" in error and "--force to start again" in error
    run(monkeypatch, *words, "--force")


def test_nothing_is_removed_before_a_refusal(tmp_path, words, monkeypatch, capsys):
    split = [*words, "--valid-output", str(tmp_path / "v"), "--valid-fraction", "0.3"]
    run(monkeypatch, *split)
    capsys.readouterr()
    (tmp_path / "v" / "mine.h5").write_text("precious")
    before = sorted(path for path in tmp_path.rglob("*.h5"))
    assert "v: holds shards of unknown origin" in refused(monkeypatch, capsys, *split, "--force")
    other = [*words, "--valid-output", str(tmp_path / "w"), "--valid-fraction", "0.3", "--force"]
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "shard-00000-00000.h5").write_text("precious")
    assert "w: holds shards of unknown origin" in refused(monkeypatch, capsys, *other)
    assert before == sorted(path for path in tmp_path.rglob("[!w]/*.h5"))


def test_held_out_shards_whose_summary_is_gone(tmp_path, words, monkeypatch, capsys):
    split = [*words, "--valid-output", str(tmp_path / "v"), "--valid-fraction", "0.3"]
    run(monkeypatch, *split)
    capsys.readouterr()
    (tmp_path / "v" / SUMMARY).unlink()
    assert "v: tokenize.json is missing; use --force" in refused(monkeypatch, capsys, *split)
    run(monkeypatch, *split, "--force")
    assert (tmp_path / "v" / SUMMARY).exists()
