"""The training order: a pure function of (seed, global sample index) that returns the dataset and
the number of the sample in this dataset.

Only one period of the mixture (the repeating sequence of datasets) is stored. Other trainers store
shuffled index files; ptdmpi computes the order by a keyed permutation. Start-up time and memory
therefore do not depend on the size of the corpus. Resuming needs only one integer, the number of
consumed samples.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from math import lcm

import numpy as np

from ptdmpi.config import InputError

MAX_PERIOD = 10**6  # the maximum period of a mixture, in samples.
# The number of rounds of the Feistel network. Four rounds of random functions would be enough (Luby
# and Rackoff 1988). The round function is a hash, which is weaker than a random function, so there
# are more rounds.
_ROUNDS = 8
# The number of rounds for words of at most _SMALL_BITS bits. For such short words, _ROUNDS rounds
# do not mix the words well, because the output of a round has too few bits.
_SMALL_ROUNDS = 32
_SMALL_BITS = 14

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the increment of splitmix64
_WORD = (1 << 64) - 1
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)


def _mix(words: np.ndarray) -> np.ndarray:
    """Return the images of 64-bit words under a bijection whose output bits each depend on all
    input bits.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014; variant 13 of D.
    Stafford).
    """
    words = (words ^ (words >> np.uint64(30))) * _M1
    words = (words ^ (words >> np.uint64(27))) * _M2
    return words ^ (words >> np.uint64(31))


def _word(value: int) -> np.ndarray:
    """Return the integer `value` modulo 2^64 as a uint64 array with one element."""
    return np.array([value & _WORD], dtype=np.uint64)


def _encrypt(words: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """Return the images of `bits`-bit words under a Feistel network, which is a bijection of
    [0, 2^bits) for every key.

    The low half of a word has bits//2 bits, and the high half has the remaining bits. Rounds change
    the two halves alternately (an alternating, unbalanced network). The halves may have unequal
    lengths, so `bits` may be odd. `permute` can therefore choose the smallest `bits` with 2^bits >=
    size, and then 2^bits is less than 2 size.
    """
    low_bits = np.uint64(bits // 2)
    widths = (np.uint64(bits - bits // 2), low_bits)
    halves = [words >> low_bits, words & ((np.uint64(1) << low_bits) - np.uint64(1))]
    rounds = _SMALL_ROUNDS if bits <= _SMALL_BITS else _ROUNDS
    for number in range(rounds):
        changed = number % 2
        if widths[changed] == 0:
            continue
        # Each round has a different function. With the same function in all rounds, patterns of the
        # two halves would remain.
        output = (halves[1 - changed] ^ (key + _word(_GOLDEN * (number + 1)))) * _M1
        output ^= output >> np.uint64(32)
        output *= _M2
        output >>= np.uint64(64) - widths[changed]
        halves[changed] = halves[changed] ^ output
    return (halves[0] << low_bits) | halves[1]


def permute(index: np.ndarray, size: int, key: int | np.ndarray) -> np.ndarray:
    """Return the images of `index` under the permutation of [0, size) that `key` selects.

    `index` is int [n], each in [0, size). `key` is an integer, or an uint64 array [n] with one key
    per index. The result is int64 [n]. Raise IndexError for an index outside [0, size).

    A Feistel network permutes the range up to the next power of two. An image outside [0, size) is
    permuted again until it is inside (cycle walking). The result is a bijection of [0, size), and
    an index needs fewer than two passes of the network on average.

    Source: Luby and Rackoff, SIAM J. Comput. 17 (1988); Black and Rogaway, "Ciphers with arbitrary
    finite domains", CT-RSA 2002 (cycle walking).
    """
    index = np.asarray(index, dtype=np.int64)
    if index.size and (index.min() < 0 or index.max() >= size):
        raise IndexError(f"index outside [0, {size})")
    bits = (size - 1).bit_length()
    if bits == 0:
        return np.zeros_like(index)
    keys = _mix(key if isinstance(key, np.ndarray) else _word(key))
    images = _encrypt(index.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(images >= np.uint64(size))
    while outside.size:
        walked = _encrypt(images[outside], bits, keys if keys.size == 1 else keys[outside])
        images[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return images.astype(np.int64)


@dataclass(frozen=True)
class Part:
    """One dataset of a mixture: its number of training samples, its weight, and its maximum number
    of epochs.

    `key` selects the permutations of the dataset (None: the number of the dataset in the mixture).
    `drawn` is the number of the dataset's samples that the run used before this order began. `key`
    and `drawn` differ from their defaults only if the mixture was changed during the run.
    """

    samples: int
    weight: Decimal | str
    epochs: Decimal | None = None  # the maximum, which may be fractional; None: no limit
    key: int | None = None
    drawn: int = 0


@dataclass(frozen=True)
class Start:
    """The start of an order: the order begins at step `step` (from 0) of the run, with global
    sample `sample`."""

    step: int = 0
    sample: int = 0


def _weights(parts: Sequence[Part]) -> list[int]:
    """Return the weights of `parts` as integers with exactly the same ratios. The sum of these
    integers is the period of the mixture.

    Raise InputError for a weight that is not a decimal above 0, and for a period above MAX_PERIOD.
    """
    exact = []
    for number, part in enumerate(parts):
        try:
            weight = Decimal(part.weight)
        except InvalidOperation:
            weight = Decimal("NaN")
        if not weight.is_finite() or weight <= 0:
            raise InputError(
                f"weight {part.weight} of training dataset {number}: a weight is a decimal above 0"
            )
        exact.append(Fraction(weight))
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period > MAX_PERIOD:
        raise InputError(
            f"the mixture weights {', '.join(str(part.weight) for part in parts)} repeat only "
            f"after {period} samples; at most {MAX_PERIOD} are legal: round them to fewer digits"
        )
    return [int(share * period) for share in shares]


def _apportion(weights: list[int]) -> np.ndarray:
    """Return the number of the dataset for each sample of one period, int32 [sum of weights].

    For every n, the first n samples contain floor(w_i n) or ceil(w_i n) samples of dataset i (w_i =
    weights[i] / period). The number of samples of dataset i therefore differs from w_i n by less
    than one.

    Proof: this is a scheduling problem with jobs of unit length. A slot is a sample of the period,
    and job k of dataset i is the dataset's sample number k in the period. Job k may run from slot
    floor(k / w_i) and must have run by slot ceil((k + 1) / w_i). The bounds floor(w_i n) and
    ceil(w_i n) hold for every n if and only if every job runs in its window. If jobs may be split,
    a schedule exists: give dataset i the fraction w_i of every slot. The sum of the fractions is 1,
    so every slot is full. Job k of dataset i then runs from k / w_i to (k + 1) / w_i, which is
    inside its window. Such a schedule is a flow in the bipartite graph of jobs and slots, and its
    bounds are integers. With integer bounds, an integral flow exists whenever a flow exists. So
    there is a schedule in which no job is split. For jobs of unit length on one machine, the rule
    "earliest deadline first" finds such a schedule (Horn, Naval Res. Logist. 21 (1974)).
    Proportionate fairness (Baruah, Cohen, Plaxton, Varvel, Algorithmica 15 (1996)) and Steiner and
    Yeomans (1993) define the same windows of slots."""
    period = sum(weights)
    table = np.empty(period, dtype=np.int32)
    given = [0] * len(weights)
    # for each dataset: (first slot in which its next job may run, number of the dataset)
    waiting = [(0, number) for number in range(len(weights))]
    ready: list[tuple[int, int]] = []  # (deadline, dataset)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            number = heapq.heappop(waiting)[1]
            deadline = -(-(given[number] + 1) * period // weights[number])
            heapq.heappush(ready, (deadline, number))
        number = heapq.heappop(ready)[1]
        table[slot] = number
        given[number] += 1
        heapq.heappush(waiting, (given[number] * period // weights[number], number))
    return table


class SampleOrder:
    """The order of all training samples of a run: a pure function of (seed, global sample index).

    A table has the dataset of each slot of a period. The period is the smallest number of samples
    in which the datasets have exactly the ratios of their weights; after it, the table is used
    again. Global sample n comes from the dataset of slot (n - start.sample) mod period. Let n be
    the k-th sample from its dataset (k counts from 0), and let the dataset have S samples. Then n
    is the dataset's sample permute(k mod S), in epoch k // S. The key of `permute` is made from
    seed, dataset and epoch. Every epoch of a dataset therefore has each of its samples exactly
    once, in a new order. With a later `start`, k also counts the `drawn` samples of the dataset
    that the run used before the start."""

    def __init__(self, parts: Sequence[Part], seed: int, start: Start = Start()):
        """Prepare the order. Raise InputError if there are no parts or a part has no samples, if a
        weight is not a decimal above 0, if the weights need a period above MAX_PERIOD, or if a
        limit of epochs is not above 0."""
        if not parts:
            raise InputError("no training dataset: at least one is needed")
        for number, part in enumerate(parts):
            if part.samples < 1:
                raise InputError(
                    f"training dataset {number} has no samples: at least one is needed"
                )
            if part.epochs is not None and not part.epochs > 0:
                raise InputError(
                    f"epochs {part.epochs} of training dataset {number}: must be above 0"
                )
        self.parts = tuple(parts)
        self.seed = seed
        self.start = start
        self._weights = _weights(self.parts)
        self._period = sum(self._weights)
        self._table = _apportion(self._weights)
        # for each slot of the period, the number of earlier samples of the same dataset, int64
        # [period]
        self._rank = np.empty(self._period, dtype=np.int64)
        for number, weight in enumerate(self._weights):
            self._rank[self._table == number] = np.arange(weight)

    def _keys(self, dataset: int, epochs: np.ndarray) -> np.ndarray:
        """Return the permutation key of each epoch (int [n]) of a dataset: uint64 [n]."""
        key = _mix(_mix(_word(self.seed)) + _word(_GOLDEN * (dataset + 1)))
        return _mix(key + epochs.astype(np.uint64) * np.uint64(_GOLDEN))

    def locate(self, global_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each global sample (int [n], at or after the start) the number of its dataset
        (int64 [n]), and the number of the sample in this dataset (int64 [n])."""
        indices = np.asarray(global_indices, dtype=np.int64) - self.start.sample
        periods, slots = np.divmod(indices, self._period)
        datasets = self._table[slots].astype(np.int64)
        samples = np.empty_like(datasets)
        for number, part in enumerate(self.parts):
            chosen = np.flatnonzero(datasets == number)
            if not chosen.size:
                continue
            draws = periods[chosen] * self._weights[number] + self._rank[slots[chosen]]
            epochs, positions = np.divmod(draws + part.drawn, part.samples)
            key = number if part.key is None else part.key
            samples[chosen] = permute(positions, part.samples, self._keys(key, epochs))
        return datasets, samples

    def counts(self, total_samples: int) -> list[int]:
        """Return how many of the first `total_samples` samples of the run come from each dataset,
        including the samples used before the start."""
        periods, rest = divmod(total_samples - self.start.sample, self._period)
        begun = np.bincount(self._table[:rest], minlength=len(self.parts))
        return [
            part.drawn + periods * weight + int(n)
            for part, weight, n in zip(self.parts, self._weights, begun, strict=True)
        ]

    def check(self, total_samples: int) -> None:
        """Raise InputError if a run of `total_samples` samples exceeds a dataset's limit of
        epochs."""
        for number, drawn in enumerate(self.counts(total_samples)):
            part = self.parts[number]
            if part.epochs is not None and Fraction(drawn, part.samples) > Fraction(part.epochs):
                raise InputError(
                    f"training dataset {number} would be read for {drawn / part.samples:.4g} "
                    f"epochs ({drawn} samples of {part.samples}), but its limit is epochs = "
                    f"{part.epochs}: train on fewer samples, lower its weight, or raise its epochs"
                )
