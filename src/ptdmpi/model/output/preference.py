"""The loss of pairs of answers: direct preference optimization (DPO; Rafailov et al. 2023, arXiv
2305.18290, equation 7).

The reward of an answer is beta times the sum, over its tokens, of log pi - log ref. Here pi is the
probability of the token in the trained model, and ref is its probability in the reference model,
whose log-probabilities are stored with the data. For the margin m = (reward of the preferred
answer) - (reward of the other answer) and the label smoothing e, the loss of a pair is

    -(1 - e) log sigmoid(m) - e log sigmoid(-m)
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from ptdmpi.config import Config
from ptdmpi.config.sections import PreferenceConfig
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.output.cross_entropy import token_losses
from ptdmpi.model.output.losses import MARGIN, PREFERRED, TASK
from ptdmpi.model.output.own import sum_over
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tensor_parallel import TensorAxis


@dataclass(frozen=True)
class PreferenceLoss:
    """The DPO loss with the settings of the section [preference], and the tensor and context axes
    on which the ranks compute it together."""

    config: PreferenceConfig
    tensor: TensorAxis
    context: ContextAxis

    @classmethod
    def of(
        cls, config: Config, vocab_size: int, tensor: TensorAxis, context: ContextAxis
    ) -> "PreferenceLoss":
        """Return the loss of a run with the section [preference]."""
        return cls(config.preference, tensor, context)

    def __call__(self, logits: Tensor, batch: Microbatch) -> dict[str, Tensor]:
        """Return three sums over the pairs of a microbatch, computed from this tensor rank's
        columns of the logits: the losses, the reward margins, and the number of pairs in which the
        preferred answer has the greater reward. The logits are overwritten.

        All ranks of the context axis compute the same pairs of answers. Each pair must be counted
        once, so only the rank with the first position returns the sums; all other ranks return 0.
        """
        pairs = batch.pairs
        assert pairs is not None, "the batch must have pairs of answers"
        ratios = -token_losses(logits, batch.labels, self.tensor) - pairs.references
        # [pairs, 2]: the sum over all tokens of each answer; ranks of the context axis have
        # different tokens of an answer, so their sums are added
        sums = sum_over(pairs.summed(ratios), self.context.comm)
        rewards = self.config.beta * sums
        margins = rewards[:, 0] - rewards[:, 1]
        smoothing = self.config.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
        counts = float(pairs.counted > 0)
        return {
            TASK: losses.sum() * counts,
            MARGIN: margins.sum() * counts,
            PREFERRED: (margins > 0).to(margins.dtype).sum() * counts,
        }
