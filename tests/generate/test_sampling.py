"""Which tokens may be drawn, and how often."""

import numpy as np
import pytest

from ptdmpi.config import InputError
from ptdmpi.generate.sampling import GREEDY, Sampling, candidates, choose

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05], dtype=np.float32))


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (GREEDY, [1]),
        (Sampling(), [1, 3, 2, 0, 4]),
        (Sampling(top_k=2), [1, 3]),
        (Sampling(top_k=9), [1, 3, 2, 0, 4]),
        (Sampling(top_p=0.39), [1]),
        (Sampling(top_p=0.64), [1, 3]),
        (Sampling(top_p=0.66), [1, 3, 2]),
        (Sampling(top_p=1e-9), [1]),
        (Sampling(top_k=3, top_p=0.8), [1, 3, 2]),  # 0.4 and 0.25 of 0.85 are less than 0.8
        (Sampling(top_k=3, top_p=0.75), [1, 3]),
        (Sampling(temperature=0.5, top_p=0.7), [1, 3]),  # as 16 : 6.25 : 4 : 1 : 0.25
    ],
)
def test_candidates(sampling, expected):
    assert candidates(LOGITS, sampling)[0].tolist() == expected


def test_equal_logits_take_the_lowest_id():
    logits = np.array([0, 2, 2, 1], dtype=np.float32)
    assert choose(logits, GREEDY, 0, 0) == 1
    assert candidates(logits, Sampling(top_k=1))[0].tolist() == [1]


def test_impossible_tokens_and_extreme_temperatures():
    logits = np.array([-np.inf, 3e38, -3e38, -np.inf], dtype=np.float32)
    for temperature in (1e-30, 1.0, 1e30):
        drawn = {choose(logits, Sampling(temperature=temperature, seed=s), 0, 0) for s in range(9)}
        assert drawn <= {1, 2}
    assert {choose(logits, Sampling(temperature=1e-30, seed=s), 0, 0) for s in range(9)} == {1}


@pytest.mark.filterwarnings("error")
def test_the_least_temperature_is_greedy():
    assert choose(LOGITS, Sampling(temperature=5e-324, top_p=0.5), 0, 0) == 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers(wrong):
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(InputError, match=r"logits are not finite: weights"):
            choose(np.array([0.0, wrong], dtype=np.float32), sampling, 0, 0)


def test_frequencies_are_those_of_the_softmax():
    sampling = Sampling(temperature=2.0)
    drawn = np.array([choose(LOGITS, sampling, 3, position) for position in range(4000)])
    weights = np.sqrt(np.exp(LOGITS))
    expected = weights / weights.sum()
    shares = np.bincount(drawn, minlength=5) / drawn.size
    assert np.abs(shares - expected).max() < 0.03  # four standard deviations


def test_a_draw_belongs_to_seed_sample_and_position():
    uniform = np.zeros(10_000, dtype=np.float32)
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = [choose(uniform, Sampling(seed=seed), *rest) for seed, *rest in places]
    assert len(set(drawn)) == 4
    assert drawn == [choose(uniform, Sampling(seed=seed), *rest) for seed, *rest in places]


@pytest.mark.parametrize(
    "keys",
    [
        *({"temperature": value} for value in (-1.0, float("nan"), float("inf"))),
        *({"top_p": value} for value in (0.0, 1.1, float("nan"))),
        {"top_k": 0},
        {"seed": -1},
    ],
)
def test_what_is_refused(keys):
    with pytest.raises(InputError, match=next(iter(keys))):
        Sampling(**keys)
