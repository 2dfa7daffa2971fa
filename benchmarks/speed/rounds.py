"""Rounds of a row, their disturbance by other processes, and the file of results."""

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import write_whole

FOREIGN_LIMIT = 0.05  # of one core
# A processor's name does not tell whether it has them; without them torch's products are scalar.
BF16_UNITS = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True)
class Round:
    """This project and a peer, measured in one round. `foreign_share` is the greatest number of
    cores that other processes took while a side of the round ran."""

    tokens_per_s: float
    peer_tokens_per_s: float
    foreign_share: float

    @property
    def ratio(self) -> float:
        """This project's tokens per second over the peer's."""
        return self.tokens_per_s / self.peer_tokens_per_s

    @property
    def disturbed(self) -> bool:
        """Return True if other processes took more than FOREIGN_LIMIT cores."""
        return self.foreign_share > FOREIGN_LIMIT


@dataclass(frozen=True)
class LeastTimes:
    """Seconds of a step's bare linear GEMMs, and of these and its attention, on one rank. They are
    of the fastest kernels known here, and the least of several measurements: no step takes less."""

    gemm_s: float
    both_s: float

    def least(self, other: "LeastTimes") -> "LeastTimes":
        """Return the lesser of each."""
        return LeastTimes(min(self.gemm_s, other.gemm_s), min(self.both_s, other.both_s))


def busy_cpu_s(stat: str | None = None) -> float:
    """Return the CPU time that processes of this machine have used since boot, from the text of
    /proc/stat.

    Stolen time counts, for another guest used it. Interrupts do not: they belong to no process, and
    those of the loopback network are our own.
    """
    first = (stat or Path("/proc/stat").read_text()).splitlines()[0].split()
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = (int(x) for x in first[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def foreign_share(busy_s: float, own_s: float, wall_s: float) -> float:
    """Return the cores used by other processes during `wall_s` seconds, at least 0 (ticks are
    coarse)."""
    return max(0.0, (busy_s - own_s) / wall_s)


def enough(rounds: Sequence[Round], wanted: int) -> bool:
    """Return True after `wanted` undisturbed rounds, or twice as many in all."""
    return sum(not r.disturbed for r in rounds) >= wanted or len(rounds) >= 2 * wanted


def counted(rounds: Sequence[Round], wanted: int) -> list[Round]:
    """Return the `wanted` least disturbed rounds."""
    return sorted(rounds, key=lambda r: r.foreign_share)[:wanted]


@dataclass(frozen=True)
class PeerTrial:
    """A trial of a peer's way on a small batch. A way that was given up is not `finished`: its rate
    is an upper bound."""

    tokens_per_s: float
    finished: bool


@dataclass(frozen=True)
class Constants:
    """The values that are the same in all rounds: for each side, the greatest over its ranks."""

    peak_memory_bytes: int
    peer_peak_memory_bytes: int | None  # None: it did not finish
    limits: LeastTimes  # the least of all rounds
    losses: list[float]  # of all steps, with those before the first round
    peer_losses: list[float]
    peer_trials: dict[str, PeerTrial]  # by the name of the way


@dataclass(frozen=True)
class Result:
    """A row of the file of results."""

    layout: str
    precision: str
    tool: str
    peer: str  # the tool's way
    tokens_per_s: float
    peer_tokens_per_s: float
    ratio_median: float
    ratio_min: float
    ratio_max: float
    peak_memory_bytes: int
    peer_peak_memory_bytes: int | None
    gemm_share: float
    limit_share: float  # GEMMs and attention, over our step
    counted: int  # rounds, the least disturbed ones, that the figures are of
    rounds: list[dict[str, float]]
    disturbed: int  # of all rounds
    counted_disturbed: int
    losses: list[float]
    peer_losses: list[float]
    peer_trials: dict[str, PeerTrial]
    peer_finished: bool  # if not, peer_tokens_per_s is an upper bound, and ratios are lower bounds
    measured: str
    scalar: bool  # the peer's products of this type are scalar code here: it is no rival


def summarise(
    names: tuple[str, str, str, str],
    rounds: Sequence[Round],
    wanted: int,
    sample: Constants,
    *,
    tokens: int,
) -> Result:
    """Return the result of a row's rounds. `names` are layout, precision, tool and its way;
    `tokens` are those of one step."""
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
    """Put `results` into the file, atomically.

    Its rows that were not measured again remain, if they were measured on the same machine. `order`
    lists the (layout, precision, tool) of all rows.
    """
    here = machine()
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    if path.exists():
        before = json.loads(path.read_text())
        if before["machine"] == here:
            keys = {field.name for field in fields(Result)}  # of an older benchmark: others
            kept = (row for row in before["rows"] if row.keys() == keys)
            rows = {(row["layout"], row["precision"], row["tool"]): row for row in kept}
    rows |= {(each.layout, each.precision, each.tool): asdict(each) for each in results}
    content = {"machine": here, "rows": [rows[key] for key in order if key in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def table(results: Sequence[Result]) -> str:
    """Return the results as text."""
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
            f"{r.gemm_share:6.0%} {r.limit_share:6.0%} "
            f"{r.counted:6d} {r.counted - r.counted_disturbed:5d} {len(r.rounds):6d}  {r.peer}"
        )
    return "\n".join(lines)
