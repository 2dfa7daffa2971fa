"""GELU by a sigmoid, its derivative kept in place of its input: the values of the library's."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ptdmpi.model.kernels import Kernels, activation
from ptdmpi.model.kernels.choice import BY_LIBRARY, HostChoice, measured_choice

BY_SIGMOID, LIBRARY = Kernels(HostChoice(gelu="sigmoid")), Kernels(BY_LIBRARY)
TYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [("gelu", activation.gelu), ("geglu", activation.gated)]


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    monkeypatch.setattr(activation, "LEAST_ELEMENTS", 0)


def computed(function, kind: str, x: Tensor, dy: Tensor, by: Kernels) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = function(x, kind, by)
    y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind, function", KINDS)
def test_no_less_exact_than_the_library_by_more_than_half(kind, function, dtype, monkeypatch):
    monkeypatch.setattr(activation, "CHUNK_ELEMENTS", 1000)  # the last rows are fewer
    draw = torch.Generator().manual_seed(3)
    x = (2.0 * torch.randn(7, 5, 2 * 96, generator=draw)).to(dtype)
    dy = torch.randn(7, 5, 192 if kind == "gelu" else 96, generator=draw).to(dtype)
    exact = computed(function, kind, x.double(), dy.double(), LIBRARY)
    ours = computed(function, kind, x, dy, BY_SIGMOID)
    library = computed(function, kind, x, dy, LIBRARY)
    for mine, theirs, true in zip(ours, library, exact, strict=True):
        assert mine.dtype == dtype and mine.shape == true.shape
        assert (mine - true).norm() <= 1.5 * (theirs - true).norm()
    assert torch.equal(function(x, kind, BY_SIGMOID), ours[0])  # without gradients


@pytest.mark.parametrize("kind, function", KINDS)
def test_gradients_are_those_of_the_function(kind, function):
    x = torch.randn(3, 1, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: function(x, kind, BY_SIGMOID), x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind, function", KINDS)
def test_what_is_far_out_stays_finite(kind, function, dtype):
    gate = torch.tensor([[-1e4, -50.0, -0.0, 0.0, 50.0, 1e4]])
    x = (torch.cat((gate, torch.ones_like(gate)), -1) if kind == "geglu" else gate).to(dtype)
    y, dx = computed(function, kind, x, torch.ones_like(gate), BY_SIGMOID)
    wanted = torch.tensor([[0.0, 0.0, 0.0, 0.0, 50.0, 1e4]]).to(dtype)
    slopes = torch.tensor([[0.0, 0.0, 0.5, 0.5, 1.0, 1.0]]).to(dtype)
    assert torch.equal(y, wanted)
    assert torch.equal(dx, torch.cat((slopes, wanted), -1) if kind == "geglu" else slopes)


@pytest.mark.parametrize("kind, function", KINDS)
def test_one_tensor_of_the_size_of_the_input_is_kept(kind, function):
    """And the input is not: the account of memory knows of one."""
    x = torch.randn(4, 2, 64).bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda one: kept.append(one) or one, id):
        function(x * 1.0, kind, BY_SIGMOID)
    sizes = [one.untyped_storage().nbytes() for one in kept if one.dim()]
    assert sizes == [x.untyped_storage().nbytes()]


def test_exact_gelu_other_types_and_small_tensors_are_left_alone(monkeypatch):
    entry = {"capability": "", "type": "bfloat16", "way": "sigmoid", "measured": "by hand"}
    found = [
        measured_choice(dtype, {"gelu": [entry]}).gelu for dtype in (torch.bfloat16, torch.float64)
    ]
    assert found == ["sigmoid", "library"]
    x = torch.randn(5, 3, requires_grad=True)

    def name(kind: str) -> str:
        return activation.gelu(x, kind, BY_SIGMOID).grad_fn.name()

    assert name("gelu_exact") == "GeluBackward0"
    assert name("gelu") == "_GeluBackward"
    monkeypatch.setattr(activation, "LEAST_ELEMENTS", 16)
    assert name("gelu") == "GeluBackward0"
