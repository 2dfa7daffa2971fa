"""Microbatches of arrays as batches of tensors."""

import numpy as np
import torch

from ptdmpi.data.batches import Microbatch
from ptdmpi.model.batch import Batch
from ptdmpi.model.documents import Documents


def as_batch(microbatch: Microbatch) -> Batch:
    """Return a microbatch [b, s] as tensors [s, b] on the host."""

    def sequence_first(array: np.ndarray) -> torch.Tensor:
        """Return [s, b] of [b, s]; sequence parallelism then divides contiguous memory."""
        return torch.from_numpy(array).t().contiguous()

    def perhaps(array: np.ndarray | None) -> torch.Tensor | None:
        """Return `sequence_first(array)`, or None of None."""
        return None if array is None else sequence_first(array)

    documents = None
    if microbatch.documents is not None:
        documents = Documents.of(torch.from_numpy(microbatch.documents))
    return Batch(
        inputs=sequence_first(microbatch.inputs),
        labels=sequence_first(microbatch.labels),
        weights=perhaps(microbatch.loss_mask),
        samples=torch.from_numpy(microbatch.sample_ids),
        documents=documents,
        masked=perhaps(microbatch.masked),
        types=perhaps(microbatch.types),
        order=perhaps(microbatch.order),
    )
