"""The most probable tokens of a teacher model for each label of a dataset.

The folder `teacher` of a dataset has two arrays per shard: ids (uint16 or uint32 [tokens, K]) and
log-probabilities in nats (float32 [tokens, K]). Row i has the K tokens that the teacher finds most
probable at the position of token i, given the earlier tokens of the same training sample. If no
training sample predicts token i, the log-probabilities of row i are -inf.
"""

import numpy as np

from ptdmpi.config import Config, InputError
from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.data.scores.stored import LabelScores, ScoreKind, StoredScores

IDS = ".ids"
LOGS = ".logs"
TEACHER = ScoreKind(
    folder="teacher",
    noun="outputs of a teacher",
    made_by="make them with ptdmpi-data score MODEL DATA --top K",
    types={IDS: (np.uint16, np.uint32), LOGS: (np.float32,)},
    blank={IDS: 0, LOGS: -np.inf},
)


def check_teacher(scores: StoredScores, config: Config) -> None:
    """Raise InputError if the stored outputs were not computed for the windows on which a run with
    this configuration trains."""
    here = {
        "seq_length": config.model.text_length,
        "document_boundaries": config.data.document_boundaries,
    }
    for key, value in here.items():
        made = scores.summary.get(key)
        if made != value:
            raise InputError(
                f"{scores.directory}: the outputs of the teacher were made with {key} = {made}, "
                f"but the run has {value}; {TEACHER.made_by}"
            )


def with_teacher(outputs: LabelScores, microbatch: MicrobatchRows) -> MicrobatchRows:
    """Return a copy of the microbatch with the teacher's outputs for its labels. Raise InputError
    if the datasets have different numbers of tokens per label."""
    try:
        ids = outputs.of(microbatch.samples, IDS).astype(np.int64)
    except ValueError:
        raise InputError(
            "the datasets have outputs of a teacher with different numbers of tokens per label; "
            "legal: the same ptdmpi-data score --top K for all datasets of a run"
        ) from None
    return microbatch._replace(teacher=(ids, outputs.of(microbatch.samples, LOGS)))
