"""Which way of computing causal attention, linears and GELU is the quickest on this host: entries
as presets/kernels.toml has them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ptdmpi.model import kernels
from ptdmpi.model.kernels import HostWays
from ptdmpi.model.kernels.activation import gelu
from ptdmpi.model.kernels.attention import attention
from ptdmpi.model.kernels.blocks import Scores
from ptdmpi.model.kernels.choice import OF_PRODUCTS
from ptdmpi.probe.bench import Bench

LEAST_GAIN = 0.03  # of the time; what is less may be chance
# what a processor can do, the rarest first, as torch.cpu.get_capabilities() names it
CAPABILITIES = ("amx_bf16", "avx512_bf16", "avx512_f", "avx2")
LIBRARY = HostWays()
ATTENTION = {
    "products": HostWays(products=True),
    "products of 256 queries": HostWays(products=True, block=256),
    "products of 512 queries": HostWays(products=True, block=512),
    "products in fpmath mode": HostWays(products=True, fpmath=True),
    "the library forward, products back": HostWays(products=True, library_forward=True),
    "these in fpmath mode": HostWays(products=True, library_forward=True, fpmath=True),
    "blocks": LIBRARY,
    "whole": HostWays(whole_from=0.0),
}
ONEDNN = HostWays(output=0.0, input_gradient=0.0)
SIGMOID = HostWays(gelu_by_sigmoid=True)


@dataclass(frozen=True)
class TimedSizes:
    """What is timed: attention at these lengths with so many heads of such a size, linears of
    (positions, inputs, outputs), GELU of (positions, numbers of each)."""

    lengths: tuple[int, ...] = (512, 1024, 2048)
    heads: int = 4
    head_size: int = 64
    linears: tuple[tuple[int, int, int], ...] = (
        (16, 64, 256),
        (256, 64, 256),
        (256, 256, 1024),
        (512, 512, 512),
        (1024, 512, 1536),
        (1024, 2048, 512),
    )
    gelu: tuple[int, int] = (1024, 2048)

    def measurements(self, dtype: torch.dtype) -> int:
        ways = len(_attention_ways(dtype))
        return ways * len(self.lengths) + 2 * 2 * len(self.linears) + 2


def entries(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, list[dict[str, Any]]]:
    """What was measured in numbers of a type: one entry of each kind, for processors as this one.

    Raises ProbeError on every rank if a way gives a wrong result on any.
    """
    has = torch.cpu.get_capabilities()
    here = {
        "capability": next((name for name in CAPABILITIES if has.get(name, False)), ""),
        "cpu": str(has.get("cpu_name", "")),
        "type": str(dtype).removeprefix("torch."),
    }
    return {
        "attention": [here | _attention(bench, dtype, sizes)],
        "linear": [here | _linears(bench, dtype, sizes)],
        "gelu": [here | _gelu(bench, dtype, sizes)],
    }


def _attention_ways(dtype: torch.dtype) -> dict[str, HostWays]:
    """Those that differ in numbers of this type."""
    narrow = dtype == torch.bfloat16
    return {way: taken for way, taken in ATTENTION.items() if narrow or not taken.fpmath}


def _attention(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, Any]:
    ways = _attention_ways(dtype)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for length in sizes.lengths:
        shape = (1, sizes.heads, length, sizes.head_size)
        q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
        core = partial(attention, q, k, v, Scores(sizes.head_size**-0.5))
        results = {}
        for way, settled in ways.items():
            with kernels.taken(settled):
                results[way] = core().detach().float()
                times[way].append(bench.work_s(partial(_there_and_back, core, (q, k, v))))
        for way, result in results.items():
            apart = (result - results["blocks"]).abs().max()
            bench.check(bool(apart < 0.05), f"attention by {way}, {length} positions")
    best = [min(pair) for pair in zip(times["blocks"], times["whole"], strict=True)]
    products = [way for way, settled in ways.items() if settled.products]
    quickest = min(products, key=lambda way: _sum_of_logarithms(times[way]))
    if not _gains(times["products"], times[quickest]):
        quickest = "products"  # the blocks that are the smallest, unless others gain
    found: dict[str, Any] = {"way": "library"}
    if _gains(best, times[quickest]):
        taken = ways[quickest]
        found |= {"way": "products", "block": taken.block}
        found |= {key: True for key in OF_PRODUCTS.values() if getattr(taken, key)}
    else:
        whole_from = _from(sizes.lengths, times["blocks"], times["whole"])
        found |= {} if whole_from is None else {"whole_from": whole_from}
    words = "library" if found["way"] == "library" else quickest
    words += f", at once from {found['whole_from']}" if "whole_from" in found else ""
    bench.note("causal attention by", words)
    at = ", ".join(map(str, sizes.lengths))
    words = f"{sizes.heads} heads of {sizes.head_size}, there and back, ms at {at} positions: "
    words += "; ".join(f"{way} {_ms(found_s)}" for way, found_s in times.items())
    return found | {"measured": words}


def _there_and_back(core: Callable[[], Tensor], operands: tuple[Tensor, ...]) -> None:
    torch.autograd.grad(core(), operands, operands[0].detach())


def _gelu(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, Any]:
    x = torch.randn(sizes.gelu).to(dtype).requires_grad_()
    work = partial(gelu, x, "gelu")
    times, exact = [], gelu(x.detach().double(), "gelu")
    for settled in (LIBRARY, SIGMOID):
        with kernels.taken(settled):
            apart = (work().detach().double() - exact).abs().max()
            bench.check(bool(apart <= 0.02 * exact.abs().max()), f"GELU of {sizes.gelu}")
            times.append(bench.work_s(partial(_there_and_back, work, (x,))))
    way = "sigmoid" if _gains(times[:1], times[1:]) else "library"
    bench.note("GELU by", way)
    at = "x".join(map(str, sizes.gelu))
    words = f"ms there and back at {at}, the library's against by a sigmoid: {_ms(times)}"
    return {"way": way, "measured": words}


def _linears(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    said = []
    able = kernels.has_fused() and dtype in kernels.FUSED_TYPES and not kernels.widens("cpu", dtype)
    ways = (LIBRARY, ONEDNN) if able else (LIBRARY,)
    products = [math.prod(shape) for shape in sizes.linears]
    for kind, works in (("output", _outputs), ("input_gradient", _input_gradients)):
        times: list[list[float]] = [[] for _ in ways]
        for shape, work in works(sizes.linears, dtype):
            exact = None
            for settled, taken_s in zip(ways, times, strict=True):
                with kernels.taken(settled):
                    result = work().float()
                    exact = result if exact is None else exact
                    apart = (result - exact).abs().max()
                    bench.check(bool(apart <= 0.02 * exact.abs().max()), f"linear of {shape}")
                    taken_s.append(bench.work_s(work))
        least = _from(products, *times) if able else None
        found |= {} if least is None else {kind: least}
        said.append(f"{kind} {' against '.join(map(_ms, times))}")
        bench.note(f"linears, {kind}, by", "library" if least is None else f"oneDNN from {least}")
    at = ", ".join("x".join(map(str, shape)) for shape in sizes.linears)
    return found | {"measured": f"ms at {at}, the library's against oneDNN's: {'; '.join(said)}"}


Work = Callable[[], Tensor]
Shapes = Sequence[tuple[int, int, int]]


def _outputs(shapes: Shapes, dtype: torch.dtype) -> Iterator[tuple[tuple[int, int, int], Work]]:
    for m, i, o in shapes:
        x, weight, bias = (torch.randn(size).to(dtype) for size in ((m, i), (o, i), (o,)))
        yield (m, i, o), partial(kernels.linear, x, weight, bias)


def _input_gradients(
    shapes: Shapes, dtype: torch.dtype
) -> Iterator[tuple[tuple[int, int, int], Work]]:
    for m, i, o in shapes:
        dy, weight = (torch.randn(size).to(dtype) for size in ((m, o), (o, i)))
        yield (m, i, o), partial(kernels.input_gradient, dy, weight)


def _from(sizes: Sequence[int], before: Sequence[float], after: Sequence[float]) -> int | None:
    """From which size on the second way is the quicker one, at every size that was timed; None: not
    even at the largest."""
    found = None
    for size, one, other in sorted(zip(sizes, before, after, strict=True), reverse=True):
        if other > (1 - LEAST_GAIN) * one:
            break
        found = size
    return found


def _gains(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the second way is the quicker one at the sizes together."""
    apart = _sum_of_logarithms(after) - _sum_of_logarithms(before)
    return apart < len(before) * math.log(1 - LEAST_GAIN)


def _sum_of_logarithms(times_s: Sequence[float]) -> float:
    return sum(map(math.log, times_s))


def _ms(times_s: Sequence[float]) -> str:
    return ", ".join(f"{1e3 * one:.3g}" for one in times_s)
