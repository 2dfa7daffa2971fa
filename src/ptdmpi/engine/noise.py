"""The differences between the gradients of small batches, which indicate if a larger batch would
help (McCandlish et al. 2018, arXiv 1812.06162)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ptdmpi.comm.communicator import Communicator
from ptdmpi.model.batch import Microbatch


@dataclass(frozen=True)
class GradientNoise:
    """Unbiased estimates from one step with `tokens` valid tokens: `square` of |G|^2, the true
    gradient's squared norm, and `variance` of tr(Sigma), the trace of the covariance of one token's
    gradient. Either may be negative by chance; divide means over many steps: B_simple = tr(Sigma) /
    |G|^2 tokens (section 2.2, equation 2.9)."""

    square: float
    variance: float
    tokens: float


@dataclass(frozen=True)
class OwnGradient:
    """A data rank's part of a step: the norm of its gradient, in which each token has the weight 1
    / all valid tokens, and the number of its own valid tokens."""

    norm: float
    tokens: float

    @classmethod
    def of(cls, norm: float, batches: Sequence[Microbatch]) -> "OwnGradient":
        """Return the part of a rank with these microbatches and the norm of their gradient."""
        return cls(norm, sum(batch.tokens for batch in batches))

    def noise(self, data: Communicator, norm: float, tokens: float) -> GradientNoise | None:
        """Return the noise of all data ranks' parts, whose sum has `norm` and `tokens` valid
        tokens; equal on all data ranks, which call it together."""
        every = data.all_gather_object((self.norm, self.tokens))
        means = [(own * tokens / count if count else 0.0, count) for own, count in every]
        return gradient_noise(means, norm, tokens)


def gradient_noise(
    parts: Sequence[tuple[float, float]], norm: float, tokens: float
) -> GradientNoise | None:
    """Return the noise from `parts`, the norms of the mean gradients over parts of a batch, each
    with its number of tokens, and from the `norm` of the mean over all `tokens`. Return None if a
    part has no tokens, or there is only one part.

    E|G_B|^2 = |G|^2 + tr(Sigma) / B (appendix A.1, equations A.1 and A.2): if parts differ in size,
    1 / B_small is the mean of their 1 / B.
    """
    if len(parts) < 2 or not all(count for _, count in parts):
        return None
    small = sum(part_norm * part_norm for part_norm, _ in parts) / len(parts)
    inverse = sum(1 / count for _, count in parts) / len(parts)
    variance = (small - norm * norm) / (inverse - 1 / tokens)
    return GradientNoise(norm * norm - variance / tokens, variance, tokens)
