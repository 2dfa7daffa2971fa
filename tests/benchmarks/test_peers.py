"""Who stands beside this project in the benchmark: named, installed, and computing the same."""

import math
import os
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.speed import bench, peers
from benchmarks.speed.bench import check_losses
from benchmarks.speed.case import LAYOUTS, TOOLS, GptSizes, Row, Variant, select, select_tools
from benchmarks.speed.sides import Side, TimedSteps
from benchmarks.speed.trials import Trials, rivals
from ptdmpi.config import InputError

TINY = GptSizes(
    layers=4, hidden=32, heads=2, seq_length=16, vocab_size=64, global_size=8, micro_size=1
)


def test_every_row_has_plain_torch_beside_it_and_others_where_they_do_the_same():
    for row in select(None):
        # weak scaling is told by this project alone
        assert "torch" in row.peers or row.peers == {"ptdmpi": "single"}
        assert set(row.peers) <= set(TOOLS)
    # with this project itself as a rival, undivided or with the other schedule
    assert Row("d=2,zero=3", "bf16").peers["ptdmpi"] in LAYOUTS
    assert Row("p=2,v=2,zb-v", "bf16").peers["ptdmpi"] == "p=2,v=2"


def test_an_unknown_peer_is_refused_with_who_is_known():
    assert select_tools(None) == list(TOOLS)
    assert select_tools("deepspeed torch") == ["deepspeed", "torch"]
    with pytest.raises(InputError, match=r"--peers horovod: nobody known; legal are torch, .*"):
        select_tools("torch horovod")


def test_a_peer_that_cannot_be_installed_is_named_and_the_others_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "PINS", {"deepspeed": ("no-such-trainer==0.0.0",)})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    found, absent = rivals(Row("d=2,zero=1", "fp32"), ["deepspeed", "torch", "ptdmpi"], Trials())
    assert [rival.tool for rival in found] == ["torch", "ptdmpi"]
    assert len(absent) == 1
    assert absent[0].startswith("DeepSpeed ZeRO-1: not available (ERROR: No matching distribution")
    assert list(tmp_path.iterdir()) == []  # nothing half done is left


def test_what_is_installed_with_other_pins_is_installed_anew(monkeypatch, tmp_path):
    done: list[list[str]] = []

    def pip(words):
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


def test_a_round_of_all_sides_gives_each_peer_its_result(monkeypatch):
    class Turns:
        speeds: ClassVar = {"torch": 2.0, "deepspeed": 4.0}
        row_of_rival: ClassVar[list[str]] = []

        def __init__(self, row, variant):
            self.row = row
            self.row_of_rival.append(row.layout)
            tool = variant.tool if variant else None
            self.speed = self.speeds.get(tool, 8.0) * row.case.tokens

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def train(self, count):
            return TimedSteps(row.case.tokens * count / self.speed, [9.0] * count, 1, 0.0)

        def limits(self):
            return 0.01, 0.005

    row = Row("d=2,zero=1", "fp32", TINY)
    monkeypatch.setattr(bench, "Side", Turns)
    monkeypatch.setattr("benchmarks.speed.trials.install", lambda tool: None)
    against, _ = rivals(row, TOOLS, Trials())
    results = bench.measure(row, 3, 1, against, math.inf)
    assert [(each.tool, each.ratio_median) for each in results] == [
        ("torch", 4.0),
        ("deepspeed", 2.0),
        ("ptdmpi", 1.0),
    ]
    assert Turns.row_of_rival == ["d=2,zero=1"] * 3 + ["d=2"]
    assert {len(each.rounds) for each in results} == {3}
    # a row whose time is over has one round all the same
    results = bench.measure(row, 3, 1, against, 0.0)
    assert {len(each.rounds) for each in results} == {1}


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "variant"),
    [
        (Row("t=2", "fp32", TINY), Variant(loss_parallel=True)),
        (Row("p=2,v=2,zb-v", "fp32", TINY), Variant()),
        (Row("d=2,zero=1", "fp32", TINY), Variant()),
        (Row("d=2,zero=3", "fp32", TINY), Variant(reduce_each=True)),
        (Row("d=2,zero=3", "fp32", TINY), Variant("deepspeed")),
        (Row("d=2,zero=3", "fp32", TINY), Variant("torchtitan")),
        (Row("single", "fp32", TINY), Variant("transformers")),
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
        steps, peer_steps = ours.train(3), peer.train(3)
        assert steps.losses[2] < steps.losses[0]  # it does train
        check_losses(row, "torch", steps.losses, peer_steps.losses)
        assert min(ours.limits()) > 0.0
        assert ours.steps_done == 3
        assert steps.peak_memory_bytes > 0
