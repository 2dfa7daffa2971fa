"""Experiments on the quadratic problem: speed-up, topologies, local steps, compression."""

from dataclasses import dataclass

import numpy as np

from benchmarks.less import quadratic
from benchmarks.less.quadratic import Array, Problem, descend, falling
from ptdmpi.plan.layout.topology import topology

SIZES = (4, 8, 16)
TOPOLOGIES = ("ring", "grid", "torus", "one_peer_exponential", "exponential", "complete")
LOCAL_STEPS = (1, 2, 4, 8, 16, 32)
RATIOS = (0.01, 0.05)
FEEDBACK = ("none", "mem_sgd", "double_squeeze", "ef21", "neolithic")


@dataclass(frozen=True)
class Lengths:
    """The lengths of the experiments: the number of steps of each experiment, and the number of
    repeats over which results are averaged."""

    speed_up: int = 4000
    topologies: int = 20_000
    local: int = 3200
    compressed: int = 4000
    repeats: int = 10


def speed_up(lengths: Lengths) -> dict[str, dict[int, float]]:
    """Return, for each method and each number of workers, the mean error in the last quarter of all
    steps. The learning rate is constant."""
    by_method: dict[str, dict[int, float]] = {}
    for size in SIZES:
        problem = Problem.drawn(size, 10, noise=3.0, apart=0.3)
        ways = {
            "PSGD": quadratic.parallel(),
            "DSGD, ring": quadratic.decentralized(topology("ring", size)),
            "DSGD, exponential": quadratic.decentralized(topology("exponential", size)),
        }
        for name, way in ways.items():
            errors = descend(
                problem,
                way,
                lengths.speed_up,
                lambda step: 0.02,
                repeats=lengths.repeats,
                every=10,
            )
            by_method.setdefault(name, {})[size] = float(errors[-len(errors) // 4 :].mean())
    return by_method


@dataclass(frozen=True)
class TopologyCurve:
    """The results of the experiment for one topology. `gap` is the spectral gap of the topology.
    `ratio` is the error divided by the error of parallel SGD, at the recorded steps. `transient` is
    the number of steps after which `ratio` stays below 1.25; None means that more steps are needed
    than were done."""

    gap: float
    ratio: Array
    transient: int | None


def topologies(lengths: Lengths, size: int = 16, every: int = 100) -> dict[str, TopologyCurve]:
    """Return the results of decentralized SGD on `size` workers with each topology, by the name of
    the topology. The learning rate decreases, and the workers have different minima."""
    problem = Problem.drawn(size, 10, noise=3.0, apart=1.0)

    def errors_of(update: quadratic.Update) -> Array:
        rate = falling(0.2, 200)
        repeats = lengths.repeats
        return descend(problem, update, lengths.topologies, rate, repeats=repeats, every=every)

    plain = errors_of(quadratic.parallel())
    curves = {}
    for name in TOPOLOGIES:
        graph = topology(name, size)
        errors = errors_of(quadratic.decentralized(graph))
        transient = quadratic.transient(errors, plain, every)
        curves[name] = TopologyCurve(graph.spectral_gap, errors / plain, transient)
    return curves


def local(lengths: Lengths, size: int = 8) -> dict[int, float]:
    """Return, for each number of local steps, the mean error of local SGD on `size` workers in the
    last quarter of all steps. The learning rate is constant."""
    problem = Problem.drawn(size, 10, noise=3.0, apart=1.0)
    by_steps = {}
    for count in LOCAL_STEPS:
        errors = descend(
            problem,
            quadratic.local(count),
            lengths.local,
            lambda step: 0.02,
            repeats=2 * lengths.repeats,
            every=max(LOCAL_STEPS),
        )
        by_steps[count] = float(errors[-len(errors) // 4 :].mean())
    return by_steps


def compressed(lengths: Lengths, size: int = 8, dim: int = 200) -> dict[tuple[str, float], Array]:
    """Return the errors at the recorded steps, for each pair (kind of error feedback, compression
    ratio). The key ("PSGD", 1.0) has the errors of parallel SGD. If a training diverges, its errors
    become infinite."""
    problem = Problem.drawn(size, dim, noise=0.3, apart=0.3)

    def errors_of(update: quadratic.Update) -> Array:
        return descend(
            problem,
            update,
            lengths.compressed,
            falling(0.02, 1000),
            repeats=max(1, lengths.repeats // 5),
            every=max(1, lengths.compressed // 40),
        )

    errors = {("PSGD", 1.0): errors_of(quadratic.parallel())}
    for ratio in RATIOS:
        top_k = quadratic.top_k(int(ratio * dim))
        for feedback in FEEDBACK:
            values = errors_of(quadratic.CompressedDescent(feedback, top_k, rounds=2))
            errors[feedback, ratio] = np.nan_to_num(values, nan=np.inf)
    return errors
