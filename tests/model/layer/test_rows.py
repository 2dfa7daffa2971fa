"""Each row of a layer against reality: what it keeps, its FLOPs, and its messages.

Rows are run one by one. Kept bytes are those of the storages that autograd saves, FLOPs those that
PyTorch's counter sees, messages those that the communicator counts.
"""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ptdmpi.config import Layout, RecomputeConfig
from ptdmpi.model.operators import Context, run
from ptdmpi.model.random import RandomStream
from ptdmpi.model.transformer import Block, rotary_table
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.account import FusedAttention, total_bytes
from ptdmpi.plan.layer.attention import Attend
from ptdmpi.plan.layer.elementwise import Activate, AddResidual, Normalize
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.layer.sizes import Sizes
from tests._configs import small
from tests._layers import CPU, Placed, positions, random_tensor, tensor_axis
from tests.parallel import parallel

S, B, H = 8, 2, 32
SHAPES = {
    "gpt": {},
    "llama": {"model.kind": "llama", "model.ffn_hidden": 48, "model.kv_heads": 4},
    "qwen3": {"model.kind": "qwen3", "model.kv_heads": 4, "model.head_size": 6},
    "bert": {"model.kind": "bert"},
    "dropout": {"model.dropout": 0.1},
    "attention dropout": {"model.dropout": 0.1, "model.attention_dropout": 0.1},
}


def layer_of(name: str, axis, precision: str):
    """A layer with known weights, its rows' sizes, and the context of its forward."""
    sizes = {"model.hidden": H, "model.heads": 8, "model.seq_length": S, "model.layers": 2}
    model = small({**sizes, **SHAPES[name]}).model
    placed = Placed(Block(model, axis, 0, RecomputeConfig()), axis, precision)
    if model.positions == "rope":
        dtype = placed.buffer.precision.compute
        cos, sin = rotary_table(model, CPU)
        placed.layer.place_rotary((cos.to(dtype), sin.to(dtype)))
    layout = Layout(axis.size, 1, 1, micro_size=B, sequence_parallel=axis.sequence_parallel)
    stream = RandomStream.of(1, 2, torch.arange(B)) if "dropout" in name else None
    return placed, Sizes(model, layout, precision), Context(stream)


class Row:
    """One row's run: the bytes that autograd saved, FLOPs and messages, forward and backward."""

    def __init__(self) -> None:
        self.saved: dict[int, int] = {}
        self.flops: tuple[int, int] = (0, 0)
        self.messages: tuple[Counter[str], Counter[str]] = (Counter(), Counter())


def measured(placed: Placed, context: Context) -> dict[str, Row]:
    """Run a layer row by row, forward and backward, and return what each row did."""
    axis = placed.axis
    x = positions(random_tensor("x", (S, B, H), placed_precision(placed)), axis).clone()
    values = {"x": x.requires_grad_()}
    weights = {weight.untyped_storage().data_ptr() for weight in placed.layer.parameters()}
    rows = {}
    for step in placed.layer.steps:
        row = rows[step.row.name] = Row()
        inputs = {name: values[name].detach().clone().requires_grad_() for name in step.row.inputs}

        def pack(tensor: Tensor, row=row) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                row.saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with Counted(axis.comm) as forward, saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = run([replace_last(step)], dict(inputs), context)
        made = [outputs[name] for name in step.row.outputs]
        with Counted(axis.comm) as backward:
            torch.autograd.backward(made, [torch.ones_like(value) for value in made])
        row.flops = (forward.flops, backward.flops)
        row.messages = (forward.messages, backward.messages)
        values.update({name: outputs[name].detach() for name in step.row.outputs})
    return rows


def replace_last(step):
    """The step, which lets go of nothing: its inputs are looked at afterwards."""
    return step._replace(last=frozenset())


def placed_precision(placed: Placed) -> str:
    return {torch.float64: "fp64", torch.float32: "fp32"}[placed.buffer.precision.compute]


def _added_flops(total: Tensor, left: Tensor, right: Tensor, **rest: object) -> int:
    """FLOPs of a product that is added in place; the counter passes shapes or tensors."""
    rows, inner = getattr(left, "shape", left)
    _, columns = getattr(right, "shape", right)
    return 2 * rows * inner * columns


class Counted:
    """FLOPs and messages of what is computed inside."""

    def __init__(self, comm) -> None:
        self.comm = comm
        # gradients of weights are added in place, which the counter does not know
        in_place = {torch.ops.aten.addmm_: _added_flops}
        self.counter = FlopCounterMode(display=False, custom_mapping=in_place)

    def __enter__(self) -> "Counted":
        self.before = self.comm.tally.copy()
        self.counter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.counter.__exit__(*error)
        since = self.comm.tally.since(self.before)
        sent = {kind: size for kind, size in since.whole_bytes.items() if size}
        self.messages = Counter(sent)
        self.flops = self.counter.get_total_flops()


def foreseen_messages(row, sizes: Sizes, phase) -> Counter[str]:
    found: Counter[str] = Counter()
    for message in row.messages(sizes, phase):
        found[message.collective] += message.whole_bytes
    return found


def foreseen_flops(row, sizes: Sizes) -> tuple[float, float]:
    """Return the FLOPs of products; PyTorch counts none of its attention kernel on a CPU."""
    forward = [k for k in row.forward(sizes) if not isinstance(k, FusedAttention)]
    back = [*row.backward(sizes), *row.weights(sizes)]
    backward = [k for k in back if not isinstance(k, FusedAttention)]
    return sum(k.flops for k in forward), sum(k.flops for k in backward)


def saved_by(rows: dict[str, Row], row) -> int:
    return sum(rows[row.name].saved.values())


def wrong(name: str, axis, precision: str = "fp64") -> list[str]:
    """Return the rows whose account is not what was measured, and in which respect."""
    placed, sizes, context = layer_of(name, axis, precision)
    rows = measured(placed, context)
    mistakes = []
    described = operators(describe.layer(sizes.model, 0))
    for row in described:
        found = rows[row.name]
        kept = total_bytes(row.kept(sizes, "none")) + shared_bytes(row, sizes)
        if saved_by(rows, row) != kept:
            mistakes.append(f"{row.name}: keeps {saved_by(rows, row)}, not {kept}")
        counts_flops = not (isinstance(row, Attend) and row_is_capped(sizes))
        if counts_flops and found.flops != foreseen_flops(row, sizes):
            mistakes.append(f"{row.name}: FLOPs {found.flops}, not {foreseen_flops(row, sizes)}")
        sent = tuple(foreseen_messages(row, sizes, phase) for phase in ("forward", "backward"))
        if found.messages != sent:
            mistakes.append(f"{row.name}: sends {found.messages}, not {sent}")
    return mistakes


def row_is_capped(sizes: Sizes) -> bool:
    """Capped scores, and those that are dropped from, are computed by products in blocks."""
    return sizes.model.attention_softcap > 0.0 or sizes.model.attention_dropout > 0.0


def shared_bytes(row, sizes: Sizes) -> int:
    """Bytes of an input that another row's account has; and less what this one's has of others."""
    if isinstance(row, Multiply) and row.shares_input:
        return row.replaced_bytes(sizes)
    if isinstance(row, Attend) and row_is_capped(sizes):
        return -row_output(row, sizes)  # explicit cores do not keep their output
    return 0


def row_output(row, sizes: Sizes) -> int:
    (output,) = (i for i in row.kept(sizes, "none") if i.name.endswith(".output"))
    return output.bytes


@parallel(ranks=[1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_does_what_it_says(comm, name, sequence_parallel):
    assert wrong(name, tensor_axis(comm, sequence_parallel)) == []


PLANTED = {
    "a norm keeps no input": (Normalize, "kept", lambda self, sizes, mode: iter(())),
    "a product keeps no input": (Multiply, "kept", lambda self, sizes, mode: iter(())),
    "a product sends nothing": (Multiply, "messages", lambda self, *rest: iter(())),
    "a product multiplies less": (Multiply, "weights", lambda self, sizes: iter(())),
    "an activation keeps nothing": (Activate, "kept", lambda self, sizes, mode: iter(())),
    "attention keeps nothing": (Attend, "kept", lambda self, sizes, mode: iter(())),
    "dropout keeps nothing": (AddResidual, "kept", lambda self, sizes, mode: iter(())),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error):
    from mpi4py import MPI

    kind, method, broken = PLANTED[error]
    axis = tensor_axis(MPI.COMM_SELF, False)
    if method == "messages":
        row = next(r for r in operators(describe.layer(small({}).model, 0)) if isinstance(r, kind))
        two = Sizes(small({}).model, Layout(2, 1, 1), "fp64")
        assert foreseen_messages(row, two, "backward")
        with mock.patch.object(kind, method, broken):
            assert not foreseen_messages(row, two, "backward")
        return
    with mock.patch.object(kind, method, broken):
        assert wrong("dropout", axis) != []


def test_another_number_of_rows_is_another_account():
    """The test above looks at sizes, not at zeros."""
    model = small({}).model
    sizes = Sizes(model, Layout(1, 1, 1, micro_size=2), "fp64")
    more = replace(sizes, layout=Layout(1, 1, 1, micro_size=4))
    for row in operators(describe.layer(model, 0)):
        assert total_bytes(row.kept(more, "none")) >= total_bytes(row.kept(sizes, "none"))
