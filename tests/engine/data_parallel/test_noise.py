"""Gradient noise: the published estimators, equal in every layout, and the training as it was."""

import math

import numpy as np
import pytest

from ptdmpi.comm.world import World
from ptdmpi.engine.noise import gradient_noise
from ptdmpi.report import noise
from tests._configs import layout
from tests._engines import (
    assert_same_bits,
    build,
    from_root,
    microbatches,
    train,
)
from tests.parallel import parallel


def test_estimates_are_unbiased_and_the_published_ones():
    """Token gradients drawn with a known mean and covariance; parts of equal size give McCandlish's
    formulas, unequal ones the same expectations."""
    draw, dims = np.random.default_rng(0), 20
    mean, spread = draw.normal(size=dims), np.linspace(0.5, 2.0, dims)
    true_square, true_variance = float(mean @ mean), float((spread**2).sum())
    for sizes in ((8, 8), (4, 8, 20)):
        found = []
        for _ in range(4000):
            parts = [mean + spread * draw.normal(size=dims) / math.sqrt(n) for n in sizes]
            whole = sum(n * part for n, part in zip(sizes, parts, strict=True)) / sum(sizes)
            told = [(float(np.linalg.norm(p)), n) for p, n in zip(parts, sizes, strict=True)]
            found.append(gradient_noise(told, float(np.linalg.norm(whole)), sum(sizes)))
        assert np.mean([one.square for one in found]) == pytest.approx(true_square, rel=0.02)
        assert np.mean([one.variance for one in found]) == pytest.approx(true_variance, rel=0.02)
    small, big = (3.0, 8), (2.0, 16)
    one = gradient_noise([small, small], *big)
    assert one.square == pytest.approx((16 * 4 - 8 * 9) / (16 - 8))  # equation A.2
    assert one.variance == pytest.approx((9 - 4) / (1 / 8 - 1 / 16))  # equation A.3
    assert gradient_noise([(1.0, 8), (0.0, 0)], 1.0, 8) is None
    assert gradient_noise([(1.0, 8)], 1.0, 8) is None


NOISE = {"log.gradient_noise_every_steps": 2}


@pytest.mark.cases(1)
@parallel(ranks=[2, 4])
def test_noise_is_that_of_data_ranks_gradients(comm):
    """The norm of each data rank's gradient is that of one rank that has its samples alone; nothing
    of the training changes."""
    where = {2: layout(d=2), 4: layout(t=2, d=2) | {"parallel.sequence_parallel": True}}[comm.size]
    engine, expected = build(World(comm), where | NOISE), None
    results = [
        engine.step(k, microbatches(engine.config, k, engine.axes["data"].rank)) for k in range(4)
    ]
    assert [result.noise is None for result in results] == [True, False, True, False]
    assert comm.allgather([result.noise for result in results]) == (
        [[result.noise for result in results]] * comm.size
    )
    norm = engine.reduction.global_norm
    engine.reduction.global_norm = lambda: norm() * math.inf
    lost = engine.step(3, microbatches(engine.config, 3, engine.axes["data"].rank))
    assert lost.skipped and lost.noise is None
    world = World(comm).first(1)
    if world is not None:
        serial, parts = build(world, {}), []
        serial.step(0, microbatches(serial.config, 0, 0))
        batches = microbatches(serial.config, 1, 0)
        for half in (batches[:2], batches[2:]):
            # the mean over its own tokens: of the missing microbatches none counts
            empty = [microbatches(serial.config, 1, 0, masked=True)[0] for _ in range(2)]
            none = [one.each(lambda t: t * 0) for one in empty]
            for one in none:
                object.__setattr__(one, "tokens", 0.0)
            serial.accumulate(1, [*half, *none], serial.stopwatch())
            serial.reduction.reduce()
            tokens = sum(one.tokens for one in half)
            parts.append((float(serial.reduction.global_norm()), tokens))
        norm, tokens = results[1].grad_norm, sum(count for _, count in parts)
        expected = gradient_noise(parts, norm, tokens)
    expected = from_root(comm, expected)
    found = results[1].noise
    assert found.tokens == expected.tokens
    assert found.square == pytest.approx(expected.square, rel=1e-3)
    assert found.variance == pytest.approx(expected.variance, rel=1e-3)
    if comm.size == 2:
        # a tied table's two uses are added before the sum over data ranks, not behind it
        untied = where | {"model.tie_embeddings": False}
        assert_same_bits(train(comm, untied | NOISE, steps=3), train(comm, untied, steps=3))


LOST = {"square": math.nan, "variance": -math.inf, "tokens": 100.0}


def test_answers():
    def answer(square: float, variance: float) -> str:
        of = {"square": square, "variance": variance, "tokens": 100.0}
        found = noise.judged([{"step": 1}, *({"gradient_noise": one} for one in (of, LOST, of))])
        assert found["steps"] == 2
        return found["answer"]

    assert noise.judged([{"step": 1}]) is None
    assert noise.judged([{"gradient_noise": LOST}]) is None
    assert answer(1.0, 201.0) == "a larger batch is beneficial"
    assert answer(1.0, 100.0) == "the batch is about right"
    assert answer(1.0, 49.0).startswith("a larger batch is of little use")
    assert answer(-1.0, 100.0).startswith("a larger batch is beneficial: the gradient is lost")
    ((_, text), _) = noise.rows(
        noise.judged([{"gradient_noise": {"square": 2.0, "variance": 4e4, "tokens": 100.0}}])
    )
    assert text == "20,000 tokens, batch 100 valid tokens, over 1 steps"
