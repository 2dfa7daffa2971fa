"""`make gpu` without a GPU: what is kept, what is asked for again, and every reason on the page."""

import json
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import (
    identity,
    overlap,
    parts,
    peers,
    process,
    programs,
    run,
    timing,
    training,
    wires,
)
from benchmarks.gpu.page import page
from benchmarks.gpu.process import answer, last_words
from benchmarks.gpu.reasons import Left, Skipped, done, reasons
from benchmarks.gpu.training import in_turn, quickest
from ptdmpi.comm.nccl import library
from tests.parallel import ROOT

SAID = {"device": "some", "commit": "0", "libraries": {"torch": "2"}, "date": "today"}


@pytest.mark.parametrize(
    ("found", "whole"),
    [
        ({}, False),
        ({"s": 1.0}, True),
        ({"skipped": "not installed"}, True),
        ({"left": "no time was left"}, False),
        ({"failed": "exit code 1"}, False),
        ({"nccl": {"checks": 21}, "mpi": {"checks": 21}}, True),
        ({"nccl": {"checks": 21}, "mpi": {"left": "not over after 40 s"}}, False),
        ({"nccl": {"checks": 21, "wrong": ["broadcast"], "failed": "wrong: broadcast"}}, False),
        ({"fa3": {"skipped": "no package"}, "flash": {"s": 1.0}}, True),
    ],
)
def test_what_is_measured_again(found, whole):
    assert done(found) == whole


FRAMED = f"""Traceback (most recent call last):
ValueError: what it was
{"-" * 75}
prterun detected that one or more processes exited with non-zero status
{"-" * 75}

"""


def test_a_program_is_heard_to_its_end():
    assert last_words(FRAMED) == "ValueError: what it was" and last_words("") == ""
    say = 'print(\'{"a": {"s": 1}}\', flush=True)'
    bad = answer([sys.executable, "-c", f"{say}; raise ValueError('what it was')"], 60)
    assert bad == {"a": {"s": 1}, "failed": "exit code 1: ValueError: what it was"}
    words = f"{say}; import sys, time; print('waits', file=sys.stderr, flush=True); time.sleep(60)"
    assert answer([sys.executable, "-c", words], 1.5) == {
        "a": {"s": 1},
        "left": "not over after 2 s: waits",
    }
    assert answer(["true"], 60) == {"failed": "it printed nothing"}


def test_every_reason_stands_on_the_page():
    found = {
        "wires": {"nccl": {"checks": 21, "failed": "wrong: broadcast"}, "mpi": {"left": "no end"}},
        "peers": {"autocast": {"tokens_per_s": 3.0}, "left": "not over after 9 s"},
        "torchtitan": {"skipped": "it is not here"},
    }
    assert reasons(found["wires"]) == {"nccl": "wrong: broadcast", "mpi": "no end"}
    text = page({**SAID, "parts": found})
    assert "Not done yet; the same command continues with: wires; peers." in text
    assert "| nccl | 21 | wrong: broadcast |" in text and "| mpi |  | no end |" in text
    assert "Not measured: not over after 9 s." in text and "| autocast | 3 |" in text
    assert "## Torchtitan\n\nNot measured: it is not here." in text


def test_the_time_is_dealt_out(tmp_path):
    """A part that hangs takes twice its share at most, and what is left is said."""
    assert run.share_s(540.0, 10.0, 890.0) == pytest.approx(12.0)
    assert run.share_s(100.0, 50.0, 0.0) == 100.0
    limits, now = [], [0.0]

    def hangs(name: str, limit_s: float, record: run.Record) -> dict:
        limits.append(limit_s)
        now[0] += limit_s
        return {"left": "not over"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "identity", lambda: {key: SAID[key] for key in SAID if key != "date"})
        patch.setattr(run, "asked", lambda: dict.fromkeys("abcdefgh", 10.0))
        patch.setattr(run, "measured", hangs)
        patch.setattr(run.time, "monotonic", lambda: now[0])
        found = run.run(tmp_path, tmp_path / "gpu.md", 80.0, anew=True)
    assert limits[0] == pytest.approx(20.0) and now[0] <= 80.0 and len(limits) >= 4
    assert found["parts"]["h"]["left"].startswith("no time was left")


def test_what_a_row_was_stays_where_the_next_time_has_none():
    before = {"a": {"s": 1.0}, "b": {"left": "no end"}, "left": "not over"}
    assert run.better(before, {"b": {"s": 2.0}}) == {"a": {"s": 1.0}, "b": {"s": 2.0}}
    assert run.better(before, {"a": {"failed": "x"}})["a"] == {"s": 1.0}
    assert run.better({"left": "no time"}, {"s": 1.0}) == {"s": 1.0}


def test_several_ranks_on_a_gpu_need_a_libnccl_that_has_them(monkeypatch):
    monkeypatch.setattr(programs, "loaded", lambda: ("2.27.5", "/lib/libnccl.so.2"))
    reason = programs.nccl_refusal(2, 1)
    assert "libnccl 2.27.5 (/lib/libnccl.so.2) connects one rank on a GPU" in reason
    assert "several need libnccl 2.30" in programs.nccl_refusal(4, 2)
    assert programs.nccl_refusal(2, 2) == ""
    monkeypatch.setattr(programs, "loaded", lambda: ("2.30.1", "/lib/libnccl.so.2"))
    assert programs.nccl_refusal(4, 1) == ""


def test_ranks_that_nccl_cannot_connect_are_not_started(monkeypatch):
    """They would take a minute of the nine to say so."""
    started = []

    def answered(command: list[str], *arguments: object) -> dict:
        started.append(command[-1])
        return {"checks": 21}

    monkeypatch.setattr(programs, "answer", answered)
    monkeypatch.setattr(programs, "loaded", lambda: ("2.28.9", "/lib/libnccl.so.2"))
    rows = programs.run_program("wires, 2 ranks", 20.0, 1, lambda rows: None)
    assert started == ["mpi"] and rows["mpi"] == {"checks": 21}
    assert "several need libnccl 2.30" in rows["nccl"]["skipped"]
    assert list(programs.run_program("overlap, 2 ranks", 20.0, 1, lambda rows: None)) == ["nccl"]
    assert started == ["mpi"]


def test_how_much_is_said_under_kernels():
    def kernel(name: str, ts: float, dur: float, cat: str = "kernel") -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    said = [kernel("ncclDevKernel_AllReduce", 0, 10), kernel("ncclDevKernel_AllReduce", 20, 10)]
    others = [
        kernel("gemm", 5, 10),
        kernel("gemm", 8, 4),  # on another stream, at the same time
        kernel("norm", 28, 1),
        kernel("aten::mm", 0, 99, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    found = overlap.under_kernels(said + others)
    assert found["communication_s"] == pytest.approx(20e-6)
    assert found["share_under_kernels"] == pytest.approx(6 / 20)
    assert overlap.under_kernels(others)["skipped"] == "no kernel of NCCL among the 3 of the trace"


def test_versions_of_what_stands_under_torch(tmp_path, monkeypatch):
    """On the page and in the JSON, whose numbers are worth nothing under others."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91200)
    monkeypatch.setattr(identity, "loaded", lambda: ("2.30.1", "/lib/libnccl.so.2"))
    found = identity.identity()
    under = {"CUDA": "13.0", "driver": "580.65.06", "cuDNN": "91200", "libnccl": "2.30.1"}
    assert identity.machinery() == under and found["libraries"].items() >= under.items()
    text = page({**found, "date": "today", "parts": {}})
    assert "CUDA 13.0, driver 580.65.06, cuDNN 91200, libnccl 2.30.1" in text


def test_a_library_that_cannot_say_its_version_ends_nothing(monkeypatch):
    """Such as a cuDNN that is not the one torch was built with."""

    def mismatch() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", mismatch)
    assert "cuDNN" not in identity.machinery()


def test_without_git_other_sources_begin_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    source = tmp_path / "src/module.py"
    source.parent.mkdir()
    commits = []
    for text in ("a", "b", "a"):
        source.write_text(text)
        commits.append(identity.identity()["commit"])
    assert commits[0] == commits[2] != commits[1] and commits[0].startswith("sources ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has a libnccl")
def test_a_machine_without_libnccl_says_so():
    pytest.importorskip("nccl.core")
    assert "libnccl" not in identity.machinery()
    assert library.description().startswith("nccl4py, but no libnccl: ")
    axis = SimpleNamespace(size=2, control=SimpleNamespace(allgather=lambda one: [one, one]))
    refused = wires.refusal(axis, "nccl", torch.device("cpu"))
    assert refused.startswith("no NCCL: no libnccl: ")
    assert wires.refusal(axis, "mpi", torch.device("cpu")) == ""


def test_ours_and_the_best_other_in_turn():
    rows = {
        "autocast": {"tokens_per_s": 8.0},
        "bf16 weights": {"tokens_per_s": 10.0},
        "compiled": {"failed": "x"},
    }
    assert quickest(rows) == "bf16 weights"
    with pytest.raises(Left, match="autocast was not measured"):
        quickest({"autocast": {"left": "no time"}})
    order = []

    def side(name: str, rates: list[float]) -> dict:
        order.append(name)
        return {"tokens_per_s": rates[order.count(name) - 1]}

    named = {"ours": "gpt, compiled", "theirs": "bf16 weights"}
    rounds = in_turn(
        lambda: side("ours", [12.0, 22.0, 9.0]), lambda: side("theirs", [10.0] * 3), named, 3
    )
    rows = [measure() for _, measure in rounds]
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert rows[-1]["ours_over_best"] == pytest.approx(1.2) and len(rows[0]["ratios"]) == 1
    assert rows[-1] | named == rows[-1]
    assert rows[0]["left"] == "1 of 3 rounds" and [done(row) for row in rows] == [
        False,
        False,
        True,
    ]


def test_a_side_without_a_rate_is_left():
    sides = [lambda: {"tokens_per_s": 1.0}, lambda: {"failed": "RuntimeError: no triton"}]
    (rows,) = timing.measured_rows(in_turn(*sides, {}, 1))
    assert rows["in turn"]["left"].startswith("theirs was not measured: ")


def test_the_ways_in_turn_are_those_that_were_best(tmp_path, monkeypatch):
    known = {
        "small": {"tokens_per_s": 1.0},
        "small, compiled": {"tokens_per_s": 2.0},
        "small by transformers": {"autocast": {"tokens_per_s": 1.0}, "left": "not over"},
    }
    (tmp_path / "latest.json").write_text(json.dumps({"parts": known}))
    monkeypatch.setattr(parts, "MODELS", {"small": parts.Shape(parts.SMALL, 97)})
    monkeypatch.setattr(parts, "_workload", lambda *shape: None)
    monkeypatch.setattr(
        parts, "training", lambda *shape, compiled: {"tokens_per_s": 3.0 if compiled else 0.0}
    )
    monkeypatch.setattr(
        peers, "transformers_side", lambda workload, only: [(only, lambda: {"tokens_per_s": 2.0})]
    )
    every = {part.name: part.measure for part in parts.parts(torch.device("cpu"), tmp_path)}
    *_, rows = timing.measured_rows(every["small in turn"]())
    found = rows["in turn"]
    assert found["ours"] == "small, compiled" and found["theirs"] == "autocast"
    assert found["ours_over_best"] == 1.5


def test_a_microbatch_for_which_there_is_memory(monkeypatch):
    """Twice ours at first; of what did not fit in one setting nothing is tried compiled."""
    tried = []

    def way(asked: peers.Workload, one: peers.Setting, size: peers.Size) -> dict:
        tried.append((one.half, one.compiled, size))
        if size[0] > 1 and not one.half:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if one.half and one.compiled:
            raise RuntimeError("no triton\nmore")
        return {"micro_size": size[0], "recompute": size[1], "tokens_per_s": 1.0}

    monkeypatch.setattr(timing, "fresh", lambda device: None)
    monkeypatch.setattr(peers, "transformers_way", way)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: True)
    asked = peers.Workload(torch.device("cpu"), None, 97, 8, 2)
    assert peers.sizes(asked) == [(4, "none"), (2, "none"), (1, "none"), (2, "full"), (1, "full")]
    *_, found = timing.measured_rows(peers.transformers_side(asked))
    assert found["autocast"]["micro_size"] == 1 and found["bf16 weights"]["micro_size"] == 4
    assert [size for half, compiled, size in tried if compiled and not half] == [(1, "none")]
    assert found["bf16 weights, compiled"] == {"failed": "RuntimeError: no triton"}
    (only,) = peers.transformers_side(asked, only="bf16 weights")
    assert only[0] == "bf16 weights"
    nothing = timing.first_that_fits(asked.device, (), lambda one: {})
    assert nothing is None


GIB = 2**30


def test_models_fit_a_gpu_of_80_gb(monkeypatch):
    monkeypatch.setattr(training, "rank_memory_bytes", lambda device, ranks: 76 * GIB)
    largest = {
        name: (configs[0].batch.micro_size, configs[0].recompute.mode)
        for name, shape in parts.MODELS.items()
        for configs in [training.fitting(*shape, torch.device("cpu"))]
    }
    assert largest == {"gpt 1.3b": (8, "none"), "llama 2.7b": (8, "none")}


def test_others_are_skipped_where_nothing_of_ours_fits(tmp_path, monkeypatch):
    """Their numbers would stand alone."""
    monkeypatch.setattr(training, "rank_memory_bytes", lambda device, ranks: GIB)
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    known = {name: {"skipped": "no memory"} for name in parts.MODELS}
    (tmp_path / "latest.json").write_text(json.dumps({"parts": known}))
    every = {one.name: one.measure for one in parts.parts(torch.device("cpu"), tmp_path)}
    sides = ("by transformers", "by torchtitan", "in turn")
    asked = [name for name in every if name.endswith(sides)]
    assert len(asked) == 5
    for name in asked:
        with pytest.raises(Skipped, match="it does not fit into 1 GiB"):
            every[name]()


def test_the_parts_of_most_worth_come_first_within_nine_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", tmp_path)  # without torchtitan
    asked = run.asked()
    first = ["machine", "parity", "gpt 1.3b", "gpt 1.3b, compiled", "llama 2.7b"]
    assert list(asked)[:5] == first and sum(asked.values()) <= run.LIMIT_S
    assert len(asked) == 19
    for name in parts.MODELS:
        assert list(asked).index(f"{name} by transformers") < list(asked).index(f"{name} in turn")


def test_rows_are_measured_once():
    """A part that was cut short continues with the rows that it has not."""

    def fails() -> dict:
        raise RuntimeError("no triton\nmore")

    rows = {"known": fails, "bad": fails, "good": lambda: {"s": 1.0}}
    *_, measured = timing.measured_rows(rows.items(), known={"known": {"s": 2.0}})
    assert measured == {"bad": {"failed": "RuntimeError: no triton"}, "good": {"s": 1.0}}


@pytest.mark.long
def test_rows_are_kept_while_their_part_goes_on(tmp_path, monkeypatch):
    """Whoever ends the measurement from outside loses ten seconds of it at most."""
    say = 'print(\'{"a": {"s": 1}}\', flush=True); import time; time.sleep(60)'
    monkeypatch.setattr(process, "EVERY_S", 0.1)
    seen = []
    ended = answer([sys.executable, "-c", say], 3.0, so_far=seen.append)
    assert seen[-1] == {"a": {"s": 1}} and ended["a"] == {"s": 1} and "left" in ended

    results = tmp_path / "results"
    copies = tmp_path / "copies"
    record = run.Record({**SAID, "parts": {}}, results, tmp_path / "gpu.md", copies)

    def cut_short(command: list[str], limit_s: float, *, so_far: Callable) -> dict:
        so_far(seen[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "answer", cut_short)
    with pytest.raises(KeyboardInterrupt):
        run.measured("part", 3.0, record)
    kept = json.loads((copies / "latest.json").read_text())["parts"]["part"]
    assert kept["a"] == {"s": 1} and not done(kept)
    assert "| a | 1 |" in (copies / "gpu.md").read_text()
    own = {key: SAID[key] for key in SAID if key != "date"}
    assert run.known_parts(results, own) == {"part": kept}
    assert run.known_parts(results, {**own, "commit": "1"}) == {}
    assert run.known_rows("part", results) == {"a": {"s": 1}}


def test_the_recipe_for_a_bare_machine_names_locked_packages():
    text = page({**SAID, "parts": {}})
    assert "## On a machine without a network" in text
    quoted = re.findall(r"names='([^']+)'|names=\"\$names([^\"]+)\"", text)
    names = {name for some in quoted for name in "".join(some).split("|") if name}
    locks = [
        (ROOT / name).read_text() for name in ("requirements.lock", "requirements-extras.lock")
    ]
    locked = {line.partition("==")[0] for lock in locks for line in lock.splitlines()}
    assert len(names) == 12 and names <= locked
