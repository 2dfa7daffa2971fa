"""A new sublayer takes three places: a row kind, its module, and the list of sublayers.

The dummy is a gated causal convolution (Dauphin et al. 2017, arXiv 1612.08083) over the positions
of each channel, between two linears.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import plugin
from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.world import World
from ptdmpi.config import Layout, ModelConfig, RecomputeConfig
from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.model import SUBLAYERS
from ptdmpi.model import operators as modules
from ptdmpi.model.parameters import Split, declare
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import Block
from ptdmpi.plan.cost.layer import LayerTimes, Seconds
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer import sublayer as sublayers
from ptdmpi.plan.layer.account import Item, Kernel, MemoryPass
from ptdmpi.plan.layer.legality import is_legal, layout_mistakes
from ptdmpi.plan.layer.operator import Operator, OwnOperator
from ptdmpi.plan.layer.parts import Linear, Part, Scale, Table
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.layer.sublayer import Sublayer
from ptdmpi.plan.machine.cluster import Model, load_cluster, load_model
from ptdmpi.plan.machine.kernels import Group
from ptdmpi.plan.machine.measured import machine_of
from ptdmpi.plan.shape.flops import model_flops
from ptdmpi.plan.shape.parameters import layer_elements
from ptdmpi.train.checks import checked_data
from tests._configs import layout, small
from tests._engines import build, steps_of
from tests._layers import tensor_axis
from tests._rows import SHAPES
from tests.model.layer.test_rows import wrong
from tests.parallel import parallel

TAPS = 3
WIDTH = 16


# 1. The row: what it is called, its parts, and its account; and the sublayer.
@dataclass(frozen=True)
class Convolve(Operator):
    """[s, b, 2 w/t] -> [s, b, w/t]: a causal filter of one half, gated by the other."""

    width: int
    trained: bool

    def parts(self) -> dict[str, Part]:
        return {f"{self.name}.tap{k}": Scale(self.width, trains=self.trained) for k in range(TAPS)}

    def multiplications(self, model: ModelConfig) -> float:
        return TAPS * self.width

    def _elements(self, sizes: Sizes) -> int:
        return sizes.tokens * sizes.share(self.width)

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        yield MemoryPass(3 * self._elements(sizes) * sizes.compute_bytes)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        yield MemoryPass(5 * self._elements(sizes) * sizes.compute_bytes)

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Its input, which has the gate, what it gates, and what each tap is multiplied with."""
        size, c = self._elements(sizes), sizes.compute_bytes
        yield Item(f"{self.name}.input", 2 * size, c)
        yield Item(f"{self.name}.filtered", size, c)
        if self.trained:
            yield Item(f"{self.name}.shifted", TAPS * size, c)

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        """The gradients of the taps, which I computes and W adds."""
        if self.trained:
            yield Item(f"{self.name}.taps", TAPS * sizes.share(self.width), sizes.compute_bytes)

    def replaced_bytes(self, sizes: Sizes) -> int:
        return 2 * self._elements(sizes) * sizes.compute_bytes

    def backward_bytes(self, sizes: Sizes) -> int:
        return 3 * self._elements(sizes) * sizes.compute_bytes


def convolution(build: describe.LayerBuild, kind: type[Convolve] = Convolve) -> Sublayer:
    model = build.model
    columns = partial(Linear, bias=False, init_std=model.matrix_std, split="columns")
    rows = partial(Linear, bias=False, init_std=build.residual_std, split="rows")
    up, down = columns(model.hidden, (WIDTH, WIDTH)), rows(WIDTH, (model.hidden,))
    return build.sublayer(
        "convolution",
        4,
        build.product("convolution.up", up, "y", "y"),
        kind("convolution.filter", ("y",), ("y",), WIDTH, not model.adapt.adapts),
        build.product("convolution.down", down, "y", "y"),
    )


# 2. The module that computes it.
class Tap(nn.Module):
    def __init__(self, width: int, tensor: int) -> None:
        super().__init__()
        self.weight = declare(tensor, (width,), 0.02, split=Split(0, (width,)))


class Convolution(nn.Module):
    def __init__(self, row: "Convolve", tensor: int) -> None:
        super().__init__()
        for tap in range(TAPS):
            self.add_module(f"tap{tap}", Tap(row.width, tensor))

    def forward(self, x: Tensor, context: object) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        total = torch.zeros_like(value)
        for tap in range(TAPS):
            past = value[: len(value) - tap]
            total = (
                total + F.pad(past, (0, 0, 0, 0, tap, 0)) * self.get_submodule(f"tap{tap}").weight
            )
        return gate * total


def make_convolution(
    owner: nn.Module, row: Operator, build: modules.Build
) -> Callable[..., Tensor]:
    assert isinstance(row, Convolve)
    module = Convolution(row, build.axis.size)
    modules.add(owner, row.name, module)
    return module


@dataclass(frozen=True)
class OwnConvolve(Convolve, OwnOperator):
    """The same row of a user, outside of the package: it makes its module itself."""

    def module(self, build: modules.Build) -> nn.Module:
        return Convolution(self, build.axis.size)


def own_convolution(build: describe.LayerBuild) -> Sublayer:
    return convolution(build, OwnConvolve)


# The ways to add it: in the package, by lines in two tables, or in a file of the user's own.
WAYS = {
    "contributed": ("attention", "convolution", "mlp"),
    "own": ("attention", f"{__name__}:own_convolution", "mlp"),
}


@contextmanager
def contributed() -> Iterator[None]:
    """The lines that a contributor adds."""
    with (
        mock.patch.dict(modules.MAKERS, {Convolve.__name__: make_convolution}),
        mock.patch.dict(SUBLAYERS, {"convolution": f"{__name__}:convolution"}),
    ):
        yield


def convolved(model: ModelConfig) -> ModelConfig:
    """The model with the convolution between attention and MLP."""
    return model.model_copy(update={"sublayers": WAYS["own"]})


def test_the_planner_counts_prices_and_holds_it():
    """On two tensor ranks, by hand: it adds what its rows say, and nothing else."""
    tensor, hidden, tokens = 2, 512, 128
    model = load_model(f"l=4,h={hidden},a=8,s={tokens}")
    machine = machine_of(load_cluster("dgx-h100"), "bf16", 2)

    def account(model: Model) -> tuple[int, Seconds, int]:
        times = LayerTimes(machine, model, Layout(tensor, 1, 1))
        memory = MemoryModel(model.config, model.vocab_size, "bf16").stages
        kept = memory.kept_bytes(Layout(tensor, 1, 1), 0)
        return layer_elements(model.config), times.forward, kept

    elements, seconds, kept = account(model)
    more_elements, more_seconds, more_kept = account(replace(model, config=convolved(model.config)))
    assert more_elements - elements == 2 * hidden + 3 * WIDTH * hidden + WIDTH * TAPS

    sizes = LayerTimes(machine, model, Layout(tensor, 1, 1)).sizes
    x, width = tokens * hidden, WIDTH // tensor
    mask = int(sizes.software.dropout)  # bytes of an element
    compute = (
        machine.elementwise_s("layernorm", x, x * 2 * 2)
        + machine.gemm_s(tokens, 2 * width, hidden)
        + machine.stream_s(tokens * width * 3 * 2)
        + machine.gemm_s(tokens, hidden, width)
        + machine.stream_s(x * (3 * 2 + mask))
    )
    assert more_seconds.compute - seconds.compute == pytest.approx(compute, rel=1e-9)
    message = machine.all_reduce_s(x * 2, Group(tensor, tensor))
    assert more_seconds.messages - seconds.messages == pytest.approx(message, rel=1e-9)

    norm = 2 * x + 2 * 2 * tokens  # its input, and mean and deviation of each row
    linears = 2 * (x + tokens * width)
    filtered = 2 * tokens * width * (2 + 1 + TAPS)
    each = norm + linears + filtered
    assert more_kept - kept == model.config.layers * each


def test_its_flops_count_twice_backward_only_if_it_trains():
    """Per token: two FLOPs a multiplication, three times, or twice next to adapters."""
    model = load_model("l=4,h=512,a=8,s=128")
    each = 2 * model.config.layers * (3 * WIDTH * 512 + TAPS * WIDTH)
    frozen = model.config.adapted(AdaptConfig(method="lora", rank=4))
    for config, times in ((model.config, 3), (frozen, 2)):
        without = model_flops(config, model.vocab_size, 1)
        assert model_flops(convolved(config), model.vocab_size, 1) - without == times * each


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_a_mask_number_that_is_taken_is_refused(taken):
    """It would drop the same elements as another mask: the other sublayers', or an adapter's."""

    def same_place(build: describe.LayerBuild) -> Sublayer:
        return build.sublayer("other", taken, *convolution(build).operators[1:-1])

    def named(group: str, name: str) -> Any:
        return same_place if name == "other" else plugin(group, name)

    model = small({}).model.model_copy(update={"sublayers": ("attention", "mlp", "other")})
    with (
        mock.patch.object(sublayers, "plugin", named),
        pytest.raises(InputError, match=rf"other\.residual has the number {taken} of .*another"),
    ):
        describe.layer(model)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda build: build.sublayer("k", 4, None, None), "has an operator of the type NoneType"),
        (lambda build: describe.attention(build), "two operators have the name attention.qkv"),
        (lambda build: exit(), "model.sublayers: other ends the program"),
    ],
)
def test_a_strange_sublayer_is_refused_in_one_line(made, text):
    def named(group: str, name: str) -> Any:
        return made if name == "other" else plugin(group, name)

    model = small({"model.block_norm": "post"}).model
    model = model.model_copy(update={"sublayers": ("attention", "mlp", "other")})
    with mock.patch.object(sublayers, "plugin", named), pytest.raises(InputError, match=text) as e:
        describe.layer(model)
    assert "\n" not in str(e.value)


REFUSAL = "it needs whole sequences; legal: parallel.context = 1"


@dataclass(frozen=True)
class WholeSequences(OwnConvolve):
    """The same row, if its module needs all positions of a sequence."""

    def refuses(self, layout: Layout) -> str | None:
        return REFUSAL if layout.context > 1 else None


def of_whole_sequences(build: describe.LayerBuild) -> Sublayer:
    return convolution(build, WholeSequences)


def test_a_layout_that_a_row_refuses_is_legal_nowhere():
    """The planner's rules and the checks before a training give the row's own reason."""
    sublayers = ["attention", f"{__name__}:of_whole_sequences", "mlp"]
    config = small({"model.sublayers": sublayers})
    for context, mistakes in ((1, []), (2, [f"convolution.filter: {REFUSAL}"])):
        cut = Layout(tensor=1, pipeline=1, data=1, context=context)
        assert list(layout_mistakes(cut, config.model, 4)) == mistakes
        assert is_legal(cut, config.model, 4) == (not mistakes)
    with pytest.raises(InputError, match=re.escape(REFUSAL)):
        checked_data(small({"model.sublayers": sublayers, "parallel.context": 2}, ranks=2))


WRONG_PARTS = {
    "a tap too many": ({"tap3": Scale(WIDTH)}, "tap3 has"),
    "a tap too wide": ({"tap1": Scale(2 * WIDTH)}, "tap1 has"),
    "a tap too few": ({"tap1": None}, "more elements"),
    "a matrix that is no linear": ({"tap1": Table(WIDTH, 1, 0.02)}, "no linear"),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_parts_that_are_not_the_module_are_refused(name):
    """The optimizer and the plan read the parts, so a training would go on with other numbers."""
    changed, message = WRONG_PARTS[name]

    @dataclass(frozen=True)
    class Wrong(OwnConvolve):
        def parts(self) -> dict[str, Part]:
            changes = {f"{self.name}.{tap}": part for tap, part in changed.items()}
            return {k: part for k, part in (super().parts() | changes).items() if part is not None}

        def module(self, build: modules.Build) -> nn.Module:
            module = super().module(build)
            if isinstance(changed.get("tap1"), Table):
                module.tap1.weight = declare(1, (WIDTH, 1), 0.02)
            return module

    def sublayer(build: describe.LayerBuild) -> Sublayer:
        return convolution(build, Wrong)

    def named(group: str, name: str) -> Any:
        return sublayer if name == "wrong" else plugin(group, name)

    model = small({}).model.model_copy(update={"sublayers": ("attention", "mlp", "wrong")})
    with mock.patch.object(sublayers, "plugin", named), pytest.raises(InputError, match=message):
        Block(model, TensorAxis(OneRank()), 0, RecomputeConfig())


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_its_rows_do_what_they_say(comm, way, sequence_parallel):
    with contributed(), mock.patch.dict(SHAPES, convolved={"model.sublayers": WAYS[way]}):
        assert wrong("convolved", tensor_axis(comm, sequence_parallel)) == []


@parallel(ranks=[1, 2, 4])
def test_it_trains_alike_in_every_layout(comm):
    """Over the tensor, the data and the pipeline axis, in both ways to add it."""
    from mpi4py import MPI

    layouts = {1: [{}], 2: [layout(t=2), layout(d=2)], 4: [layout(t=2, p=2)]}
    changes = {"model.layers": 2, "precision.compute": "fp64", "batch.global_size": 4}
    alone = losses_of(MPI.COMM_SELF, changes | {"model.sublayers": WAYS["own"]})
    assert alone[0] > alone[-1]
    for number, cut in enumerate(layouts[comm.size]):
        way = list(WAYS)[number]
        with contributed():
            losses = losses_of(comm, changes | {"model.sublayers": WAYS[way]} | cut)
        assert losses == pytest.approx(alone, rel=1e-12), (way, cut)


def losses_of(comm, changes) -> list[float]:
    return [float(result.loss) for result in steps_of(build(World(comm), changes), 3)]
