"""Keys and values that are gathered while the queries are projected, where the transport makes
progress during computation: the numbers of the path without overlap, in the announced order."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator, Handle, OneRank
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.wires import Wire, wire_named
from ptdmpi.comm.world import World
from ptdmpi.config.choices import CONTEXT_METHODS
from ptdmpi.engine.engine import Engine
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.operators import EarlyKeys
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layout.grid import grid_of
from tests._configs import Changes, layout, small
from tests._engines import VOCAB_SIZE, microbatches, whole_weights
from tests._rows import ADAPTED, SHAPES, foreseen_flops, foreseen_messages, foreseen_products
from tests.comm._stand_in import StandInCommunicator
from tests.comm._wires import FastCommunicator
from tests.context._rows import BASE, LLAMA
from tests.context.test_memory import LENGTH, LIMIT, peak
from tests.context.test_memory import SHAPES as MEMORY_SHAPES
from tests.context.test_parity import moved
from tests.model.layer.test_rows import kept_by_layer, layer_of, measured
from tests.parallel import parallel

STAND_IN = Wire(StandInCommunicator)
QWEN = {"model.kind": "qwen3", "model.ffn_hidden": 48, "model.head_size": 6}
LORA = {"adapt.method": "lora", "adapt.rank": 3, "adapt.dropout": 0.1}
SEQUENCE = {**layout(t=2), "parallel.sequence_parallel": True}
PUT_OFF = {**layout(p=2), "parallel.schedule": "zb-h1"}
ROWS: dict[str, tuple[int, Changes]] = {
    "gpt": (2, {}),
    "llama": (2, LLAMA),
    "head norms": (2, QWEN),
    "selective": (2, {"recompute.mode": "selective", "model.attention_dropout": 0.1}),
    "full": (2, {"recompute.mode": "full", **LLAMA}),
    "lora": (2, LORA),
    "lora of queries": (2, {**LORA, **LLAMA, "adapt.targets": ("attention.q",)}),
    "ia3": (2, {"adapt.method": "ia3", **LLAMA}),
    "tensor": (4, {**layout(t=2), **LLAMA}),
    "sequence": (4, {**SEQUENCE, **QWEN}),
    "sequence, lora": (4, {**SEQUENCE, **LORA}),
    "put off": (4, {**PUT_OFF, **QWEN}),
    "put off, biases": (4, PUT_OFF),
    "zero 3": (4, {**layout(d=2), "parallel.zero": 3, **LLAMA}),
    "zero 3, full": (4, {**layout(d=2), "parallel.zero": 3, "recompute.mode": "full"}),
}
SHORT = ("llama", "lora", "sequence", "put off, biases", "zero 3")


def engine_on(world: World, changes: Changes, wire: Wire | None) -> Engine:
    config = small({**BASE, "parallel.context": 2, **changes}, world.size)
    return Engine(config, world.split(grid_of(config), wire), VOCAB_SIZE)


def early_steps(engine: Engine) -> list[EarlyKeys]:
    blocks = (block for stage in engine.stages.values() for block in stage.layers.values())
    computes = (step.compute for block in blocks for step in block.steps)
    return [compute for compute in computes if isinstance(compute, EarlyKeys)]


def curve(engine: Engine, steps: int = 2) -> Tensor:
    values = []
    for number in range(steps):
        batches = microbatches(engine.config, number, engine.axes["data"].rank)
        result = engine.step(number, [one.at(engine.context.positions) for one in batches])
        values += [result.loss, result.grad_norm]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.cases(2)
@parallel(ranks=[4])
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in SHORT else pytest.mark.long) for one in ROWS]
)
def test_the_numbers_are_those_without_overlap(comm, name):
    """Messages of the stand-in are complete only some time after they have begun."""
    ranks, changes = ROWS[name]
    world = World(comm).first(ranks)
    if world is not None:
        same_numbers(world, changes)
    comm.Barrier()


def same_numbers(world: World, changes: Changes) -> None:
    usual, early = engine_on(world, changes, None), engine_on(world, changes, STAND_IN)
    assert not early_steps(usual)
    assert len(early_steps(early)) == sum(len(one.layers) for one in early.stages.values()) > 0
    torch.testing.assert_close(curve(early), curve(usual), rtol=1e-12, atol=0)
    model = usual.config.model
    weights = whole_weights(early)
    for key, whole in whole_weights(usual).items():
        expected, found = moved(model, key, whole), moved(model, key, weights[key])
        assert (found - expected).abs().max() <= 1e-12 * expected.abs().max(), key
    assert not early.context.comm.under_way


@parallel(ranks=[2])
@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_a_wire_that_really_overlaps_gives_the_numbers_of_mpi(comm, method, zero):
    """PyTorch's own: gloo sends while a rank computes."""
    changes = {**LLAMA, "parallel.context_method": method, "parallel.zero": zero}
    usual = engine_on(World(comm), changes, wire_named("mpi"))
    fast = engine_on(World(comm), changes, wire_named("torch"))
    assert fast.context.comm.overlaps and not usual.context.comm.overlaps
    assert bool(early_steps(fast)) == (method == "all_gather") and not early_steps(usual)
    torch.testing.assert_close(curve(fast), curve(usual), rtol=1e-12, atol=0)


@parallel(ranks=[2])
def test_a_quantized_weight_is_unpacked_once(comm):
    changes = {**LLAMA, **LORA, "quantize.weights": "int8", "quantize.block": 16}
    assert not early_steps(engine_on(World(comm), changes, STAND_IN))


@parallel(ranks=[2])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_other_methods_compute_one_product(comm, method):
    changes = {"parallel.context_method": method}
    assert not early_steps(engine_on(World(comm), changes, STAND_IN))


class Noted:
    """A handle that writes into a diary when it is waited for."""

    def __init__(self, handle: Handle, lines: list[str], name: str) -> None:
        self.handle, self.lines, self.name = handle, lines, name

    def wait(self) -> None:
        """Wait, and note it."""
        self.handle.wait()
        self.lines.append(f"{self.name} ends")

    def done(self) -> bool:
        """Return True if the message is complete."""
        return self.handle.done()


@contextmanager
def diary(comm: Communicator) -> Iterator[list[str]]:
    """What happens when: messages of keys and values and of their gradients, and products with
    weights of so many rows."""
    lines: list[str] = []

    def message(name: str, begin):
        def noted(tensor):
            lines.append(f"{name} begins")
            result, handle = begin(tensor)
            return result, Noted(handle, lines, name)

        return noted

    def product(name: str, usual, place: int):
        def noted(kernels, *operands):
            lines.append(f"{name} of {operands[place].shape[0]}")
            return usual(kernels, *operands)

        return noted

    with (
        patch.object(comm, "all_gather_begin", message("gather", comm.all_gather_begin)),
        patch.object(comm, "reduce_scatter_begin", message("sum", comm.reduce_scatter_begin)),
        patch.object(Kernels, "linear", product("product", Kernels.linear, 1)),
        patch.object(
            Kernels, "input_gradient", product("input's gradient", Kernels.input_gradient, 1)
        ),
        patch.object(
            Kernels,
            "add_weight_gradient",
            product("weight's gradient", Kernels.add_weight_gradient, 0),
        ),
    ):
        yield lines


def around(lines: list[str], name: str) -> list[list[str]]:
    """Return each part of a diary from the line before `name` begins to the line after it ends."""
    first = [number for number, line in enumerate(lines) if line == f"{name} begins"]
    last = [number for number, line in enumerate(lines) if line == f"{name} ends"]
    return [lines[begin - 1 : end + 2] for begin, end in zip(first, last, strict=True)]


@parallel(ranks=[4])
@pytest.mark.parametrize("name", ["llama", "full", "put off"])
def test_messages_are_under_way_during_the_product_of_the_queries(comm, name):
    """The queries have 32 rows of the weight, keys and values 16."""
    ranks, changes = ROWS[name]
    world = World(comm).first(ranks)
    if world is not None:
        in_order(world, {**changes, **LLAMA, "model.head_size": 8, "model.kv_heads": 1})
    comm.Barrier()


def in_order(world: World, changes: Changes) -> None:
    engine = engine_on(world, changes, STAND_IN)
    put_off = changes.get("parallel.schedule") == "zb-h1"
    recomputes = changes.get("recompute.mode") == "full"
    with diary(engine.context.comm) as lines:
        curve(engine, 1)
    forwards, backwards = around(lines, "gather"), around(lines, "sum")
    layers = len(early_steps(engine)) * engine.config.microbatches
    assert len(forwards) == layers * (1 + recomputes)
    for forward in forwards:
        assert forward[:-1] == [
            "product of 16",
            "gather begins",
            "product of 32",
            "gather ends",
        ]
    assert len(backwards) == layers
    weights = [] if put_off else ["weight's gradient of 32"]
    for backward in backwards:
        assert backward[1:] == [
            "sum begins",
            "input's gradient of 32",
            *weights,
            "sum ends",
            "input's gradient of 16",
        ]


class EarlyCommunicator(FastCommunicator):
    """A transport that makes progress during computation."""

    overlaps = True


@pytest.mark.cases(6)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", [*SHAPES, *ADAPTED])
def test_a_layer_keeps_as_much_as_without_overlap(comm, name):
    """Under every mode of recomputation, in wide and in half types."""
    usual, early = ContextAxis(MpiCommunicator(comm)), ContextAxis(EarlyCommunicator(comm))
    axis = TensorAxis(OneRank())
    for precision in ("fp64", "bf16"):
        for recompute in ("none", "selective", "full"):
            expected, _ = kept_by_layer(name, axis, precision, recompute, cut=usual)
            found, _ = kept_by_layer(name, axis, precision, recompute, cut=early)
            assert found == expected, (precision, recompute)


@pytest.mark.cases(6)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", [name for name in [*SHAPES, *ADAPTED] if name != "latent"])
def test_three_rows_in_one_step_do_what_they_say(comm, name):
    """FLOPs, products and messages of the step are those of its rows, where messages overlap.
    Latent attention has no single product of queries, keys and values, so no such step."""
    axis = ContextAxis(EarlyCommunicator(comm))
    placed, sizes, context = layer_of(name, TensorAxis(OneRank()), "fp64", context=axis)
    software = sizes.software.model_copy(update={"overlap_context": True})
    sizes = replace(sizes, software=software)
    found = measured(placed, context)["attention.qkv"]
    names = ("attention.qkv", "attention.heads", "attention.keys")
    rows = [row for row in operators(describe.layer(sizes.model, 0)) if row.name in names]
    assert len(rows) == len(names)
    for foreseen, seen in ((foreseen_flops, found.flops), (foreseen_products, found.products)):
        by_row = [foreseen(row, sizes) for row in rows]
        assert seen == tuple(map(sum, zip(*by_row, strict=True)))
    for phase, sent in zip(("forward", "backward"), found.messages, strict=True):
        expected: Counter[str] = Counter()
        for row in rows:
            expected += foreseen_messages(row, sizes, phase)
        assert sent == expected


@parallel(ranks=[2])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_peak_of_memory_is_that_of_the_formula(comm, name):
    """Gradients that are being summed stay in memory during the backward of the queries."""
    with patch.object(MpiCommunicator, "overlaps", True):
        found, foreseen = peak(World(comm), MEMORY_SHAPES[name], LENGTH)
    assert abs(found / foreseen - 1) < LIMIT, (found, foreseen)
