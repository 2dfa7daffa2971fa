"""The benchmark's harness: which rows, what disturbs a round, what is written. It times nothing."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields, replace

import psutil
import pytest
import torch

from benchmarks.data.tokenize import rates_between
from benchmarks.launch import ROOT
from benchmarks.speed import bench, ours
from benchmarks.speed.bench import RESULTS, check_losses
from benchmarks.speed.case import (
    CUT,
    EXPERTS,
    LAYOUTS,
    WEAK,
    GptSizes,
    Row,
    Variant,
    every,
    select,
)
from benchmarks.speed.rounds import (
    Constants,
    LeastTimes,
    PeerTrial,
    Result,
    Round,
    busy_cpu_s,
    counted,
    enough,
    foreign_share,
    machine,
    summarise,
    table,
    write,
)
from benchmarks.speed.shown import picture, scaling
from benchmarks.speed.sides import (
    Side,
    SideFailed,
    family_cpu_s,
)
from ptdmpi.config import InputError
from ptdmpi.model.kernels import host

TINY = GptSizes(
    layers=4, hidden=32, heads=2, seq_length=16, vocab_size=64, global_size=8, micro_size=1
)
QUIET, LOUD = 0.01, 0.5


def test_only_the_asked_side_is_reproducible():
    plain = Row("d=2", "fp32", TINY)
    assert not plain.config.run.reproducible
    assert Row.from_json(replace(plain, reproducible=True).to_json()).config.run.reproducible


def test_all_rows():
    rows = select(None)
    assert [row.layout for row in rows[::2]] == [
        *("single", "d=2", "t=2", "p=2", "p=2,v=2", "d=2,weak", "t=2,weak", "p=2,weak"),
    ]
    assert {row.precision for row in rows} == {"fp32", "bf16"}
    others = {row.layout for row in every()} - {row.layout for row in rows}
    zero = {"d=2,zero=1", "d=2,zero=3"}
    assert others == {"p=2,v=2,zb-v", *zero, "single,compile", "c=2", *EXPERTS}
    assert len({row.id for row in every()}) == 32


def test_the_time_is_shared_by_how_long_a_round_of_all_sides_takes():
    work = {row.id: row.work for row in every()}
    # ours, torch, Megatron-Core, torchtitan and transformers, each on one core
    assert work["single-fp32"] == 2 * work["single-bf16"] == 10.0
    # ours, torch, Megatron-Core and torchtitan on two, and one rank alone
    assert work["t2-fp32"] == 6.0
    # of twice the work: two ranks, and one
    assert work["d2weak-bf16"] == 2.0


def test_compiled_layers_are_beside_those_that_are_not():
    for row in select("singlecompile"):
        assert row.config.run.compile is True and row.alone.config.run.compile is not True
        assert row.peers == {"ptdmpi": row.alone.layout} and row.alone.case == row.case
    assert not any(row.config.run.compile is True for row in select(None))


def test_in_weak_scaling_a_rank_has_as_much_to_do_as_one_alone():
    for row in select("d2weak-fp32 t2weak-fp32 p2weak-fp32"):
        assert row.alone == Row("single", "fp32", GptSizes())
        work = row.case.global_size * row.case.layers
        assert work == row.sizes.ranks * row.alone.case.global_size * row.alone.case.layers
    tiny = Row("t=2", "fp32", TINY)
    assert tiny.alone == replace(tiny, layout="single")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("p2v2-bf16", ["p2v2-bf16"]),
        ("t2", ["t2-fp32", "t2-bf16"]),
        ("p=2,v=2", ["p2v2-fp32", "p2v2-bf16"]),
        ("d2-bf16 single-fp32 d2-bf16", ["single-fp32", "d2-bf16"]),
        ("d2 d2zero3-bf16", ["d2-fp32", "d2-bf16", "d2zero3-bf16"]),
        ("d=2,zero=1", ["d2zero1-fp32", "d2zero1-bf16"]),
    ],
)
def test_rows_are_selected_by_name(text, ids):
    assert [row.id for row in select(text)] == ids


def test_an_unknown_row_is_refused_with_what_is_legal():
    with pytest.raises(InputError, match=r"--rows t3: no such row; legal are single-fp32, .*"):
        select("t2 t3")


STRONG = [row for row in every() if row.layout not in (*WEAK, CUT, *EXPERTS)]


@pytest.mark.parametrize("row", STRONG, ids=lambda row: row.id)
def test_the_configuration_of_a_row_is_the_case(row):
    config = row.config
    sizes = LAYOUTS[row.layout]
    model = config.model
    assert (model.layers, model.hidden, model.heads, model.seq_length) == (8, 512, 8, 512)
    assert not model.tie_embeddings
    assert model.bias
    assert config.precision.compute == row.precision
    assert config.data_size == sizes.data
    assert config.microbatches == 8 // sizes.data
    assert config.run.threads == 1
    assert config.optimizer.clip_norm == 0.0


def test_cut_sequences_are_long_and_a_step_has_as_many_tokens():
    fp32, bf16 = select("c2")
    assert {fp32.precision, bf16.precision} == {"fp32", "bf16"}
    assert fp32.case.seq_length == 4096 and fp32.case.tokens == GptSizes().tokens
    assert fp32.config.parallel.context == 2 and fp32.config.microbatches == 2
    assert fp32.alone.case == fp32.case and fp32.alone.sizes.ranks == 1


def test_experts_compute_about_as_much_as_the_mlp_of_the_other_rows():
    for row in select(" ".join(EXPERTS)):
        mixture = row.config.model
        assert (mixture.experts, mixture.experts_per_token) == (8, 2)
        active = mixture.experts_per_token * 3 * mixture.hidden * mixture.expert_hidden
        dense = Row("single", row.precision).config.model
        assert active == pytest.approx(2 * dense.hidden * dense.ffn_hidden, rel=0.05)


def test_experts_on_two_ranks_are_beside_experts_on_each():
    for row in select("moe-e2"):
        assert row.config.parallel.expert == 2 and row.config.microbatches == 4
        beside = replace(row, layout=row.peers["ptdmpi"])
        assert beside.config.parallel.expert == 1
        assert beside.config.model == row.config.model and beside.sizes.ranks == row.sizes.ranks
    assert [row.id for row in select("moe")] == ["moe-fp32", "moe-bf16"]


def test_a_row_survives_its_journey_to_a_worker():
    row = Row("p=2,v=2", "bf16", TINY)
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_busy_time_is_that_of_processes_and_of_other_guests():
    stat = "cpu  100 20 30 5000 400 7 8 50 3 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    assert busy_cpu_s(stat) == 200 / os.sysconf("SC_CLK_TCK")
    assert busy_cpu_s() > 0.0


def test_the_sides_and_what_they_started_are_no_strangers():
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = family_cpu_s()
    launch = [
        sys.executable,
        "-c",
        f"import os\nif os.fork() == 0:\n  exec({spin!r})\nelse: os.wait()",
    ]
    with subprocess.Popen(launch, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert family_cpu_s() - before >= 0.25
        child.communicate(b"\n", timeout=30)


def test_foreign_share_is_what_others_used_of_a_core():
    assert foreign_share(busy_s=7.0, own_s=4.0, wall_s=2.0) == 1.5
    assert foreign_share(busy_s=3.99, own_s=4.0, wall_s=2.0) == 0.0


def test_a_disturbed_round_is_repeated_up_to_a_limit():
    quiet, loud = Round(2.0, 1.0, QUIET), Round(9.0, 1.0, LOUD)
    assert not quiet.disturbed
    assert loud.disturbed
    assert not enough([quiet, loud], 2)
    assert enough([quiet, loud, quiet], 2)
    assert not enough([loud] * 3, 2)
    assert enough([loud] * 4, 2)


def test_quiet_rounds_count_and_all_are_kept():
    done = [Round(9.0, 1.0, LOUD), Round(2.0, 1.0, QUIET), Round(3.0, 1.0, QUIET)]
    assert counted(done, 2) == done[1:]
    result = _result(done)
    assert (result.ratio_min, result.ratio_median, result.ratio_max) == (2.0, 2.5, 3.0)
    assert result.tokens_per_s == 2.5
    assert result.disturbed == 1
    assert [r["ratio"] for r in result.rounds] == [9.0, 2.0, 3.0]
    assert (result.counted, result.counted_disturbed) == (2, 0)
    # GEMMs of 4 s in a step of 20 tokens at 2.5 tokens/s
    assert result.gemm_share == 0.5
    # and 2 s of attention
    assert result.limit_share == 0.75


def test_the_limit_is_the_least_of_the_rounds_on_the_rank_that_has_most():
    assert LeastTimes(4.0, 6.0).least(LeastTimes(5.0, 5.5)) == LeastTimes(4.0, 5.5)
    side = Side(Row("p=2", "fp32", TINY), None)
    # one rank has the head, the other one most of the attention: no rank has both
    side.ask = lambda **command: [{"limits_s": [3.0, 7.0]}, {"limits_s": [5.0, 6.0]}]
    assert side.limits() == LeastTimes(5.0, 7.0)


def test_each_product_of_the_limit_is_taken_the_quickest_way(monkeypatch):
    """And each at its quickest, so that no step is quicker than its limit."""
    monkeypatch.setattr(ours, "REPEATS", 2)
    monkeypatch.setattr(host, "has_fused", lambda dtype: True)
    times = iter([5.0, 1.0, 3.0, 2.0, 4.0, 3.0, 5.0, 2.0, 9.0, 3.0, 4.0, 3.0])
    monkeypatch.setattr(ours, "_time_s", lambda work: next(times))
    # output, input and weight gradient by one way, by the other, and again
    assert ours._linear_time_s(2, 2, 2, torch.float32) == 2.0 + 1.0 + 3.0


def test_results_are_written_row_by_row(tmp_path):
    file = tmp_path / "results" / "latest.json"
    order = [("single", "fp32", "torch"), ("t=2", "bf16", "deepspeed"), ("t=2", "bf16", "torch")]
    second = _result([Round(2.0, 1.0, QUIET)] * 2)
    first = replace(second, layout="single", precision="fp32")
    write(file, [second], order)
    write(file, [first, replace(second, tool="deepspeed")], order)
    content = json.loads(file.read_text())
    assert content["machine"] == machine()
    rows = [(row["layout"], row["precision"], row["tool"]) for row in content["rows"]]
    assert rows == order
    assert set(content["rows"][0]) == {field.name for field in fields(Result)}
    assert list(file.parent.iterdir()) == [file]

    # rows of another machine do not stand beside rows of this one
    content["machine"]["cpu"] = "another"
    file.write_text(json.dumps(content))
    write(file, [second], order)
    assert [row["layout"] for row in json.loads(file.read_text())["rows"]] == ["t=2"]


def test_the_table_has_a_line_for_each_row():
    # on whatever processor this is tested
    result = replace(_result([Round(2000.0, 1000.0, QUIET)] * 2), scalar=False)
    lines = table([result, result]).splitlines()
    assert lines[0].endswith(f"for bf16: {machine()['bf16']}")
    assert len(lines) == 4
    assert " 2.000 " in lines[2]
    # both rounds count, both were undisturbed
    assert lines[2].split("%")[-1].split()[:3] == ["2", "2", "2"]
    # who runs scalar code is no rival that one could be twice as fast as
    (line,) = table([replace(result, scalar=True)]).splitlines()[2:]
    assert " scalar " in line and " 2.000 " not in line
    # a row whose time ended before the bare products were measured
    (line,) = table([replace(result, gemm_share=math.inf, limit_share=math.inf)]).splitlines()[2:]
    assert "inf" not in line and "-      -" in line


def test_scaling_is_told_in_shares_of_ideal():
    quiet = [Round(1800.0, 1000.0, QUIET)] * 2
    strong = replace(_result(quiet), layout="d=2", tool="ptdmpi", peer="ptdmpi single")
    weak = replace(strong, layout="t=2,weak")
    assert scaling.share(strong) == pytest.approx(0.9)
    # twice the layers, but one head: a token is less than twice the work
    assert 1.6 < scaling.share(weak) < 1.8
    assert list(scaling.lines([_result(quiet)])) == []
    told = list(scaling.lines([strong, weak]))
    assert told[2].split() == ["d=2", "bf16", "90%", "-"]
    assert told[3].split()[:3] == ["t=2", "bf16", "-"]


def test_the_picture_has_a_panel_for_each_type(tmp_path):
    result = _result([Round(2.0, 1.0, QUIET), Round(3.0, 1.0, QUIET)])
    order = [("t=2", "bf16", "torch")]
    write(tmp_path / "latest.json", [result], order)
    picture.draw(tmp_path / "latest.json", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_no_ratio_without_the_same_losses():
    row = Row("t=2", "fp32")
    check_losses(row, "torch", [9.0, 8.0], [9.00001, 8.00001])
    with pytest.raises(SideFailed, match=r"t2-fp32: at step 1 .* not the same computation"):
        check_losses(row, "torch", [9.0, 8.0], [9.0, 8.01])
    with pytest.raises(SideFailed, match="nan"):
        check_losses(row, "torch", [9.0, float("nan")], [9.0, 8.0])


@pytest.mark.long
def test_a_side_that_does_not_start_says_why(monkeypatch):
    # five heads of a width of 32: the worker refuses the row
    row = Row("single", "fp32", replace(TINY, heads=5))
    with pytest.raises(SideFailed, match=r"(?s)single-fp32: a rank .*model.heads = 5"):
        Side(row, Variant()).__enter__()


def test_a_tool_that_is_too_quick_for_the_corpora_gets_no_rate():
    tokens = [100, 500, 5000]
    assert rates_between([[1.0, 3.0], [1.0, 2.5]], tokens) == [200, 400 / 1.5]
    assert rates_between([[1.0, 1.1, 3.0], [1.0, 0.9, 3.5]], tokens) == [2450, 1960]
    for scattered in ([[1.0, 1.2], [1.0, 1.5]], [[1.0, 1.2], [1.2, 1.0]], [[1.0, 1.0]]):
        assert rates_between(scattered, tokens) is None


def test_a_worker_ends_with_its_commands():
    """The end of the stream is the end of the work, so that no rank outlives the benchmark."""
    from benchmarks.speed.worker import serve

    here, there = socket.socketpair()
    with here, there:
        trainer = type("Trainer", (), {"rank": 3})()
        stream, other = here.makefile("rw"), there.makefile("rw")
        other.write(json.dumps({"limits": True}) + "\n")
        other.flush()
        there.shutdown(socket.SHUT_WR)
        serve(stream, trainer, lambda: (0.25, 0.5))
        assert json.loads(other.readline())["rank"] == 3
        assert json.loads(other.readline())["limits_s"] == [0.25, 0.5]


def _result(done: list[Round]) -> Result:
    sample = Constants(
        peak_memory_bytes=1,
        peer_peak_memory_bytes=2,
        limits=LeastTimes(gemm_s=4.0, both_s=6.0),
        losses=[9.0],
        peer_losses=[9.0],
        peer_trials={"masters": PeerTrial(2.0, finished=True)},
    )
    return summarise(("t=2", "bf16", "torch", "torch DTensor"), done, 2, sample, tokens=20)


def test_the_results_in_the_project_follow_the_schema():
    file = RESULTS / "latest.json"
    for row in json.loads(file.read_text())["rows"]:
        result = Result(**row)
        assert result.ratio_min <= result.ratio_median <= result.ratio_max
        assert len(result.rounds) >= 1


@pytest.mark.parametrize("rows", [[], ["--rows", "bf16"]])
def test_without_units_for_bf16_the_time_is_spent_on_fp32(monkeypatch, capsys, rows):
    """Unless somebody asks for the others."""
    asked: list[str] = []

    def rivals(row, tools, absent, trials):
        asked.append(row.precision)
        return [], []

    here = machine() | {"bf16": "none"}
    monkeypatch.setattr(bench, "rivals", rivals)
    monkeypatch.setattr(bench.peers, "absent", lambda tools, end_s: {})
    monkeypatch.setattr(bench.measuring, "machine", lambda: here)
    monkeypatch.setattr(bench.measuring, "write", lambda *given: None)
    monkeypatch.setattr(bench.picture, "draw", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["bench", *rows])
    before = {ending: signal.getsignal(ending) for ending in (signal.SIGINT, signal.SIGTERM)}
    try:
        bench.main()
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)
    assert set(asked) == {"bf16" if rows else "fp32"}
    assert ("left out on a processor without bf16" in capsys.readouterr().out) == (not rows)


@pytest.mark.long
@pytest.mark.parametrize("answers", [False, True], ids=["while it starts", "while it trains"])
def test_a_benchmark_that_is_interrupted_leaves_no_rank(answers):
    words = ["-m", "benchmarks.speed.bench", "--rows", "t2-fp32", "--peers", "torch"]
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        own = psutil.Process(process.pid)
        workers: list[psutil.Process] = []
        while len(workers) < 2:
            assert process.poll() is None
            workers = [one for one in own.children(recursive=True) if is_worker(one)]
            time.sleep(0.1)
        if answers:
            time.sleep(8)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.startswith("bench: stopped; ") and errors.count("\n") == 1
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def is_worker(process: psutil.Process) -> bool:
    """Return True for a rank of a side."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return words[0] == sys.executable and "benchmarks.speed.worker" in words
    return False
