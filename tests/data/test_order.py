"""The sample order: a bijection, evenly spread, an exact mixture, a pure function."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptdmpi.config import InputError
from ptdmpi.data.order import Part, SampleOrder, permute

EDGE_SIZES = sorted({1, 2, 3, 5, 6, 7} | {2**k + e for k in range(2, 17) for e in (-1, 0, 1)})


def sigmas(counts: np.ndarray) -> float:
    """Pearson's chi-square statistic of equally likely cells, in standard deviations above its
    mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("size", EDGE_SIZES)
def test_permutation_is_a_bijection(size):
    for key in (0, 1, 2**64 - 1):
        assert (np.sort(permute(np.arange(size), size, key)) == np.arange(size)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20000), st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection_of_any_size(size, key):
    assert (np.sort(permute(np.arange(size), size, key)) == np.arange(size)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**13), st.integers(0, 2**64 - 1), st.data())
def test_large_permutations_stay_inside_and_are_injective(size, key, data):
    start = data.draw(st.integers(0, max(0, size - 2000)))
    index = np.arange(start, min(size, start + 2000))
    images = permute(index, size, key)
    assert images.min() >= 0 and images.max() < size
    assert np.unique(images).size == index.size


def test_permutation_is_elementwise_and_takes_a_key_per_index():
    index = np.arange(500)
    keys = np.arange(500, dtype=np.uint64) % 7
    mixed = permute(index, 500, keys)
    for key in range(7):
        chosen = keys == key
        assert (mixed[chosen] == permute(index[chosen], 500, key)).all()
        assert (permute(index, 500, key)[chosen] == mixed[chosen]).all()


@pytest.mark.parametrize("index", [-1, 10])
def test_index_outside_is_refused(index):
    with pytest.raises(IndexError):
        permute(np.array([index]), 10, 0)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_small_permutations_are_equally_likely(size):
    keys = np.random.default_rng(size).integers(0, 2**64, 60000, dtype=np.uint64)
    images = [permute(np.full(keys.size, index), size, keys) for index in range(size)]
    codes = sum(image * size**place for place, image in enumerate(images))
    counts = np.zeros(math.factorial(size))
    seen = np.unique(codes, return_counts=True)[1]
    counts[: seen.size] = seen
    assert sigmas(counts) < 5


@pytest.mark.parametrize("size", [97, 1000, 4096, 5000, 20000, 10**6, 10**9, 2**40 + 1, 10**13])
@pytest.mark.parametrize("key", [0, 1])
def test_positions_and_neighbours_are_uniform(size, key):
    samples = min(size - 1, 100_000)
    index = (
        np.random.default_rng(key).choice(size - 1, samples, replace=False)
        if size <= 10**6
        else (np.random.default_rng(key).integers(0, size - 1, samples))
    )
    here = permute(index, size, key)
    there = permute(index + 1, size, key)
    cells = 8
    joint = np.bincount(here * cells // size * cells + there * cells // size, minlength=cells**2)
    assert sigmas(joint) < 5  # where a sample goes and where its neighbour goes: independent
    gaps = np.bincount((there - here) % size * 32 // size, minlength=32)
    assert sigmas(gaps) < 5
    lowest = np.bincount(here % 4, minlength=4) if size % 4 == 0 else np.ones(4)
    assert sigmas(lowest) < 5


def test_keys_give_unrelated_permutations():
    first = permute(np.arange(10**5), 10**5, 0)
    second = permute(np.arange(10**5), 10**5, 1)
    assert np.count_nonzero(first == second) < 10
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02


weights = st.lists(st.integers(1, 400), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(weights)
def test_mixture_holds_at_every_prefix(numerators):
    parts = [Part(10**6, Decimal(number) / 100) for number in numerators]
    total = sum(numerators)
    length = min(2 * total, 3000)
    order = SampleOrder(parts, seed=0)
    datasets = order.locate(np.arange(length))[0]
    prefix = np.arange(1, length + 1)
    for dataset, numerator in enumerate(numerators):
        count = np.cumsum(datasets == dataset)
        assert (np.abs(count * total - numerator * prefix) < total).all()  # |count - w n| < 1
        assert order.counts(length)[dataset] == count[-1]


def test_llama_mixture_is_exact_over_its_period():
    shares = ["0.67", "0.15", "0.045", "0.045", "0.045", "0.025", "0.02"]
    order = SampleOrder([Part(1000, share) for share in shares], seed=3)
    assert order.counts(1000) == [int(Fraction(share) * 1000) for share in shares]


@pytest.mark.parametrize("weight", ["0", "-1", "NaN", "Infinity", "half", ""])
def test_bad_weight_is_refused(weight):
    with pytest.raises(InputError, match="dataset 1"):
        SampleOrder([Part(5, "1"), Part(5, weight)], seed=0)


def test_too_fine_weights_are_refused():
    SampleOrder([Part(5, "0.999999"), Part(5, "0.000001")], seed=0)
    with pytest.raises(InputError, match="10000000"):
        SampleOrder([Part(5, "0.9999999"), Part(5, "0.0000001")], seed=0)


def test_each_epoch_has_every_sample_once_in_a_new_order():
    order = SampleOrder([Part(100, "0.25"), Part(37, "0.75")], seed=5)
    datasets, samples = order.locate(np.arange(4000))
    for dataset, size in enumerate((100, 37)):
        drawn = samples[datasets == dataset]
        epochs = drawn[: drawn.size // size * size].reshape(-1, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()
        assert np.unique(epochs, axis=0).shape == epochs.shape


def test_order_is_a_pure_function_of_seed_and_index():
    parts = [Part(10**9, "0.9"), Part(100, "0.1")]
    index = np.random.default_rng(0).integers(0, 10**12, 1000)
    datasets, samples = SampleOrder(parts, seed=1).locate(index)
    again = SampleOrder(parts, seed=1)
    for number in (0, 1, 500, 999):
        dataset, sample = again.locate(index[number : number + 1])
        assert (dataset[0], sample[0]) == (datasets[number], samples[number])
    assert (SampleOrder(parts, seed=2).locate(index)[1] != samples).mean() > 0.9


def test_datasets_of_one_size_are_shuffled_differently():
    datasets, samples = SampleOrder([Part(1000, "1"), Part(1000, "1")], seed=0).locate(
        np.arange(2000)
    )
    assert np.count_nonzero(samples[datasets == 0] == samples[datasets == 1]) < 20


def test_epoch_limit_is_exact_and_names_the_dataset():
    order = SampleOrder([Part(1000, "1"), Part(100, "1", epochs=Decimal("2.5"))], seed=0)
    order.check(500)
    with pytest.raises(InputError, match=r"dataset 1 .* 2.51 epochs .* epochs = 2.5"):
        order.check(502)


@pytest.mark.parametrize("part", [Part(0, "1"), Part(5, "1", epochs=Decimal(0))])
def test_impossible_part_is_refused(part):
    with pytest.raises(InputError):
        SampleOrder([part], seed=0)


def test_no_dataset_is_refused():
    with pytest.raises(InputError, match="no training dataset"):
        SampleOrder([], seed=0)
