"""The parts of the measurement that are MPI programs with one or more ranks. Each of these programs
runs once for each transport (`wire`)."""

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.gpu.process import answer
from benchmarks.launch import mpirun
from ptdmpi.comm.nccl.library import loaded


class Program(NamedTuple):
    """A part that runs `python -m benchmarks.gpu.MODULE WIRE` on `ranks` ranks, for each transport
    in `wires`.

    The fields `turn` and `s` have the same meaning as in `timing.Measurement`.
    """

    module: str
    ranks: int
    wires: tuple[str, ...]
    turn: int
    s: float


PROGRAMS = {
    "wires, 1 rank": Program("wires", 1, ("nccl", "mpi"), turn=3, s=20.0),
    "wires, 2 ranks": Program("wires", 2, ("nccl", "mpi"), turn=6, s=20.0),
    "overlap, 2 ranks": Program("overlap", 2, ("nccl",), turn=6, s=20.0),
    "wires, 4 ranks": Program("wires", 4, ("nccl", "mpi"), turn=6, s=15.0),
}
# NCCL settings for ranks that share a GPU. Each rank gets only a few thread blocks, so that the
# thread blocks of all ranks run at the same time. Otherwise the ranks would wait for each other's
# thread blocks for ever.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
SHARING = (2, 30)  # the first version of libnccl that connects several ranks on one GPU


def nccl_refusal(ranks: int, gpus: int) -> str:
    """Return the reason why NCCL cannot connect `ranks` ranks on `gpus` GPUs; "" if NCCL can
    connect them."""
    try:
        version, path = loaded()
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        return f"no NCCL: {error}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if ranks <= gpus or numbers >= SHARING:
        return ""
    needed = ".".join(map(str, SHARING))
    return (
        f"libnccl {version} ({path}) connects one rank on a GPU, and these are {ranks} on {gpus}: "
        f"several need libnccl {needed}"
    )


def run_program(
    name: str, limit_s: float, gpus: int, so_far: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run a program of `PROGRAMS` with each transport, within `limit_s` seconds, and return its
    output by transport.

    If a transport cannot connect this number of ranks on `gpus` GPUs, no program is started for it,
    and its row has the reason. About every ten seconds `so_far` is called with the rows of the
    transports that are done.
    """
    program = PROGRAMS[name]
    end_s = time.monotonic() + limit_s
    rows: dict[str, Any] = {}
    for number, wire in enumerate(program.wires):
        refusal = nccl_refusal(program.ranks, gpus) if wire == "nccl" else ""
        if refusal:
            rows[wire] = {"skipped": refusal}
            continue
        command = mpirun(program.ranks, ["-m", f"benchmarks.gpu.{program.module}", wire])
        left_s = (end_s - time.monotonic()) / (len(program.wires) - number)
        extra = SHARED if program.ranks > 1 else None
        rows[wire] = answer(command, left_s, extra, lambda printed: so_far(rows))
    return rows
