"""Ours on one GPU: steps of a model of some shape, alone, and in turn with another trainer's."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.reasons import Left, Skipped
from benchmarks.gpu.timing import OUT_OF_MEMORY, Row, first_that_fits, rates
from benchmarks.turns import round_of
from ptdmpi.base.box import Box
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import Config, resolve
from ptdmpi.engine.engine import Engine
from ptdmpi.model import buffer
from ptdmpi.model.batch import Batch, Placing
from ptdmpi.model.kernels import choice
from ptdmpi.model.parameters import Entry
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train.capacity import rank_memory_bytes

ROUNDS = 3
# largest first: the first that fits is measured
WAYS = ((4, "none"), (2, "none"), (1, "none"), (4, "full"), (1, "full"))


def configuration(
    model: dict[str, Any],
    precision: str,
    micro_size: int,
    mode: str,
    compiled: bool = False,
    ranks: int = 1,
) -> Config:
    """A step of four microbatches of each rank."""
    tree = {
        "run": {"steps": 100, "compile": compiled},
        "model": model,
        "batch": {"global_size": 4 * micro_size * ranks, "micro_size": micro_size},
        "precision": {"compute": precision},
        "recompute": {"mode": mode},
        "data": {"train": [{"path": "unused"}]},
    }
    return resolve(tree, ranks)


def batches(config: Config, vocab_size: int, step: int) -> list[Batch]:
    """Random tokens, on the host."""
    generator = torch.Generator().manual_seed(step)
    shape = (config.model.seq_length + 1, config.batch.global_size)
    ids = torch.randint(vocab_size, shape, generator=generator)
    samples = torch.arange(config.batch.global_size).split(config.batch.micro_size)
    parts = ids.split(config.batch.micro_size, dim=1)
    return [
        Batch(part[:-1].contiguous(), part[1:].contiguous(), None, numbers)
        for part, numbers in zip(parts, samples, strict=True)
    ]


def engine_on(
    config: Config,
    vocab_size: int,
    device: torch.device,
    wire: str = "auto",
    world: World | None = None,
) -> Engine:
    world = World() if world is None else world
    axes = world.split(grid_of(config), wire_named(wire, device))
    return Engine(config, axes, vocab_size, device)


@contextlib.contextmanager
def drawn_there() -> Iterator[None]:
    """Initial weights are drawn where they are kept: others than a run's, which are the host's and
    take it a minute and a half for 6.7e9 of them, but as quick to train."""
    with mock.patch.object(buffer, "_fill", _draw):
        yield


def _draw(parts: Sequence[tuple[Box, Tensor]], entry: Entry, seed: int) -> None:
    init = entry.declaration.init
    for _, view in parts:
        if isinstance(init, str):
            view.fill_({"zeros": 0.0, "ones": 1.0}[init])
        else:
            view.normal_(0.0, init)


def fitting(
    model: dict[str, Any], vocab_size: int, device: torch.device, compiled: bool = False
) -> list[Config]:
    """What fits by the memory model, the largest microbatch first, with full recomputation only
    where it must be. Raises Skipped where nothing does."""
    capacity, found = rank_memory_bytes(device, 1), []
    for micro_size, mode in WAYS:
        config = configuration(model, "bf16", micro_size, mode, compiled)
        memory = MemoryModel.of(config, vocab_size, on_host=False)
        if memory.fits(config.layout, config.microbatches, capacity):
            found.append(config)
    if not found:
        raise Skipped(f"it does not fit into {capacity / 2**30:.0f} GiB, whatever is recomputed")
    return found


def training(
    device: torch.device,
    model: dict[str, Any],
    vocab_size: int,
    steps: int = 6,
    compiled: bool = False,
) -> dict[str, Any]:
    """Steps of a model on the one device: tokens a second, MFU, memory."""
    found = first_that_fits(
        device,
        fitting(model, vocab_size, device, compiled),
        lambda config: _steps(device, config, vocab_size, steps),
    )
    if found is None:
        raise Skipped(OUT_OF_MEMORY)
    return found


def _steps(device: torch.device, config: Config, vocab_size: int, steps: int) -> dict[str, Any]:
    with drawn_there():
        engine, placing = engine_on(config, vocab_size, device), Placing(device)
    times = []
    with choice.computing_by({"attention": choice.offered(device)}):
        for step in range(steps):
            placed = placing.place(batches(config, vocab_size, step))
            begin = time.perf_counter()
            engine.step(step, placed)
            engine.axes.clock.settle()
            times.append(time.perf_counter() - begin)
    tokens = config.batch.global_size * config.model.seq_length
    way = {"micro_size": config.batch.micro_size, "recompute": config.recompute.mode}
    step_s = statistics.median(times[2:])
    return way | rates(device, config.model, vocab_size, tokens, step_s)


def in_turn(
    ours: Callable[[], dict[str, Any]],
    theirs: Callable[[], dict[str, Any]],
    named: dict[str, str],
    rounds: int = ROUNDS,
) -> Iterator[Row]:
    """The best way of ours and the best of another trainer, round by round, so that a machine whose
    speed drifts is the same for both; one row, told anew after each round. `named`: these ways."""
    rounds_of: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds):
        rounds_of.append(round_of({"ours": ours, "theirs": theirs}, number))
        rates_of = {
            side: [one[side]["tokens_per_s"] for one in rounds_of] for side in ("ours", "theirs")
        }
        ratios = [a / b for a, b in zip(*rates_of.values(), strict=True)]
        yield (
            "in turn",
            named
            | {f"{side}_tokens_per_s": every for side, every in rates_of.items()}
            | {"ours_over_best": statistics.median(ratios), "ratios": ratios},
        )


def quickest(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The row of most tokens a second. Raises Left where none was measured."""
    measured = {name: row["tokens_per_s"] for name, row in rows.items() if "tokens_per_s" in row}
    if not measured:
        raise Left(f"nothing to compare with: {', '.join(rows) or 'no row'} was not measured")
    return max(measured, key=lambda name: measured[name])
