"""Small checkpoints made without a model, cut into boxes as some layout might."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ptdmpi.base.box import Box
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Outgoing, write
from ptdmpi.checkpoint.manifest import Progress, write_manifest

SHAPE = (12, 10)


def values(seed: int = 1, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return random tensors by name."""
    random = np.random.default_rng(seed)
    return {
        "weights/table": random.standard_normal(SHAPE).astype(dtype),
        "weights/bias": random.standard_normal(7).astype(dtype),
    }


def boxes(rows: int, columns: int) -> list[Box]:
    """Return the boxes of `SHAPE` cut into rows x columns."""
    height, width = SHAPE[0] // rows, SHAPE[1] // columns
    return [
        Box((r * height, c * width), ((r + 1) * height, (c + 1) * width))
        for r in range(rows)
        for c in range(columns)
    ]


def outgoing(name: str, tensor: np.ndarray, box: Box) -> Outgoing:
    """Return a box of a tensor, to be written."""
    return Outgoing(name, tensor.shape, box, str(tensor.dtype), lambda: tensor[box.index])


def save(
    directory: Path,
    step: int = 3,
    tensors: Mapping[str, np.ndarray] | None = None,
    cut: tuple[int, int] = (1, 1),
) -> Path:
    """Write a checkpoint of two ranks: boxes of the table in turn, other tensors on rank 0."""
    tensors = values() if tensors is None else tensors
    directory.parent.mkdir(parents=True, exist_ok=True)  # a run makes its own
    temporary = files.prepare(directory, step, 1000)
    parts: list[list[Outgoing]] = [[], []]
    for number, box in enumerate(boxes(*cut)):
        parts[number % 2].append(outgoing("weights/table", tensors["weights/table"], box))
    for name in sorted(tensors.keys() - {"weights/table"}):
        parts[0].append(outgoing(name, tensors[name], Box.whole(tensors[name].shape)))
    written = [
        write(temporary / f"rank-{rank:05d}.safetensors", part) for rank, part in enumerate(parts)
    ]
    progress = Progress(step, 8 * step, updates=step, seed=1234)
    write_manifest(temporary, progress, {}, written=written)
    return files.publish(temporary)
