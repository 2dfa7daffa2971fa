"""Ranks, networks and sweeps on small machines, and the command in front of all questions."""

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ptdmpi.commands.ask import command
from ptdmpi.config import InputError
from ptdmpi.config.layout import Layout
from ptdmpi.plan.ask import network, ranks, sweep
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import load_cluster, load_model
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space

MODEL = "l=8,h=1024,a=16"
COMMON = ("--model", MODEL, "--cluster", "selene", "--batch", "32")
SMALL = Pricer.of(load_cluster("selene"), load_model(MODEL), 32, "bf16")


def ask(question, *arguments):
    return CliRunner().invoke(command, [question, *arguments], catch_exceptions=False)


@pytest.mark.long
def test_the_cheapest_by_a_deadline_is_the_cheapest_of_those_in_time():
    every = ranks.answer(SMALL, 32, 1e9).numbers
    costs = {one["ranks"]: one for one in every["choices"]}
    assert list(costs) == [8, 16, 32]
    for count, one in costs.items():
        best = search(SMALL, Space(count), 1)[0]
        hours = 1e9 / (32 * 2048) * best.step_time_s / 3600
        assert one["rank_hours"] == pytest.approx(hours * count)
        assert one["days"] == pytest.approx(hours / 24)
        assert one["mwh"] == pytest.approx(hours * count / 8 * 6500 / 1e6)
    assert every["best_ranks"] == min(costs, key=lambda count: costs[count]["rank_hours"])
    # a deadline between those of 16 and 32 ranks: 24 is asked too
    days = (costs[16]["days"] + costs[32]["days"]) / 2
    told = ranks.answer(SMALL, 32, 1e9, days=days, price=2.0).numbers
    in_time = [one for one in told["choices"] if one["days"] <= days]
    assert {16, 32} <= {one["ranks"] for one in told["choices"]}
    best = min(in_time, key=lambda one: one["rank_hours"])
    assert told["best_ranks"] == best["ranks"] and best["money"] == 2 * best["rank_hours"]
    with pytest.raises(InputError, match=r"takes \S+ days on 32 ranks .*: not within"):
        ranks.answer(SMALL, 32, 1e9, days=costs[32]["days"] / 2)


def test_rungs():
    assert ranks.ladder(8, 0, 40) == [8, 16, 32, 40]
    assert ranks.ladder(8, 20, 64) == [32, 64]
    assert ranks.ladder(8, 0, 6) == [1, 2, 4, 6]
    assert ranks.between(16, 32, 8) == [24]
    assert ranks.between(64, 128, 8) == [80, 96, 112]


def test_a_slower_network_is_never_faster():
    told = network.answer(SMALL, 16, 1).numbers["changes"]
    step_s = {one["network"]: one["step_time_s"] for one in told}
    base_s = step_s.pop("as it is")
    assert step_s.pop("adapters twice as fast") <= base_s
    assert all(one >= base_s for one in step_s.values()) and max(step_s.values()) > base_s
    for one in told:
        assert one["best_step_time_s"] <= one["step_time_s"] * (1 + 1e-12)
    assert step_s["adapters half as fast"] <= step_s["adapters a quarter as fast"]


@pytest.mark.long
def test_pods_share_what_stays_in_them():
    """Pipelines across pods send at the tapered rate, data axes only where pods cut them."""
    cluster, model = SMALL.cluster, SMALL.model
    whole = Pricer.of(network.slower(cluster, 4), model, 32, "bf16")

    def step_s(pricer, layout):
        return pricer.price(layout).step_time_s

    def tiers(pod_nodes, taper=4):
        return Pricer(network.TieredTimes(cluster, model, "bf16", (pod_nodes, taper)), 32)

    both = Layout(8, 2, 2, zero=1)
    assert step_s(tiers(4), both) == step_s(tiers(1, 1), both) == step_s(SMALL, both)
    assert step_s(tiers(1), both) == step_s(whole, both)
    inside = step_s(tiers(2), both)  # only the pipeline leaves a pod
    assert step_s(SMALL, both) < inside < step_s(whole, both)
    assert step_s(tiers(5), both) == step_s(SMALL, both)  # the whole layout is in one pod
    cut = replace(both, tensor=4, context=2)  # its data groups are as far apart
    assert step_s(tiers(1), cut) == step_s(whole, cut)
    assert step_s(SMALL, cut) < step_s(tiers(2), cut) < step_s(whole, cut)
    alone = replace(both, pipeline=4, data=1, zero=0)
    assert step_s(tiers(2), alone) == step_s(whole, alone)
    pricer = tiers(2)
    for price in search(pricer, Space(32)):
        bound_s = pricer.bound_s(price.layout)
        assert pricer.rough_bound_s(price.layout) <= bound_s * (1 + 1e-9)
        assert bound_s <= price.step_time_s * (1 + 1e-9)


def test_a_measured_machine_has_no_rates_to_change():
    measured = Pricer.of(load_cluster("cpu-avx2"), load_model(MODEL), 32, "fp32")
    with pytest.raises(InputError, match="cpu-avx2 was measured"):
        network.answer(measured, 2, None)


def test_lengths_keep_the_tokens_of_a_step():
    pricers = sweep.lengths(SMALL, [1024, 4096])
    assert [(one.model.config.seq_length, one.batch) for one in pricers.values()] == [
        (1024, 64),
        (4096, 16),
    ]
    told = sweep.answer(pricers, 8, "sequence length").numbers["choices"]
    assert [one["sequence_length"] for one in told] == [1024, 4096]
    assert told[0]["tokens_per_s"] == pytest.approx(32 * 2048 / told[0]["step_time_s"])
    with pytest.raises(InputError, match="whole number of sequences of 3000"):
        sweep.lengths(SMALL, [3000])
    with pytest.raises(InputError, match="no layout"):  # 7 sequences on 9 ranks
        sweep.answer(sweep.batches(SMALL, [7]), 9001, "batch")


QUESTIONS = {
    "ranks": (*COMMON, "--ranks", "16", "--tokens", "1e9"),
    "restarts": (
        *(*COMMON, "--ranks", "16", "--node-days", "100"),
        *("--write-gb-s", "10", "--restart-minutes", "5"),
    ),
    "network": (*COMMON, "--ranks", "16"),
    "sweep": (*COMMON, "--ranks", "8", "--batches", "16,32"),
    "partition": (*COMMON[:4], "--tensor", "8"),
    "days": (*COMMON[:4], "--ranks", "8", "--tokens", "1e9", "--utilisation", "0.4"),
    "size": ("--flops", "1e22"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_has_words_numbers_and_a_picture(question, tmp_path):
    picture = tmp_path / "answer.svg"
    told = ask(question, *QUESTIONS[question], "--png", str(picture))
    assert told.exit_code == 0 and told.stdout.count("\n") > 2
    assert picture.stat().st_size > 5000
    assert json.loads(ask(question, *QUESTIONS[question], "--json").stdout)


@pytest.mark.parametrize("logarithmic", ["", "xy"])
def test_pictures_separate_thousands(tmp_path, logarithmic):
    """On linear and on logarithmic axes, and without a power of ten at the end of an axis."""
    points = [(10e3, 1.0e6), (20e3, 1.2e6)]
    line = Panel("ranks", "rank-hours", {"cost": points}, logarithmic=logarithmic)
    small = Panel("ranks", "MFU", {"MFU": [(1, 0.60), (2, 0.65)]})
    Reply("", (), {}, "", [line, small]).draw(tmp_path / "a.svg")
    labels = re.findall("<!-- (.*?) -->", (tmp_path / "a.svg").read_text())
    assert {"10,000", "20,000", "1,000,000", "0.60"} <= set(labels), labels
    assert not any("e" in text for text in labels if text[0].isdigit())


@pytest.mark.parametrize(
    ("question", "arguments", "word"),
    [
        ("sweep", (*COMMON, "--ranks", "8"), "--batches or --lengths"),
        ("sweep", (*COMMON, "--ranks", "8", "--batches", "16,x"), "--batches 16,x: must be"),
        ("ranks", (*COMMON[:4], "--ranks", "8", "--tokens", "1e9"), "give --batch"),
        ("size", ("--flops", "-1"), "--flops -1: must be a finite number above 0"),
        ("size", ("--flops", "1e22", "--png", "a.jpg"), "a.jpg: pictures are .png or .svg"),
    ],
)
def test_bad_input_is_one_line(question, arguments, word):
    with pytest.raises(InputError, match=word) as error:
        ask(question, *arguments)
    assert "\n" not in str(error.value)
