"""What the stages of ZeRO share out over the data axis (Rajbhandari et al. 2020, arXiv 1910.02054).

A stage is the number that `parallel.zero` has. Whoever depends on it asks here, or asks `Layout`
and `Portion`, which answer for a number of ranks; nobody else compares the number.
"""

from typing import NamedTuple

STAGES = (0, 1, 2, 3)


def covers_state(zero: int) -> bool:
    """Return whether a stage shares out the optimizer's state, if there is anyone to share with."""
    return zero >= 1


def covers_gradients(zero: int) -> bool:
    """Return whether a stage shares out the gradients too, if there is anyone to share with."""
    return zero >= 2


def covers_weights(zero: int) -> bool:
    """Return whether a stage shares out the weights too, if there is anyone to share with."""
    return zero >= 3


class Sharing(NamedTuple):
    """A stage of ZeRO, and the number of ranks of the group that shares out what it covers.

    A group of one rank shares out nothing, whatever the stage.
    """

    zero: int = 0
    ranks: int = 1

    @property
    def shards_state(self) -> bool:
        """True if each rank updates a part of the parameters, and has the optimizer's state of that
        part alone."""
        return self.ranks > 1 and covers_state(self.zero)

    @property
    def shards_gradients(self) -> bool:
        """True if each rank keeps a part of the gradients; then each microbatch's are reduced."""
        return self.ranks > 1 and covers_gradients(self.zero)

    @property
    def shards_weights(self) -> bool:
        """True if each rank keeps a part of the weights, which are gathered for each use."""
        return self.ranks > 1 and covers_weights(self.zero)

    @property
    def state_shards(self) -> int:
        """The number of parts into which the optimizer's state is cut; 1 where it is whole."""
        return self.ranks if self.shards_state else 1

    @property
    def gradient_shards(self) -> int:
        """The number of parts into which gradients are cut; 1 where they are whole."""
        return self.ranks if self.shards_gradients else 1

    @property
    def weight_shards(self) -> int:
        """The number of parts into which weights are cut; 1 where they are whole."""
        return self.ranks if self.shards_weights else 1


def stages_of_zero(reproducible: bool) -> tuple[int, ...]:
    """Return the legal stages. A run that adds up gradients along one tree has each of them whole
    until all microbatches are in."""
    return tuple(zero for zero in STAGES if not (reproducible and covers_gradients(zero)))
