"""Whole runs inside a test: shards of random tokens, a configuration, a Loop on its ranks."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from ptdmpi.comm.world import World
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.train.checks import checked
from ptdmpi.train.loop import Loop
from ptdmpi.watch.requests import StopRequest
from tests._configs import tree

VOCAB_SIZE = 53
SIZES = {
    "model.layers": 4,
    "model.hidden": 32,
    "model.seq_length": 16,
    "batch.micro_size": 1,
    "optimizer.warmup_steps": 0,
}


def shard(folder: Path, tokens: int, seed: int) -> str:
    """Make a directory with one shard of random ids, and return its path."""
    folder.mkdir()
    ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE - 1, tokens)
    path = folder / "shard-00000.h5"
    with ShardWriter(path, "t", "0" * 64, vocab_size=VOCAB_SIZE, eod_id=VOCAB_SIZE - 1) as writer:
        writer.write(ids, np.array([tokens]))
    return str(folder)


def configuration(folder: Path, changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tree of a small run in `folder`, which has the data of `corpus`."""
    where = {"run.dir": str(folder / "run"), "data.train": [{"path": str(folder / "train")}]}
    return tree({**SIZES, **where, **changes})


def corpus(folder: Path) -> None:
    """Write shards for training and validation into `folder`."""
    shard(folder / "train", 4000, 1)
    shard(folder / "valid", 1000, 2)


@contextlib.contextmanager
def loop(
    comm, folder: Path, changes: dict[str, Any], patch: Callable[[Loop], None] = lambda loop: None
) -> Iterator[Loop]:
    """Yield a Loop on all ranks of `comm`, patched before it runs; close it at the end."""
    if comm.rank == 0 and not (folder / "train").exists():
        corpus(folder)
    comm.Barrier()
    with StopRequest() as signals:
        world = World(comm)
        config = world.on_root(lambda: checked(configuration(folder, changes), world.size))
        made = Loop(config, world, signals)
        try:
            patch(made)
            yield made
        finally:
            made.close()


def after(method: Callable, call: int, action: Callable[[], None]) -> Callable:
    """Return `method` with `action` after its `call`-th call."""
    calls = 0

    def wrapped(*arguments, **named):
        nonlocal calls
        calls += 1
        result = method(*arguments, **named)
        if calls == call:
            action()
        return result

    return wrapped


def records(run: Path) -> list[dict]:
    """Return the records of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return the logical tensors of a checkpoint, assembled from their boxes."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    whole = {}
    for name, tensor in manifest["tensors"].items():
        whole[name] = np.full(tensor["shape"], np.nan, dtype=tensor["dtype"])
        for piece in tensor["pieces"]:
            box = tuple(slice(*ends) for ends in zip(piece["start"], piece["stop"], strict=True))
            with safe_open(checkpoint / piece["file"], framework="np") as file:
                assert np.isnan(whole[name][box]).all()  # each element is written once
                whole[name][box] = file.get_tensor(piece["key"])
        assert not np.isnan(whole[name]).any()
    return whole


def log(run: Path) -> str:
    """Return the log of a run."""
    return (run / "log.txt").read_text()
