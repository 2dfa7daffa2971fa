"""Linears by oneDNN's one call: the values of the library's way, where the table says so."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from ptdmpi.model import kernels
from ptdmpi.model.kernels import USUAL, Kernels, host
from ptdmpi.model.kernels import choice as choices
from ptdmpi.model.kernels.choice import (
    BY_LIBRARY,
    AttentionByProducts,
    HostChoice,
    OneDnnLinears,
    measured_choice,
)
from ptdmpi.model.kernels.host import table

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def operands(dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(4)
    shapes = ((5, 3, 24), (40, 24), (40,), (5, 3, 40))
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


@pytest.mark.skipif(not host.has_fused(torch.float32), reason="this torch is without oneDNN")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("biased", [True, False])
def test_one_call_gives_what_product_and_sum_give(dtype, biased):
    if not host.multiplies("cpu", dtype):
        pytest.skip("no instructions for the type")
    x, weight, bias, dy = operands(dtype)
    given = (x, weight, bias if biased else None)
    found = {}
    for fused in (True, False):
        by = Kernels(HostChoice(linear=OneDnnLinears(0, 0)) if fused else BY_LIBRARY)
        with mock.patch.object(
            kernels, "linear_by_onednn", side_effect=kernels.linear_by_onednn
        ) as call:
            found[fused] = by.linear(*given), by.input_gradient(dy, weight)
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
    only = {"linear": [mine], "attention": [], "gelu": []}
    x, weight, bias, dy = operands(torch.float32)
    has = {"avx2": True, "cpu_name": "A B"}
    ask = choices.usual_choice.__wrapped__  # whatever was answered before
    with (
        mock.patch.object(choices, "table", lambda: only),
        mock.patch.object(torch.cpu, "get_capabilities", lambda: has),
        mock.patch.object(host, "has_fused", lambda dtype: True),
        mock.patch.object(choices, "usual_choice", ask),
        mock.patch.object(kernels, "linear_by_onednn") as call,
    ):
        assert ask("cpu", torch.float32) == HostChoice(linear=OneDnnLinears(size, size + 1))
        assert ask("cpu", torch.bfloat16) == ask("cuda", torch.float32) == BY_LIBRARY
        USUAL.linear(x[:4], weight, bias)
        USUAL.input_gradient(dy, weight)
        USUAL.linear(x[:0], weight, bias)
        assert not call.called
        USUAL.linear(x, weight, bias)
        assert call.call_count == 1
        # what a machine measured of itself comes first
        own = {"linear": [entry | {"output": 7}], "attention": [entry | {"way": "products"}]}
        assert measured_choice(torch.float32, own) == HostChoice(
            AttentionByProducts(), OneDnnLinears(7)
        )
        has["cpu_name"] = "B"
        assert ask("cpu", torch.float32) == measured_choice(torch.float32, own) == BY_LIBRARY
        has["cpu_name"] = "A"
        with mock.patch.object(host, "has_fused", lambda dtype: False):
            assert ask("cpu", torch.float32) == BY_LIBRARY


def test_each_entry_says_what_was_measured():
    for entry in table()["linear"]:
        assert entry["measured"] and getattr(torch, entry["type"]) in host.FUSED_TYPES
        assert entry.get("output", 0) >= 0 <= entry.get("input_gradient", 0)


LIMITED = """
import torch
from ptdmpi.model.kernels import Kernels, host
from ptdmpi.model.kernels.choice import usual_choice
x = torch.randn(64, 32, dtype=torch.bfloat16)
y = Kernels(usual_choice("cpu", torch.bfloat16)).linear(x, torch.randn(48, 32).bfloat16())
print(host.has_fused(torch.bfloat16), host.has_fused(torch.float64), tuple(y.shape))
"""


def test_a_call_that_onednn_may_not_compute_is_not_chosen(monkeypatch):
    """A user may limit oneDNN to instructions that lack a type, on any processor."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False (64, 48)\n", done.stderr
