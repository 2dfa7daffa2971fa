"""The noise of gradients: how much the gradients of small batches differ. The noise indicates
whether a larger batch would help (McCandlish et al. 2018, arXiv 1812.06162)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ptdmpi.comm.communicator import Communicator
from ptdmpi.model.batch import Microbatch


@dataclass(frozen=True)
class GradientNoise:
    """Unbiased estimates from one step with `tokens` valid tokens: `square` estimates |G|^2, the
    squared norm of the true gradient, and `variance` estimates tr(Sigma), the trace of the
    covariance of one token's gradient. Each of the two may be negative by chance, so divide the
    means of both over many steps: B_simple = tr(Sigma) / |G|^2 tokens (section 2.2, equation
    2.9)."""

    square: float
    variance: float
    tokens: float


@dataclass(frozen=True)
class OwnGradient:
    """The contribution of one data rank to a step: the norm of its gradient, in which each token
    has the weight 1 / all valid tokens, and the number of its own valid tokens."""

    norm: float
    tokens: float

    @classmethod
    def of(cls, norm: float, batches: Sequence[Microbatch]) -> "OwnGradient":
        """Return the contribution of a rank with these microbatches, whose gradient has the norm
        `norm`."""
        return cls(norm, sum(batch.tokens for batch in batches))

    def noise(self, data: Communicator, norm: float, tokens: float) -> GradientNoise | None:
        """Return the noise of the gradients of all data ranks. The sum of all ranks' gradients has
        the norm `norm` and `tokens` valid tokens. All data ranks call this together, and get the
        same result."""
        every = data.all_gather_object((self.norm, self.tokens))
        means = [(own * tokens / count if count else 0.0, count) for own, count in every]
        return gradient_noise(means, norm, tokens)


def gradient_noise(
    parts: Sequence[tuple[float, float]], norm: float, tokens: float
) -> GradientNoise | None:
    """Return the noise, given the norms of mean gradients over parts of a batch, each with the
    part's number of tokens (`parts`), and the `norm` of the mean over all `tokens`. Return None if
    a part has no tokens, or if there is only one part.

    E|G_B|^2 = |G|^2 + tr(Sigma) / B (appendix A.1, equations A.1 and A.2). If the parts differ in
    size, the mean of their 1 / B is used as 1 / B_small.
    """
    if len(parts) < 2 or not all(count for _, count in parts):
        return None
    small = sum(part_norm * part_norm for part_norm, _ in parts) / len(parts)
    inverse = sum(1 / count for _, count in parts) / len(parts)
    variance = (small - norm * norm) / (inverse - 1 / tokens)
    return GradientNoise(norm * norm - variance / tokens, variance, tokens)
