"""The state that each stage of ZeRO shards (Rajbhandari et al. 2020, arXiv 1910.02054).

A stage is the value of `parallel.zero`. No code outside this module compares the number of the
stage. Other code calls the functions of this module, or the methods of `Layout` and `Portion`,
which also consider the number of ranks.
"""

from typing import NamedTuple

STAGES = (0, 1, 2, 3)


def covers_state(zero: int) -> bool:
    """Return True if a stage shards the optimizer's state (in groups of more than one rank)."""
    return zero >= 1


def covers_gradients(zero: int) -> bool:
    """Return True if a stage also shards the gradients (in groups of more than one rank)."""
    return zero >= 2


def covers_weights(zero: int) -> bool:
    """Return True if a stage also shards the weights (in groups of more than one rank)."""
    return zero >= 3


class Sharing(NamedTuple):
    """A stage of ZeRO, and the number of ranks in the group that shards its state.

    A group of one rank shards nothing, whatever the stage.
    """

    zero: int = 0
    ranks: int = 1

    @property
    def shards_state(self) -> bool:
        """Return True if each rank updates a part of the parameters, and has the optimizer's state
        of that part only."""
        return self.ranks > 1 and covers_state(self.zero)

    @property
    def shards_gradients(self) -> bool:
        """Return True if each rank keeps a part of the gradients; then they are reduced after each
        microbatch."""
        return self.ranks > 1 and covers_gradients(self.zero)

    @property
    def shards_weights(self) -> bool:
        """Return True if each rank keeps a part of the weights, which are gathered for each use."""
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
    """Return the legal stages of ZeRO. If a run sums gradients along one tree, gradients and
    weights cannot be sharded, because each rank needs complete gradients until all microbatches are
    summed.
    """
    return tuple(zero for zero in STAGES if not (reproducible and covers_gradients(zero)))
