"""One rank's memory in two steps of LoRA or of full tuning, or the time of both in turns.

    python -m benchmarks.tuning.step memory BASE METHOD LENGTH MICRO RECOMPUTE
    python -m benchmarks.tuning.step time BASE LENGTH MICRO ROUNDS

In bfloat16, on random tokens and weights, of the sizes of BASE; METHOD is "lora" or "full". Prints
JSON. One process measures one setting of memory: what it had resident once stays in its peak.
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
from ptdmpi.model.batch import Batch
from ptdmpi.model.kernels import USUAL
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train.capacity import process_bytes

STEPS = 2


def settled(base: Path, method: str, length: int, micro: int, recompute: str) -> Config:
    """One microbatch of so many rows a step, on one rank."""
    model = tomllib.loads((base / "config.toml").read_text())["model"]
    adapt = {"adapt": {**LORA, "base": str(base)}} if method == "lora" else {}
    return synthetic_config(
        Layout(1, 1, 1, micro_size=micro, recompute=recompute),
        {**model, "seq_length": length},
        run={"steps": 1_000_000},
        precision={"compute": "bf16"},
        **adapt,
    )


def built(config: Config, world: World) -> tuple[Engine, Callable[[int], None]]:
    """An engine, and what makes a step of it."""
    vocab_size = config.model.vocab_size
    engine = Engine(config, world.split(grid_of(config)), vocab_size)
    shape = (config.model.seq_length + 1, config.batch.micro_size)
    ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:-1], ids[1:], None, torch.arange(shape[1]))
    return engine, lambda step: engine.step(step, [batch]) and None


def memory(config: Config, world: World) -> dict[str, Any]:
    """Bytes: resident when built and at a step's peak, both beyond the start, and as foreseen."""
    some = torch.ones(256, 256, dtype=torch.bfloat16)
    some @ some  # what libraries take once is theirs
    _, start = process_bytes()
    engine, step = built(config, world)
    give_back()
    _, standing = process_bytes()
    for number in range(STEPS):
        step(number)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    wide = USUAL.widens("cpu", torch.bfloat16)
    account = MemoryModel.of(config, engine.vocab_size, wide)
    foreseen = account.peak(config.layout, 0, config.microbatches)
    return {
        "built": standing - start,
        "peak": peak - start,
        "parts": foreseen.parts,
        "standing": foreseen.standing,
        "total": foreseen.total,
    }


def times(configs: dict[str, Config], world: World, rounds: int) -> dict[str, dict[str, float]]:
    """Steps a second of each, and their ratios to full tuning's, round by round."""
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
    doing, base, *words = sys.argv[1:]
    torch.set_num_threads(1)
    keep_freed(os.environ)
    world = World()
    if doing == "memory":
        method, length, micro, recompute = words
        config = settled(Path(base), method, int(length), int(micro), recompute)
        print(json.dumps(memory(config, world)))
        return
    length, micro, rounds = map(int, words)
    configs = {name: settled(Path(base), name, length, micro, "none") for name in ("full", "lora")}
    print(json.dumps(times(configs, world, rounds)))


if __name__ == "__main__":
    main()
