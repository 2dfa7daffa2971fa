"""The installation of other trainers in pinned versions. Each trainer is installed into its own
folder when a row needs it. All trainers use the project's torch."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.launch import PEERS as FOLDER
from benchmarks.launch import ROOT

LIMIT_S = 600.0
BUILT = "built"
# The pinned packages that a trainer needs in addition to the packages of `make setup`. torch itself
# is not listed, so all trainers use the project's torch.
PINS: dict[str, tuple[str, ...]] = {
    "deepspeed": (
        "deepspeed==0.19.0",
        "einops==0.8.2",
        "hjson==3.1.0",
        "msgpack==1.2.4",
        "py-cpuinfo==9.0.0",
    ),
    "megatron": ("megatron-core==0.16.1",),
    "torchtitan": (
        "torchtitan==0.3.0",
        "docstring_parser==0.18.0",
        "spmd_types==0.2.3",
        "typeguard==4.6.0",
        "tyro==1.0.17",
    ),
}


class PeerMissing(Exception):
    """The error for a trainer that cannot be installed on this machine. The message gives the
    reason."""


def absent(tools: Iterable[str], end_s: float) -> dict[str, str]:
    """Install the trainers in `tools` that are not installed yet. Return the reasons why trainers
    cannot be installed, by the names of these trainers. All installations together may take a third
    of the time until `end_s` (of time.monotonic)."""
    reasons = {}
    left = list(tools)
    for lock in FOLDER.glob(f"*/{BUILT}/*/lock"):
        # This lock remains from a process that was ended while it compiled. Remove it, because
        # other processes would wait for it.
        lock.unlink()
    end_s -= 2 / 3 * max(0.0, end_s - time.monotonic())
    while left:
        share_s = (end_s - time.monotonic()) / len(left)
        tool = left.pop(0)
        try:
            install(tool, min(LIMIT_S, max(0.0, share_s)))
        except PeerMissing as reason:
            reasons[tool] = str(reason)
    return reasons


def install(tool: str, limit_s: float = LIMIT_S) -> None:
    """Install `tool` if it is not installed yet. Raises PeerMissing if the installation fails."""
    pins = PINS.get(tool, ())
    place = FOLDER / tool
    listed = place / "pins.txt"
    if not pins or (listed.exists() and listed.read_text().split() == list(pins)):
        return
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as work:
        fresh = Path(work) / tool
        _pip(["--target", str(fresh), *pins], limit_s)
        (fresh / "pins.txt").write_text("\n".join(pins) + "\n")
        if place.exists():
            place.rename(Path(work) / "old")
        fresh.rename(place)


def _pip(words: Sequence[str], limit_s: float) -> None:
    """Run `pip install` with the arguments `words`. Raises PeerMissing, with the errors of pip, if
    pip fails."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # packages without wheels are built with the project's setuptools, because their setup scripts
    # import torch
    flags = ["--no-deps", "--no-build-isolation", "--no-compile", "--root-user-action=ignore"]
    try:
        done = subprocess.run(
            [*command, *flags, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerMissing(f"pip did not end within {limit_s:.0f} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PeerMissing((errors or done.stderr.splitlines() or ["pip failed"])[-1])


def environment(tool: str) -> dict[str, str]:
    """Return the environment variables that the processes of `tool` need."""
    if tool not in PINS:
        return {}
    # Python finds the packages of `tool` before the project's packages. DeepSpeed compiles an
    # extension when it starts, and stores it in TORCH_EXTENSIONS_DIR.
    path = os.pathsep.join([str(FOLDER / tool), str(ROOT), *sys.path])
    return {"PYTHONPATH": path, "TORCH_EXTENSIONS_DIR": str(FOLDER / tool / BUILT)}
