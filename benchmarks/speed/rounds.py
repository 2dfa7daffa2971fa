"""The rounds of a row, the disturbance of rounds by other processes, and the file of results."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import write_whole

FOREIGN_LIMIT = 0.05  # A round is disturbed if other processes use more cores.
# Instructions for bf16. The name of a processor does not show whether the processor has
# instructions for bf16. Without them, torch's bf16 matrix multiplications run in scalar code.
BF16_UNITS = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True)
class Round:
    """The measurements of ptdmpi and of another trainer (the peer) in one round. `foreign_share` is
    the number of cores that other processes used while a trainer of the round ran (the greatest
    number over the trainers)."""

    tokens_per_s: float
    peer_tokens_per_s: float
    foreign_share: float

    @property
    def ratio(self) -> float:
        """Return ptdmpi's tokens per second divided by the peer's."""
        return self.tokens_per_s / self.peer_tokens_per_s

    @property
    def disturbed(self) -> bool:
        """Return True if other processes used more than FOREIGN_LIMIT cores."""
        return self.foreign_share > FOREIGN_LIMIT


@dataclass(frozen=True)
class LeastTimes:
    """The seconds of a step's GEMMs of linear layers alone (`gemm_s`), and of GEMMs and attention
    together (`both_s`), on one rank. Each time is the smallest of several measurements with the
    fastest known kernels, so it is a lower bound of the time of a step."""

    gemm_s: float
    both_s: float

    def least(self, other: "LeastTimes") -> "LeastTimes":
        """Return, for each field, the smaller one of the two values."""
        return LeastTimes(min(self.gemm_s, other.gemm_s), min(self.both_s, other.both_s))


def busy_cpu_s(stat: str | None = None) -> float:
    """Return the CPU time that processes on this machine have used since boot, according to the
    text of /proc/stat.

    The result includes stolen time, which is the time that another virtual machine on the same host
    used. The result does not include the time of interrupts, which belong to no process. (The
    benchmark itself causes interrupts, by the loopback network.)
    """
    first = (stat or Path("/proc/stat").read_text()).splitlines()[0].split()
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = (int(x) for x in first[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def foreign_share(busy_s: float, own_s: float, wall_s: float) -> float:
    """Return the number of cores that other processes used during `wall_s` seconds. `busy_s` is the
    CPU time of all processes in this time, and `own_s` the CPU time of the benchmark's processes.
    The number is never negative, although the clock ticks of /proc/stat are coarse."""
    return max(0.0, (busy_s - own_s) / wall_s)


def enough(rounds: Sequence[Round], wanted: int) -> bool:
    """Return True after `wanted` undisturbed rounds, or after twice as many rounds in total."""
    return sum(not r.disturbed for r in rounds) >= wanted or len(rounds) >= 2 * wanted


def counted(rounds: Sequence[Round], wanted: int) -> list[Round]:
    """Return the `wanted` least disturbed rounds; the result is computed from these rounds."""
    return sorted(rounds, key=lambda r: r.foreign_share)[:wanted]


@dataclass(frozen=True)
class PeerTrial:
    """A trial of one variant of another trainer on a small batch. If the trial was stopped early,
    `finished` is False, and the rate is an upper bound."""

    tokens_per_s: float
    finished: bool


@dataclass(frozen=True)
class Constants:
    """The values of a row that do not belong to a single round. The memory of a trainer is the
    greatest memory of its ranks."""

    peak_memory_bytes: int
    peer_peak_memory_bytes: int | None  # None if the peer did not finish.
    # Lower bounds of the time of a step: for each field, the smallest time of all rounds.
    limits: LeastTimes
    losses: list[float]  # Losses of all steps, including those before the first round.
    peer_losses: list[float]
    peer_trials: dict[str, PeerTrial]  # name of a variant of the peer -> its trial


@dataclass(frozen=True)
class Result:
    """A row of the comparison, as the file of results contains it."""

    layout: str
    precision: str
    tool: str
    peer: str  # name of the tool's variant with which ptdmpi is compared
    tokens_per_s: float
    peer_tokens_per_s: float
    ratio_median: float
    ratio_min: float
    ratio_max: float
    peak_memory_bytes: int
    peer_peak_memory_bytes: int | None
    gemm_share: float
    limit_share: float  # Time of GEMMs and attention, divided by the time of ptdmpi's step.
    # Number of the least disturbed rounds, from which the numbers in this row are computed.
    counted: int
    rounds: list[dict[str, float]]
    disturbed: int  # number of disturbed rounds among all rounds
    counted_disturbed: int
    losses: list[float]
    peer_losses: list[float]
    peer_trials: dict[str, PeerTrial]
    # If False, `peer_tokens_per_s` is an upper bound, and the ratios are lower bounds.
    peer_finished: bool
    measured: str
    # True if, on this machine, the peer's matrix multiplications in this data type run in scalar
    # code, so that the comparison says little
    scalar: bool


def summarise(
    names: tuple[str, str, str, str],
    rounds: Sequence[Round],
    wanted: int,
    sample: Constants,
    *,
    tokens: int,
) -> Result:
    """Return the result of a row, computed from its `wanted` least disturbed rounds. `names` are
    the layout, the precision, the tool, and the variant of the tool. `sample` has the values of the
    row that do not belong to a single round. `tokens` is the number of tokens in one step."""
    used = counted(rounds, wanted)
    ratios = [r.ratio for r in used]
    rate = statistics.median(r.tokens_per_s for r in used)
    layout, precision, tool, peer = names
    shared = dict(vars(sample))
    limits = shared.pop("limits")
    return Result(
        layout=layout,
        precision=precision,
        tool=tool,
        peer=peer,
        tokens_per_s=rate,
        peer_tokens_per_s=statistics.median(r.peer_tokens_per_s for r in used),
        ratio_median=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        gemm_share=limits.gemm_s * rate / tokens,
        limit_share=limits.both_s * rate / tokens,
        counted=len(used),
        rounds=[{**asdict(r), "ratio": r.ratio} for r in rounds],
        disturbed=sum(r.disturbed for r in rounds),
        counted_disturbed=sum(r.disturbed for r in used),
        peer_finished=sample.peer_peak_memory_bytes is not None,
        measured=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        scalar=precision == "bf16" and tool != "ptdmpi" and machine()["bf16"] == "none",
        **shared,
    )


def machine() -> dict[str, Any]:
    """Return a description of this machine and its software."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in pairs}
    units = [name for name in BF16_UNITS if name in facts.get("flags", "").split()]
    return {
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "bf16": " ".join(units) or "none",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "mpi4py": importlib.metadata.version("mpi4py"),
    }


def write(path: Path, results: Sequence[Result], order: Sequence[tuple[str, str, str]]) -> None:
    """Write `results` into the file of results, in one step.

    Earlier rows of the file that were not measured again remain in the file if they were measured
    on the same machine. `order` lists the (layout, precision, tool) of all rows.
    """
    here = machine()
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    if path.exists():
        before = json.loads(path.read_text())
        if before["machine"] == here:
            # leave out rows of older versions, which have other keys
            keys = {field.name for field in fields(Result)}
            kept = (row for row in before["rows"] if row.keys() == keys)
            rows = {(row["layout"], row["precision"], row["tool"]): row for row in kept}
    rows |= {(each.layout, each.precision, each.tool): asdict(each) for each in results}
    content = {"machine": here, "rows": [rows[key] for key in order if key in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def percent(share: float) -> str:
    """Return a table cell with a fraction of a step's time, or "-" if there was no time to measure
    it."""
    return f"{share:6.0%}" if math.isfinite(share) else f"{'-':>6}"


def table(results: Sequence[Result]) -> str:
    """Return the results of all rows as text, for the terminal."""
    units = f"instructions of this processor for bf16: {machine()['bf16']}"
    head = (
        f"{'layout':12} {'type':5} {'tokens/s':>9} {'peer':>9} {'ratio':>6} {'min':>6} {'max':>6} "
        f"{'MiB':>6} {'peer':>6} {'GEMMs':>6} {'limit':>6} {'rounds':>6} {'quiet':>5} {'of all':>6}"
        "  peer's way"
    )
    lines = [units, head]
    for r in results:
        at_most = "" if r.peer_finished else "<"
        peer_memory = f"{r.peer_peak_memory_bytes / 2**20:.0f}" if r.peer_finished else "-"
        ratios = f"{r.ratio_median:6.3f} {r.ratio_min:6.3f} {r.ratio_max:6.3f}"
        if r.scalar:
            ratios = f"{'scalar':>20}"
        lines.append(
            f"{r.layout:12} {r.precision:5} {r.tokens_per_s:9.1f} "
            f"{at_most + format(r.peer_tokens_per_s, '.1f'):>9} "
            f"{ratios} "
            f"{r.peak_memory_bytes / 2**20:6.0f} {peer_memory:>6} "
            f"{percent(r.gemm_share)} {percent(r.limit_share)} "
            f"{r.counted:6d} {r.counted - r.counted_disturbed:5d} {len(r.rounds):6d}  {r.peer}"
        )
    return "\n".join(lines)
