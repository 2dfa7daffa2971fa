"""GELU with the bias of the linear before it, by the kernels in Triton: the values and gradients of
torch's operations, in whole trainings too, and the bytes of the account."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import chunks, describe
from ptdmpi.plan.layer.account import MatrixProduct
from ptdmpi.plan.layer.folds import operators
from tests._configs import layout, small
from tests._layers import DTYPES, difference
from tests.model.fused import test_engine
from tests.model.fused._interpreted import ENVIRONMENT, NEEDS_TRITON, PROCESS, counted
from tests.model.layer.test_rows import layer_of
from tests.parallel import parallel

__all__ = ["ENVIRONMENT", "PROCESS"]  # of the ranks that run these tests
pytestmark = NEEDS_TRITON

CLOSE = {"fp64": 1e-13, "fp32": 2e-6, "fp16": 2e-3, "bf16": 1.6e-2}
ROWS, WIDTH = 5, 37
FEW_ROWS = mock.patch.object(chunks, "NORM_ROWS", 2)  # 3 programs, of which some have fewer rows


def fused() -> ModuleType:
    return importlib.import_module("ptdmpi.model.kernels.fused.gelu")


def operands(precision: str, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of a linear, its bias, and the gradient of the result. Exponentials of
    some of the outputs overflow."""
    generator = torch.Generator().manual_seed(3)
    x, dy, bias = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64).to(DTYPES[precision])
        for rows in (ROWS, ROWS, 1)
    )
    x[0] *= 50.0
    return x, bias[0], dy


def expected(x: Tensor, bias: Tensor, dy: Tensor, exact: bool) -> list[Tensor]:
    """Return the result of torch, and the gradients of x and of the bias, in float64."""
    x, bias, dy = (values.double() for values in (x, bias, dy))
    leaves = [x.requires_grad_(), bias.requires_grad_()]
    y = F.gelu(x + bias, approximate="none" if exact else "tanh")
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check_values(by: ModuleType, precision: str, exact: bool) -> None:
    """Compare with torch, in blocks that the columns do not fill, and in one block."""
    x, bias, dy = operands(precision)
    for block in (16, 1024):
        with mock.patch.object(by, "BLOCK", block), FEW_ROWS:
            y = by.forward(x, bias, exact=exact)
            dx, dbias = by.backward(x, bias, dy, exact=exact, trains=True)
            frozen, none = by.backward(x, bias, dy, exact=exact, trains=False)
        assert none is None and torch.equal(frozen, dx)
        assert dbias.dtype == torch.promote_types(x.dtype, torch.float32)
        for mine, theirs in zip((y, dx, dbias), expected(x, bias, dy, exact), strict=True):
            assert difference(mine.double(), theirs) < CLOSE[precision]


@parallel(ranks=[1])
@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize("exact", [False, True])
def test_values_of_torch(comm, precision, exact):
    check_values(fused(), precision, exact)


@parallel(ranks=[1])
def test_the_order_of_the_sums_is_fixed(comm):
    """Every third row by a program, then the programs in order; the bits of a column do not depend
    on the others, which a tensor rank may not have."""
    x, bias, dy = operands("fp32")
    with FEW_ROWS:
        dx, whole = fused().backward(x, bias, dy, exact=False, trains=True)
        part = fused().backward(
            x[:, 3:7].contiguous(), bias[3:7], dy[:, 3:7].contiguous(), exact=False, trains=True
        )[1]
    assert torch.equal(part, whole[3:7])
    by_program = [dx[0] + dx[3], dx[1] + dx[4], dx[2]]
    assert torch.equal(whole, by_program[0] + by_program[1] + by_program[2])


@parallel(ranks=[1])
def test_no_rows(comm):
    x, bias, dy = operands("fp32")
    y = fused().forward(x[:0], bias, exact=True)
    dx, dbias = fused().backward(x[:0], bias, dy[:0], exact=True, trains=True)
    assert y.shape == dx.shape == (0, WIDTH) and not dbias.any()


ERRORS = {
    "bias twice": ("z += tl.load(bias", "z += 2 * tl.load(bias"),
    "no bias backward": ("z = b + tl.load", "z = tl.load"),
    "factor of the exact form": ("z * (0.5 *", "z * (0.51 *"),
    "density": ("* z * z)\n        else", "* z)\n        else"),
    "slope": ("(z + 3.0 * cube)", "(z + 2.0 * cube)"),
    "overflow": ("tl.exp(-tl.abs(u))", "tl.exp(-u)"),
    "a row left out": ("range(program, rows,", "range(program, rows - 1,"),
    "a program left out": ("range(programs)", "range(programs - 1)"),
    "sums of one program": ("sums + program.to(tl.int64) * columns", "sums"),
    "first row again": ("tl.cast(row, tl.int64)", "tl.cast(0 * row, tl.int64)"),
}


@pytest.mark.cases(3)
@parallel(ranks=[1])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_found(comm, tmp_path, error):
    old, new = ERRORS[error]
    text = Path(fused().__file__).read_text()
    assert text.count(old) == 1
    # a name of its own: python keeps what it has read of a file
    path = tmp_path / f"gelu_{error.replace(' ', '_')}.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    by = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by)
    with pytest.raises(AssertionError):
        for exact in (False, True):
            check_values(by, "fp64", exact)


@parallel(ranks=[1])
@FEW_ROWS
def test_bytes(comm):
    """5 numbers of each element, forward and backward; torch's operations move 6."""
    for precision, size in (("bf16", 2), ("fp32", 4)):
        x, bias, dy = operands(precision)
        with counted() as moves:
            fused().forward(x, bias, exact=False)
            fused().backward(x, bias, dy, exact=False, trains=True)
        programs = chunks.norm_programs(ROWS)
        narrow = (ROWS + programs) * WIDTH * size  # the bias, which caches have
        assert moves.launches == 3
        assert moves.bytes == 5 * ROWS * WIDTH * size + 4 * WIDTH * (2 * programs + 1) + narrow


@parallel(ranks=[1, 2])
def test_the_account_of_a_layer(comm):
    """The product before GELU has no pass for the gradient of its bias."""
    _, sizes, _ = layer_of("gpt", TensorAxis(MpiCommunicator(comm)), "bf16")
    software = sizes.software.model_copy(update={"triton": ("gelu",)})
    by_triton = dataclasses.replace(sizes, software=software)
    rows = operators(describe.layer(sizes.model, 0))
    up, gelu = (row for row in rows if row.name in ("mlp.up", "mlp.activation"))
    assert up.before_gelu and gelu.bias == "trains"
    width = up.linear.local(comm.size)[1]
    elements = sizes.rows("whole") * width
    sums = 4 * chunks.norm_programs(sizes.rows("whole")) * width
    assert passes((gelu, up), sizes) == [3 * 2 * elements, 2 * elements]
    assert passes((gelu, up), by_triton) == [3 * 2 * elements + sums, sums]
    assert gelu.backward_bytes(by_triton) - gelu.backward_bytes(sizes) == sums


def passes(rows, sizes) -> list[float]:
    """Return the bytes of the kernels of the backward that are no matrix products."""
    kernels = (kernel for row in rows for kernel in row.backward(sizes))
    return [test_engine.moved(some) for some in kernels if not isinstance(some, MatrixProduct)]


@pytest.mark.parametrize(
    ("changes", "bias"),
    [
        ({}, "trains"),
        ({"model.kind": "llama", "model.ffn_hidden": 24}, "none"),
        ({"adapt.method": "lora", "adapt.rank": 2}, "frozen"),
        # the scales multiply the outputs of the linear after the bias
        ({"adapt.method": "ia3", "adapt.targets": ["mlp.up"]}, "none"),
    ],
)
def test_where_kernels_can_add_the_bias(changes, bias):
    rows = operators(describe.layer(small(changes).model, 0))
    up, gelu = (row for row in rows if row.name in ("mlp.up", "mlp.activation"))
    assert gelu.bias == bias and up.before_gelu == (bias != "none")


# -- whole trainings -------------------------------------------------------------------------------

BERT = {"model.kind": "bert", "model.sentence_order": True}
KINDS = {
    "gpt": {},
    "bf16": {"precision.compute": "bf16"},
    "bert": BERT,  # the exact form
    "recomputed": {"recompute.mode": "full"},
    "lora": {"adapt.method": "lora", "adapt.rank": 2, "adapt.dropout": 0.2},
    "tensor": layout(t=2) | {"parallel.sequence_parallel": True},
    "split backward": layout(p=2) | {"parallel.schedule": "zb-h1"},
    "zero": layout(d=2) | {"parallel.zero": 3},
}


@pytest.mark.cases(1)
@parallel(ranks=[1])
@pytest.mark.parametrize("kind", [k for k in KINDS if "parallel.data" not in KINDS[k]])
def test_trainings(comm, kind):
    with mock.patch.object(test_engine, "KINDS", ("gelu",)):
        test_engine.check_training(comm, KINDS[kind])


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("kind", [k for k in KINDS if "parallel.data" in KINDS[k]])
def test_layouts(comm, kind):
    with mock.patch.object(test_engine, "KINDS", ("gelu",)):
        test_engine.check_training(comm, KINDS[kind])
