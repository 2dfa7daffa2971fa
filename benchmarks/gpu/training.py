"""ptdmpi on one GPU: training steps of a model, measured alone or alternating with another
trainer."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
from ptdmpi.model.batch import Microbatch, Placing
from ptdmpi.model.kernels import agreement
from ptdmpi.model.parameters import Entry
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train.capacity import rank_memory_bytes

ROUNDS = 3
# pairs of microbatch size and recomputation mode, largest first; the first pair that fits is
# measured
WAYS = ((8, "none"), (4, "none"), (2, "none"), (1, "none"), (4, "full"), (1, "full"))
FILLED = {"zeros": 0.0, "ones": 1.0}


def configuration(
    model: dict[str, Any],
    precision: str,
    micro_size: int,
    mode: str,
    *,
    compiled: bool = False,
    ranks: int = 1,
) -> Config:
    """Return the configuration for a step of four microbatches of `micro_size` sequences on each of
    `ranks` replicas. `mode` is the mode of recomputation. If `compiled` is True, layers are
    compiled."""
    tree = {
        "run": {"steps": 100, "compile": compiled},
        "model": model,
        "batch": {"global_size": 4 * micro_size * ranks, "micro_size": micro_size},
        "precision": {"compute": precision},
        "recompute": {"mode": mode},
        "data": {"train": [{"path": "unused"}]},
    }
    return resolve(tree, ranks)


def batches(config: Config, vocab_size: int, step: int) -> list[Microbatch]:
    """Return the microbatches of a step for all ranks, in rank order. The microbatches consist of
    random tokens, and are in the memory of the host."""
    generator = torch.Generator().manual_seed(step)
    shape = (config.model.seq_length + 1, config.batch.global_size)
    ids = torch.randint(vocab_size, shape, generator=generator)
    samples = torch.arange(config.batch.global_size).split(config.batch.micro_size)
    parts = ids.split(config.batch.micro_size, dim=1)
    return [Microbatch.of_ids(part, numbers) for part, numbers in zip(parts, samples, strict=True)]


def engine_on(
    config: Config,
    vocab_size: int,
    device: torch.device,
    *,
    wire: str = "auto",
    world: World | None = None,
) -> Engine:
    """Return the engine for a configuration on a device. If `world` is None, the engine uses all
    ranks."""
    world = World() if world is None else world
    axes = world.split(grid_of(config), wire_named(wire, device))
    return Engine(config, axes, vocab_size, device)


@contextlib.contextmanager
def drawn_there() -> Iterator[None]:
    """Return a context in which initial weights are drawn on the device on which they are stored.

    In a real run, the initial weights are other random numbers, which the host computes. For 6.7e9
    weights, the host needs a minute and a half. The training speed does not depend on the random
    numbers.
    """
    with mock.patch.object(buffer, "_fill", _draw):
        yield


def _draw(parts: Sequence[tuple[Box, Tensor]], entry: Entry, seed: int) -> None:
    init = entry.declaration.init
    for _, view in parts:
        if isinstance(init, str):
            view.fill_(FILLED[init])
        else:
            view.normal_(0.0, init)


def fitting(
    model: dict[str, Any], vocab_size: int, device: torch.device, *, compiled: bool = False
) -> list[Config]:
    """Return the configurations from WAYS that fit into the memory of the device, according to the
    memory model, in the order of WAYS. Raises Skipped if no configuration fits."""
    capacity = rank_memory_bytes(device, 1)
    configs = []
    for micro_size, mode in WAYS:
        config = configuration(model, "bf16", micro_size, mode, compiled=compiled)
        memory = MemoryModel.of(config, vocab_size, on_host=False)
        if memory.fits(config.layout, config.microbatches, capacity):
            configs.append(config)
    if not configs:
        raise Skipped(f"it does not fit into {capacity / 2**30:.0f} GiB, even with recomputation")
    return configs


def training(
    device: torch.device,
    model: dict[str, Any],
    vocab_size: int,
    *,
    steps: int = 6,
    compiled: bool = False,
) -> dict[str, Any]:
    """Train a model for some steps on one device, with the largest microbatch that fits. Return the
    rates of `timing.rates`, such as tokens per second, MFU and memory."""
    numbers = first_that_fits(
        device,
        fitting(model, vocab_size, device, compiled=compiled),
        lambda config: _steps(device, config, vocab_size, steps),
    )
    if numbers is None:
        raise Skipped(OUT_OF_MEMORY)
    return numbers


def _steps(device: torch.device, config: Config, vocab_size: int, steps: int) -> dict[str, Any]:
    with drawn_there():
        engine = engine_on(config, vocab_size, device)
    placing = Placing(device)
    times = []
    with agreement.trying(agreement.offered(device)):
        for step in range(steps):
            placed = placing.place(batches(config, vocab_size, step))
            begin = time.perf_counter()
            engine.step(step, placed)
            engine.axes.clock.settle()
            times.append(time.perf_counter() - begin)
    way = {"micro_size": config.batch.micro_size, "recompute": config.recompute.mode}
    return way | rates(
        device,
        config.model,
        vocab_size,
        tokens=config.batch.global_size * config.model.seq_length,
        step_s=statistics.median(times[2:]),  # leave out the first two steps, which are warm-ups
    )


def in_turn(
    ours: Callable[[], dict[str, Any]],
    theirs: Callable[[], dict[str, Any]],
    named: dict[str, str],
    rounds: int = ROUNDS,
) -> Iterator[Row]:
    """Yield rounds in which ptdmpi (`ours`) and another trainer (`theirs`) train alternately, so
    that a drift in the machine's speed affects both equally.

    All rounds together are one table row. The row has the key "left" until the last round is done.
    `named` has the names of the two settings. Raises Left if one of the two trainers was not
    measured.
    """
    rounds_of: list[dict[str, dict[str, Any]]] = []

    def measure(number: int) -> dict[str, Any]:
        rounds_of.append(round_of({"ours": ours, "theirs": theirs}, number))
        row = named | _compared(rounds_of)
        if number + 1 < rounds:
            row["left"] = f"{number + 1} of {rounds} rounds"
        return row

    for number in range(rounds):
        yield "in turn", partial(measure, number)


def _compared(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return, for each round, the tokens per second of ptdmpi and of the other trainer, and the
    ratios of these two rates."""
    rates_of: dict[str, list[float]] = {"ours": [], "theirs": []}
    for sides in rounds:
        for side, row in sides.items():
            if "tokens_per_s" not in row:
                raise Left(f"{side} was not measured: {row}")
            rates_of[side].append(row["tokens_per_s"])
    pairs = zip(rates_of["ours"], rates_of["theirs"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    return {
        "ours_tokens_per_s": rates_of["ours"],
        "theirs_tokens_per_s": rates_of["theirs"],
        "ours_over_best": statistics.median(ratios),
        "ratios": ratios,
    }


def quickest(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the row with the most tokens per second. Raises Left if no row has a
    rate."""
    measured = {name: row["tokens_per_s"] for name, row in rows.items() if "tokens_per_s" in row}
    if not measured:
        raise Left(f"nothing to compare with: {', '.join(rows) or 'no row'} was not measured")
    return max(measured, key=lambda name: measured[name])
