"""The experiments on the quadratic problem: speed-up, topologies, local steps, compression."""

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
    """How long the experiments take: steps of each, and repeats over which they are averaged."""

    speed_up: int = 4000
    topologies: int = 20_000
    local: int = 3200
    compressed: int = 4000
    repeats: int = 10


def speed_up(lengths: Lengths) -> dict[str, dict[int, float]]:
    """Method -> workers -> the error that a constant rate ends at."""
    found: dict[str, dict[int, float]] = {}
    for size in SIZES:
        problem = Problem.drawn(size, 10, noise=3.0, apart=0.3)
        ways = {
            "PSGD": quadratic.parallel(),
            "DSGD, ring": quadratic.decentralized(topology("ring", size)),
            "DSGD, exponential": quadratic.decentralized(topology("exponential", size)),
        }
        for name, way in ways.items():
            errors = descend(
                problem, way, lengths.speed_up, lambda step: 0.02, lengths.repeats, every=10
            )
            found.setdefault(name, {})[size] = float(errors[-len(errors) // 4 :].mean())
    return found


@dataclass(frozen=True)
class TopologyCurve:
    """An experiment on a topology: spectral gap, errors by recorded step relative to PSGD's, and
    after how many steps they stay within a quarter of these; None: later."""

    gap: float
    ratio: Array
    transient: int | None


def topologies(lengths: Lengths, size: int = 16, every: int = 100) -> dict[str, TopologyCurve]:
    """Topology -> its curve, with a falling rate and workers whose minima differ."""
    problem = Problem.drawn(size, 10, noise=3.0, apart=1.0)
    steps, rate = lengths.topologies, falling(0.2, 200)
    plain = descend(problem, quadratic.parallel(), steps, rate, lengths.repeats, every)
    found = {}
    for name in TOPOLOGIES:
        graph = topology(name, size)
        way = quadratic.decentralized(graph)
        errors = descend(problem, way, steps, rate, lengths.repeats, every)
        late = quadratic.transient(errors, plain, every)
        found[name] = TopologyCurve(graph.spectral_gap, errors / plain, late)
    return found


def local(lengths: Lengths, size: int = 8) -> dict[int, float]:
    """Local steps -> the error at averages, with a constant rate, when it falls no more."""
    problem = Problem.drawn(size, 10, noise=3.0, apart=1.0)
    found = {}
    for count in LOCAL_STEPS:
        way = quadratic.local(count)
        errors = descend(
            problem, way, lengths.local, lambda step: 0.02, 2 * lengths.repeats, max(LOCAL_STEPS)
        )
        found[count] = float(errors[-len(errors) // 4 :].mean())
    return found


def compressed(lengths: Lengths, size: int = 8, dim: int = 200) -> dict[tuple[str, float], Array]:
    """(feedback, ratio) -> errors by recorded step; ("PSGD", 1.0) beside them."""
    problem = Problem.drawn(size, dim, noise=0.3, apart=0.3)
    steps, rate = lengths.compressed, falling(0.02, 1000)
    repeats, every = max(1, lengths.repeats // 5), max(1, lengths.compressed // 40)
    found = {("PSGD", 1.0): descend(problem, quadratic.parallel(), steps, rate, repeats, every)}
    for ratio in RATIOS:
        for feedback in FEEDBACK:
            way = quadratic.CompressedDescent(feedback, quadratic.top_k(int(ratio * dim)), rounds=2)
            errors = descend(problem, way, steps, rate, repeats, every)
            found[feedback, ratio] = np.nan_to_num(errors, nan=np.inf)
    return found
