"""An expert activates a few rows at a time, with the bits of all rows at once."""

import pytest
import torch

from ptdmpi.comm.communicator import OneRank
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.experts import mixture
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.experts.mixture import Mixture, Router
from ptdmpi.model.experts.routing import Chosen, Routing
from ptdmpi.model.flat import Portion
from ptdmpi.model.kernels import Kernels, activation, compute_by
from ptdmpi.model.kernels.activation import ActivationFunction
from ptdmpi.model.kernels.choice import HostChoice
from ptdmpi.model.parameters import data_types
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer.describe import layer
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.folds import operators
from tests._configs import small

MODEL = {"model.experts": 4, "model.experts_per_token": 2, "model.expert_hidden": 24}
MODEL |= {"model.bias": False}


def computed(kind: str, precision: str, choice: HostChoice) -> list[torch.Tensor]:
    """Output, input's gradient and parameters' gradients of a mixture for 97 tokens."""
    torch.manual_seed(0)
    model = small(MODEL | {"model.kind": kind, "precision.compute": precision}).model
    (row,) = (row for row in operators(layer(model)) if isinstance(row, MixExperts))
    router = Router(row)
    layer_of = Mixture(row, Routing(model), TensorAxis(OneRank()), ExpertAxis(), context=OneRank())
    compute_by(layer_of, Kernels(choice))
    named = [*router.named_parameters(prefix="router"), *layer_of.named_parameters()]
    types = data_types(precision)
    buffer = ParameterBuffer(named, types, torch.device("cpu"), Portion())
    buffer.weights.normal_(std=0.3)
    x = torch.randn(97, 1, model.hidden).to(types.compute).requires_grad_()
    y = layer_of(x, router, Chosen())
    y.backward(torch.randn(y.shape).to(y.dtype))
    return [y.detach(), x.grad, buffer.gradients]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mistral", "gpt", "gemma2"])
@pytest.mark.parametrize("gelu", ["library", "sigmoid"])
def test_a_few_rows_have_the_bits_of_all_rows(kind, precision, gelu, monkeypatch):
    """All rows of an expert are many enough for GELU by a sigmoid, but a few of them are not. The
    elements of 5 rows, a chunk, do not fill vector registers. The last rows are fewer."""
    monkeypatch.setattr(activation, "LEAST_ELEMENTS", 300)
    monkeypatch.setattr(activation, "CHUNK_ELEMENTS", 5 * 24)
    monkeypatch.setattr(mixture, "AT_ONCE", 5 * 48)
    choice = HostChoice(gelu=gelu)
    ours = computed(kind, precision, choice)
    monkeypatch.setattr(mixture, "_few_rows", lambda *_: [slice(None)])
    assert all(map(torch.equal, ours, computed(kind, precision, choice)))


@pytest.mark.parametrize("gelu", ["library", "sigmoid"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["swiglu", "geglu", "gelu"])
def test_an_activation_computed_again_has_the_bits_of_the_first_time(
    name, precision, gelu, monkeypatch
):
    monkeypatch.setattr(activation, "LEAST_ELEMENTS", 0)
    kernels = Kernels(HostChoice(gelu=gelu))
    function = ActivationFunction(name, is_gated=name != "gelu")
    x = torch.randn(5, 12, dtype=data_types(precision).compute, requires_grad=True)
    y = function.of(x, kernels)
    dy = torch.randn_like(y)
    again = function.again(x.detach(), kernels)
    dx = torch.empty_like(x)
    again.write_gradient(dx, dy)
    assert torch.equal(again.result, y)
    assert torch.equal(dx, torch.autograd.grad(y, x, dy)[0])
