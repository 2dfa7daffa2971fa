"""`make gpu` without a GPU: what is kept, what is asked for again, and every reason on the page."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import overlap, parts, peers, run, timing, wires
from benchmarks.gpu.page import page
from benchmarks.gpu.process import answer, last_words
from benchmarks.gpu.reasons import Left, done, reasons
from benchmarks.gpu.training import in_turn, quickest
from ptdmpi.comm.nccl import library

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
    assert "Not done yet, and gone on with by the same command: wires; peers." in text
    assert "| nccl | 21 | wrong: broadcast |" in text and "| mpi |  | no end |" in text
    assert "Not measured: not over after 9 s." in text and "| autocast | 3 |" in text
    assert "## Torchtitan\n\nNot measured: it is not here." in text


def test_the_time_is_dealt_out():
    """A part that hangs takes twice its share at most, and what is left is said."""
    assert run.share_s(540.0, 10.0, 890.0) == pytest.approx(12.0)
    assert run.share_s(100.0, 50.0, 0.0) == 100.0
    limits, now = [], [0.0]

    def hangs(name: str, limit_s: float) -> dict:
        limits.append(limit_s)
        now[0] += limit_s
        return {"left": "not over"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "identity", lambda: {key: SAID[key] for key in SAID if key != "date"})
        patch.setattr(run, "asked", lambda: dict.fromkeys("abcdefgh", 10.0))
        patch.setattr(run, "measured", hangs)
        patch.setattr(run.time, "monotonic", lambda: now[0])
        patch.setattr(run, "write_whole", lambda path, text: None)
        found = run.run(run.RESULTS / "none", run.RESULTS, 80.0, anew=True)
    run.RESULTS.joinpath("none").rmdir()
    assert limits[0] == pytest.approx(20.0) and now[0] <= 80.0 and len(limits) >= 4
    assert found["parts"]["h"]["left"].startswith("no time was left")


def test_what_a_row_was_stays_where_the_next_time_has_none():
    before = {"a": {"s": 1.0}, "b": {"left": "no end"}, "left": "not over"}
    assert run.better(before, {"b": {"s": 2.0}}) == {"a": {"s": 1.0}, "b": {"s": 2.0}}
    assert run.better(before, {"a": {"failed": "x"}})["a"] == {"s": 1.0}
    assert run.better({"left": "no time"}, {"s": 1.0}) == {"s": 1.0}


def test_several_ranks_on_a_gpu_need_a_libnccl_that_has_them(monkeypatch):
    monkeypatch.setattr(wires, "loaded", lambda: ("2.27.5", "/lib/libnccl.so.2"))
    assert "libnccl 2.27.5 (/lib/libnccl.so.2) has one rank on a GPU" in wires.too_many(2, 1)
    assert "several need libnccl 2.30" in wires.too_many(4, 2)
    assert wires.too_many(2, 2) == ""
    monkeypatch.setattr(wires, "loaded", lambda: ("2.30.1", "/lib/libnccl.so.2"))
    assert wires.too_many(4, 1) == ""


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
    monkeypatch.setattr(library, "loaded", lambda: ("2.30.1", "/lib/libnccl.so.2"))
    found = run.identity()
    under = {"CUDA": "13.0", "driver": "580.65.06", "cuDNN": "91200", "libnccl": "2.30.1"}
    assert run.machinery() == under and found["libraries"].items() >= under.items()
    text = page({**found, "date": "today", "parts": {}})
    assert "CUDA 13.0, driver 580.65.06, cuDNN 91200, libnccl 2.30.1" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has a libnccl")
def test_a_machine_without_libnccl_says_so():
    pytest.importorskip("nccl.core")
    assert "libnccl" not in run.machinery()
    assert library.told().startswith("nccl4py, but no libnccl: ")
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
    told = [
        row
        for _, row in in_turn(
            lambda: side("ours", [12.0, 22.0, 9.0]), lambda: side("theirs", [10.0] * 3), named, 3
        )
    ]
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert told[-1]["ours_over_best"] == pytest.approx(1.2) and len(told[0]["ratios"]) == 1
    assert told[-1] | named == told[-1]


def test_the_ways_in_turn_are_those_that_were_best(tmp_path, monkeypatch):
    known = {
        "small": {"tokens_per_s": 1.0},
        "small, compiled": {"tokens_per_s": 2.0},
        "small by transformers": {"autocast": {"tokens_per_s": 1.0}, "left": "not over"},
    }
    (tmp_path / "latest.json").write_text(json.dumps({"parts": known}))
    monkeypatch.setattr(parts, "MODELS", {"small": (parts.SMALL, 97)})
    monkeypatch.setattr(parts, "_beside", lambda *shape: None)
    monkeypatch.setattr(
        parts, "training", lambda *shape, compiled: {"tokens_per_s": 3.0 if compiled else 0.0}
    )
    side = {"autocast": {"tokens_per_s": 2.0}}
    monkeypatch.setattr(peers, "transformers_side", lambda asked, only: {only: side[only]}.items())
    every = {one.name: one.measure for one in parts.parts(torch.device("cpu"), tmp_path)}
    found = dict(every["small in turn"]())["in turn"]
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
    found = dict(peers.transformers_side(asked))
    assert found["autocast"]["micro_size"] == 1 and found["bf16 weights"]["micro_size"] == 4
    assert [size for half, compiled, size in tried if compiled and not half] == [(1, "none")]
    assert found["bf16 weights, compiled"] == {"failed": "RuntimeError: no triton"}
    assert list(dict(peers.transformers_side(asked, only="bf16 weights"))) == ["bf16 weights"]
    nothing = timing.first_that_fits(asked.device, (), lambda one: {})
    assert nothing is None
