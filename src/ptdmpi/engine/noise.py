"""The noise of gradients: how much the gradients of small batches differ. The noise indicates
whether a larger batch would help (McCandlish et al. 2018, arXiv 1812.06162)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ptdmpi.comm.communicator import Communicator
from ptdmpi.model.batch import Microbatch


@dataclass(frozen=True)
class GradientNoise:
    """Unbiased estimates for the noise of gradients, from one step with `tokens` valid tokens
    (tokens that count in the loss). `square` estimates |G|^2, the squared norm of the true
    gradient, and `variance` estimates tr(Sigma), the trace of the covariance of one token's
    gradient. Both estimates may be negative by chance. Users should therefore average each estimate
    over many steps, and compute the noise scale B_simple = tr(Sigma) / |G|^2, in tokens, from the
    two means (McCandlish et al., section 2.2, equation 2.9).
    """

    square: float
    variance: float
    tokens: float


@dataclass(frozen=True)
class OwnGradient:
    """The gradient of one data rank in a step. `norm` is the norm of this gradient, in which each
    token has the weight 1 / (valid tokens of the global batch). `tokens` is the number of valid
    tokens of this rank."""

    norm: float
    tokens: float

    @classmethod
    def of(cls, norm: float, batches: Sequence[Microbatch]) -> "OwnGradient":
        """Return the `OwnGradient` of a rank with the microbatches `batches`. `norm` is the norm of
        the rank's gradient."""
        return cls(norm, sum(batch.tokens for batch in batches))

    def noise(self, data: Communicator, norm: float, tokens: float) -> GradientNoise | None:
        """Return the noise, estimated from the gradients of all data ranks. `norm` is the norm of
        the sum of all ranks' gradients, and `tokens` is the number of valid tokens of all ranks.
        All data ranks call this method together, and get the same result. Return None in the same
        cases as `gradient_noise`."""
        every = data.all_gather_numbers((self.norm, self.tokens))
        means = [(own * tokens / count if count else 0.0, count) for own, count in every]
        return gradient_noise(means, norm, tokens)


def gradient_noise(
    parts: Sequence[tuple[float, float]], norm: float, tokens: float
) -> GradientNoise | None:
    """Return the noise of gradients, estimated from the parts of a batch. `parts` has two values
    for each part: the norm of its mean gradient, and its number of tokens. `norm` is the norm of
    the mean gradient over all `tokens`. Return None if a part has no tokens, or if there is only
    one part.

    The estimate follows from E|G_B|^2 = |G|^2 + tr(Sigma) / B for the mean gradient G_B over B
    tokens (McCandlish et al., appendix A.1, equations A.1 and A.2). If the parts have different
    numbers of tokens B, 1 / B is replaced by its mean over the parts.
    """
    if len(parts) < 2 or not all(count for _, count in parts):
        return None
    small = sum(part_norm * part_norm for part_norm, _ in parts) / len(parts)
    inverse = sum(1 / count for _, count in parts) / len(parts)
    variance = (small - norm * norm) / (inverse - 1 / tokens)
    return GradientNoise(norm * norm - variance / tokens, variance, tokens)
