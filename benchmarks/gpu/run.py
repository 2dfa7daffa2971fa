"""`make gpu`: measures one GPU part by part, each in a process of its own, and writes the page.

What is done is kept in results/latest.json, so that a run that was cut short goes on with the parts
that are left; another device, torch or commit begins anew (and so does --anew).
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.page import page
from benchmarks.gpu.process import answer
from benchmarks.gpu.reasons import LATEST, done, reasons, why_not
from benchmarks.gpu.table import filled, with_weight_gradients
from benchmarks.launch import mpirun
from ptdmpi.base.disk import write_whole
from ptdmpi.comm import launch

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
LIMIT_S = 540.0
LEAST_S = 15.0  # less is not worth a start
# programs of several ranks: what is started on how many, by which wires, and what it takes at most
PROGRAMS = {
    "wires, 1 rank": ("wires", 1, ("nccl", "mpi"), 30.0),
    "wires, 2 ranks": ("wires", 2, ("nccl", "mpi"), 40.0),
    "wires, 4 ranks": ("wires", 4, ("nccl", "mpi"), 50.0),
    "overlap, 2 ranks": ("overlap", 2, ("nccl",), 40.0),
}
# where ranks share a GPU: few thread blocks each, or they wait for each other's for ever
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
LIBRARIES = ("torch", "nccl4py", "transformers", "torchtitan")


def asked() -> dict[str, float]:
    """The parts by name, with the seconds that each takes at most where all is well."""
    import torch

    from benchmarks.gpu.parts import parts

    own = [(one.name, one.s) for one in parts(torch.device("cpu"), RESULTS)]
    programs = [(name, s) for name, (*_, s) in PROGRAMS.items()]
    return dict([*own[:2], *programs[:-1], *own[2:], programs[-1]])


def identity() -> dict[str, Any]:
    """What the numbers are of: another one makes them worthless."""
    import torch

    found = torch.cuda.is_available()
    commit = _said(["git", "rev-parse", "--short", "HEAD"])
    libraries = {one: importlib.metadata.version(one) for one in LIBRARIES if _installed(one)}
    device = torch.cuda.get_device_name() if found else None
    return {"device": device, "commit": commit, "libraries": libraries | machinery()}


def machinery() -> dict[str, str]:
    """The versions of what stands under torch, as far as it is here."""
    import torch

    from ptdmpi.comm.nccl.library import loaded

    found = {
        "CUDA": torch.version.cuda,
        "HIP": torch.version.hip,
        "driver": _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuDNN": torch.backends.cudnn.version(),
    }
    with contextlib.suppress(ImportError, ValueError, RuntimeError, OSError):  # there is none
        found["libnccl"] = loaded()[0]
    return {name: str(version) for name, version in found.items() if version}


def _said(command: list[str]) -> str:
    """The first line that a program prints; empty where there is no such program."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
        return next(iter(done.stdout.splitlines()), "") if done.returncode == 0 else ""
    return ""


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def gpu() -> "torch.device | None":
    """The GPU that is measured; None: there is none."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else None


def one_part(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """A part on this process's GPU, as far as it got, after each row of it; or why there is none of
    it."""
    device = gpu()
    if device is None:
        yield {"skipped": "there is no GPU here"}
        return
    from benchmarks.gpu.parts import parts

    rows: dict[str, Any] = {}
    try:
        found = {one.name: one.measure for one in parts(device, folder)}[name]()
        for key, row in found.items() if isinstance(found, dict) else found:
            rows[key] = row
            if not isinstance(found, dict):
                yield rows
        yield rows
    except Exception as error:  # whatever a library raises: the others can be measured
        yield rows | why_not(error)


def program(name: str, limit_s: float) -> dict[str, Any]:
    """A program of several ranks, by one wire after the other."""
    module, ranks, wires, _ = PROGRAMS[name]
    end_s, rows = time.monotonic() + limit_s, {}
    for number, wire in enumerate(wires):
        command = mpirun(ranks, ["-m", f"benchmarks.gpu.{module}", wire])
        left_s = (end_s - time.monotonic()) / (len(wires) - number)
        rows[wire] = answer(command, left_s, SHARED if ranks > 1 else None)
    return rows


def measured(name: str, limit_s: float) -> dict[str, Any]:
    """A part in a process of its own: what it leaves in the memory of the GPU ends with it."""
    if name in PROGRAMS:
        return program(name, limit_s)
    return answer([sys.executable, "-m", "benchmarks.gpu.run", "--part", name], limit_s)


def share_s(left_s: float, mine_s: float, others_s: float) -> float:
    """What a part may take of the time that is left: twice its share by what it and those behind it
    ask for, for most need less than that. So none takes all that the others would need."""
    return left_s * min(1.0, 2 * mine_s / (mine_s + others_s))


def run(results: Path, docs: Path, limit_s: float, anew: bool) -> dict[str, Any]:
    """All parts that are left, and the page."""
    end_s, own, file = time.monotonic() + limit_s, identity(), results / LATEST
    found: dict[str, Any] = {**own, "parts": {}}
    if file.is_file() and not anew:
        before = json.loads(file.read_text(encoding="utf-8"))
        if {key: before.get(key) for key in own} == own:
            found = before
    results.mkdir(parents=True, exist_ok=True)
    found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = asked()
    todo = [name for name in parts if not done(found["parts"].get(name, {}))]
    for number, name in enumerate(todo):
        left_s = end_s - time.monotonic()
        others_s = sum(parts[one] for one in todo[number + 1 :])
        if own["device"] is None:
            fresh = {"skipped": "there is no GPU here"}
        elif left_s < LEAST_S:
            fresh = {"left": "no time was left: the same command goes on with it"}
        else:
            fresh = measured(name, max(LEAST_S, share_s(left_s, parts[name], others_s)))
        gemm = found["parts"].get("machine", {}).get("gemm_flops")
        if gemm and "model_flops_per_s" in fresh:
            fresh["of_gemm"] = fresh["model_flops_per_s"] / gemm
        found["parts"][name] = better(found["parts"].get(name, {}), fresh)
        write_whole(file, json.dumps(found, indent=1) + "\n")
        said = [": ".join(filter(None, one)) for one in reasons(found["parts"][name]).items()]
        print(f"{name}: {'; '.join(said) or 'measured'}", flush=True)
    write_whole(docs, page(found))
    return found


def better(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a part that was measured again: now, but rows that only the time before had
    stay."""
    rows = {key: one for key, one in before.items() if isinstance(one, dict) and done(one)}
    return {**rows, **{key: one for key, one in now.items() if key not in rows or done(one)}}


def fill(found: dict[str, Any], path: Path) -> None:
    """Put what was measured of attention and of gradients of weights into the table of kernel
    choices."""
    parts = found["parts"]
    device = parts.get("machine", {}).get("capability", "")
    if device:
        said = f"{found['device']}, torch {found['libraries'].get('torch')}, {found['date']}"
        text = filled(path.read_text(encoding="utf-8"), device, parts.get("attention", {}), said)
        rows = parts.get("weight gradients", {})
        write_whole(path, with_weight_gradients(text, device, rows, said))


def main() -> None:
    launch.prepare()  # of what is started from here too: the environment that a training has
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", help="one part, on this process's GPU; prints its numbers")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--anew", action="store_true", help="nothing of what was measured is kept")
    chosen = parser.parse_args()
    if chosen.part:
        for found in one_part(chosen.part, RESULTS):
            print(json.dumps(found), flush=True)
        return
    everything = run(RESULTS, ROOT / "docs" / "gpu.md", chosen.limit_s, chosen.anew)
    fill(everything, ROOT / "src/ptdmpi/presets/kernels.toml")


if __name__ == "__main__":
    main()
