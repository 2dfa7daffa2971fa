"""Functions for all parts of the GPU measurement: timing of work on a device, rates, and table rows
that are measured one by one."""

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks.gpu.reasons import why_not
from ptdmpi.config import ModelConfig
from ptdmpi.plan.shape.flops import model_flops
from ptdmpi.train.records.rates import device_name, known_peak, peak_memory_bytes

T = TypeVar("T")
OUT_OF_MEMORY = "out of memory in every size and with full recomputation"
WARM_UPS = 2
compiled: Callable[[Any], Any] = torch.compile
Numbers = dict[str, Any]
Row = tuple[str, Callable[[], Numbers]]  # (name of the row, function that measures it)


class Measurement(NamedTuple):
    """One part of the measurement of a GPU.

    Parts with a lower `turn` are measured first, because they are more important. `s` is the time
    in seconds that an undisturbed measurement of the part takes approximately. The available time
    is divided among the parts in proportion to `s`. `measure` is a function that returns all rows
    at once, or yields the rows one by one, so that the measured rows remain if the part is
    interrupted.
    """

    name: str
    turn: int
    s: float
    measure: Callable[[], Numbers | Iterator[Row]]


def measured_rows(rows: Iterable[Row], known: Container[str] = ()) -> Iterator[Numbers]:
    """Yield, after each row, all rows measured so far, by name. Rows that are in `known` are not
    measured.

    If measuring a row raises an exception, the reason is recorded, and the following rows are still
    measured.
    """
    measured: Numbers = {}
    for name, measure in rows:
        if name in known:
            continue
        try:
            measured[name] = measure()
        except Exception as error:  # a library may raise any exception
            measured[name] = why_not(error)
        yield measured


def vendor(device: torch.device) -> str:
    """Return the kind of a device in the table of kernels, such as "cuda" or "rocm". The device
    type of torch is not enough, because torch calls AMD's GPUs "cuda", too."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type


def fresh(device: torch.device) -> None:
    """Return cached memory to the device, and reset the device's counter of peak memory, if it has
    one."""
    # forget compiled graphs, because their references to tensors would keep these tensors in memory
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.empty_cache()
        module.reset_peak_memory_stats(device)


def first_that_fits(
    device: torch.device, ways: Iterable[T], measure: Callable[[T], Numbers]
) -> Numbers | None:
    """Call `measure` with one setting of `ways` after another, until a setting fits into the
    device's memory. Return the numbers that `measure` returned for this setting, or None if no
    setting fits."""
    for way in ways:
        fresh(device)
        with contextlib.suppress(torch.OutOfMemoryError):
            return measure(way)
    fresh(device)
    return None


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the median time in seconds of `repeats` calls of `work`, after two warm-up calls. The
    time of a call ends when the device has finished its work."""
    module = torch.get_device_module(device)
    times = []
    for _ in range(WARM_UPS + repeats):
        module.synchronize()
        begin = time.perf_counter()
        work()
        module.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UPS:])


def rates(
    device: torch.device, model: ModelConfig, vocab_size: int, *, tokens: int, step_s: float
) -> Numbers:
    """Return tokens and FLOPs per second, MFU (None if the peak is unknown) and peak memory for a
    step with `tokens` tokens that took `step_s` seconds."""
    peak = None
    if device.type != "cpu":
        peak = known_peak(device_name(device), "bf16")
    rate = model_flops(model, vocab_size, tokens) / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "model_flops_per_s": rate,
        "mfu": None if peak is None else rate / peak,
        "peak_memory_bytes": peak_memory_bytes(device),
    }
