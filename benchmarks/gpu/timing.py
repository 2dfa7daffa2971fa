"""What every part measures with: work timed on a device, and rates beside its data sheet."""

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from ptdmpi.config import ModelConfig
from ptdmpi.plan.shape.flops import model_flops
from ptdmpi.train.records.rates import device_name, known_peak, peak_memory_bytes

T = TypeVar("T")
OUT_OF_MEMORY = "out of memory in every size and with full recomputation"
compiled: Callable[[Any], Any] = torch.compile
Row = tuple[str, dict[str, Any]]
Found = dict[str, Any] | Iterator[Row]  # at once, or row by row: what was measured stays


class Measurement(NamedTuple):
    """`s`: what it takes at most where all is well, roughly; time is dealt out by that."""

    name: str
    s: float
    measure: Callable[[], Found]


def vendor(device: torch.device) -> str:
    """As the table of kernel choices has it: torch calls AMD's GPUs "cuda", too."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type


def fresh(device: torch.device) -> None:
    """Give memory back and let its peak begin anew, where the device counts it."""
    if "torch._dynamo" in sys.modules:  # graphs keep what they were made for
        torch.compiler.reset()
    gc.collect()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.empty_cache()
        module.reset_peak_memory_stats(device)


def first_that_fits(
    device: torch.device, ways: Iterable[T], measure: Callable[[T], dict[str, Any]]
) -> dict[str, Any] | None:
    """What is measured of the first way for which the device has memory; None: of none."""
    for way in ways:
        fresh(device)
        with contextlib.suppress(torch.OutOfMemoryError):
            return measure(way)
    fresh(device)
    return None


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


def rates(
    device: torch.device, model: ModelConfig, vocab_size: int, tokens: int, step_s: float
) -> dict[str, Any]:
    """What a step of so many tokens comes to, and what it took of memory."""
    peak = known_peak(device_name(device), "bf16") if device.type != "cpu" else None
    rate = model_flops(model, vocab_size, tokens) / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "model_flops_per_s": rate,
        "mfu": None if peak is None else rate / peak,
        "peak_memory_bytes": peak_memory_bytes(device),
    }
