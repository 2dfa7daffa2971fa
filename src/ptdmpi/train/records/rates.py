"""Rates of a training step: tokens and FLOPs per second, and the MFU (model FLOPs utilization). To
compute the MFU, this module also finds the peak FLOP rate of the device."""

import functools
import resource
import statistics
import time
import tomllib
from importlib.resources import files

import torch

from ptdmpi.comm.world import Axes
from ptdmpi.config import Config
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.shape.flops import hardware_flops, model_flops

# Number of rows and columns of the square matrices whose product is timed. The measured FLOP rate
# is within 1 % of the rate with 1024 x 1024 matrices (fp32 and bf16, EPYC with AVX-512). The
# measurement takes a quarter of the time that it would take with 1024 x 1024 matrices, and each
# product ends within one time slice of a shared core.
GEMM_SIZE = 512
GEMM_RUNS = 8
# The measurement is valid if the thread that computes the products is running for at least this
# fraction of the time. Otherwise another program or rank has used its core. With load on all cores,
# the fraction was 0.17 to 0.48 (EPYC with AVX-512, 2 cores).
LEAST_RUNNING_FRACTION = 0.9


def known_peak(name: str, precision: str) -> float | None:
    """Return the peak rate of a GPU for dense matrices in FLOP/s, according to its data sheet.

    `name` is torch's name of the GPU, and `precision` is the value of `precision.compute`. Returns
    None if `presets/peaks.toml` has no entry for the GPU or the precision, and for a partition of a
    GPU (MIG).
    """
    text = files("ptdmpi").joinpath("presets", "peaks.toml").read_text(encoding="utf-8")
    words = f" {name} "
    if " MIG " in words:
        return None
    for entry in tomllib.loads(text)["gpu"]:
        if any(f" {known} " in words for known in entry["names"]):
            peak = entry["peak_flops"].get(precision)
            return None if peak is None else float(peak)
    return None


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype, precision: str) -> float | None:
    """Return the peak rate of one rank for dense matrices in FLOP/s. On a GPU, the result is the
    value of the data sheet, or None if it is unknown.

    On a CPU, the result is measured, because no data sheet says how many cores a rank has. The
    measured peak is the highest rate of a few products of square matrices of the type `dtype`. The
    result is None if other programs or ranks used the same cores during the measurement: the
    measured peak would be too low, and the MFU too high.
    """
    if device.type != "cpu":
        return known_peak(device_name(device), precision)
    a = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
    a @ a  # the first product also starts threads
    times_s: list[float] = []
    running_s = time.thread_time()
    for _ in range(GEMM_RUNS):
        start = time.perf_counter()
        a @ a
        times_s.append(time.perf_counter() - start)
    running_s = time.thread_time() - running_s
    if running_s < LEAST_RUNNING_FRACTION * sum(times_s):
        return None
    # use the shortest time, because disturbances only make a product slower
    return 2 * GEMM_SIZE**3 / min(times_s)


def why_no_peak(device: torch.device, precision: str) -> str:
    """Return the reason why `peak_flops` has returned None for a rank."""
    if device.type == "cpu":
        return "other programs or ranks used the same cores while the CPU's peak was measured"
    return f"the data sheet's {precision} peak of {device_name(device)} is not known"


def agreed_peak_flops(config: Config, axes: Axes, device: torch.device) -> float | None:
    """Return the median over all ranks of the peak rate for dense matrices in FLOP/s. The MFU of
    the run is computed from this median.

    Every rank must call this function. Return None if the peak rate of any rank is unknown.
    """
    precision = config.precision.compute
    mine = peak_flops(device, data_types(precision).compute, precision)
    every = axes.world.all_gather_object(mine)
    return None if None in every else statistics.median(every)


def device_name(device: torch.device) -> str:
    """Return torch's name of a device, such as "NVIDIA H100 80GB HBM3"."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: the memory allocated by torch on a GPU, or
    the resident memory on a CPU."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Rates:
    """The tokens and FLOPs of one step of a run, and their rates per second."""

    def __init__(
        self, config: Config, vocab_size: int, ranks: int, peak_flops: float | None
    ) -> None:
        """Compute the tokens and FLOPs of a step. `peak_flops` is the peak rate of one rank for
        dense matrices in FLOP/s, or None if it is unknown.
        """
        model = config.model
        recompute = config.recompute
        self.tokens = config.batch.global_size * model.seq_length
        self.ranks = ranks
        self.peak_flops = peak_flops
        layers = recompute.layers
        if layers == "all":
            layers = model.layers
        self.model_flops = model_flops(model, vocab_size, self.tokens)
        self.hardware_flops = hardware_flops(
            model, vocab_size, self.tokens, recompute.mode, layers=layers
        )

    def of(self, step_time_s: float) -> dict[str, float | None]:
        """Return the rates of a step that took `step_time_s` seconds. The keys are as in
        `metrics.jsonl`.

        `mfu` (model FLOP/s as a fraction of the peak) is None if the peak is unknown.
        """
        per_rank = self.ranks * step_time_s
        mfu = None
        if self.peak_flops is not None:
            mfu = self.model_flops / per_rank / self.peak_flops
        return {
            "step_time_s": step_time_s,
            "tokens_per_s": self.tokens / step_time_s,
            "model_tflops_per_rank": self.model_flops / per_rank / 1e12,
            "hardware_tflops_per_rank": self.hardware_flops / per_rank / 1e12,
            "mfu": mfu,
        }


def duration(seconds: float) -> str:
    """Return a time as text: 3725 -> 1:02:05, 65 -> 1:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"
