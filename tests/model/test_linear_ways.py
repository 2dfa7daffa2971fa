"""Linears by oneDNN's one call: the values of the library's way, where the table says so."""

from unittest import mock

import pytest
import torch

from ptdmpi.model import kernels

LIBRARY = kernels.HostWays()
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def operands(dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(4)
    shapes = ((5, 3, 24), (40, 24), (40,), (5, 3, 40))
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


@pytest.mark.skipif(not kernels.has_fused(), reason="this torch is without oneDNN")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("biased", [True, False])
def test_one_call_gives_what_product_and_sum_give(dtype, biased):
    if kernels.widens("cpu", dtype):
        pytest.skip("no instructions for the type")
    x, weight, bias, dy = operands(dtype)
    given = (x, weight, bias if biased else None)
    found = {}
    for fused in (True, False):
        with (
            kernels.taken(kernels.HostWays(output=0, input_gradient=0) if fused else LIBRARY),
            mock.patch.object(
                kernels, "linear_by_onednn", side_effect=kernels.linear_by_onednn
            ) as call,
        ):
            found[fused] = kernels.linear(*given), kernels.input_gradient(dy, weight)
        # without a bias a half type's product is oneDNN's in both ways
        assert call.call_count == fused * (2 if biased or dtype == torch.float32 else 1)
    exact = torch.nn.functional.linear(*(one if one is None else one.double() for one in given))
    wanted = (exact, dy.double() @ weight.double())
    for way in found.values():
        for one, other in zip(way, wanted, strict=True):
            assert one.dtype == dtype and one.shape == other.shape
            assert (one.double() - other).norm() < BOUNDS[dtype] * other.norm()


def test_small_products_are_the_library_s():
    size = 15 * 24 * 40
    entry = {"capability": "avx2", "cpu": "A", "type": "float32"}
    mine = entry | {"output": size, "input_gradient": size + 1}
    table = {"linear": [mine], "attention": [], "gelu": []}
    x, weight, bias, dy = operands(torch.float32)
    has = {"avx2": True, "cpu_name": "A B"}
    ask = kernels.usual_ways.__wrapped__  # whatever was answered before
    with (
        mock.patch.object(kernels, "table", lambda: table),
        mock.patch.object(torch.cpu, "get_capabilities", lambda: has),
        mock.patch.object(kernels, "has_fused", lambda: True),
        mock.patch.object(kernels, "usual_ways", ask),
        mock.patch.object(kernels, "linear_by_onednn") as call,
    ):
        assert ask("cpu", torch.float32) == LIBRARY._replace(output=size, input_gradient=size + 1)
        assert ask("cpu", torch.bfloat16) == ask("cuda", torch.float32) == LIBRARY
        kernels.linear(x[:4], weight, bias)
        kernels.input_gradient(dy, weight)
        kernels.linear(x[:0], weight, bias)
        assert not call.called
        kernels.linear(x, weight, bias)
        assert call.call_count == 1
        # what a machine measured of itself comes first
        own = {"linear": [entry | {"output": 7}], "attention": [entry | {"way": "products"}]}
        assert kernels.measured_ways(torch.float32, own) == kernels.HostWays(True, output=7)
        has["cpu_name"] = "B"
        assert ask("cpu", torch.float32) == kernels.measured_ways(torch.float32, own) == LIBRARY
        has["cpu_name"] = "A"
        with mock.patch.object(kernels, "has_fused", lambda: False):
            assert ask("cpu", torch.float32) == LIBRARY


def test_each_entry_says_what_was_measured():
    for entry in kernels.table()["linear"]:
        assert entry["measured"] and getattr(torch, entry["type"]) in kernels.FUSED_TYPES
        assert entry.get("output", 0) >= 0 <= entry.get("input_gradient", 0)
