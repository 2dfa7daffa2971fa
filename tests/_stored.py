"""Run directories with a checkpoint of random weights, without any training."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Outgoing, write
from ptdmpi.checkpoint.manifest import Progress, write_manifest
from ptdmpi.inference.stored import config_of, declarations
from tests._layers import random_tensor

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16}
LLAMA = {"kind": "llama", "kv_heads": 2, "ffn_hidden": 48}


def stored(
    folder: Path,
    vocab_size: int,
    factor: float = 0.3,
    average: float = 0.0,
    changed: Callable[[str, Tensor], Tensor] = lambda name, values: values,
    **model,
) -> Path:
    """Write a run directory with one checkpoint of random weights, and return it.

    `model`: keys of [model] besides SHAPE. `factor`: magnitude of the weights. `average`: magnitude
    of their moving average; 0 stores none. `changed(name, values)` is stored instead of `values`.
    """
    keys = SHAPE | model
    kinds = {"weights": factor} | ({"ema": average} if average else {})
    parts = []
    for name, one in declarations(config_of(keys), vocab_size).items():
        for kind, size in kinds.items():
            values = changed(name, random_tensor(name, one.shape, "fp32") * size)
            whole, numbers = Box.whole(one.shape), partial(values.numpy)
            parts.append(Outgoing(f"{kind}/{name}", one.shape, whole, "float32", numbers))
    temporary = folder / "checkpoints" / (files.name_of(7) + ".tmp")
    temporary.mkdir(parents=True)
    written = write(temporary / "rank-00000.safetensors", parts)
    progress = Progress(step=7, samples=7, updates=7, loss_scale=1.0, good_steps=0, seed=0)
    write_manifest(temporary, progress, {}, written=[written])
    files.publish(temporary)
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    (folder / "config.toml").write_text("\n".join(["[model]", *lines, ""]))
    return folder
