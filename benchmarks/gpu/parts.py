"""The parts of a measurement of one GPU, each of which leaves numbers, or says why not"""

import contextlib
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import peers
from benchmarks.gpu.peers import Skipped
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import Config, resolve
from ptdmpi.engine.engine import Engine
from ptdmpi.model import kernels
from ptdmpi.model.batch import Batch, Placing
from ptdmpi.model.kernels import choice
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.shape.flops import model_flops
from ptdmpi.train.capacity import rank_memory_bytes
from ptdmpi.train.meter import device_name, known_peak, peak_memory_bytes

PARITY_STEPS = 5
GEMM_SIZE = 8192
# largest first: the first that fits is measured
WAYS = ((4, "none"), (2, "none"), (1, "none"), (4, "full"), (1, "full"))
MODELS = {
    "gpt 1.3b": ({"layers": 24, "hidden": 2048, "heads": 16, "seq_length": 2048}, 50257),
    "llama 6.7b": (
        {
            "kind": "llama",
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "ffn_hidden": 11008,
            "seq_length": 2048,
        },
        32000,
    ),
}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "seq_length": 32}


def configuration(
    model: dict[str, Any], precision: str, micro_size: int, mode: str, compiled: bool = False
) -> Config:
    """A step of four microbatches."""
    tree = {
        "run": {"steps": 100, "compile": compiled},
        "model": model,
        "batch": {"global_size": 4 * micro_size, "micro_size": micro_size},
        "precision": {"compute": precision},
        "recompute": {"mode": mode},
        "data": {"train": [{"path": "unused"}]},
    }
    return resolve(tree, 1)


def batches(config: Config, vocab_size: int, step: int) -> list[Batch]:
    """Random tokens, on the host."""
    generator = torch.Generator().manual_seed(step)
    shape = (config.model.seq_length + 1, config.batch.global_size)
    ids = torch.randint(vocab_size, shape, generator=generator)
    samples = torch.arange(config.batch.global_size).split(config.batch.micro_size)
    parts = ids.split(config.batch.micro_size, dim=1)
    return [
        Batch(part[:-1].contiguous(), part[1:].contiguous(), None, numbers)
        for part, numbers in zip(parts, samples, strict=True)
    ]


def engine_on(config: Config, vocab_size: int, device: torch.device) -> Engine:
    axes = World().split(grid_of(config), wire_named("auto", device))
    return Engine(config, axes, vocab_size, device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median of some calls, each waited for, behind two that warm up."""
    module, times = torch.get_device_module(device), []
    for number in range(repeats + 2):
        module.synchronize()
        begin = time.perf_counter()
        work()
        module.synchronize()
        times.append(time.perf_counter() - begin)
        del times[: 1 if number < 2 else 0]
    return statistics.median(times)


def machine(device: torch.device, size: int = GEMM_SIZE) -> dict[str, Any]:
    """What it is, its data sheet's peak, and the rate of one large product."""
    a, b = (torch.ones(size, size, dtype=torch.bfloat16, device=device) for _ in "ab")
    rate = 2 * size**3 / seconds_of(lambda: a @ b, device)
    name, module = device_name(device), torch.get_device_module(device)
    capability = ".".join(map(str, module.get_device_capability(device)))
    return {
        "peak_flops": known_peak(name, "bf16"),
        "gemm_size": size,
        "gemm_flops": rate,
        "capability": f"{device.type} {capability}",
    }


def parity(device: torch.device, steps: int = PARITY_STEPS) -> dict[str, Any]:
    """Losses of small models on the device beside those of the host, from the same weights."""
    rows = {}
    for kind in ("gpt", "llama"):
        for precision in ("fp32", "bf16"):
            config = configuration({**SMALL, "kind": kind}, precision, 2, "none")
            losses = {}
            for where in (device, torch.device("cpu")):
                engine, placing = engine_on(config, 97, where), Placing(where)
                losses[where.type] = [
                    engine.step(step, placing.place(batches(config, 97, step))).loss
                    for step in range(steps)
                ]
            there, here = losses[device.type], losses["cpu"]
            apart = max(abs(a - b) / abs(b) for a, b in zip(there, here, strict=True))
            rows[f"{kind} {precision}"] = {"losses": there, "on_host": here, "apart": apart}
    return rows


def weight_gradients(device: torch.device, size: int = 4096) -> dict[str, Any]:
    """A weight's gradient added in float32 by the product itself, and by a second kernel: seconds,
    and how far each is from the product in float32."""
    generator = torch.Generator().manual_seed(1)
    dy, x = (torch.randn(size // 2, size, generator=generator).bfloat16() for _ in "ab")
    dy, x = dy.to(device), x.to(device)
    exact = dy.float().t() @ x.float()
    rows = {}
    for way, add in {
        "adds": lambda total: torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total),
        "rounds": lambda total: total.add_(dy.t() @ x),
        "as chosen": lambda total: kernels.add_weight_gradient(total, dy, x),
    }.items():
        total = torch.zeros(size, size, device=device)
        add(total)
        apart = float((total - exact).abs().max() / exact.abs().max())
        rows[way] = {"s": seconds_of(partial(add, total), device), "apart": apart}
    return rows


def attentions(device: torch.device, shape: tuple[int, ...] = (2, 16, 2048, 128)) -> dict[str, Any]:
    """Causal attention in bfloat16, forward and backward, by each way that the library has here:
    seconds, and how far its result is from that in float32."""
    attention: Any = importlib.import_module("torch.nn.attention")
    q, k, v = (torch.randn(shape).bfloat16().to(device) for _ in "qkv")
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        wide = (one.float() for one in (q, k, v))
        exact = F.scaled_dot_product_attention(*wide, is_causal=True)
    for one in (q, k, v):
        one.requires_grad_()

    def there() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    rows: dict[str, Any] = {}
    ways = {**choice.BACKENDS, "efficient": "EFFICIENT_ATTENTION"}
    for way, name in ways.items():
        with contextlib.ExitStack() as restored:
            try:
                if way == "fa3":
                    attention.activate_flash_attention_impl("FA3")
                    restored.callback(attention.restore_flash_attention_impl)
                restored.enter_context(attention.sdpa_kernel(getattr(attention.SDPBackend, name)))
                apart = float((there().detach().float() - exact).abs().max() / exact.abs().max())
                s = seconds_of(lambda: there().sum().backward(), device)
                rows[way] = {"s": s, "apart": apart}
            except (RuntimeError, ImportError, ValueError) as error:
                rows[way] = {"skipped": str(error).partition("\n")[0]}
    return rows


def fitting(
    model: dict[str, Any], vocab_size: int, device: torch.device, compiled: bool = False
) -> Config:
    """The largest microbatch that fits, with full recomputation only where it must be."""
    capacity = rank_memory_bytes(device, 1)
    for micro_size, mode in WAYS:
        config = configuration(model, "bf16", micro_size, mode, compiled)
        memory = MemoryModel.of(config, vocab_size, on_host=False)
        if memory.fits(config.layout, config.microbatches, capacity):
            return config
    raise Skipped(f"it does not fit into {capacity / 2**30:.0f} GiB, whatever is recomputed")


def training(
    device: torch.device,
    model: dict[str, Any],
    vocab_size: int,
    steps: int = 6,
    compiled: bool = False,
) -> dict[str, Any]:
    """Steps of a model on the one device: tokens a second, MFU, memory."""
    config = fitting(model, vocab_size, device, compiled)
    engine, placing = engine_on(config, vocab_size, device), Placing(device)
    times = []
    with choice.computing_by({"attention": choice.offered(device)}):
        for step in range(steps):
            placed = placing.place(batches(config, vocab_size, step))
            begin = time.perf_counter()
            engine.step(step, placed)
            engine.axes.clock.settle()
            times.append(time.perf_counter() - begin)
    step_s = statistics.median(times[2:])
    tokens = config.batch.global_size * config.model.seq_length
    peak = known_peak(device_name(device), "bf16")
    rate = model_flops(config.model, vocab_size, tokens) / step_s
    return {
        "micro_size": config.batch.micro_size,
        "recompute": config.recompute.mode,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "model_flops_per_s": rate,
        "mfu": None if peak is None else rate / peak,
        "peak_memory_bytes": peak_memory_bytes(device),
    }


def trace(device: torch.device, folder: Path) -> dict[str, Any]:
    """Two steps of a small model as a Chrome trace."""
    from torch.profiler import ProfilerActivity, profile

    config = configuration(SMALL, "bf16", 2, "none")
    engine, placing = engine_on(config, 97, device), Placing(device)
    engine.step(0, placing.place(batches(config, 97, 0)))
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=kinds) as watched:
        for step in (1, 2):
            engine.step(step, placing.place(batches(config, 97, step)))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.json"
    watched.export_chrome_trace(str(path))
    return {"file": path.name, "bytes": path.stat().st_size}


def _beside(
    side: peers.Side, device: torch.device, fits: Callable[[], Config], vocab_size: int
) -> dict[str, Any]:
    """What another trainer makes of the same shape, in microbatches of the same size."""
    config = fits()
    ids = (
        [one.inputs.t().contiguous().to(device) for one in batches(config, vocab_size, step)]
        for step in itertools.count()
    )
    return side(device, config.model, vocab_size, ids)


def parts(device: torch.device, folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """All parts by name, in the order in which they are worth most."""
    yield "machine", lambda: machine(device)
    yield "parity", lambda: parity(device)
    yield "weight gradients", lambda: weight_gradients(device)
    yield "attention", lambda: attentions(device)
    for name, (model, vocab_size) in MODELS.items():
        for more, compiled in (("", False), (", compiled", True)):
            yield (
                name + more,
                partial(training, device, model, vocab_size, compiled=compiled),
            )
        fits = partial(fitting, model, vocab_size, device)
        for peer, side in peers.SIDES.items():
            if peer != "torchtitan" or model.get("kind") == "llama":  # it has no GPT
                yield f"{name} by {peer}", partial(_beside, side, device, fits, vocab_size)
    yield "trace", lambda: trace(device, folder)
