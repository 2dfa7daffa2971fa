"""The parts of a measurement of one GPU, each of which leaves numbers, or says why not"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import kernels, peers
from benchmarks.gpu.reasons import LATEST, Skipped
from benchmarks.gpu.timing import Measurement, Row, seconds_of, vendor
from benchmarks.gpu.training import (
    WAYS,
    batches,
    configuration,
    engine_on,
    fitting,
    in_turn,
    quickest,
    training,
)
from ptdmpi.model.batch import Placing
from ptdmpi.train.records.rates import device_name, known_peak

COMPILED = ", compiled"
PARITY_STEPS = 5
GEMM_SIZE = 8192
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
        "capability": f"{vendor(device)} {capability}",
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


def _in_turn(
    device: torch.device, name: str, folder: Path, shape: tuple[dict[str, Any], int]
) -> Iterator[Row]:
    """The quickest way of ours and of transformers, as far as they are known by now, in turn."""
    known = json.loads((folder / LATEST).read_text(encoding="utf-8"))["parts"]
    ours = quickest({one: known.get(one, {}) for one in (name, name + COMPILED)})
    theirs = quickest(known.get(f"{name} by transformers", {}))
    model, vocab_size = shape
    beside = _beside(model, vocab_size, device)
    return in_turn(
        partial(training, device, model, vocab_size, compiled=ours.endswith(COMPILED)),
        lambda: dict(peers.transformers_side(beside, only=theirs))[theirs],
        {"ours": ours, "theirs": theirs},
    )


def _beside(model: dict[str, Any], vocab_size: int, device: torch.device) -> peers.Workload:
    """What another trainer is asked for: the shape, and as many sequences a step as ours takes, or
    as it would where ours does not fit."""
    try:
        config = fitting(model, vocab_size, device)[0]
    except Skipped:
        config = configuration(model, "bf16", *WAYS[-1])
    batch = config.batch
    return peers.Workload(device, config.model, vocab_size, batch.global_size, batch.micro_size)


def _of_shape(
    device: torch.device, folder: Path, name: str, shape: tuple[dict[str, Any], int]
) -> Iterator[Measurement]:
    """Ours, the others, and ours in turn with the best of them."""
    model, vocab_size = shape
    yield Measurement(name, 25, partial(training, device, model, vocab_size))
    yield Measurement(
        name + COMPILED, 40, partial(training, device, model, vocab_size, compiled=True)
    )
    for peer, side in peers.SIDES.items():
        if peer == "torchtitan" and model.get("kind") != "llama":  # it has no GPT
            continue
        yield Measurement(
            f"{name} by {peer}",
            100 if peer == "transformers" else 50,
            lambda side=side: side(_beside(model, vocab_size, device)),
        )
    yield Measurement(f"{name} in turn", 90, partial(_in_turn, device, name, folder, shape))


def parts(device: torch.device, folder: Path) -> Iterator[Measurement]:
    """All parts of one process, in the order in which they are worth most; those that come behind
    others find in `folder` what these measured."""
    yield Measurement("machine", 30, lambda: machine(device))
    yield Measurement("parity", 30, lambda: parity(device))
    yield Measurement("weight gradients", 15, lambda: kernels.weight_gradients(device))
    yield Measurement("attention", 20, lambda: kernels.attentions(device))
    for name, shape in MODELS.items():
        yield from _of_shape(device, folder, name, shape)
    yield Measurement("small kernels", 40, lambda: _small_kernels(device))
    yield Measurement("trace", 15, lambda: trace(device, folder))


def _small_kernels(device: torch.device) -> Iterator[Row]:
    """Those of a LLaMA, whichever stands among the models."""
    model, vocab_size = next(one for one in MODELS.values() if one[0].get("kind") == "llama")
    return kernels.small_kernels(
        device, configuration(model, "bf16", 2, "none").model, 2, vocab_size
    )
