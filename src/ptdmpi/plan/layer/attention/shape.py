"""The part of the attention core (scores, softmax, weighted sum of values) that a rank computes."""

import math
from typing import NamedTuple

from ptdmpi.config import ModelConfig
from ptdmpi.plan.layer.sizes import Sizes


def key_copies(kv_heads: int, ranks: int) -> int:
    """Return the smallest number of copies of each key head with which the key heads can be
    distributed evenly over `ranks` ranks.
    """
    return ranks // math.gcd(kv_heads, ranks)


def keeps_outputs(model: ModelConfig, selective: bool) -> bool:
    """Return True if the kernels of attention keep their outputs for the backward.

    With dropout or soft caps, attention is computed by matrix products, whose backward does not
    need the outputs. If `selective` is True (selective recomputation), the backward computes
    attention again, so no outputs are kept.
    """
    return not (selective or model.attention_dropout or model.attention_softcap)


class CoreShape(NamedTuple):
    """The part of the attention core, softmax(Q K^T) V, that a rank computes in each sequence. The
    fields are the number of query heads, the number of key heads, and the number of queries of each
    head. The rank reads the keys of all positions."""

    heads: int
    kv_heads: int
    queries: int

    @classmethod
    def of(cls, sizes: Sizes, heads_of_both: tuple[int, int]) -> "CoreShape":
        """Return the part of the core that a context-parallel rank computes. `heads_of_both` is
        (number of query heads, number of key heads) of the tensor-parallel rank.

        With "all_gather" and "ring", the rank computes all these heads for its own queries. With
        "ulysses", the rank computes 1/c of the heads for all queries, where c is the
        context-parallel size.
        """
        heads, kv_heads = heads_of_both
        length, c = sizes.model.seq_length, sizes.layout.context
        if sizes.layout.exchange != "ulysses":
            return cls(heads, kv_heads, length // c)
        return cls(-(-heads // c), -(-kv_heads * key_copies(kv_heads, c) // c), length)


def core_shape(sizes: Sizes) -> CoreShape:
    """Return the part of the attention core that a rank computes. If the tensor-parallel size does
    not divide the number of heads, the rank's number of heads is rounded up."""
    return CoreShape.of(sizes, sizes.local_heads)
