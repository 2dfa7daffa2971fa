"""From arrays to tensors: microbatches as a model takes them."""

import numpy as np
import torch

from ptdmpi.data.batches import Microbatch
from ptdmpi.model.batch import Batch
from ptdmpi.model.documents import Documents


def as_batch(microbatch: Microbatch) -> Batch:
    """The microbatch as tensors on the host, sequence first."""

    # [b, s] -> [s, b]: what sequence parallelism divides is then one piece of memory
    def sequence_first(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).t().contiguous()

    def perhaps(array: np.ndarray | None) -> torch.Tensor | None:
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
