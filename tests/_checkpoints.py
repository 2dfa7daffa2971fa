"""Small checkpoints made without a model, cut into boxes as some layout might."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Block, Slices, write
from ptdmpi.checkpoint.directory import Progress

SHAPE = (12, 10)


def values(seed: int = 1, dtype: str = "float32") -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "weights/table": random.standard_normal(SHAPE).astype(dtype),
        "weights/bias": random.standard_normal(7).astype(dtype),
    }


def boxes(rows: int, columns: int) -> list[Slices]:
    """The boxes of `SHAPE` cut into rows x columns."""
    height, width = SHAPE[0] // rows, SHAPE[1] // columns
    return [
        (slice(r * height, (r + 1) * height), slice(c * width, (c + 1) * width))
        for r in range(rows)
        for c in range(columns)
    ]


def block(name: str, tensor: np.ndarray, box: Slices) -> Block:
    return Block(name, tensor.shape, box, str(tensor.dtype), lambda: tensor[box])


def save(
    directory: Path,
    step: int = 3,
    tensors: Mapping[str, np.ndarray] | None = None,
    cut: tuple[int, int] = (1, 1),
) -> Path:
    """A checkpoint of two ranks: the boxes of the table in turn, the bias on rank 0."""
    tensors = values() if tensors is None else tensors
    temporary = files.prepare(directory, step, 1000)
    parts: list[list[Block]] = [[], []]
    for number, box in enumerate(boxes(*cut)):
        parts[number % 2].append(block("weights/table", tensors["weights/table"], box))
    if "weights/bias" in tensors:
        parts[0].append(block("weights/bias", tensors["weights/bias"], (slice(0, 7),)))
    written = [
        write(temporary / f"rank-{rank:05d}.safetensors", part) for rank, part in enumerate(parts)
    ]
    progress = Progress(step, 8 * step, step, 1.0, 0, 1234)
    files.write_manifest(temporary, asdict(progress), {}, written)
    return files.publish(temporary, ())
