"""The share of the time that counts, by closed forms, by simulation, and as Llama 3 had it."""

import math
from random import Random

import pytest

from ptdmpi.config import InputError
from ptdmpi.plan.ask import restarts
from ptdmpi.plan.ask.restarts import Failures
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import load_cluster, load_model

LLAMA = Pricer.of(load_cluster("dgx-h100"), load_model("llama3-405b"), 2048, "bf16")


def simulated(failures, interval_s, saves):
    """The share in so many saves, failure by failure."""
    random, clock_s = Random(3), 0.0

    def run(needed_s):
        """Failures do not remember: each attempt draws the time to the next one."""
        nonlocal clock_s
        gap_s = random.expovariate(1 / failures.between_s)
        clock_s += min(gap_s, needed_s)
        return gap_s >= needed_s

    for _ in range(saves):
        while not run(interval_s + failures.save_s):
            while not run(failures.restart_s):
                pass
    return saves * interval_s / clock_s


@pytest.mark.parametrize("share", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("save_s", [1.0, 60.0, 1200.0])
def test_the_closed_form_is_what_a_simulation_finds(share, save_s):
    failures = Failures(3600.0, save_s, 300.0)
    interval_s = share * failures.best_s
    found = simulated(failures, interval_s, 20_000)
    assert failures.useful(interval_s) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("save_s", [0.1, 1.0, 60.0, 1200.0, 5000.0])
def test_no_interval_is_better_than_the_best(save_s):
    failures = Failures(3600.0, save_s, 300.0)
    best = failures.useful(failures.best_s)
    assert all(
        failures.useful(failures.best_s * factor) < best for factor in (0.5, 0.9, 0.99, 1.01, 2)
    )
    # the series of Daly 2006, equation 20; Young's square root is its first term
    ratio = save_s / (2 * 3600.0)
    if ratio < 0.1:
        daly_s = failures.young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
        assert failures.best_s == pytest.approx(daly_s, rel=2e-3)
    if ratio < 1e-4:
        assert failures.best_s == pytest.approx(failures.young_s, rel=0.01)


def test_llama_3_trained_more_than_90_percent_of_its_time():
    """Dubey et al. 2024 (arXiv 2407.21783), section 3.3: 419 failures in 54 days on 16384 GPUs, 2
    TB/s of storage, more than 90 % of the time effective."""
    node_days = 2048 * 54 / 419
    told = restarts.answer(
        LLAMA, 16384, step_time_s=40.0, node_days=node_days, bytes_per_s=2e12, restart_s=600.0
    ).numbers
    assert told["failures"]["between_s"] == pytest.approx(54 * 86400 / 419)
    assert told["failures"]["save_s"] == pytest.approx(12 * told["parameters"] / 2e12, rel=1e-6)
    assert 0.90 < told["useful"] < 0.96
    assert told["every_steps"] == round(told["every_s"] / 40.0)


def test_what_leaves_no_time_is_refused():
    with pytest.raises(InputError, match="a failure every 422 s leaves no time to save"):
        restarts.answer(
            LLAMA, 16384, step_time_s=40.0, node_days=10, bytes_per_s=1e9, restart_s=600.0
        )
