"""Published days and sizes, by the closed forms."""

import pytest

from ptdmpi.config import InputError
from ptdmpi.plan.ask import inverse
from ptdmpi.plan.ask.inverse import Loss, TrainingWork
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import load_cluster, load_model


def pricer(model, cluster="selene"):
    machine = load_cluster(cluster)
    return Pricer.of(machine, load_model(model), 1, "fp16")


def test_days_of_narayanan_2021():
    """Section 5.1: GPT-3 on 1024 GPUs at 140 TFLOP/s takes 34 days, 1T on 3072 at 163 84 days."""
    assert TrainingWork(175e9, 300e9, 1024).days(140e12, 8) == pytest.approx(34, abs=0.5)
    assert TrainingWork(1008e9, 450e9, 3072).days(163e12, 8) == pytest.approx(84, abs=0.5)


def test_utilisation_from_published_days():
    gpt = inverse.days_answer(pricer("gpt3-175b"), 1024, 300e9, taken=34).numbers
    assert gpt["hardware_tflops_per_rank"] == pytest.approx(140, rel=0.01)
    # Touvron et al. 2023 (arXiv 2302.13971), section 2.4: 1.4T tokens in 21 days on 2048 A100, 380
    # tokens/s each
    llama = inverse.days_answer(pricer("llama-65b"), 2048, 1.4e12, taken=21).numbers
    by_speed = 6 * llama["parameters"] * 380 / 1e12
    assert llama["model_tflops_per_rank"] == pytest.approx(by_speed, rel=0.02)
    # 288 years on one V100, 36 on eight (Narayanan et al. 2021, section 1): a third of the peak
    v100 = inverse.days_answer(pricer("gpt3-175b", "v100-dgx2"), 1, 300e9, taken=288 * 365).numbers
    assert v100["mfu"] == pytest.approx(0.277, abs=0.003)


def test_there_and_back():
    asked = pricer("llama-65b")
    days = inverse.days_answer(asked, 2048, 1.4e12, utilisation=0.4).numbers["days"]
    assert inverse.days_answer(asked, 2048, 1.4e12, taken=days).numbers["mfu"] == pytest.approx(0.4)
    with pytest.raises(InputError, match="give either --days or --utilisation"):
        inverse.days_answer(asked, 2048, 1.4e12)
    with pytest.raises(InputError, match=r"A100-SXM-80GB has 312: at least 9.9 days"):
        inverse.days_answer(asked, 2048, 1.4e12, taken=5)


def test_compute_optimal_is_chinchillas():
    """Hoffmann et al. 2022 (arXiv 2203.15556), Table 3: parameters, FLOPs, tokens."""
    for parameters, flops, tokens in (
        (1e9, 1.21e20, 20.2e9),
        (10e9, 1.23e22, 205.1e9),
        (67e9, 5.76e23, 1.5e12),
        (175e9, 3.85e24, 3.7e12),
    ):
        told = inverse.size_answer(flops).numbers
        assert told["parameters"] == pytest.approx(parameters, rel=0.05)
        assert told["tokens"] == pytest.approx(tokens, rel=0.08)
        assert 6 * told["parameters"] * told["tokens"] == pytest.approx(flops)


def test_the_fit_is_least_at_its_closed_form():
    loss, flops = Loss(), 5.76e23
    best = loss.best(flops)
    # 40B for Gopher's budget: Hoffmann et al. 2022, section 3.4
    assert best == pytest.approx(40e9, rel=0.25)
    at = [loss.at(best * factor, flops / (6 * best * factor)) for factor in (0.9, 1, 1.1)]
    assert at[1] < min(at[0], at[2])
