"""The conversion of a microbatch from numpy arrays to the tensors that a model uses."""

import numpy as np
import torch
from torch import Tensor

from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.model.batch import Microbatch, TeacherOutputs
from ptdmpi.model.documents import Documents, Pairs


def as_tensors(rows: MicrobatchRows) -> Microbatch:
    """Convert a microbatch of arrays [sequences, positions] to tensors [positions, sequences] on
    the host. The result has the positions of all context ranks."""

    def perhaps(array: np.ndarray | None) -> Tensor | None:
        """Return the array as a sequence-first tensor (`_sequence_first`); return None if `array`
        is None."""
        return None if array is None else _sequence_first(array)

    documents = pairs = None
    if rows.documents is not None:
        documents = Documents.of(torch.from_numpy(rows.documents))
    if rows.references is not None:
        parts = (rows.documents, rows.weights, rows.references)
        pairs = Pairs.of(*(torch.from_numpy(part) for part in parts))
    teacher = None
    if rows.teacher is not None:
        teacher = TeacherOutputs(*(_sequence_first(part) for part in rows.teacher))
    return Microbatch(
        inputs=_sequence_first(rows.inputs),
        labels=_sequence_first(rows.labels),
        weights=perhaps(rows.weights),
        samples=torch.from_numpy(rows.samples),
        documents=documents,
        masked=perhaps(rows.masked),
        types=perhaps(rows.types),
        order=None if rows.order is None else torch.from_numpy(rows.order),
        pairs=pairs,
        teacher=teacher,
    )


def _sequence_first(array: np.ndarray) -> Tensor:
    """Return an array [sequences, positions, ...] as a contiguous tensor [positions, sequences,
    ...], so that the positions of one context rank are contiguous in memory."""
    return torch.from_numpy(array).transpose(0, 1).contiguous()
