"""The state that each stage of ZeRO shards (Rajbhandari et al. 2020, arXiv 1910.02054).

A stage is the value of `parallel.zero`, from 0 to 3. Code outside this module never compares stages
as numbers. Other code calls the functions of this module, or the methods of `Layout` and `Portion`,
which also consider the number of ranks.
"""

from typing import NamedTuple

STAGES = (0, 1, 2, 3)


def covers_state(zero: int) -> bool:
    """Return True if stage `zero` shards the optimizer's state, provided that the shard group has
    several ranks."""
    return zero >= 1


def covers_gradients(zero: int) -> bool:
    """Return True if stage `zero` shards the gradients, provided that the shard group has several
    ranks."""
    return zero >= 2


def covers_weights(zero: int) -> bool:
    """Return True if stage `zero` shards the weights, provided that the shard group has several
    ranks."""
    return zero >= 3


class Sharing(NamedTuple):
    """A stage of ZeRO, and the number of ranks in a shard group (a group that shards one copy of
    the state).

    If the group has one rank, nothing is sharded at any stage.
    """

    zero: int = 0
    ranks: int = 1

    @property
    def shards_state(self) -> bool:
        """Return True if each rank updates a part of the parameters, and has the optimizer's state
        only for this part."""
        return self.ranks > 1 and covers_state(self.zero)

    @property
    def shards_gradients(self) -> bool:
        """Return True if each rank keeps only a part of the gradients. Gradients are then reduced
        after each microbatch."""
        return self.ranks > 1 and covers_gradients(self.zero)

    @property
    def shards_weights(self) -> bool:
        """Return True if each rank keeps only a part of the weights, which are gathered for each
        use."""
        return self.ranks > 1 and covers_weights(self.zero)

    @property
    def state_shards(self) -> int:
        """Return the number of shards of the optimizer's state; 1 if the state is not sharded."""
        return self.ranks if self.shards_state else 1

    @property
    def gradient_shards(self) -> int:
        """Return the number of shards of the gradients; 1 if the gradients are not sharded."""
        return self.ranks if self.shards_gradients else 1

    @property
    def weight_shards(self) -> int:
        """Return the number of shards of the weights; 1 if the weights are not sharded."""
        return self.ranks if self.shards_weights else 1


def stages_of_zero(reproducible: bool) -> tuple[int, ...]:
    """Return the legal stages of ZeRO. A `reproducible` run cannot shard gradients and weights: it
    sums the gradients of microbatches along one binary tree, so each rank needs complete gradients
    until all microbatches are summed."""
    return tuple(zero for zero in STAGES if not (reproducible and covers_gradients(zero)))
