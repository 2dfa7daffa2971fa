"""Sampling of the next token from float32 logits: temperature, top-k, top-p.

The random numbers depend only on the seed, the index of the sample and the position. So, for equal
logits, the sampled token depends neither on the layout nor on the other samples of the batch.
"""

from dataclasses import dataclass

import numpy as np

from ptdmpi.config import InputError

NOT_FINITE = "logits are not finite: weights that are inf or NaN, or too large for this precision"


@dataclass(frozen=True)
class Sampling:
    """The parameters of sampling. Raises InputError for values out of range.

    With `temperature` 0, the most probable token is always chosen. `top_k` is the number of most
    probable tokens to sample from; None means all tokens. `top_p` restricts sampling to the fewest
    tokens whose probabilities add up to at least `top_p` (nucleus sampling; Holtzman et al. 2020,
    arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"temperature = {self.temperature}; legal: 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k = {self.top_k}; legal: 1 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p = {self.top_p}; legal: above 0, up to 1")
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"seed = {self.seed}; legal: 0 to 2^63 - 1")


GREEDY = Sampling(temperature=0.0)


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, log weights) of the tokens that can be sampled, the most probable first.

    `logits` is float32 [vocabulary]. Tokens with equal logits are ordered by their ids. Temperature
    is applied first, then top-k, then top-p.
    """
    order = np.argsort(-logits, kind="stable")
    if sampling.temperature == 0.0:
        return order[:1], np.zeros(1)
    order = order[: sampling.top_k]
    # subtract the greatest logit before the division, because an overflow can then only give -inf,
    # the logit of an impossible token
    with np.errstate(over="ignore"):
        values = (logits[order].astype(np.float64) - float(logits[order[0]])) / sampling.temperature
    if sampling.top_p < 1.0:
        weights = np.exp(values)
        before = np.cumsum(weights) - weights
        count = int(np.count_nonzero(before < sampling.top_p * weights.sum()))
        order = order[:count]
        values = values[:count]
    return order, values


def choose(logits: np.ndarray, sampling: Sampling, sample: int, position: int) -> int:
    """Return the token at position `position` of sample number `sample`, sampled from logits
    float32 [vocabulary].

    Raise InputError if logits are NaN or infinite.
    """
    if np.isnan(logits).any() or logits.max() == np.inf:
        raise InputError(NOT_FINITE)
    ids, values = candidates(logits, sampling)
    if len(ids) == 1:
        return int(ids[0])
    bits = np.random.Philox(key=[sampling.seed, sample], counter=[0, 0, 0, position])
    # the index of the greatest sum of value and Gumbel noise is a sample from softmax(values)
    # (Gumbel 1954)
    noise = np.random.Generator(bits).gumbel(size=len(ids))
    return int(ids[np.argmax(values + noise)])
