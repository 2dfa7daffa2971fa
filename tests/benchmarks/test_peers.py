"""Who stands beside this project in the benchmark: named, installed, and computing the same."""

import math
import os
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from benchmarks.speed import bench, peers, ring
from benchmarks.speed.bench import check_losses
from benchmarks.speed.case import (
    EXPERTS,
    LAYOUTS,
    TOOLS,
    GptSizes,
    Row,
    Variant,
    every,
    select,
    select_tools,
)
from benchmarks.speed.rounds import LeastTimes
from benchmarks.speed.sides import Side, SideFailed, TimedSteps, TimeIsOver
from benchmarks.speed.trials import Trials, rivals
from ptdmpi.comm.wires import wire_named
from ptdmpi.config import InputError
from tests._layers import difference, random_tensor
from tests.parallel import parallel

TINY = GptSizes(
    layers=4, hidden=32, heads=2, seq_length=16, vocab_size=64, global_size=8, micro_size=1
)


def test_every_row_has_plain_torch_beside_it_and_others_where_they_do_the_same():
    for row in every():
        # weak scaling is told by this project alone, and what compiling gains
        assert "torch" in row.peers or row.peers == {"ptdmpi": "single"} or row.layout in EXPERTS
        assert set(row.peers) <= set(TOOLS)
    # with this project itself as a rival, undivided or with the other schedule
    assert Row("d=2,zero=3", "bf16").peers["ptdmpi"] in LAYOUTS
    assert Row("p=2,v=2,zb-v", "bf16").peers["ptdmpi"] == "p=2,v=2"
    # five others, each wherever it does what the row does
    stand = {tool: [row.layout for row in select("fp32") if tool in row.peers] for tool in TOOLS}
    five = ["single", "d=2", "t=2", "p=2", "p=2,v=2"]
    assert stand["megatron"] == five
    assert stand["torchtitan"] == ["single", "t=2", "p=2", "p=2,v=2", "d=2,zero=3"]
    assert stand["deepspeed"] == ["d=2", "p=2", "d=2,zero=1", "d=2,zero=3"]
    assert stand["transformers"] == ["single", *EXPERTS]


def test_an_unknown_peer_is_refused_with_who_is_known():
    assert select_tools(None) == list(TOOLS)
    assert select_tools("deepspeed torch") == ["deepspeed", "torch"]
    with pytest.raises(InputError, match=r"--peers horovod: no such trainer; legal are torch, .*"):
        select_tools("torch horovod")


def test_a_peer_that_cannot_be_installed_is_named_and_the_others_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "PINS", {"deepspeed": ("no-such-trainer==0.0.0",)})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    tools = ["deepspeed", "torch", "ptdmpi"]
    absent = peers.absent(tools, time.monotonic() + 600.0)
    assert list(absent) == ["deepspeed"]
    found, without = rivals(Row("d=2,zero=1", "fp32"), tools, absent, Trials())
    assert [rival.tool for rival in found] == ["torch", "ptdmpi"]
    assert len(without) == 1
    assert without[0].startswith("DeepSpeed ZeRO-1: not available (ERROR: No matching distribution")
    assert list(tmp_path.iterdir()) == []  # nothing half done is left


def test_installing_takes_its_share_of_the_time_and_no_more(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    limits = []

    def install(tool, limit_s):
        limits.append(round(limit_s))
        raise peers.PeerMissing("offline")

    monkeypatch.setattr(peers, "install", install)
    assert peers.absent(["a", "b"], time.monotonic() + 600.0) == {"a": "offline", "b": "offline"}
    assert limits == [100, 200]  # of a third; what the first has left is the second's
    peers.absent(["a"], time.monotonic() + 1e5)
    peers.absent(["a"], time.monotonic() - 1.0)
    assert limits[2:] == [peers.LIMIT_S, 0]


def test_what_was_ended_while_it_compiled_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    lock = tmp_path / "deepspeed" / peers.BUILT / "shm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (lock.parent / "shm.o").touch()
    assert peers.absent([], time.monotonic()) == {}
    assert [file.name for file in lock.parent.iterdir()] == ["shm.o"]
    assert peers.environment("deepspeed")["TORCH_EXTENSIONS_DIR"] == str(lock.parent.parent)


def test_what_is_installed_with_other_pins_is_installed_anew(monkeypatch, tmp_path):
    done: list[list[str]] = []

    def pip(words, limit_s):
        done.append(words)
        (Path(words[1])).mkdir()

    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "_pip", pip)
    for pins in (("a==1", "b==2"), ("a==1", "b==2"), ("a==1", "b==3")):
        monkeypatch.setattr(peers, "PINS", {"a": pins})
        peers.install("a")
    assert [words[2:] for words in done] == [["a==1", "b==2"], ["a==1", "b==3"]]
    assert [place.name for place in tmp_path.iterdir()] == ["a"]
    assert peers.environment("a")["PYTHONPATH"].startswith(f"{tmp_path / 'a'}{os.pathsep}")
    assert peers.environment("torch") == {}


class Turns:
    """A side of known speed. `fails` and `strange` name whose first round ends it, and whose losses
    are others; `ends` says in which round the time is over."""

    speeds: ClassVar = {"torch": 2.0, "deepspeed": 4.0}
    fails: ClassVar[str] = ""
    strange: ClassVar[str] = ""
    ends: ClassVar[float] = math.inf
    rows: ClassVar[list[str]] = []

    def __init__(self, row, variant, end_s):
        self.row, self.steps = row, 0
        self.rows.append(row.layout)
        self.tool = variant.tool if variant else None
        self.speed = self.speeds.get(self.tool, 8.0) * row.case.tokens

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def train(self, count):
        self.steps += count
        if self.steps > self.ends:
            raise TimeIsOver
        if self.tool == self.fails:
            raise SideFailed("it fell over")
        loss = 8.0 if self.tool == self.strange else 9.0
        return TimedSteps(self.row.case.tokens * count / self.speed, [loss] * count, 1, 0.0)

    def limits(self):
        return LeastTimes(0.01, 0.015)


@pytest.fixture
def contest(monkeypatch):
    """A row between us, plain torch, DeepSpeed and ourselves, undivided."""
    monkeypatch.setattr(Turns, "rows", [])
    monkeypatch.setattr(bench, "Side", Turns)
    row = Row("d=2,zero=1", "fp32", TINY)
    against, _ = rivals(row, TOOLS, {}, Trials())
    return bench.Contest(row, against, math.inf)


def ratios(results):
    return [(each.tool, each.ratio_median) for each in results]


def test_a_round_of_all_sides_gives_each_peer_its_result(contest):
    contest.run(3, math.inf)
    results = contest.results()
    assert ratios(results) == [("torch", 4.0), ("deepspeed", 2.0), ("ptdmpi", 1.0)]
    assert Turns.rows == ["d=2,zero=1"] * 3 + ["d=2"]
    assert {len(each.rounds) for each in results} == {3}
    assert contest.out == []


def test_a_row_whose_time_is_over_has_one_round_all_the_same(contest):
    contest.run(3, 0.0)
    assert {len(each.rounds) for each in contest.results()} == {1}


@pytest.mark.parametrize("how", ["fails", "strange"])
def test_who_fails_or_computes_something_else_is_out(monkeypatch, contest, how):
    monkeypatch.setattr(Turns, how, "torch")
    contest.run(3, math.inf)
    assert ratios(contest.results()) == [("deepspeed", 2.0), ("ptdmpi", 1.0)]
    assert len(contest.out) == 1
    assert contest.out[0].startswith("d2zero1-fp32, torch: out: ")


def test_rounds_that_were_done_when_all_time_was_over_count(monkeypatch, contest):
    monkeypatch.setattr(Turns, "ends", 3)  # the first warms up
    contest.run(5, math.inf)
    assert {len(each.rounds) for each in contest.results()} == {2}
    monkeypatch.setattr(Turns, "ends", 1)
    with pytest.raises(TimeIsOver):
        bench.Contest(contest.row, contest.against, 0.0).run(5, math.inf)


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "variant"),
    [
        (Row("t=2", "fp32", TINY), Variant(loss_parallel=True)),
        (Row("p=2,v=2,zb-v", "fp32", TINY), Variant()),
        (Row("d=2,zero=1", "fp32", TINY), Variant()),
        (Row("c=2", "fp32", TINY), Variant()),
        (Row("c=2", "bf16", TINY), Variant(cast="masters")),
        (Row("d=2,zero=3", "fp32", TINY), Variant(reduce_each=True)),
        (Row("d=2,zero=3", "fp32", TINY), Variant("deepspeed")),
        (Row("p=2", "bf16", TINY), Variant("deepspeed", cast="masters")),
        (Row("d=2,zero=3", "fp32", TINY), Variant("torchtitan")),
        (Row("t=2", "bf16", TINY), Variant("torchtitan", "policy", sequence_parallel=True)),
        (Row("p=2,v=2", "fp32", TINY), Variant("torchtitan")),
        (Row("single", "fp32", TINY), Variant("transformers")),
        (Row("moe", "fp32", TINY), Variant("transformers")),
        (Row("moe", "bf16", TINY), Variant("transformers", "masters")),
        (Row("moe-d2", "bf16", TINY), Variant("transformers", "microbatch")),
        (Row("moe-e2", "fp32", TINY), Variant("transformers")),
        (Row("t=2", "fp32", TINY), Variant("megatron")),
        (Row("p=2,v=2", "bf16", TINY), Variant("megatron", cast="masters")),
    ],
    ids=lambda value: getattr(value, "id", None) or value.tool,
)
def test_both_sides_compute_the_same(row, variant):
    try:
        peers.install(variant.tool)
    except peers.PeerMissing as reason:
        pytest.skip(f"{variant.tool} cannot be installed: {reason}")
    with Side(row, None) as ours, Side(row, variant) as peer:
        steps, peer_steps = ours.train(8), peer.train(8)
        assert steps.losses[7] < steps.losses[0]  # it does train
        check_losses(row, "torch", steps.losses, peer_steps.losses)
        limits = ours.limits()
        assert 0.0 < limits.gemm_s < limits.both_s
        assert ours.steps_done == 8
        assert steps.peak_memory_bytes > 0


@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_ring_of_plain_torch_computes_attention(comm, dtype, bar):
    """Its values and gradients, compared with torch's own of whole sequences in float64."""
    wire_named("torch").open(comm)  # torch.distributed over gloo
    shape = (2, 3, 8 * comm.size, 16)
    q, k, v, gradient = (random_tensor(name, shape, "fp64") for name in ("q", "k", "v", "dy"))
    q, k, v = (x.detach().to(dtype).double().requires_grad_() for x in (q, k, v))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    whole.backward(gradient)
    here = ring.positions(comm.rank, comm.size, shape[2])
    own = [x.detach()[:, :, here].to(dtype).requires_grad_() for x in (q, k, v)]
    part = ring.RingAttention.apply(*own)
    part.backward(gradient[:, :, here].to(dtype))
    assert difference(part, whole[:, :, here]) < bar
    for x, y in zip(own, (q, k, v), strict=True):
        assert difference(x.grad, y.grad[:, :, here]) < bar
