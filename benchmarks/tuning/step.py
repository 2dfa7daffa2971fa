"""Measure the memory of one rank in two steps of LoRA or of full tuning, or the times of both
methods in alternating steps.

    python -m benchmarks.tuning.step memory BASE METHOD LENGTH RECOMPUTE
    python -m benchmarks.tuning.step time BASE LENGTH ROUNDS

A model with the sizes of BASE, a folder with a `config.toml`, is trained in bfloat16, with random
weights, on random tokens. Each step trains on one row of LENGTH tokens. The output is JSON.

`memory` measures training by METHOD ("lora" or "full") with the recomputation mode RECOMPUTE
("none", "selective" or "full"). A process measures only one setting, because the peak memory of a
process never decreases.

`time` compares both methods without recomputation. After a warm-up round, each of ROUNDS rounds has
one step of each method.
"""

import json
import os
import resource
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import turns
from benchmarks.tuning.smol import LORA
from ptdmpi.base.heap import give_back, keep_freed
from ptdmpi.comm.world import World
from ptdmpi.config import Config, Layout, synthetic_config
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.kernels import USUAL
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train.capacity import process_bytes

STEPS = 2


def configuration(base: Path, method: str, length: int, recompute: str) -> Config:
    """Return the configuration for training by `method` on one rank, with one microbatch of one row
    of `length` tokens per step."""
    model = tomllib.loads((base / "config.toml").read_text())["model"]
    sections: dict[str, Any] = {"run": {"steps": 1_000_000}, "precision": {"compute": "bf16"}}
    if method == "lora":
        sections["adapt"] = {**LORA, "base": str(base)}
    layout = Layout(1, 1, 1, recompute=recompute)
    return synthetic_config(layout, {**model, "seq_length": length}, **sections)


def built(config: Config, world: World) -> tuple[Engine, Callable[[int], None]]:
    """Return an engine, and a function that trains the step with the given number."""
    vocab_size = config.model.vocab_size
    engine = Engine(config, world.split(grid_of(config)), vocab_size)
    shape = (config.model.seq_length + 1, config.batch.micro_size)
    ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = Microbatch.of_ids(ids, torch.arange(shape[1]))

    def train(step: int) -> None:
        engine.step(step, [batch])

    return engine, train


def memory(config: Config, world: World) -> dict[str, Any]:
    """Return the resident bytes after the model is built and at the peak of a step, both minus the
    resident bytes at the start, and the planned bytes."""
    some = torch.ones(256, 256, dtype=torch.bfloat16)
    some @ some  # this multiplication makes libraries allocate their memory before the measurement
    _, start = process_bytes()
    engine, step = built(config, world)
    give_back()
    _, standing = process_bytes()
    for number in range(STEPS):
        step(number)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    attention = USUAL.chosen("cpu", torch.bfloat16).attention
    kernels = {"wide_products": USUAL.widens("cpu", torch.bfloat16), **attention.blocks}
    account = MemoryModel.of(config, engine.vocab_size, kernels=kernels)
    foreseen = account.peak(config.layout, 0, config.microbatches)
    return {
        "built": standing - start,
        "peak": peak - start,
        "parts": foreseen.parts,
        "standing": foreseen.standing,
        "total": foreseen.total,
    }


def times(configs: dict[str, Config], world: World, rounds: int) -> dict[str, dict[str, float]]:
    """Return the steps per second with each configuration, and the ratio of each rate to the rate
    of full tuning in the same round."""
    counts = dict.fromkeys(configs, 0)
    steps = {name: built(config, world)[1] for name, config in configs.items()}

    def side(name: str) -> Callable[[], float]:
        def timed() -> float:
            begun = time.perf_counter()
            steps[name](counts[name])
            counts[name] += 1
            return 1.0 / (time.perf_counter() - begun)

        return timed

    return turns.compare({name: side(name) for name in configs}, "full", rounds)


def main() -> None:
    """Measure the memory or the time; the command line says which."""
    doing, base, *words = sys.argv[1:]
    torch.set_num_threads(1)
    keep_freed(os.environ)
    world = World()
    if doing == "memory":
        method, length, recompute = words
        config = configuration(Path(base), method, int(length), recompute)
        print(json.dumps(memory(config, world)))
        return
    length, rounds = words
    configs = {
        method: configuration(Path(base), method, int(length), "none")
        for method in ("full", "lora")
    }
    print(json.dumps(times(configs, world, int(rounds))))


if __name__ == "__main__":
    main()
