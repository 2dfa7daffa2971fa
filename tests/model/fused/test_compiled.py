"""Triton's compiler accepts each kernel for a GPU of compute capability 9.0, in every type, and
makes machine code of it. No GPU is needed."""

import importlib
import math
from typing import Any

import pytest

import ptdmpi.model.kernels.fused as package
from ptdmpi.model.kernels.tanh_form import CUBE, SLOPE
from ptdmpi.model.random import GOLDEN, MIX_1, MIX_2
from tests.model.fused._interpreted import NEEDS_TRITON
from tests.model.fused._kernels import kernels

pytestmark = NEEDS_TRITON

CAPABILITY, WARP = 90, 32
GATED = {"GELU": [True, False], "SLOPE": [SLOPE], "CUBE": [CUBE], "BLOCK": [1024]}
# The types of each kernel's arguments: pointers (*) to numbers of the model's type (T), of the type
# in which kernels compute (W) and of indices; the values of its constants, whose first ones are
# compiled together, then the second ones.
ARGUMENTS = {
    "dropout._drop": "x:*T y:*T samples:*i64 positions:*i64 key:i64 first_channel:i64 batch:i32"
    " width:i32",
    "gated._backward": "x:*T dy:*T dx:*T width:i32",
    "gated._forward": "x:*T y:*T width:i32",
    "gelu._add": "sums:*W dbias:*W programs:i32 columns:i32",
    "gelu._backward": "x:*T bias:*T dy:*T dx:*T sums:*W rows:i32 columns:i32",
    "gelu._forward": "x:*T bias:*T y:*T columns:i32",
    "loss._backward": "logits:*T labels:*i64 tops:*W totals:*W factors:*W columns:i32 first:i32",
    "loss._forward": "logits:*T labels:*i64 tops:*W totals:*W targets:*W columns:i32 first:i32",
    "norm._backward": "total:*T weight:*T means:*W scales:*W dnormed:*T dtotal:*T dx:*T"
    " by_weight:*W rows:i32 columns:i32",
    "norm._forward": "x:*T y:*T weight:*T shift:*T total:*T normed:*T means:*W scales:*W"
    " columns:i32",
    "rope._turn": "x:*T y:*T cos:*T sin:*T batch:i32 pairs:i32 position_stride:i32"
    " sequence_stride:i32 head_stride:i32 angle_stride:i32 angle_sequence_stride:i32",
    "update._update": "masters:*W weights:*T gradients:*W first:*W second:*W average:*W length:i32"
    " factor:fp32 factor_rest:fp32 decay:fp32 decay_rest:fp32 pace:fp32 pace_rest:fp32"
    " correction:fp32 correction_rest:fp32",
}
CONSTANTS: dict[str, dict[str, list[Any]]] = {
    "dropout._drop": {
        "THRESHOLD": [429496729],
        "SCALE": [1.0 / 0.9],
        "GOLDEN": [GOLDEN],
        "MIX_1": [MIX_1],
        "MIX_2": [MIX_2],
        "BLOCK": [1024],
    },
    "gated._backward": GATED,
    "gated._forward": GATED,
    "gelu._add": {"BLOCK": [1024]},
    "gelu._backward": {
        "EXACT": [True, False],
        "TRAINS": [True, False],
        "ROOT": [math.sqrt(0.5)],
        "DENSITY": [1.0 / math.sqrt(2.0 * math.pi)],
        "SLOPE": [SLOPE],
        "CUBE": [CUBE],
        "BLOCK": [1024],
    },
    "gelu._forward": {
        "EXACT": [True, False],
        "ROOT": [math.sqrt(0.5)],
        "SLOPE": [SLOPE],
        "CUBE": [CUBE],
        "BLOCK": [1024],
    },
    "loss._backward": {"CHUNK": [4096]},
    "loss._forward": {"CHUNK": [4096]},
    "norm._backward": {
        "JOINS": [True, False],
        "CENTRES": [True, False],
        "TRAINS": [True, False],
        "BLOCK": [4096],
    },
    "norm._forward": {
        "ADDS": [True, False],
        "CENTRES": [True, False],
        "EPS": [1e-5],
        "BLOCK": [4096],
    },
    "update._update": {
        "BETA1": [0.9],
        "BETA2": [0.95],
        "EPS": [1e-8],
        "KEEPS": [0.0, 0.999],
        "WRITES": [True, False],
        "BLOCK": [1024],
    },
    "rope._turn": {"HALF": [64], "BACK": [True, False], "BLOCK": [512]},
}


def compiled(kernel: str, precision: str, number: int) -> Any:
    """Return what Triton makes of a kernel, for numbers of a type, with the constants of a
    number."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ptdmpi.model.kernels.fused.launch import warps_of

    module, _, name = kernel.partition(".")
    function = getattr(importlib.import_module(f"{package.__name__}.{module}"), name)
    wide = "fp64" if precision == "fp64" else "fp32"
    constants = {key: values[number % len(values)] for key, values in CONSTANTS[kernel].items()}
    warps = warps_of(constants.get("BLOCK", constants.get("CHUNK")))
    constants["WIDE"] = tl.float64 if wide == "fp64" else tl.float32
    types = dict(part.split(":") for part in ARGUMENTS[kernel].split())
    types = {
        argument: kind.replace("T", precision).replace("W", wide)
        for argument, kind in types.items()
    }
    names = function.arg_names
    assert names == [*types, *constants]
    source = ASTSource(
        function,
        types | dict.fromkeys(constants, "constexpr"),
        {(names.index(key),): value for key, value in constants.items()},
    )
    target = GPUTarget("cuda", CAPABILITY, WARP)
    return triton.compile(source, target=target, options={"num_warps": warps})


@pytest.mark.parametrize("kernel", ARGUMENTS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp64"])
def test_a_kernel_compiles_for_a_gpu(kernel, precision, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variants = max(len(values) for values in CONSTANTS[kernel].values())
    for number in range(variants):
        made = compiled(kernel, precision, number)
        assert made.asm["cubin"].startswith(b"\x7fELF")
        # a block of an H100 has 227 KiB of shared memory
        assert made.metadata.shared <= 227 << 10


def test_every_kernel_is_compiled():
    assert ARGUMENTS.keys() == CONSTANTS.keys() == kernels().keys()
