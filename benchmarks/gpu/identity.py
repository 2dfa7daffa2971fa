"""The device, the code and the libraries with which a measurement was made. Stored numbers are not
used if the device, the code or a library has changed."""

import contextlib
import hashlib
import importlib.metadata
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ptdmpi.comm.nccl.library import loaded

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "nccl4py", "transformers", "torchtitan")


def identity() -> dict[str, Any]:
    """Return the identity of a measurement: the device's name (None if there is no GPU), the
    commit, and the versions of libraries.

    If git is missing, a hash of the sources takes the place of the commit.
    """
    device = None
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    commit = _first_line(["git", "rev-parse", "--short", "HEAD"]) or _sources()
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES if _installed(name)}
    return {"device": device, "commit": commit, "libraries": libraries | machinery()}


def machinery() -> dict[str, str]:
    """Return the versions of the software below torch: CUDA or HIP, driver, cuDNN, libnccl.

    Software that is not installed, or whose version cannot be queried, is left out.
    """
    versions = {
        "CUDA": torch.version.cuda,
        "HIP": torch.version.hip,
        "driver": _first_line(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        ),
        # torch raises an error if the loaded cuDNN is not the version with which torch was built
        "cuDNN": _asked(torch.backends.cudnn.version),
        "libnccl": _asked(lambda: loaded()[0]),
    }
    return {name: str(version) for name, version in versions.items() if version}


def _asked(version: Callable[[], object]) -> object:
    with contextlib.suppress(ImportError, ValueError, RuntimeError, OSError):
        return version()
    return None


def _first_line(command: list[str]) -> str:
    """Return the first line that a program prints; "" if the program fails or does not exist."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
        if ended.returncode == 0:
            return next(iter(ended.stdout.splitlines()), "")
    return ""


def _sources() -> str:
    """Return a hash of the Python files that a measurement executes."""
    digest = hashlib.sha256()
    for folder in ("src", "benchmarks/gpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return f"sources {digest.hexdigest()[:12]}"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
