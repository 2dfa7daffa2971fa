"""Each row of a layer against reality: what it keeps, its FLOPs, its messages and its products.

Rows are run one by one. Kept bytes are those of the storages that autograd saves, FLOPs and
launched products those that PyTorch's dispatcher sees, messages those that the communicator counts.
Half types are run both ways: multiplied as they are, and widened as on a processor without their
instructions.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.config import Layout, RecomputeConfig
from ptdmpi.config.choices import ContextMethod
from ptdmpi.config.precision import scaling_of
from ptdmpi.model import transformer
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.experts.routing import Chosen
from ptdmpi.model.kernels import compute_by
from ptdmpi.model.low_bit.delayed import OPERANDS
from ptdmpi.model.operators import Context, run
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sequence.positions import ALL
from ptdmpi.model.tensor_parallel import LayerLinear, TensorAxis
from ptdmpi.model.transformer import Block, rotary_table
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.account import kept, total_bytes
from ptdmpi.plan.layer.attention.core import Attend
from ptdmpi.plan.layer.attention.exchange import JoinHeads
from ptdmpi.plan.layer.elementwise import Activate, AddResidual, Normalize
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.folds import items, operators
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.shape.parameters import layer
from tests._configs import small
from tests._layers import CPU, DTYPES, Placed, positions, random_tensor, tensor_axis
from tests._rows import (
    ADAPTED,
    HALF,
    SHAPES,
    Counted,
    chosen_kernels,
    foreseen_flops,
    foreseen_messages,
    foreseen_products,
    precisions_of,
    program,
    require_legal,
)
from tests.parallel import parallel

S, B, H = 8, 2, 32
METHODS = get_args(ContextMethod)


def layer_of(
    name: str,
    axis,
    precision: str,
    recompute: str = "none",
    *,
    widens: bool = False,
    context: ContextAxis | None = None,
    dealt: ExpertAxis | None = None,
):
    """A layer with known weights, its rows' sizes, and the context of its forward; `widens`: its
    products of half types are in float32, on request. `context`: an axis that cuts its sequence,
    whose messages are counted instead of the tensor axis'. `dealt`: the ranks over which experts
    are dealt, whose messages are counted if they are several."""
    sizes = {"model.hidden": H, "model.heads": 8, "model.seq_length": S, "model.layers": 2}
    model = small({**sizes, **(SHAPES | ADAPTED)[name]}).model
    precision, _, fp8 = precision.partition(" ")
    scaling = scaling_of(precision, fp8 or "block")
    model = model.adapted(model.adapt, model.quantize, scaling)
    experts = dealt or ExpertAxis()
    block = Block(model, axis, 0, RecomputeConfig(mode=recompute), context=context, experts=experts)
    for part in (name for name, part in layer(model, model.kind_of(0)).items() if not part.trains):
        for weight in block.get_submodule(part).parameters(recurse=False):
            weight.declaration = replace(weight.declaration, trains=False)
    if experts.size > 1:  # this rank's experts are in one buffer with its other weights
        for weight in block.parameters():
            weight.declaration = replace(weight.declaration, apart=())
    placed = Placed(block, axis, precision)
    here = ALL if context is None else context.positions
    placed.counted = axis.comm if context is None else context.comm
    if experts.size > 1:
        placed.counted = experts.comm
    kernels = chosen_kernels(precision, widens)
    compute_by(placed.layer, kernels)
    for linear in placed.layer.modules():
        if isinstance(linear, LayerLinear):
            linear.delayed.begin(dict.fromkeys(OPERANDS, 4))  # as after a first step
    placed.rotary = ()
    if model.positions == "rope":
        dtype = placed.buffer.precision.compute
        cos, sin = rotary_table(model, CPU)
        placed.rotary = (here.of(cos.to(dtype)), here.of(sin.to(dtype)))
        placed.layer.place_rotary(placed.rotary)
    divided = axis.sequence_parallel
    layout = Layout(axis.size, 1, 1, micro_size=B, sequence_parallel=divided, context=here.size)
    if experts.whole:
        layout = replace(layout, expert_tensor=1)
    if context is not None:
        layout = replace(layout, context_method=context.method)
    if experts.size > 1:
        layout = replace(layout, data=experts.size, expert=experts.size)
    stream = RandomStream.of(1, 2, torch.arange(B), here) if "dropout" in name else None
    software = program(kernels, precision)
    sizes_here = Sizes(model, layout, precision, software, by_source=experts.by_source)
    return placed, sizes_here, Context(stream, positions=here)


class Row:
    """One row's run: the bytes that autograd saved, FLOPs and messages, forward and backward."""

    def __init__(self) -> None:
        self.saved: dict[int, int] = {}
        self.flops: tuple[int, int] = (0, 0)
        self.products: tuple[int, int] = (0, 0)
        self.messages: tuple[Counter[str], Counter[str]] = (Counter(), Counter())


def measured(placed: Placed, context: Context) -> dict[str, Row]:
    """Run a layer row by row, forward and backward, and return what each row did. A row that has no
    step in this layout did nothing."""
    axis = placed.axis
    whole = random_tensor("x", (S, B, H), placed_precision(placed))
    x = positions(context.positions.of(whole), axis).clone()
    values = {"x": x.requires_grad_()}
    weights = {weight.untyped_storage().data_ptr() for weight in placed.layer.parameters()}
    rows: dict[str, Row] = defaultdict(Row)
    for step in placed.layer.steps:
        row = rows[step.row.name] = Row()
        inputs = {name: values[name].detach().clone().requires_grad_() for name in step.row.inputs}

        def pack(tensor: Tensor, row=row) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                row.saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with Counted(placed.counted) as forward, saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = run([replace_last(step)], dict(inputs), context)
        made = [outputs[name] for name in step.row.outputs]
        with Counted(placed.counted) as backward:
            torch.autograd.backward(made, [torch.ones_like(value) for value in made])
        row.flops = (forward.flops, backward.flops)
        row.products = (forward.products, backward.products)
        row.messages = (forward.messages, backward.messages)
        values.update({name: outputs[name].detach() for name in step.row.outputs})
    return rows


def replace_last(step):
    """The step, which lets go of nothing: its inputs are looked at afterwards."""
    return step._replace(last=frozenset())


def placed_precision(placed: Placed) -> str:
    return next(name for name, kind in DTYPES.items() if kind == placed.buffer.precision.compute)


def saved_by(rows: dict[str, Row], row) -> int:
    return sum(rows[row.name].saved.values())


def wrong(
    name: str,
    axis,
    precision: str = "fp64",
    *,
    widens: bool = False,
    context: ContextAxis | None = None,
    dealt: ExpertAxis | None = None,
) -> list[str]:
    """Return the rows whose account is not what was measured, and in which respect."""
    placed, sizes, given = layer_of(
        name, axis, precision, widens=widens, context=context, dealt=dealt
    )
    rows = measured(placed, given)
    mistakes = []
    described = operators(describe.layer(sizes.model, 0))
    for row in described:
        if dealt is None or dealt.comm.rank == 0:  # the parts have the first rank's names
            mistakes += wrong_parts(row, placed.layer, sizes.layout)
        found = rows[row.name]
        kept = total_bytes(row.kept(sizes, "none")) + shared_bytes(row, sizes)
        if saved_by(rows, row) != kept:
            mistakes.append(f"{row.name}: keeps {saved_by(rows, row)}, not {kept}")
        counts_flops = not (isinstance(row, Attend) and row_is_capped(sizes))
        if counts_flops and found.flops != foreseen_flops(row, sizes):
            mistakes.append(f"{row.name}: FLOPs {found.flops}, not {foreseen_flops(row, sizes)}")
        if not isinstance(row, Attend) and not launched(row, found.products, sizes):
            foreseen = foreseen_products(row, sizes)
            mistakes.append(f"{row.name}: launches {found.products} products, not {foreseen}")
        sent = tuple(foreseen_messages(row, sizes, phase) for phase in ("forward", "backward"))
        if found.messages != sent:
            mistakes.append(f"{row.name}: sends {found.messages}, not {sent}")
    return mistakes


def wrong_parts(row, layer, layout: Layout) -> list[str]:
    """Return the parts of a row whose parameters are not those of the layer's module."""
    modules, mistakes = dict(layer.named_modules()), []
    for name, part in row.held(layout.dealing).items():
        found = [weight.numel() for weight in modules[name].parameters(recurse=False)]
        said = list(part.weights(layout.tensor))
        if found != said:
            mistakes.append(f"{name}: has {found} elements, not {said}")
    return mistakes


def launched(row, products: tuple[int, int], sizes: Sizes) -> bool:
    """Return True if a row launches as many products as foreseen. Experts without tokens launch
    none."""
    foreseen = foreseen_products(row, sizes)
    if isinstance(row, MixExperts) and row.chosen < row.count:
        return all(1 < found <= most for found, most in zip(products, foreseen, strict=True))
    return products == foreseen


def row_is_capped(sizes: Sizes) -> bool:
    """Capped scores, and those that are dropped from, are computed by products in blocks."""
    return sizes.model.attention_softcap > 0.0 or sizes.model.attention_dropout > 0.0


def shared_bytes(row, sizes: Sizes) -> int:
    """Bytes of an input that another row's account has; and less what this one's has of others."""
    if isinstance(row, Multiply) and row.shares_input and (row.keeps_input or row.adapters):
        return row.replaced_bytes(sizes)
    if isinstance(row, MixExperts) and row.shares_input:
        return sizes.boundary_bytes  # the first linear of the shared experts keeps it
    if isinstance(row, JoinHeads):  # the next row keeps it; this one does if it sends it back
        return 0 if row.sends_back(sizes) else -row_output(row, sizes)
    if isinstance(row, Attend) and sizes.layout.exchange == "ring":
        return 0  # all of its cores keep their output
    if isinstance(row, Attend) and row_is_capped(sizes):
        return -row_output(row, sizes)  # explicit cores do not keep their output
    if isinstance(row, Attend) and sizes.operand_bytes != sizes.compute_bytes:
        return -row_output(row, sizes)  # widened ones keep it as it was before it was rounded
    if isinstance(row, Attend) and sizes.layout.exchange == "ulysses":
        return sizes.tokens * sizes.model.values_width * sizes.compute_bytes  # `JoinHeads` frees
    return 0


def row_output(row, sizes: Sizes) -> int:
    """Bytes of the output; none of the core in "ulysses", whose output is freed."""
    return total_bytes(i for i in row.kept(sizes, "none") if i.name.endswith(".output"))


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_does_what_it_says(comm, name, sequence_parallel):
    require_legal(name, comm.size)
    assert wrong(name, tensor_axis(comm, sequence_parallel)) == []


@parallel(ranks=[2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_experts_that_are_not_divided_do_what_they_say(comm, sequence_parallel):
    axis, undivided = tensor_axis(comm, sequence_parallel), ExpertAxis(whole=True)
    for name in ("experts", "shared experts"):
        for precision in ("fp64", "bf16"):
            assert wrong(name, axis, precision, dealt=undivided) == []
            for recompute in ("none", "full"):
                real, said = kept_by_layer(name, axis, precision, recompute, dealt=undivided)
                assert real == said, (name, precision, recompute)


@parallel(ranks=[2])
@pytest.mark.parametrize("by_source", [False, True])
def test_experts_of_several_ranks_do_what_they_say(comm, by_source):
    """Each token has all experts, so every expert has as many rows as any other. An expert of four
    has one product for all ranks' rows, or one for each rank's."""
    dealt = ExpertAxis(MpiCommunicator(comm), by_source=by_source)
    every = SHAPES["experts"] | {"model.experts_per_token": 4}
    with mock.patch.dict(SHAPES, {"all experts": every}):
        for precision in ("fp64", "bf16"):
            axis = TensorAxis(OneRank())
            assert wrong("all experts", axis, precision, dealt=dealt) == [], precision


@pytest.mark.cases(10)
@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_row_does_so_at_some_positions(comm, name, method):
    """A context axis cuts the sequence: attention sees all positions, by each method."""
    context = ContextAxis(MpiCommunicator(comm), method)
    mistakes = wrong(name, TensorAxis(OneRank()), context=context)
    assert not mistakes, mistakes


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_does_so_in_every_precision(comm, name):
    """Half types too, as this processor multiplies them, and widened."""
    require_legal(name, comm.size)
    axis = tensor_axis(comm, sequence_parallel=False)
    mistakes = {
        (precision, widens): wrong(name, axis, precision, widens=widens)
        for precision in precisions_of(name)
        for widens in {False, precision in HALF}
    }
    assert not any(mistakes.values()), mistakes


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ADAPTED)
def test_every_row_with_adapters_does_what_it_says(comm, name, sequence_parallel):
    axis = tensor_axis(comm, sequence_parallel)
    mistakes = {precision: wrong(name, axis, precision) for precision in ("fp64", "bf16")}
    assert not any(mistakes.values()), mistakes


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_that_says_it_keeps_nothing_is_found(name):
    from mpi4py import MPI

    whole = Multiply.kept

    def broken(self, sizes, mode):
        return (item for item in whole(self, sizes, mode) if ".adapter" not in item.name)

    with mock.patch.object(Multiply, "kept", broken):
        assert wrong(name, tensor_axis(MPI.COMM_SELF, False)) != []


def kept_by_layer(
    name: str,
    axis,
    precision: str,
    recompute: str,
    *,
    widens: bool = False,
    cut: ContextAxis | None = None,
    dealt: ExpertAxis | None = None,
) -> tuple[int, int]:
    """Return (bytes that a whole layer keeps from its forward, bytes that its rows say); `cut`: an
    axis that cuts its sequence; `dealt` as in `layer_of`."""
    placed, sizes, context = layer_of(
        name, axis, precision, recompute, widens=widens, context=cut, dealt=dealt
    )
    every = random_tensor("x", (S, B, H), precision)
    x = positions(context.positions.of(every), axis).clone().requires_grad_()
    held = {x.untyped_storage().data_ptr(): x.untyped_storage()}
    weights = {weight.untyped_storage().data_ptr() for weight in placed.layer.parameters()}
    tables = {table.untyped_storage().data_ptr() for table in placed.rotary}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights | tables:
            held[storage.data_ptr()] = storage
        return tensor

    choices: list[Chosen] = []
    with (
        saved_tensors_hooks(pack, lambda tensor: tensor),
        mock.patch.object(transformer, "Chosen", lambda: choices.append(Chosen()) or choices[-1]),
    ):
        placed.layer(x, context)
    for choice in choices:  # recomputation keeps it outside of autograd
        pack(choice.indices)
    described = operators(describe.layer(sizes.model, 0))
    real = sum(storage.nbytes() for storage in held.values())  # a row may free what another kept
    return real, total_bytes(kept(items(described, sizes, recompute), recompute))


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_whole_layer_keeps_what_its_rows_say(comm, name, recompute):
    """Under every mode of recomputation, in every precision."""
    require_legal(name, comm.size)
    axis = tensor_axis(comm, sequence_parallel=False)
    mistakes = {}
    for precision in precisions_of(name):
        for widens in {False, precision in HALF}:
            real, said = kept_by_layer(name, axis, precision, recompute, widens=widens)
            if real != said:
                mistakes[precision, widens] = (real, said)
    assert not mistakes


@pytest.mark.cases(10)
@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_at_some_positions_keeps_what_its_rows_say(comm, name, method):
    """By each method, under every mode of recomputation, in wide, in half and in widened types."""
    cut = ContextAxis(MpiCommunicator(comm), method)
    mistakes = {}
    for precision, widens in (("fp64", False), ("bf16", False), ("bf16", True)):
        for recompute in ("none", "selective", "full"):
            real, said = kept_by_layer(
                name, TensorAxis(OneRank()), precision, recompute, widens=widens, cut=cut
            )
            if real != said:
                mistakes[precision, widens, recompute] = (real, said)
    assert not mistakes, mistakes


@pytest.mark.parametrize("targets", ["all", ("attention.q",), ("mlp.down",)])
@pytest.mark.parametrize("method", ["lora", "ia3", "none"])
def test_a_row_frees_no_input_that_is_not_kept(method, targets):
    """The core's output is the input of attention's last linear, and a scale keeps its own."""
    changes = {"model.kind": "llama", "adapt.method": method}
    if method == "lora":
        changes |= {"adapt.rank": 2, "adapt.targets": targets}
    model = small(changes).model
    sizes = Sizes(model, Layout(1, 1, 1, micro_size=B), "fp32")
    rows = operators(describe.layer(model))
    names = {item.name for item in items(rows, sizes, "none")}
    for row in rows:
        scaled = isinstance(row, Multiply) and bool(row.adapters)
        if row.replaced_bytes(sizes) and not scaled and row.name != "attention.out":
            assert f"{row.name}.input" in names, row.name


PLANTED = {
    "a norm keeps no input": (Normalize, "kept", lambda self, sizes, mode: iter(())),
    "a product keeps no input": (Multiply, "kept", lambda self, sizes, mode: iter(())),
    "a product multiplies less": (Multiply, "weights", lambda self, sizes: iter(())),
    "an activation keeps nothing": (Activate, "kept", lambda self, sizes, mode: iter(())),
    "experts keep nothing": (MixExperts, "kept", lambda self, sizes, mode: iter(())),
    "experts multiply less": (MixExperts, "weights", lambda self, sizes: iter(())),
    "attention keeps nothing": (Attend, "kept", lambda self, sizes, mode: iter(())),
    "dropout keeps nothing": (AddResidual, "kept", lambda self, sizes, mode: iter(())),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error):
    from mpi4py import MPI

    kind, method, broken = PLANTED[error]
    name = "experts" if kind is MixExperts else "dropout"
    with mock.patch.object(kind, method, broken):
        assert wrong(name, tensor_axis(MPI.COMM_SELF, False)) != []


@parallel(ranks=[2])
def test_a_product_that_says_it_sends_nothing_is_found(comm):
    with mock.patch.object(Multiply, "messages", lambda self, *rest: iter(())):
        mistakes = wrong("gpt", tensor_axis(comm, False))
    assert len(mistakes) == 4 and all(": sends " in text for text in mistakes), mistakes


def test_another_number_of_rows_is_another_account():
    """The test above looks at sizes, not at zeros."""
    model = small({}).model
    sizes = Sizes(model, Layout(1, 1, 1, micro_size=2), "fp64")
    more = replace(sizes, layout=Layout(1, 1, 1, micro_size=4))
    for row in operators(describe.layer(model, 0)):
        assert total_bytes(row.kept(more, "none")) >= total_bytes(row.kept(sizes, "none"))
