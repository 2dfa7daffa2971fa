"""`python -m benchmarks.tuning.mup`: muP compared with the standard parametrization, on one rank.

muP is the maximal update parametrization of Yang et al. 2022, which `mup_base_hidden` switches on.
Models of several widths are trained on the text of ptdmpi's documentation, with and without muP.
The coordinate check (appendix D.1 of the paper) shows the root mean square of activations after
some steps. With muP, this value must not grow with the width. The benchmark also measures the loss
after a short training with several learning rates. With muP, the best learning rate must not depend
on the width. docs/pictures/mup.png is drawn, and a table is printed.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.launch import ROOT
from ptdmpi.comm.world import World
from ptdmpi.config import Config, Layout, synthetic_config
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.probe.coordinates import MUP, STANDARD, Coordinates, plot, sizes_after
from ptdmpi.probe.coordinates import STEPS as CHECKED_STEPS

PICTURE = ROOT / "docs/pictures/mup.png"
VOCAB_SIZE = 256  # bytes
BASE = 32  # hidden size of the base model
WIDTHS = (32, 64, 128, 256)
WIDER = (*WIDTHS, 512)  # widths for the coordinate check, whose trainings are short
HEAD_SIZE = 16
LENGTH = 64
BATCH = 16
CHECKED_RATE = 2.0**-6
STEPS = 60
LAST = 10  # the loss of a training is the mean loss of its last LAST steps
RATES = tuple(2.0**power for power in (-10, -9, -8, -7, -6, -5))
NAMES = {False: STANDARD, True: MUP}


def text() -> torch.Tensor:
    """Return the bytes of all pages of the documentation as token ids."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return torch.tensor(list(b"".join(page.read_bytes() for page in pages)))


def configuration(width: int, rate: float, steps: int, *, mup: bool) -> Config:
    """Return the configuration of a training of a model with hidden size `width` and learning rate
    `rate`, with muP if `mup` is True."""
    model = {
        "kind": "llama",
        "layers": 2,
        "hidden": width,
        "heads": width // HEAD_SIZE,
        "ffn_hidden": 4 * width,
        "seq_length": LENGTH,
        "mup_base_hidden": BASE if mup else 0,
    }
    sections: dict[str, Mapping[str, Any]] = {
        "run": {"steps": steps},
        "batch": {"global_size": BATCH},
        "optimizer": {"learning_rate": rate, "decay": "constant", "weight_decay": 0.0},
    }
    return synthetic_config(Layout(1, 1, 1, micro_size=BATCH), model, **sections)


def rows_of(ids: torch.Tensor) -> Callable[[int], Microbatch]:
    """Return a function that makes the microbatch of a step from random positions of the text
    `ids`."""

    def batch(step: int) -> Microbatch:
        """Return the microbatch of a step."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(ids) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([ids[start : start + LENGTH + 1] for start in starts], dim=1)
        return Microbatch.of_ids(rows, torch.arange(BATCH) + step * BATCH)

    return batch


def coordinates(world: World, ids: torch.Tensor, width: int, *, mup: bool) -> dict[str, float]:
    """Train a model with hidden size `width` for a few steps, and return the root mean squares of
    its activations in the last step, by the name of the activation."""
    config = configuration(width, CHECKED_RATE, CHECKED_STEPS, mup=mup)
    return sizes_after(config, world, VOCAB_SIZE, rows_of(ids))


def final_loss(world: World, ids: torch.Tensor, width: int, rate: float, *, mup: bool) -> float:
    """Train a model with hidden size `width` and the learning rate `rate`, and return the mean loss
    of the last steps."""
    config = configuration(width, rate, STEPS, mup=mup)
    engine = Engine(config, world.split(grid_of(config)), VOCAB_SIZE)
    batch = rows_of(ids)
    losses = [engine.step(step, [batch(step)]).loss for step in range(STEPS)][-LAST:]
    return sum(losses) / len(losses)


def draw(measured: Coordinates, losses: Mapping[tuple[bool, int], Mapping[float, float]]) -> None:
    """Draw the coordinate check, and the losses by learning rate, for both parametrizations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, *others) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    plot(left, measured)
    highest = max(losses[True, BASE].values())
    for axes, mup in zip(others, NAMES, strict=True):
        for width in WIDTHS:
            curve = losses[mup, width]
            axes.plot(list(curve), list(curve.values()), "o-", label=f"hidden {width}")
            best = min(curve, key=lambda rate: curve[rate])
            axes.plot([best], [curve[best]], "k*", markersize=9)
        axes.set(xscale="log", xlabel="learning rate", ylabel=f"loss after {STEPS} steps")
        axes.set_xscale("log", base=2)
        axes.set_ylim(top=highest + 0.1)
        axes.set_title(f"{NAMES[mup]} (star: best rate)", fontsize=10)
        axes.legend(fontsize=7)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Train the models, print the table and draw the picture."""
    torch.set_num_threads(1)
    world, ids = World(), text()
    measured = Coordinates(WIDER)
    losses: dict[tuple[bool, int], dict[float, float]] = {}
    for mup in NAMES:
        for width in WIDER:
            measured.add(NAMES[mup], coordinates(world, ids, width, mup=mup))
    print(measured.text(), flush=True)
    if "--coordinates" in sys.argv[1:]:
        return
    for mup in NAMES:
        for width in WIDTHS:
            curve = {rate: final_loss(world, ids, width, rate, mup=mup) for rate in RATES}
            losses[mup, width] = curve
            values = " | ".join(f"{value:.3f}" for value in curve.values())
            best = math.log2(min(curve, key=lambda rate: curve[rate]))
            print(f"| {NAMES[mup]} | {width} | {values} | 2^{best:.0f} |", flush=True)
    draw(measured, losses)


if __name__ == "__main__":
    main()
