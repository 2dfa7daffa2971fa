"""RMSNorm for some rows at a time has the bits of all rows at once."""

import pytest
import torch

from ptdmpi.model.kernels import Kernels, norm
from ptdmpi.model.kernels.choice import HostChoice
from ptdmpi.model.kernels.norm import Norm, rms_norm
from tests._configs import small

SHAPE = (37, 3, 48)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("own_type", [True, False])
def test_rows_at_a_time_have_equal_bits(dtype, trains, own_type, monkeypatch):
    """Whatever the number of rows, with a weight in the type of the input or in float32."""
    torch.manual_seed(7)
    x, dy = torch.randn(SHAPE).to(dtype), torch.randn(SHAPE).to(dtype)
    weight = torch.randn(SHAPE[-1]).to(dtype if own_type else torch.float32)
    sizes = []
    slices = norm._row_slices
    monkeypatch.setattr(
        norm, "_row_slices", lambda flat, elements: sizes.append(elements) or slices(flat, elements)
    )
    results = []
    for elements in (None, 1, 48, 48 * 7, 48 * 110, 48 * 111):
        mine, gain = x.clone().requires_grad_(), weight.clone().requires_grad_(trains)
        y = rms_norm(mine, gain, 1e-5, Kernels(HostChoice(norm=elements)))
        y.backward(dy)
        assert y.dtype == dtype and mine.grad.shape == SHAPE
        results.append((y.detach(), mine.grad, *([gain.grad] if trains else ())))
    assert sizes == [1, 1, 48, 48, 336, 336, 5280, 5280]  # once forward, once backward
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_model_s_norm_has_the_run_s_choice(monkeypatch):
    module = Norm(small({"model.kind": "llama"}, 1).model)
    seen = []
    monkeypatch.setattr(norm, "_row_slices", lambda flat, elements: seen.append(elements) or [])
    x = torch.randn(4, 2, *module.shape)
    with torch.no_grad():
        module(x)
        assert not seen
        module.take(Kernels(HostChoice(norm=16)))
        module(x)
        assert seen == [16]
        module(x.transpose(0, 1))  # not contiguous: a copy would cost more
    assert seen == [16]
