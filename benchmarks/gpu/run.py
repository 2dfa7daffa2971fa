"""`make gpu`: measures one GPU part by part, each in a process of its own, and writes the page.

What is done is kept in results/latest.json, so that a run that was cut short goes on with the parts
that are left; another device, torch or commit begins anew (and so does --anew).
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.page import page
from benchmarks.gpu.table import filled
from benchmarks.launch import mpirun, start
from ptdmpi.base.disk import write_whole
from ptdmpi.comm import launch

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
LIMIT_S = 540.0
LEAST_S = 10.0  # less is not worth a start
WIRE_S = 40.0  # what ranks on one GPU may take that wait for each other for ever
WIRES = "wires,"  # the parts of these names are programs of several ranks
LIBRARIES = ("torch", "nccl4py", "transformers", "torchtitan")


def names() -> list[str]:
    """The parts by name."""
    import torch

    from benchmarks.gpu.parts import parts

    own = [name for name, _ in parts(torch.device("cpu"), RESULTS)]
    return [*own[:2], *(f"{WIRES} {ranks} ranks" for ranks in (1, 2, 4)), *own[2:]]


def identity() -> dict[str, Any]:
    """What the numbers are of: another one makes them worthless."""
    import torch

    found = torch.cuda.is_available()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    libraries = {one: importlib.metadata.version(one) for one in LIBRARIES if _installed(one)}
    device = torch.cuda.get_device_name() if found else None
    return {"device": device, "commit": commit, "libraries": libraries}


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


def one_part(name: str, folder: Path) -> dict[str, Any]:
    """A part on this process's GPU: its numbers, or why there are none."""
    launch.prepare()
    device = gpu()
    if device is None:
        return {"skipped": "there is no GPU here"}
    from benchmarks.gpu.parts import parts
    from benchmarks.gpu.peers import Skipped

    try:
        return dict(parts(device, folder))[name]()
    except Skipped as reason:
        return {"skipped": str(reason)}
    except (RuntimeError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def wires(ranks: int, limit_s: float) -> dict[str, Any]:
    """The contract of wires on so many ranks: by NCCL, and staged through the host by MPI."""
    rows = {}
    # where ranks share a GPU: few thread blocks each, or they wait for each other's for ever
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
    for wire in ("nccl", "mpi"):
        command = mpirun(ranks, ["-m", "benchmarks.gpu.wires", wire])
        process = start(command, subprocess.PIPE, extra=shared if ranks > 1 else None)
        rows[wire] = _said(process, min(WIRE_S, limit_s / 2))
    return rows


def _said(process: subprocess.Popen[str], limit_s: float) -> dict[str, Any]:
    """The JSON that a program prints last, or why there is none."""
    try:
        text, _ = process.communicate(timeout=max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return {"skipped": f"not over after {limit_s:.0f} s"}
    if process.returncode or not text.strip():
        return {"skipped": f"exit code {process.returncode}"}
    return json.loads(text.strip().splitlines()[-1])


def _finished(command: list[str], limit_s: float) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, limit_s)
        )
    except subprocess.TimeoutExpired:
        return None


def measured(name: str, left_s: float) -> dict[str, Any]:
    """A part in a process of its own: what it leaves in the memory of the GPU ends with it."""
    if name.startswith(WIRES):
        return wires(int(name.split()[-2]), left_s)
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--part", name]
    done = _finished(command, left_s)
    if done is None:
        return {"skipped": f"not over after {left_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        return {"failed": f"exit code {done.returncode}: {why}"}
    return json.loads(lines[-1])


def run(results: Path, docs: Path, limit_s: float, anew: bool) -> dict[str, Any]:
    """All parts that are left, and the page."""
    end_s, own, file = time.monotonic() + limit_s, identity(), results / "latest.json"
    found: dict[str, Any] = {**own, "parts": {}}
    if file.is_file() and not anew:
        before = json.loads(file.read_text(encoding="utf-8"))
        if {key: before.get(key) for key in own} == own:
            found = before
    results.mkdir(parents=True, exist_ok=True)
    found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    for name in names():
        kept = found["parts"].get(name, {})
        if kept and not {"skipped", "failed"} & kept.keys():
            continue
        left_s = end_s - time.monotonic()
        if own["device"] is None:
            answer = {"skipped": "there is no GPU here"}
        elif left_s < LEAST_S:
            answer = {"skipped": "no time was left: the same command goes on with it"}
        else:
            answer = measured(name, left_s)
        gemm = found["parts"].get("machine", {}).get("gemm_flops")
        if gemm and "model_flops_per_s" in answer:
            answer["of_gemm"] = answer["model_flops_per_s"] / gemm
        found["parts"][name] = answer
        write_whole(file, json.dumps(found, indent=1) + "\n")
        print(f"{name}: {answer.get('skipped') or answer.get('failed') or 'measured'}", flush=True)
    write_whole(docs, page(found))
    return found


def fill(found: dict[str, Any], path: Path) -> None:
    """Put what was measured of attention into the table of kernel choices."""
    device = found["parts"].get("machine", {}).get("capability", "")
    rows = found["parts"].get("attention", {})
    if device:
        said = f"{found['device']}, torch {found['libraries'].get('torch')}, {found['date']}"
        write_whole(path, filled(path.read_text(encoding="utf-8"), device, rows, said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", help="one part, on this process's GPU; prints its numbers")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--anew", action="store_true", help="nothing of what was measured is kept")
    chosen = parser.parse_args()
    if chosen.part:
        print(json.dumps(one_part(chosen.part, RESULTS)))
        return
    found = run(RESULTS, ROOT / "docs" / "gpu.md", chosen.limit_s, chosen.anew)
    fill(found, ROOT / "src/ptdmpi/presets/kernels.toml")


if __name__ == "__main__":
    main()
