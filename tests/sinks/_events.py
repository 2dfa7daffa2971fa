"""Event files, read as TensorBoard reads them."""

from pathlib import Path

import pytest


def curve(folder: Path, name: str = "train/loss") -> dict[int, float]:
    """Return the curves and texts that TensorBoard shows of a run."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {event.step: event.value for event in reader.Scalars(name)}
