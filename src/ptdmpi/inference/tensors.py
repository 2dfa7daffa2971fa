"""The conversion of a microbatch from the arrays that are read to the tensors of a model."""

import numpy as np
import torch
from torch import Tensor

from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.documents import Documents


def as_tensors(rows: MicrobatchRows) -> Microbatch:
    """Return a microbatch of arrays [b, s] as tensors [s, b] on the host, all positions of it."""

    def perhaps(array: np.ndarray | None) -> Tensor | None:
        """Return `_sequence_first(array)`, or None of None."""
        return None if array is None else _sequence_first(array)

    documents = None
    if rows.documents is not None:
        documents = Documents.of(torch.from_numpy(rows.documents))
    return Microbatch(
        inputs=_sequence_first(rows.inputs),
        labels=_sequence_first(rows.labels),
        weights=perhaps(rows.weights),
        samples=torch.from_numpy(rows.samples),
        documents=documents,
        masked=perhaps(rows.masked),
        types=perhaps(rows.types),
        order=perhaps(rows.order),
    )


def _sequence_first(array: np.ndarray) -> Tensor:
    """Return [s, b] of [b, s], contiguous: a rank's positions are then one piece of memory."""
    return torch.from_numpy(array).t().contiguous()
