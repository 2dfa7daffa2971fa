"""What a run is measured by: one record per step, one line on the terminal, the run directory."""

import errno
import functools
import json
import math
import os
import resource
import statistics
import sys
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ptdmpi.base.disk import write_whole
from ptdmpi.comm.world import Axes
from ptdmpi.config import Config, InputError
from ptdmpi.engine.engine import Sums
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.plan.shape.flops import hardware_flops, model_flops
from ptdmpi.sinks.sinks import Past, Sinks
from ptdmpi.watch.stopwatch import Stopwatch

# The rate of 1024-cubed products within a hundredth (fp32 and bf16, EPYC with AVX-512) in a quarter
# of their time, and each shorter than a slice of a core that ranks share.
GEMM_SIZE, GEMM_RUNS = 512, 8
RECENT_STEPS = 20  # of one of so many last steps the timeline is kept


def known_peak(name: str, precision: str) -> float | None:
    """The data sheet's dense peak of a GPU in FLOP/s; None where no table of ours has it, and of a
    part of a GPU."""
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
    """Dense peak of one rank: the data sheet's of a GPU, if it is known.

    On a CPU no data sheet knows how many cores a rank has, so MFU is against the best of a few
    products of square matrices in the compute type.
    """
    if device.type != "cpu":
        return known_peak(device_name(device), precision)
    a = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
    best = float("inf")
    for _ in range(GEMM_RUNS):
        start = time.perf_counter()
        a @ a
        # the best: whatever disturbs a product only makes it longer
        best = min(best, time.perf_counter() - start)
    return 2 * GEMM_SIZE**3 / best


def agreed_peak_flops(config: Config, axes: Axes, device: torch.device) -> float | None:
    """The dense peak in FLOP/s of the rank in the middle: one denominator of MFU for all ranks.
    None where a rank does not know its own."""
    precision = config.precision.compute
    mine = peak_flops(device, data_types(precision).compute, precision)
    every = axes.world.all_gather_object(mine)
    return None if None in every else statistics.median(every)


def device_name(device: torch.device) -> str:
    """What torch calls a device, such as "NVIDIA H100 80GB HBM3"."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device))


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank has used so far: allocated on a GPU, resident on a CPU."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Rates:
    """FLOPs of a step and what they come to per second."""

    def __init__(self, config: Config, vocab_size: int, ranks: int, peak: float | None) -> None:
        model, recompute = config.model, config.recompute
        self.tokens = config.batch.global_size * model.seq_length
        self.ranks, self.peak = ranks, peak
        layers = model.layers if recompute.layers == "all" else recompute.layers
        self.model_flops = model_flops(model, vocab_size, self.tokens)
        self.hardware_flops = hardware_flops(model, vocab_size, self.tokens, recompute.mode, layers)

    def of(self, step_time_s: float) -> dict[str, float | None]:
        """`mfu` is None where no peak is known."""
        per_rank = self.ranks * step_time_s
        return {
            "step_time_s": step_time_s,
            "tokens_per_s": self.tokens / step_time_s,
            "model_tflops_per_rank": self.model_flops / per_rank / 1e12,
            "hardware_tflops_per_rank": self.hardware_flops / per_rank / 1e12,
            "mfu": None if self.peak is None else self.model_flops / per_rank / self.peak,
        }


class RecentSteps:
    """The spans of this rank's last steps."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._steps: deque[tuple[float, list[Stopwatch], Mapping[str, float]]] = deque(
            maxlen=RECENT_STEPS
        )

    def add(
        self, elapsed_s: float, watches: list[Stopwatch], inside_s: Mapping[str, float]
    ) -> None:
        """A step, by the stopwatches that took its time; they are read when one is kept.

        `inside_s`: of that time, in collectives that are part of ops, by group.
        """
        self._steps.append((elapsed_s, watches, inside_s))

    def keep(self, directory: Path, last_step: int, say: Callable[[str], None]) -> None:
        """Write the step of median time, of all ranks of one pipeline; every rank calls it."""
        if not self._steps:
            return
        times = [elapsed_s for elapsed_s, *_ in self._steps]
        place = times.index(statistics.median_low(times))
        # rank 0's: each rank's own median may be another step, and they would not fit together
        place = self.axes.world.broadcast_object(place)
        self.axes.clock.settle()
        _, watches, inside_s = self._steps[place]
        mine = [span for watch in watches for span in watch.spans]
        parts = self.axes["pipeline"].all_gather_object((mine, inside_s))
        if self.axes.world.rank:
            return
        step = last_step - len(self._steps) + place + 1
        spans = tuple(span for part, _ in parts for span in part)
        waits_s = {rank: dict(seconds) for rank, (_, seconds) in enumerate(parts)}
        measured = Timeline(spans, f"measured, step {step}", inside_s=waits_s)
        path = directory / f"step-{step:08d}.json"
        try:
            directory.mkdir(exist_ok=True)
            write_whole(path, measured.to_json())
        except OSError as error:  # a picture less
            say(f"the timeline of step {step} is not kept: {error}")


def _show(line: str) -> None:
    print(line, flush=True)


class RunDirectory:
    """`metrics.jsonl` and `log.txt` of a run; only rank 0 holds one.

    Each record is one write of a whole line. Resuming at a step removes a torn last line, the
    records and timelines after that step, and the `done` of an earlier end. Raises InputError if it
    cannot be written at the start. A disk that fails later does not end the run, whose state is in
    memory: it is said once, and lines wait.
    """

    def __init__(
        self, path: Path, config_text: str, resumed_step: int, show: Callable[[str], None] = _show
    ) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.show = show
        self._waiting: dict[Path, str] = {}
        self._sinks: Sinks | None = None
        self._resumed_step, self._dropped = resumed_step, False
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_whole(path / "config.toml", config_text)
            (path / "done").unlink(missing_ok=True)
            if self.metrics.exists():
                lines = self.metrics.read_bytes().splitlines()
                # a torn last line is no JSON, and goes with them
                kept = [line + b"\n" for line in lines if _until(line, resumed_step)]
                self._dropped = len(kept) < len(lines)
                write_whole(self.metrics, b"".join(kept))
            for timeline in (path / "timeline").glob("step-*.json"):
                if int(timeline.stem.removeprefix("step-")) > resumed_step:
                    timeline.unlink()
        except OSError as error:
            raise InputError(f"run.dir = {path}: {error}") from None

    def open_sinks(self, config: Config) -> None:
        """Have the records go to the tools too that `[log]` names, from now on."""
        past = Past(self.path, self._resumed_step, self._dropped)
        self._sinks = Sinks(config, past, self.say)

    def record(self, **values: Any) -> None:
        self._append(self.metrics, json.dumps(values))
        if self._sinks is not None:
            self._sinks.record(values)

    def close(self) -> None:
        """Close the sinks; a record after that reaches metrics.jsonl alone."""
        if self._sinks is not None:
            self._sinks.close()

    def say(self, line: str, shown: bool = True) -> None:
        """Keep a line in the log, and show it."""
        if shown:
            self.show(line)
        self._append(self.log, line)

    def _append(self, path: Path, line: str) -> None:
        waiting = self._waiting.pop(path, "")
        try:
            append_lines(path, waiting + line + "\n")
        except OSError as error:
            if not waiting:
                text = f"ptdmpi: warning: {path}: {error.strerror}; its lines wait"
                print(text, file=sys.stderr, flush=True)
            self._waiting[path] = waiting + line + "\n"


def mark_done(path: Path, steps: int) -> None:
    """Say in the file `done` that the whole run is complete: the last thing that is written.

    A launcher can end with code 0 although it lost a node; this file is what counts. Where it says
    so already, nothing is written. Raises InputError if it cannot be written.
    """
    done, text = path / "done", json.dumps({"steps": steps}) + "\n"
    try:
        if not done.is_file() or done.read_text(encoding="utf-8") != text:
            write_whole(done, text)
    except OSError as error:
        raise InputError(
            f"{done} cannot be written: {error.strerror}; all steps are trained and saved: the "
            "same command ends the run when there is space"
        ) from None


def append_lines(path: Path, lines: str) -> None:
    """One write of whole lines or of nothing, on disk's way before the next step begins."""
    data = lines.encode()
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        if file.write(data) < len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _until(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def validation_record(
    paths: Sequence[str], sums: Sequence[Sums], classifies: bool = False
) -> tuple[dict[str, Any], str]:
    """A validation's values and its line, from the sums of each dataset. `classifies`: these are of
    samples with one right class each, and an accuracy is told instead of a perplexity.

    The mean is over all tokens; where there are several datasets, each one's own is given too.
    """
    whole = sum(sums, Sums())
    mean = whole.loss / whole.tokens
    if classifies:
        right = whole.right / whole.tokens
        told = {"validation_loss": mean, "validation_accuracy": right}
        return _by_dataset(told, f"validation loss {mean:.4f}  accuracy {right:.2%}", paths, sums)
    perplexity = math.exp(mean) if mean < 700 else math.inf
    values: dict[str, Any] = {"validation_loss": mean, "validation_perplexity": perplexity}
    text = f"validation loss {mean:.4f}  perplexity {perplexity:.2f}"
    if whole.orders:
        values["validation_sentence_order_loss"] = order = whole.order_loss / whole.orders
        text += f"  sentence order loss {order:.4f}"
    return _by_dataset(values, text, paths, sums)


def _by_dataset(
    values: dict[str, Any], text: str, paths: Sequence[str], sums: Sequence[Sums]
) -> tuple[dict[str, Any], str]:
    """With the loss of each dataset, where there are several."""
    if len(paths) > 1:
        means = {path: one.loss / one.tokens for path, one in zip(paths, sums, strict=True)}
        values["validation_losses"] = means
        text += f"  ({', '.join(f'{path} {loss:.4f}' for path, loss in means.items())})"
    return values, text


def duration(seconds: float) -> str:
    """3725 -> 1:02:05, 65 -> 1:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
