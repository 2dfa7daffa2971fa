"""The parts of the measurement of one GPU. Each part returns numbers, or raises an error with the
reason why it was not measured."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import kernels, peers
from benchmarks.gpu.reasons import LATEST
from benchmarks.gpu.timing import Measurement, Row, measured_rows, seconds_of, vendor
from benchmarks.gpu.training import (
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


class Shape(NamedTuple):
    """A model to measure: its section [model], and the size of its vocabulary."""

    model: dict[str, Any]
    vocab_size: int


MODELS = {
    "gpt 1.3b": Shape({"layers": 24, "hidden": 2048, "heads": 16, "seq_length": 2048}, 50257),
    # This model has 12 of the 32 layers of LLaMA 7B. The weights and optimizer states of 32 layers
    # would take 113 GiB. The 12 layers fit into 80 GB, and the time of a layer does not depend on
    # the number of layers.
    "llama 2.7b": Shape(
        {
            "kind": "llama",
            "layers": 12,
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
    """Return the compute capability of the device, its FLOP/s according to the data sheet, and the
    measured FLOP/s of a multiplication of two matrices [size, size] in bfloat16.

    The matrices have random elements. Multiplications of constant matrices would switch fewer
    transistors, take less power, and run faster than any training can.
    """
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(size, size, generator=generator).bfloat16().to(device)
    b = torch.randn(size, size, generator=generator).bfloat16().to(device)
    rate = 2 * size**3 / seconds_of(lambda: a @ b, device)
    module = torch.get_device_module(device)
    capability = ".".join(map(str, module.get_device_capability(device)))
    return {
        "peak_flops": known_peak(device_name(device), "bf16"),
        "gemm_size": size,
        "gemm_flops": rate,
        "capability": f"{vendor(device)} {capability}",
    }


def parity(device: torch.device, steps: int = PARITY_STEPS) -> dict[str, Any]:
    """Return a row for each kind of model and precision. A row has the losses of a small model on
    the device and on the host, starting from the same weights, and the largest relative difference
    of these losses."""
    rows = {}
    for kind in ("gpt", "llama"):
        for precision in ("fp32", "bf16"):
            there = _losses(kind, precision, device, steps)
            here = _losses(kind, precision, torch.device("cpu"), steps)
            apart = max(abs(a - b) / abs(b) for a, b in zip(there, here, strict=True))
            rows[f"{kind} {precision}"] = {"losses": there, "on_host": here, "apart": apart}
    return rows


def _losses(kind: str, precision: str, device: torch.device, steps: int) -> list[float]:
    config = configuration({**SMALL, "kind": kind}, precision, 2, "none")
    engine = engine_on(config, 97, device)
    placing = Placing(device)
    return [
        engine.step(step, placing.place(batches(config, 97, step))).loss for step in range(steps)
    ]


def trace(device: torch.device, folder: Path) -> dict[str, Any]:
    """Trace two training steps of a small model, and write them as a Chrome trace into `folder`.
    Return the name and the size of the file."""
    from torch.profiler import ProfilerActivity, profile

    config = configuration(SMALL, "bf16", 2, "none")
    engine = engine_on(config, 97, device)
    placing = Placing(device)
    engine.step(0, placing.place(batches(config, 97, 0)))
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        for step in (1, 2):
            engine.step(step, placing.place(batches(config, 97, step)))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.json"
    profiled.export_chrome_trace(str(path))
    return {"file": path.name, "bytes": path.stat().st_size}


def _in_turn(device: torch.device, name: str, folder: Path, shape: Shape) -> Iterator[Row]:
    """Yield rounds in which ptdmpi and transformers alternate, each in the setting that is fastest
    according to latest.json in `folder`."""
    workload = _workload(shape, device)
    known = json.loads((folder / LATEST).read_text(encoding="utf-8"))["parts"]
    ours = quickest({way: known.get(way, {}) for way in (name, name + COMPILED)})
    theirs = quickest(known.get(f"{name} by transformers", {}))

    def train_theirs() -> dict[str, Any]:
        (rows,) = measured_rows(peers.transformers_side(workload, only=theirs))
        row: dict[str, Any] = rows[theirs]
        return row

    return in_turn(
        partial(training, device, *shape, compiled=ours.endswith(COMPILED)),
        train_theirs,
        {"ours": ours, "theirs": theirs},
    )


def _workload(shape: Shape, device: torch.device) -> peers.Workload:
    """Return the workload for another trainer: the shape of the model, and the number of sequences
    per step, which is the same as for ptdmpi. Raises Skipped if no setting of ptdmpi fits, because
    the numbers of the other trainer would have nothing to be compared with."""
    config = fitting(*shape, device)[0]
    batch = config.batch
    return peers.Workload(
        device=device,
        model=config.model,
        vocab_size=shape.vocab_size,
        sequences=batch.global_size,
        micro_size=batch.micro_size,
    )


def parts(device: torch.device, folder: Path) -> Iterator[Measurement]:
    """Yield all parts of the measurement that need only one process.

    `folder` contains latest.json, from which later parts read the results of earlier parts.
    """
    yield Measurement("machine", 0, 15, lambda: machine(device))
    yield Measurement("parity", 0, 25, lambda: parity(device))
    for name, shape in MODELS.items():
        yield Measurement(name, 1, 25, partial(training, device, *shape))
        compiled = partial(training, device, *shape, compiled=True)
        yield Measurement(name + COMPILED, 1, 45, compiled)
    yield Measurement("weight gradients", 2, 10, lambda: kernels.weight_gradients(device))
    yield Measurement("attention", 2, 15, lambda: kernels.attentions(device))
    for name, shape in MODELS.items():
        yield from _comparisons(device, folder, name, shape)
    yield Measurement("small kernels", 5, 25, lambda: _small_kernels(device))
    yield Measurement("trace", 7, 10, lambda: trace(device, folder))


def _comparisons(
    device: torch.device, folder: Path, name: str, shape: Shape
) -> Iterator[Measurement]:
    """Yield the parts that compare other trainers with ptdmpi for one model: transformers alone,
    ptdmpi and transformers alternately, and, if the model is a LLaMA, torchtitan alone."""
    llama = shape.model.get("kind") == "llama"
    yield Measurement(
        f"{name} by transformers",
        4,
        60 if llama else 80,
        lambda: peers.transformers_side(_workload(shape, device)),
    )
    yield Measurement(f"{name} in turn", 4, 40, partial(_in_turn, device, name, folder, shape))
    if llama:  # torchtitan has no GPT model
        yield Measurement(
            f"{name} by torchtitan",
            5,
            40 if peers.torchtitan_folder().is_dir() else 1,
            lambda: peers.torchtitan_side(_workload(shape, device)),
        )


def _small_kernels(device: torch.device) -> Iterator[Row]:
    """Yield the rows of the small kernels, in the shapes of the first LLaMA in MODELS."""
    llama = next(shape for shape in MODELS.values() if shape.model.get("kind") == "llama")
    config = configuration(llama.model, "bf16", 2, "none")
    return kernels.small_kernels(device, config.model, 2, llama.vocab_size)
