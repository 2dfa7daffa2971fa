"""Measurements that find the fastest kernels of attention, linears, GELU, the loss and RMSNorm on
this host. The results have the form of presets/kernels.toml."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ptdmpi.comm.communicator import OneRank
from ptdmpi.model.kernels import Kernels, host
from ptdmpi.model.kernels.activation import gelu
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.blocks import Scores
from ptdmpi.model.kernels.choice import (
    BY_LIBRARY,
    AttentionByLibrary,
    AttentionByProducts,
    HostAttention,
    HostChoice,
    OneDnnLinears,
)
from ptdmpi.model.kernels.norm import rms_norm
from ptdmpi.model.kernels.stored import WORDS
from ptdmpi.model.kernels.timing.bench import Bench
from ptdmpi.model.output.cross_entropy import cross_entropy
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer.chunks import HOST_ELEMENTS, loss_rows

# a kernel replaces a simpler one only if it saves at least this fraction of the time; a smaller
# gain may be due to chance
LEAST_GAIN = 0.03
# names of processor capabilities in torch.cpu.get_capabilities(), the rarest first
CAPABILITIES = ("amx_bf16", "avx512_bf16", "avx512_f", "avx2")
ATTENTION: dict[str, HostAttention] = {
    "products": AttentionByProducts(),
    "products of 256 queries": AttentionByProducts(block=256),
    "products of 512 queries": AttentionByProducts(block=512),
    "products in fpmath mode": AttentionByProducts(fpmath=True),
    "PyTorch forward, products backward": AttentionByProducts(library_forward=True),
    "PyTorch forward, products backward in fpmath mode": AttentionByProducts(
        library_forward=True, fpmath=True
    ),
    "blocks": AttentionByLibrary(),
    "whole": AttentionByLibrary(whole_from=0.0),
}
ONEDNN = HostChoice(linear=OneDnnLinears(output=0.0, input_gradient=0.0))
SIGMOID = HostChoice(gelu="sigmoid")
# numbers of logits that the loss may compute at a time: 256 KiB to 2 MiB of float32, which are
# typical sizes of a core's caches
LOGITS = (2**16, 2**17, 2**18, 2**19)
# numbers of elements that RMSNorm may compute at a time; its operations use several copies of them
ELEMENTS = (2**15, 2**16, 2**17)


@dataclass(frozen=True)
class TimedSizes:
    """The sizes at which kernels are timed.

    Attention is timed at the sequence lengths `lengths`. Linears are timed at the sizes `linears`
    (positions, inputs, outputs), and GELU at the size `gelu` (positions, features). The loss is
    timed at the size `loss` (positions, columns of the logits), and RMSNorm at the size `norm`
    (positions, features). If `norm` is empty, RMSNorm is not timed.
    """

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
    loss: tuple[int, int] = (128, 32768)
    norm: tuple[int, ...] = (1024, 2048)

    def measurements(self, dtype: torch.dtype) -> int:
        """Return the number of measurements for tensors of the type `dtype`: one for each kernel at
        each size."""
        ways = len(_attention_ways(dtype))
        loss = len(_chunks(self.loss))
        norm = len(_ways_of_norm(self.norm)) if self.norm else 0
        return ways * len(self.lengths) + 2 * 2 * len(self.linears) + 2 + loss + norm


def entries(
    bench: Bench, dtype: torch.dtype, sizes: TimedSizes, limit_s: float = math.inf
) -> dict[str, list[dict[str, Any]]]:
    """Time the kernels with numbers of type `dtype`. Return one entry of the kernel table for each
    kind of kernel (a key of `MEASURES`), for processors like this one.

    After `limit_s` seconds no further kind of kernel is timed, and the result lacks the other
    kinds. Every rank calls this function. Raise ProbeError on every rank if a kernel gives a wrong
    result on any rank.
    """
    has = torch.cpu.get_capabilities()
    here = {
        "capability": next((name for name in CAPABILITIES if has.get(name, False)), ""),
        "cpu": str(has.get("cpu_name", "")),
        "type": str(dtype).removeprefix("torch."),
    }
    start = time.monotonic()
    timed = dict[str, list[dict[str, Any]]]()
    for kind, measure in MEASURES.items():
        if bench.agreed(time.monotonic() - start) > limit_s:
            break
        timed[kind] = [here | measure(bench, dtype, sizes)]
    return timed


def _attention_ways(dtype: torch.dtype) -> dict[str, HostAttention]:
    """Return the kernels that are timed for numbers of the type `dtype`. Kernels that round to
    bfloat16 are timed only for bfloat16."""
    if dtype == torch.bfloat16:
        return ATTENTION
    return {way: kernel for way, kernel in ATTENTION.items() if not _rounds(kernel)}


def _rounds(kernel: HostAttention) -> bool:
    """Return True if the matrix products of a kernel may round their operands to bfloat16."""
    return isinstance(kernel, AttentionByProducts) and kernel.fpmath


def _attention(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, Any]:
    """Time the kernels of causal attention. Return the entry of the kernel table for the fastest
    one."""
    ways = _attention_ways(dtype)
    times = _attention_times(bench, dtype, sizes)
    library = [min(pair) for pair in zip(times["blocks"], times["whole"], strict=True)]
    products = [way for way, kernel in ways.items() if isinstance(kernel, AttentionByProducts)]
    quickest = min(products, key=lambda way: _sum_of_logarithms(times[way]))
    if not _gains(times["products"], times[quickest]):
        quickest = "products"  # the usual block size is used unless another one is faster
    entry: dict[str, Any] = {"way": "library"}
    words = "library"
    if _gains(library, times[quickest]):
        kernel = ways[quickest]
        assert isinstance(kernel, AttentionByProducts), "`quickest` is in `products`"
        entry = {"way": "products", "block": kernel.block}
        entry |= {key: True for key in WORDS.values() if getattr(kernel, key)}
        words = quickest
    slower = times["blocks"] if entry["way"] == "library" else times[quickest]
    whole_from = _quicker_from(sizes.lengths, slower, times["whole"])
    if whole_from is not None:
        entry["whole_from"] = whole_from
        words += f", by the library at once from {whole_from}"
    bench.note("causal attention by", words)
    at = ", ".join(map(str, sizes.lengths))
    measured = "; ".join(f"{way} {_ms(way_times)}" for way, way_times in times.items())
    entry["measured"] = (
        f"{sizes.heads} heads of {sizes.head_size}, forward and backward, ms at {at} positions: "
        f"{measured}"
    )
    return entry


def _attention_times(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, list[float]]:
    """Return the seconds of a forward and a backward of attention together, for each kernel and
    each sequence length."""
    ways = _attention_ways(dtype)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for length in sizes.lengths:
        shape = (1, sizes.heads, length, sizes.head_size)
        q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
        results = {}
        for way, kernel in ways.items():
            kernels = Kernels(HostChoice(attention=kernel))
            core = partial(AttentionCore(Scores(sizes.head_size**-0.5), kernels), q, k, v)
            results[way] = core().detach().float()
            times[way].append(bench.work_s(partial(_there_and_back, core, (q, k, v))))
        for way, result in results.items():
            apart = (result - results["blocks"]).abs().max()
            bench.check(bool(apart < 0.05), f"attention by {way}, {length} positions")
    return times


def _there_and_back(core: Callable[[], Tensor], operands: tuple[Tensor, ...]) -> None:
    """Call `core`, and compute the gradients of its result with respect to `operands`."""
    torch.autograd.grad(core(), operands, operands[0].detach())


def _gelu(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, Any]:
    """Time the kernels of GELU. Return the entry of the kernel table for the fastest one."""
    x = torch.randn(sizes.gelu).to(dtype).requires_grad_()
    exact = gelu(x.detach().double(), "gelu")
    times = []
    for choice in (BY_LIBRARY, SIGMOID):
        work = partial(gelu, x, "gelu", Kernels(choice))
        apart = (work().detach().double() - exact).abs().max()
        bench.check(bool(apart <= 0.02 * exact.abs().max()), f"GELU of {sizes.gelu}")
        times.append(bench.work_s(partial(_there_and_back, work, (x,))))
    way = "sigmoid" if _gains(times[:1], times[1:]) else "library"
    bench.note("GELU by", way)
    at = "x".join(map(str, sizes.gelu))
    words = f"forward and backward, ms at {at}, by PyTorch and by a sigmoid: {_ms(times)}"
    return {"way": way, "measured": words}


def _chunks(size: tuple[int, int]) -> dict[int, int]:
    """Return the chunk sizes that are timed for logits of the shape `size` (positions, columns), as
    a dict: number of rows of a chunk -> number of logits. Numbers of logits that lead to equal
    chunks are timed only once. The default is first."""
    positions, columns = size
    chunks = dict[int, int]()
    for logits in (HOST_ELEMENTS, *LOGITS):
        chunks.setdefault(min(positions, loss_rows(columns, logits)), logits)
    return chunks


def _loss(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, Any]:
    """Time the loss, forward and backward, for each size of a chunk. Return the entry of the kernel
    table for the fastest size."""
    positions, columns = sizes.loss
    given = torch.randn(positions, 1, columns).to(dtype).requires_grad_()
    labels = torch.arange(positions)[:, None] % columns
    times = {}
    expected: Tensor | None = None
    for logits in _chunks(sizes.loss).values():
        work = partial(_loss_of, given, labels, Kernels(HostChoice(loss=logits)))
        gradient = work()
        if expected is None:
            expected = gradient
        bench.check(torch.equal(gradient, expected), f"loss in chunks of {logits} logits")
        times[logits] = bench.work_s(work)
    quickest = min(times, key=lambda logits: times[logits])
    if not _gains([times[HOST_ELEMENTS]], [times[quickest]]):
        quickest = HOST_ELEMENTS
    bench.note("loss by", f"{quickest} logits at a time")
    measured = "; ".join(f"{logits} logits {_ms([seconds])}" for logits, seconds in times.items())
    words = f"forward and backward, ms at {positions}x{columns}: {measured}"
    return {"logits": quickest, "measured": words}


def _loss_of(given: Tensor, labels: Tensor, kernels: Kernels) -> Tensor:
    """Compute the loss of a copy of the logits `given`, because the loss overwrites its input.
    Return the gradient with respect to `given`."""
    loss = cross_entropy(given + 0.0, labels, None, TensorAxis(OneRank()), kernels=kernels)
    return torch.autograd.grad(loss, given)[0]


def _ways_of_norm(size: tuple[int, ...]) -> list[int | None]:
    """Return the numbers of elements that RMSNorm computes at a time in the measurement. The first
    is None, which means all elements at once."""
    return [None, *(elements for elements in ELEMENTS if elements < math.prod(size))]


def _norm(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, Any]:
    """Time RMSNorm, forward and backward. Return the entry of the kernel table with the fastest
    number of elements."""
    if not sizes.norm:
        return {"measured": "the model has no RMSNorm"}
    x = torch.randn(sizes.norm).to(dtype).requires_grad_()
    weight = torch.randn(sizes.norm[-1]).to(dtype).requires_grad_()
    expected = rms_norm(x, weight, 1e-5)
    times = {}
    for elements in _ways_of_norm(sizes.norm):
        work = partial(rms_norm, x, weight, 1e-5, Kernels(HostChoice(norm=elements)))
        bench.check(torch.equal(work(), expected), f"RMSNorm of {elements} elements at a time")
        times[elements] = bench.work_s(partial(_there_and_back, work, (x, weight)))
    quickest = min(times, key=lambda elements: times[elements])
    if not _gains([times[None]], [times[quickest]]):
        quickest = None
    words = {elements: f"{elements or 'all'} elements" for elements in times}
    bench.note("RMSNorm by", f"{words[quickest]} at a time")
    measured = "; ".join(f"{words[elements]} {_ms([s])}" for elements, s in times.items())
    at = "x".join(map(str, sizes.norm))
    entry: dict[str, Any] = {"measured": f"forward and backward, ms at {at}: {measured}"}
    if quickest is not None:
        entry["elements"] = quickest
    return entry


def _linears(bench: Bench, dtype: torch.dtype, sizes: TimedSizes) -> dict[str, Any]:
    """Time the kernels of linears. Return the entry of the kernel table: for each kind of matrix
    product, the smallest size from which on oneDNN is always faster than PyTorch's own product."""
    entry: dict[str, Any] = {}
    words = []
    able = host.has_fused(dtype) and host.multiplies("cpu", dtype)
    choices = (BY_LIBRARY, ONEDNN) if able else (BY_LIBRARY,)
    products = [math.prod(shape) for shape in sizes.linears]
    for kind, works in (("output", _outputs), ("input_gradient", _input_gradients)):
        times: list[list[float]] = [[] for _ in choices]
        for shape, work in works(sizes.linears, dtype):
            exact: Tensor | None = None
            for choice, way_times in zip(choices, times, strict=True):
                product = partial(work, Kernels(choice))
                result = product().float()
                if exact is None:
                    exact = result
                apart = (result - exact).abs().max()
                bench.check(bool(apart <= 0.02 * exact.abs().max()), f"linear of {shape}")
                way_times.append(bench.work_s(product))
        taken = "library"
        if able:
            least = _quicker_from(products, *times)
            if least is not None:
                entry[kind] = least
                taken = f"oneDNN from {least}"
        words.append(f"{kind} {' against '.join(map(_ms, times))}")
        bench.note(f"linears, {kind}, by", taken)
    at = ", ".join("x".join(map(str, shape)) for shape in sizes.linears)
    entry["measured"] = f"ms at {at}, PyTorch against oneDNN: {'; '.join(words)}"
    return entry


# kind of kernel -> the function that times it; the kinds that take most of a step's time are first
MEASURES: Mapping[str, Callable[[Bench, torch.dtype, TimedSizes], dict[str, Any]]] = {
    "linear": _linears,
    "attention": _attention,
    "gelu": _gelu,
    "loss": _loss,
    "norm": _norm,
}
Work = Callable[[Kernels], Tensor]
Shapes = Sequence[tuple[int, int, int]]


def _outputs(shapes: Shapes, dtype: torch.dtype) -> Iterator[tuple[tuple[int, int, int], Work]]:
    """Yield each shape (positions, inputs, outputs), with a function that computes a linear of this
    shape."""
    for m, i, o in shapes:
        x, weight, bias = (torch.randn(size).to(dtype) for size in ((m, i), (o, i), (o,)))
        yield (m, i, o), partial(_linear, x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels) -> Tensor:
    return kernels.linear(x, weight, bias)


def _input_gradient(dy: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
    return kernels.input_gradient(dy, weight)


def _input_gradients(
    shapes: Shapes, dtype: torch.dtype
) -> Iterator[tuple[tuple[int, int, int], Work]]:
    """Yield each shape (positions, inputs, outputs), with a function that computes the gradient of
    the input of a linear of this shape."""
    for m, i, o in shapes:
        dy, weight = (torch.randn(size).to(dtype) for size in ((m, o), (o, i)))
        yield (m, i, o), partial(_input_gradient, dy, weight)


def _quicker_from(
    sizes: Sequence[int], before: Sequence[float], after: Sequence[float]
) -> int | None:
    """Return the smallest of `sizes` from which on the second kernel is always faster, by at least
    the fraction LEAST_GAIN.

    `before` and `after` are the seconds of the first and the second kernel at `sizes`. Return None
    if the second kernel is not that much faster at the largest size.
    """
    least = None
    for size, first_s, second_s in sorted(zip(sizes, before, after, strict=True), reverse=True):
        if second_s > (1 - LEAST_GAIN) * first_s:
            break
        least = size
    return least


def _gains(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return True if the second kernel is faster than the first by at least the fraction
    LEAST_GAIN, in the geometric mean over all sizes. `before` and `after` are the times of the
    first and the second kernel at each size."""
    apart = _sum_of_logarithms(after) - _sum_of_logarithms(before)
    return apart < len(before) * math.log(1 - LEAST_GAIN)


def _sum_of_logarithms(times_s: Sequence[float]) -> float:
    return sum(map(math.log, times_s))


def _ms(times_s: Sequence[float]) -> str:
    return ", ".join(f"{1e3 * seconds:.3g}" for seconds in times_s)
