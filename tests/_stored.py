"""Run directories with a checkpoint of random weights, without any training."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Block, write
from ptdmpi.checkpoint.directory import Progress
from ptdmpi.inference.stored import config_of, declarations
from tests._layers import random_tensor

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16}
LLAMA = {"kind": "llama", "kv_heads": 2, "ffn_hidden": 48}


def stored(folder: Path, vocab_size: int, **model) -> Path:
    """`model` are keys of [model] beside SHAPE."""
    keys = SHAPE | model
    blocks = []
    for name, one in declarations(config_of(keys), vocab_size).items():
        values = random_tensor(name, one.shape, "fp32") * 0.3
        box = tuple(slice(0, size) for size in one.shape)
        blocks.append(Block(f"weights/{name}", one.shape, box, "float32", partial(values.numpy)))
    temporary = folder / "checkpoints" / (files.name_of(7) + ".tmp")
    temporary.mkdir(parents=True)
    written = write(temporary / "rank-00000.safetensors", blocks)
    progress = Progress(step=7, samples=7, updates=7, loss_scale=1.0, good_steps=0, seed=0)
    files.write_manifest(temporary, asdict(progress), {}, [written])
    files.publish(temporary, ())
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    (folder / "config.toml").write_text("\n".join(["[model]", *lines, ""]))
    return folder
