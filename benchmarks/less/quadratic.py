"""Data-parallel methods in matrix form, on simulated workers and a problem with a known optimum.

Worker i of n has the loss f_i(x) = |H_i x - y_i|^2 / (2 m), where H_i has m rows. The workers
together minimize the mean of all f_i, whose minimum x* is known. A stochastic gradient is the true
gradient plus normal noise with standard deviation `noise`. The rows of X [repeats, n, dim] are the
parameters of the workers. `repeats` is the number of repetitions, which differ only in the noise.
In this form, a step of a method takes only one or two lines of code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptdmpi.plan.layout.graphs import Topology, matrix

Array = NDArray[np.float64]
# a function from (X, gradients [repeats, n, dim], step, learning rate) to X of the next step
Update = Callable[[Array, Array, int, float], Array]


@dataclass(frozen=True)
class Problem:
    """A least-squares problem of n workers. The gradient of the loss f_i is curvature_i x -
    linear_i, with `curvature` [n, dim, dim] and `linear` [n, dim]. `noise` is the standard
    deviation of the noise in each element of a stochastic gradient."""

    curvature: Array
    linear: Array
    noise: float

    @classmethod
    def drawn(
        cls, workers: int, dim: int, *, noise: float, apart: float, seed: int = 0, of: int = 16
    ) -> "Problem":
        """Return a random problem whose matrices H_i have Gaussian elements. `apart` is the
        standard deviation of each element of the workers' minima. The losses of `of` workers are
        drawn, and divided into `workers` groups of equal size. Each worker of the problem has the
        mean loss of a group, so that the mean loss over all workers does not depend on
        `workers`."""
        random = np.random.default_rng(seed)
        rows = random.standard_normal((of, 4 * dim, dim))
        own = random.standard_normal(dim) + apart * random.standard_normal((of, dim))
        curvature = np.einsum("nmi,nmj->nij", rows, rows) / (4 * dim)
        linear = np.einsum("nij,nj->ni", curvature, own)
        dealt = (workers, of // workers)
        return cls(
            curvature.reshape(*dealt, dim, dim).mean(1), linear.reshape(*dealt, dim).mean(1), noise
        )

    @property
    def workers(self) -> int:
        """Return the number of workers, n."""
        return len(self.curvature)

    @property
    def optimum(self) -> Array:
        """Return the optimum x*, at which the gradient of the mean loss is zero."""
        return np.linalg.solve(self.curvature.mean(0), self.linear.mean(0))

    def gradients(self, x: Array, random: np.random.Generator) -> Array:
        """Return the stochastic gradient of each worker, computed at the worker's own
        parameters."""
        true = np.einsum("nij,rnj->rni", self.curvature, x) - self.linear
        return true + self.noise * random.standard_normal(x.shape)


def descend(
    problem: Problem,
    update: Update,
    steps: int,
    rate: Callable[[int], float],
    *,
    repeats: int = 20,
    every: int = 1,
    seed: int = 1,
) -> Array:
    """Return the mean of |x_i - x*|^2 over workers and repeats, recorded once in `every` steps. All
    workers start from x = 0. `rate` is a function that returns the learning rate of a step."""
    random = np.random.default_rng(seed)
    optimum = problem.optimum
    x = np.zeros((repeats, problem.workers, len(optimum)))
    errors = []
    for step in range(steps):
        x = update(x, problem.gradients(x, random), step, rate(step))
        if (step + 1) % every == 0:
            errors.append(float(((x - optimum) ** 2).sum(-1).mean()))
    return np.array(errors)


def _to_all(mean: Array, like: Array) -> Array:
    """Return the mean over workers [repeats, dim], repeated for every worker: [repeats, n, dim]."""
    return np.broadcast_to(mean[:, None], like.shape)


def parallel() -> Update:
    """Return the update function of parallel SGD (PSGD): x <- x - rate mean_i g_i."""
    return lambda x, g, step, rate: x - rate * _to_all(g.mean(1), x)


def decentralized(topology: Topology, average_every: int = 0) -> Update:
    """Return the update function of decentralized SGD (DSGD) in the form "adapt then combine": X <-
    W (X - rate G), with the gradients G and the mixing matrix W. If `average_every` is not 0, the
    method is Gossip-PGA, which averages over all workers once in `average_every` steps."""
    size = topology.size
    period = [np.array(matrix(topology, step)) for step in range(topology.period or 64)]
    whole = np.full((size, size), 1 / size)

    def update(x: Array, g: Array, step: int, rate: float) -> Array:
        all_now = average_every and (step + 1) % average_every == 0
        weights = whole if all_now else period[step % len(period)]
        return np.einsum("ij,rjd->rid", weights, x - rate * g)

    return update


def local(local_steps: int) -> Update:
    """Return the update function of local SGD: x_i <- x_i - rate g_i. Once in `local_steps` steps,
    every x_i is replaced by the mean of all x_i."""

    def update(x: Array, g: Array, step: int, rate: float) -> Array:
        x = x - rate * g
        return _to_all(x.mean(1), x) if (step + 1) % local_steps == 0 else x

    return update


def top_k(count: int) -> Callable[[Array], Array]:
    """Return a function that keeps the `count` elements of greatest magnitude in each row, and sets
    all other elements to zero."""

    def compress(x: Array) -> Array:
        kept = np.argpartition(-np.abs(x), count - 1, axis=-1)[..., :count]
        sparse = np.zeros_like(x)
        np.put_along_axis(sparse, kept, np.take_along_axis(x, kept, -1), -1)
        return sparse

    return compress


class CompressedDescent:
    """The update function x <- x - u with a compressor C, where u depends on the kind of error
    feedback:

    none            u = rate mean C(g_i)                   (Alistarh et al. 2017)
    mem_sgd         u = mean C(rate g_i + e_i), where e_i is the residual of the last message
                                                           (Stich et al. 2018, arXiv 1809.07599)
    double_squeeze  as mem_sgd, and the server compresses the mean in the same way
                                                           (Tang et al. 2019, arXiv 1905.05957)
    ef21            h_i += C(g_i - h_i), u = rate mean h_i  (Richtarik et al. 2021, 2106.05203)
    neolithic       as double_squeeze, with R messages; each compresses the residual of the
                    messages before it                     (Huang et al. 2022, arXiv 2206.03665)
    """

    def __init__(self, feedback: str, compress: Callable[[Array], Array], rounds: int = 1) -> None:
        self.feedback = feedback
        self.compress = compress
        self.rounds = rounds if feedback == "neolithic" else 1
        self.own: Array | None = None
        self.server: Array | None = None

    def _sent(self, x: Array) -> Array:
        sent = np.zeros_like(x)
        for _ in range(self.rounds):
            sent = sent + self.compress(x - sent)
        return sent

    def __call__(self, x: Array, g: Array, step: int, rate: float) -> Array:
        if self.own is None or self.server is None:
            self.own = np.zeros_like(g)
            self.server = np.zeros_like(g.mean(1))
        if self.feedback == "none":
            return x - rate * _to_all(self.compress(g).mean(1), x)
        if self.feedback == "ef21":
            self.own = self.own + self.compress(g - self.own)
            return x - rate * _to_all(self.own.mean(1), x)
        wanted = rate * g + self.own
        sent = self._sent(wanted)
        self.own = wanted - sent
        arrived = sent.mean(1)
        if self.feedback != "mem_sgd":
            whole = arrived + self.server
            arrived = self._sent(whole)
            self.server = whole - arrived
        return x - _to_all(arrived, x)


def falling(first: float, half: int) -> Callable[[int], float]:
    """Return a function for a learning rate that begins at `first` and decreases as 1 / (1 + step /
    half). At step `half`, the rate is half of `first`."""
    return lambda step: first / (1 + step / half)


def transient(errors: Array, reference: Array, every: int, within: float = 1.25) -> int | None:
    """Return the number of steps after which `errors` stay below `within` times `reference`; None
    if the last recorded error is still above this limit. `errors` and `reference` are both recorded
    once in `every` steps."""
    beyond = np.flatnonzero(errors > within * reference)
    if not len(beyond):
        return every
    last = int(beyond[-1])
    return None if last + 1 == len(errors) else (last + 2) * every
