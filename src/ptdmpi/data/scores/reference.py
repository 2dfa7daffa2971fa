"""The log-probabilities that a reference model assigns to the labels in shards of pairs of answers.

The folder `reference` of a dataset has one array per shard, float32 [tokens]. Element i is the
log-probability of token i, given the earlier tokens of its document. The element is 0 for tokens
that do not count as labels.
"""

import numpy as np

from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.data.scores.stored import LabelScores, ScoreKind

REFERENCE = ScoreKind(
    folder="reference",
    noun="log-probabilities of a reference model",
    made_by="make them with ptdmpi-data score MODEL DATA",
    types={"": (np.float32,)},
    blank={"": 0.0},
)


def with_references(references: LabelScores, microbatch: MicrobatchRows) -> MicrobatchRows:
    """Return a copy of the microbatch with the log-probabilities of its labels (`references`)."""
    return microbatch._replace(references=references.of(microbatch.samples, ""))
