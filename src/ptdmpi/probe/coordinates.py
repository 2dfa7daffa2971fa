"""The coordinate check of muP (Yang et al. 2022, arXiv 2203.03466, appendix D.1): narrow and wide
models train for a few steps, and their activations must not grow with the width."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ptdmpi.comm.world import World
from ptdmpi.config import Config, InputError, Layout, ModelConfig, OptimizerConfig, synthetic_config
from ptdmpi.config.files import parsed
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.show.draw import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMES = (1, 2, 4, 8)  # widths of the models, as multiples of model.mup_base_hidden
STEPS = 4
BATCH = 16  # sequences per step.
# Larger values of these three limits would take longer and would not reveal more.
MOST_LAYERS = 2
MOST_POSITIONS = 64
VOCAB_SIZE = 256
# With muP, no activation may grow by more than this factor from the narrowest model to the widest.
MOST_GROWTH = 2.0
STANDARD, MUP = "standard", "muP"  # names of the two parametrizations
LAST_LAYER, LOGITS = "after the last layer", "logits"


@dataclass
class Coordinates:
    """The root mean squares of activations. `sizes` maps (parametrization, name of the activation)
    to a list of root mean squares, one for each of the model widths `widths`."""

    widths: tuple[int, ...]
    sizes: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, parametrization: str, measured: Mapping[str, float]) -> None:
        """Add the root mean squares `measured` (name of an activation -> number) for the next
        width."""
        for name, value in measured.items():
            self.sizes.setdefault((parametrization, name), []).append(value)

    def growth(self, parametrization: str, name: str) -> float:
        """Return the factor by which an activation grows from the narrowest model to the widest."""
        sizes = self.sizes[parametrization, name]
        return sizes[-1] / max(sizes[0], 1e-30)

    @property
    def are_right(self) -> bool:
        """Return True if, with muP, no activation grows with the width by more than MOST_GROWTH."""
        named = [key for key in self.sizes if key[0] == MUP]
        return all(self.growth(*key) <= MOST_GROWTH for key in named)

    def text(self) -> str:
        """Return a table with a line for each activation, for a terminal."""
        lines = [f"{'root mean square':<32}{''.join(f'{width:>10}' for width in self.widths)}"]
        for key, sizes in self.sizes.items():
            numbers = "".join(f"{size:>10.3g}" for size in sizes)
            lines.append(f"{f'{key[1]}, {key[0]}':<32}{numbers}   x {self.growth(*key):.2g}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the root mean squares and the verdict, for the JSON output."""
        named: dict[str, dict[str, list[float]]] = {STANDARD: {}, MUP: {}}
        for (parametrization, name), sizes in self.sizes.items():
            named[parametrization][name] = sizes
        return {"widths": list(self.widths), **named, "right": self.are_right}


def check(tree: Mapping[str, Any], world: World) -> Coordinates:
    """Return the sizes of activations (root mean squares) at several widths, with muP and without.
    The models are like the model in the configuration `tree`, but small. Raise InputError if the
    configuration has mistakes or no muP."""
    sections, mistakes, _ = parsed(tree)
    if mistakes:
        raise InputError("\n".join(mistakes))
    model, optimizer = sections.model, sections.optimizer or OptimizerConfig()
    if model is None or not model.mup_base_hidden:
        raise InputError(
            "model.mup_base_hidden = 0: without muP there is nothing to check; legal: the width of "
            "the narrow model"
        )
    widths = tuple(model.mup_base_hidden * times for times in TIMES)
    made = Coordinates(widths)
    for parametrization in (STANDARD, MUP):
        for width in widths:
            config = _narrowed(model, optimizer, width, mup=parametrization == MUP)
            made.add(parametrization, sizes_after(config, world, VOCAB_SIZE, _counting(config)))
    return made


def sizes_after(
    config: Config, world: World, vocab_size: int, batch: Callable[[int], Microbatch]
) -> dict[str, float]:
    """Train a model for `config.run.steps` steps on one rank, and return the root mean squares of
    its activations in the last of the steps. `batch` returns the microbatch of a step."""
    engine = Engine(config, world.split(grid_of(config)), vocab_size)
    (stage,) = engine.stages.values()
    sizes: dict[str, float] = {}
    places = {LAST_LAYER: f"layers.{config.model.layers - 1}", LOGITS: "head"}
    for name, place in places.items():

        def seen(module: Any, given: Any, output: Tensor, name: str = name) -> None:
            """Record the root mean square of the module's output."""
            sizes[name] = output.detach().float().square().mean().sqrt().item()

        stage.get_submodule(place).register_forward_hook(seen)
    for step in range(config.run.steps):
        engine.step(step, [batch(step)])
    return {name: sizes[name] for name in places}


def _narrowed(model: ModelConfig, optimizer: OptimizerConfig, width: int, *, mup: bool) -> Config:
    """Return the configuration of a training run. Its model is like `model`, but has the hidden
    size `width`, at most MOST_LAYERS layers, and at most MOST_POSITIONS positions."""
    heads, head_size = model.heads, width // model.heads
    if not model.mup_base_head_size:
        heads, head_size = width // model.head_size, model.head_size
    if heads * head_size != width:
        raise InputError(
            f"a model with hidden = {width} cannot have heads of size {head_size}; legal: "
            "model.mup_base_hidden as a multiple of the size of heads, or model.mup_base_head_size"
        )
    ffn_hidden = max(1, model.ffn_hidden * width // model.hidden)
    keys = {
        "hidden": width,
        "heads": heads,
        "head_size": head_size,
        "kv_heads": gcd(heads, max(1, heads * model.kv_heads // model.heads)),
        "ffn_hidden": ffn_hidden,
        "layers": min(model.layers, MOST_LAYERS),
        "seq_length": min(model.seq_length, MOST_POSITIONS),
        "vocab_size": 0,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "expert_hidden": ffn_hidden,
    }
    if not mup:
        keys |= {"mup_base_hidden": 0, "mup_base_head_size": 0}
    constant = {"decay": "constant", "warmup_steps": 0, "weight_decay": 0.0}
    return synthetic_config(
        Layout(1, 1, 1, micro_size=BATCH),
        {**model.model_dump(), **keys},
        run={"steps": STEPS},
        optimizer={**optimizer.model_dump(exclude_unset=True), **constant},
    )


def _counting(config: Config) -> Callable[[int], Microbatch]:
    """Return a function that makes the microbatch of a step. From one position of a sequence to the
    next, the token id grows by 1 to 4, so that a model can partly learn to predict the next id."""
    length = config.model.seq_length

    def batch(step: int) -> Microbatch:
        """Return the microbatch of a step, which is the same at every width."""
        generator = torch.Generator().manual_seed(step)
        grown = torch.randint(1, 5, (length + 1, BATCH), generator=generator)
        grown[0] = torch.randint(VOCAB_SIZE, (BATCH,), generator=generator)
        ids = grown.cumsum(0) % VOCAB_SIZE
        return Microbatch.of_ids(ids, torch.arange(BATCH) + step * BATCH)

    return batch


def plot(axes: "Axes", measured: Coordinates) -> None:
    """Draw the sizes of activations by width into `axes`. The curves of models without muP are
    dashed."""
    names: Sequence[str] = sorted({name for _, name in measured.sizes})
    for (parametrization, name), sizes in measured.sizes.items():
        style = "-" if parametrization == MUP else "--"
        color = f"C{names.index(name)}"
        label = f"{name}, {parametrization}"
        axes.plot(measured.widths, sizes, f"{color}o{style}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="hidden size", ylabel="root mean square")
    axes.set_xticks(measured.widths, [str(width) for width in measured.widths], minor=False)
    axes.minorticks_off()
    axes.set_title(f"activations after {STEPS} steps", fontsize=10)
    axes.legend(fontsize=7)


def draw(measured: Coordinates, path: Path) -> None:
    """Write a picture of the sizes of activations by width to the file `path`. Raise InputError if
    the file cannot be written, or if its suffix is not .png or .svg."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
    plot(axes, measured)
    save(figure, path)
    plt.close(figure)
