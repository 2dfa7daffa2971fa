"""Compressed data parallelism as a matrix: n simulated workers, one row each, in numpy.

Written from the papers, not from the code: the greatest of each unit by sorting, random numbers by
64-bit arithmetic of numpy's own.
"""

import hashlib

import numpy as np

GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def fold(key: int, *numbers: int) -> int:
    """Return a key of 64 bits, signed, for a key and numbers."""
    for number in numbers:
        digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
    return key


def mix(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of splitmix64."""
    x = x.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def unit_number(name: str, line: int, run: int) -> int:
    """Return the number of a unit by parameter, line and run."""
    digest = hashlib.blake2b(f"{name}/{line}/{run}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Unit:
    """One unit: its number, and its random numbers by (key of step and round, source)."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _row(self, key: int, source: int) -> np.ndarray:
        return mix(np.array([(self.number + fold(key, source)) & MASK], dtype=np.uint64))

    def shared(self, key: int) -> float:
        """Return the number in [0, 1) that all sources share."""
        return float(self._row(key, -1)[0] >> np.uint64(32)) * 2.0**-32

    def hashes(self, key: int, source: int, length: int) -> np.ndarray:
        """Return a hash of 64 bits for each element."""
        columns = np.array([i * GOLDEN & MASK for i in range(length)], dtype=np.uint64)
        return mix(self._row(key, source) + columns)

    def uniform(self, key: int, source: int, length: int) -> np.ndarray:
        """Return a number in [0, 1) for each element."""
        return (self.hashes(key, source, length) >> np.uint64(40)).astype(np.float64) * 2.0**-24


def kept(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the greatest scores; among equal ones the first."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def compress(name: str, options: dict, unit: Unit, x: np.ndarray, key: int, source: int):
    """C(x) of one unit [d]; `options`: ratio, levels, unbiased."""
    d, found = len(x), np.zeros_like(x)
    if name in ("top_k", "random_k"):
        ratio = options["ratio"]
        count = min(d, int(np.floor(ratio * d + unit.shared(key))))
        if name == "top_k":
            places = kept(np.abs(x), count)
        else:
            signed = unit.hashes(key, source, d).astype(np.int64).astype(object)
            places = np.array(sorted(range(d), key=lambda i: -signed[i])[:count], dtype=int)
        found[places] = x[places] / (ratio if options["unbiased"] and name == "random_k" else 1)
        return found
    if name == "sign":
        return np.where(x >= 0, 1.0, -1.0) * np.mean(np.abs(x))
    if name in ("int8", "int4"):
        q, most = (127 if name == "int8" else 7), np.max(np.abs(x))
        return np.rint(x / most * q) / q * most if most else found
    assert name == "qsgd"
    s, norm = options["levels"], np.sqrt(np.sum(x * x))
    if norm:
        share = np.minimum(np.abs(x) / norm, 1.0) * s
        up = unit.uniform(key, source, d) < share - np.floor(share)
        found = np.sign(x) * (np.floor(share) + up) / s * norm
    omega = min(d / s**2, np.sqrt(d) / s)
    return found if options["unbiased"] else found / (1 + omega)


class Workers:
    """The rules of feedback on n workers; `units` are (unit, its places in the vector)."""

    SERVER = -2

    def __init__(self, feedback: str, name: str, options: dict, units, n: int, size: int) -> None:
        self.feedback, self.name, self.units, self.n = feedback, name, units, n
        self.options = options | {"unbiased": feedback == "none"}
        self.rounds = options.get("rounds", 1) if feedback == "neolithic" else 1
        self.error, self.estimate = np.zeros((n, size)), np.zeros((n, size))
        self.server = np.zeros(size)

    def code(self, x: np.ndarray, key: int, source: int) -> np.ndarray:
        """What arrives of x: R rounds, each of what is left."""
        arrived = np.zeros_like(x)
        for number in range(self.rounds):
            for unit, places in self.units:
                rest = x[places] - arrived[places]
                told = fold(key, number)
                arrived[places] += compress(self.name, self.options, unit, rest, told, source)
        return arrived

    def step(self, gradients: np.ndarray, key: int) -> np.ndarray:
        """[n, d] gradients whose mean is the global one -> what is updated with [d]."""
        if self.feedback == "none":
            return np.mean([self.code(g, key, i) for i, g in enumerate(gradients)], axis=0)
        if self.feedback == "ef21":
            for i, g in enumerate(gradients):
                self.estimate[i] += self.code(g - self.estimate[i], key, i)
            return self.estimate.mean(axis=0)
        aimed = gradients + self.error
        sent = np.array([self.code(x, key, i) for i, x in enumerate(aimed)])
        self.error = aimed - sent
        mean = sent.mean(axis=0)
        if self.feedback == "mem_sgd":
            return mean
        aimed = mean + self.server
        told = self.code(aimed, key, self.SERVER)
        self.server = aimed - told
        return told
