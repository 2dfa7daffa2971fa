"""The nodes on which a job may start ranks, and the command line of the launcher that starts ranks
on these nodes.

In a scheduler's allocation, the scheduler determines the nodes. In Slurm, srun starts the ranks. In
PBS, LSF and Flux, mpirun starts them on the nodes that the scheduler names. Without a scheduler,
the job uses the hosts that the user names, or only this machine.
"""

import math
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ptdmpi.base.disk import read_file
from ptdmpi.base.launched import COPIES
from ptdmpi.config import InputError
from ptdmpi.supervise.environment import PASSED_ON

# A node counts as lost if the program `true` cannot be run on it within PROBE_S seconds. If the
# program fails without exceeding this time, the test is repeated once, because an earlier launcher
# may still be cleaning up on the node.
PROBE_S = 20.0
PROBES = 2
PAUSE_S = 1.0
# Larger numbers of ranks must be typing mistakes: no machine has 2^24 cores, and no host has 4,096
# cores.
MOST_RANKS = 1 << 24
MOST_ON_HOST = 4096


@dataclass(frozen=True)
class LaunchHost:
    """A host, and the number of ranks to start on it. If `ranks` is 0, the job's ranks are divided
    equally among the hosts."""

    name: str
    ranks: int = 0


@dataclass(frozen=True)
class LaunchPlace:
    """The nodes of a job, and its launcher. Ranks are placed on the nodes in the order of `nodes`.
    If `nodes` is empty, all ranks are placed on this machine.

    `launcher` is "mpirun" (with Open MPI's options), "mpiexec" (with the options of MPICH and PALS)
    or "srun". `program` is the name or path of the launcher's program, if it differs from
    `launcher`. `options` are added to the command line that starts the ranks. `ranks` is the number
    of ranks for which the scheduler has reserved the nodes, or 0 if it is unknown.
    """

    launcher: str
    nodes: tuple[LaunchHost, ...] = ()
    options: tuple[str, ...] = ()
    ranks: int = 0
    program: str = ""

    def filled(self, ranks: int) -> "LaunchPlace":
        """Return a copy of this object in which each node has the number of ranks to start on it,
        for a job of `ranks` ranks.

        Raise InputError if fewer than `ranks` ranks fit on the nodes, or if `ranks` is larger than
        on any existing machine.
        """
        if ranks > MOST_RANKS:
            raise InputError(f"-n {ranks}: no machine takes so many; legal: 1 to {MOST_RANKS}")
        if not self.nodes:
            return replace(self, ranks=ranks)
        share = math.ceil(ranks / len(self.nodes))
        nodes = tuple(LaunchHost(node.name, node.ranks or share) for node in self.nodes)
        for node in nodes:
            if node.ranks > MOST_ON_HOST:
                raise InputError(
                    f"-n {ranks}: {node.ranks} ranks on host {node.name}; legal: 1 to "
                    f"{MOST_ON_HOST} ranks on a host"
                )
        most = sum(node.ranks for node in nodes)
        if ranks > most:
            raise InputError(f"-n {ranks}: the hosts take {most} ranks; legal: name:ranks, ...")
        return replace(self, nodes=nodes, ranks=ranks)

    def room(self, nodes: Sequence[LaunchHost]) -> int:
        """Return the number of ranks that fit on `nodes`, which are some of the job's nodes."""
        if not self.nodes:
            return self.ranks
        return sum(node.ranks for node in nodes)

    def command(self, ranks: int, nodes: Sequence[LaunchHost]) -> list[str]:
        """Return the command line that starts `ranks` ranks on the first nodes in `nodes`. It uses
        only as many nodes as are needed."""
        used: list[LaunchHost] = []
        for node in nodes:
            if self.room(used) < ranks:
                used.append(node)
        words = [self.program or self.launcher, *self.options, "-n", str(ranks)]
        names = ",".join(node.name for node in used)
        most = max((node.ranks for node in used), default=0)
        if not used:
            return words
        if self.launcher == "srun":
            count = str(len(used))
            return [*words, "-N", count, f"--ntasks-per-node={most}", "--nodelist", names]
        if self.launcher == "mpiexec":
            return [*words, "--ppn", str(most), "--hosts", names]
        hosts = ",".join(f"{node.name}:{node.ranks}" for node in used)
        return [*words, "--host", hosts]

    def on(self, node: LaunchHost, *program: str) -> list[str]:
        """Return the command line that starts one process of `program` on the node `node`."""
        launcher = self.program or self.launcher
        if self.launcher == "srun":
            options = ["--overlap", "--mpi=none", "-n", "1", "-N", "1", "--nodelist", node.name]
            return [launcher, *options, *program]
        if self.launcher == "mpiexec":
            return [launcher, "-n", "1", "--hosts", node.name, *program]
        return [launcher, "-n", "1", "--host", node.name, *program]

    def living(self, environment: Mapping[str, str]) -> tuple[LaunchHost, ...]:
        """Return the nodes of the job on which a program can be started now. The test runs on all
        nodes at the same time."""
        alive = self._on_each(environment, "true", times=PROBES)
        return tuple(node for node, here in zip(self.nodes, alive, strict=True) if here)

    def remove(self, folder: str, environment: Mapping[str, str]) -> None:
        """Remove the folder `folder` on this machine and on every node that can be reached."""
        shutil.rmtree(folder, ignore_errors=True)
        self._on_each(environment, "rm", "-rf", folder)

    def _on_each(self, environment: Mapping[str, str], *program: str, times: int = 1) -> list[bool]:
        """Start `program` on all nodes at the same time. If the program fails on a node, start it
        again on this node, up to `times` times in total. It is not started again if it has exceeded
        PROBE_S seconds. Return one bool for each node: True if the program has succeeded on the
        node.
        """

        def works(node: LaunchHost) -> bool:
            for number in range(times):
                time.sleep(number * PAUSE_S)
                try:
                    asked = subprocess.run(
                        self.on(node, *program),
                        env=dict(environment),
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        timeout=PROBE_S,
                        start_new_session=True,
                    )
                except (OSError, subprocess.TimeoutExpired):
                    return False
                if asked.returncode == 0:
                    return True
            return False

        if not self.nodes:
            return []
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            return list(threads.map(works, self.nodes))


def place_of(hosts: str, environment: Mapping[str, str], launch: str = "") -> LaunchPlace:
    """Return the nodes and the launcher of a job. The nodes are `hosts` ("a,b" or "a:4,b:4"), or
    the nodes of the scheduler's allocation, or only this machine.

    `launch` is the name of a launcher with options, such as "mpiexec --cpu-bind depth". If `launch`
    is empty, an installed launcher is chosen. Raise InputError if no launcher is installed, if a
    quotation mark in `launch` is not closed, or if a host in `hosts` has a colon that is not
    followed by a number of ranks.
    """
    try:
        words = shlex.split(launch)
    except ValueError as error:
        raise InputError(f"--launcher {launch}: {error}; quote it as for a shell") from None
    program, *options = words or [_found(hosts, environment)]
    if not shutil.which(program, path=environment.get("PATH")):
        raise InputError(f"no {program} on PATH: load the site's MPI, or pip install 'ptdmpi[mpi]'")
    nodes = tuple(_host(word) for word in hosts.split(",") if word)
    if Path(program).name == "srun":
        place = _slurm(environment, options)
    elif "Open MPI" in _version(program, environment):
        place = LaunchPlace("mpirun")
    else:
        place = LaunchPlace("mpiexec")
    if nodes:
        place = replace(place, nodes=nodes)
    elif not place.nodes and (nodes := _allocated(environment)):
        place = replace(place, nodes=nodes, ranks=sum(node.ranks for node in nodes))
    if place.nodes:
        options += _passed_on(place.launcher, environment)
    return replace(place, options=(*place.options, *options), program=program)


def _found(hosts: str, environment: Mapping[str, str]) -> str:
    """Return the name of an installed launcher. In a Slurm allocation, this is srun, unless the
    user has given `hosts`. Otherwise it is mpirun or mpiexec."""
    path = environment.get("PATH")
    if not hosts and "SLURM_JOB_ID" in environment and shutil.which("srun", path=path):
        return "srun"
    return next((name for name in ("mpirun", "mpiexec") if shutil.which(name, path=path)), "mpirun")


def _passed_on(launcher: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options that make Open MPI pass environment variables to the ranks. Other
    launchers pass all variables by default.
    """
    if launcher != "mpirun":
        return ()
    names = [name for name in PASSED_ON if name in environment or name == COPIES]
    return tuple(word for name in names for word in ("-x", name))


def _host(word: str) -> LaunchHost:
    name, colon, ranks = word.strip().partition(":")
    if not name or not name.isprintable() or (colon and not (ranks.isdigit() and int(ranks))):
        raise InputError(f"--hosts {word}: write name or name:ranks, for example n1:4,n2:4")
    return LaunchHost(name, int(ranks or 0))


def _allocated(environment: Mapping[str, str]) -> tuple[LaunchHost, ...]:
    """Return the nodes of an allocation of PBS, LSF or Flux, or () outside of such an allocation.

    PBS and LSF say how many ranks each node takes. Flux names only the nodes, so `ranks` is 0.
    Raise InputError if the scheduler's list of nodes cannot be read.
    """
    if "PBS_NODEFILE" in environment:
        return _pbs(Path(environment["PBS_NODEFILE"]))
    if "LSB_MCPU_HOSTS" in environment:
        return _lsf(environment["LSB_MCPU_HOSTS"])
    if "FLUX_URI" in environment:
        return _flux(environment)
    return ()


def _pbs(node_file: Path) -> tuple[LaunchHost, ...]:
    """Return the nodes in a node file of PBS, which has one line with the name of the node for each
    rank."""
    try:
        lines = Counter(read_file(node_file).decode(errors="replace").split())
    except OSError as error:
        raise InputError(f"PBS_NODEFILE {node_file}: {error.strerror}") from None
    return tuple(LaunchHost(name, count) for name, count in lines.items())


def _lsf(hosts: str) -> tuple[LaunchHost, ...]:
    """Return the nodes in LSF's text "host1 4 host2 4": the name of each node, followed by its
    number of ranks."""
    words = hosts.split()
    names, counts = words[::2], words[1::2]
    if len(names) != len(counts) or not all(count.isdecimal() for count in counts):
        raise InputError(f"LSB_MCPU_HOSTS {hosts}: legal: host1 4 host2 4")
    return tuple(LaunchHost(*host) for host in zip(names, map(int, counts), strict=True))


def _flux(environment: Mapping[str, str]) -> tuple[LaunchHost, ...]:
    """Return the nodes of the Flux instance in which the program runs. Flux sets no variable with
    their names for the program of `flux alloc` and `flux batch` (flux-environment(7)), but the
    command `flux hostlist` prints the names."""
    command = ["flux", "hostlist", "--expand", "local"]
    try:
        asked = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=PROBE_S
        )
    except OSError as error:
        raise InputError(f"FLUX_URI is set, but flux: {error.strerror}; legal: --hosts") from None
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{' '.join(command)}: no answer in {PROBE_S:g} s; legal: --hosts"
        ) from None
    if asked.returncode or not asked.stdout.split():
        why = (asked.stderr.strip().splitlines() or ["it printed no host"])[-1]
        raise InputError(f"{' '.join(command)}: {why}; legal: --hosts")
    return tuple(LaunchHost(name) for name in asked.stdout.split())


def _slurm(environment: Mapping[str, str], asked: Sequence[str]) -> LaunchPlace:
    """Return a `LaunchPlace` with the nodes of a Slurm allocation and the options that srun needs.
    Ranks do not stop at the same moment, so the job step must not end as soon as one rank exits
    with an error. Therefore the options make srun end the remaining ranks 60 s after the first rank
    has ended. `asked` has the user's options. The option --mpi is added unless the user has given
    it, or has set SLURM_MPI_TYPE.
    """
    names = subprocess.run(
        ["scontrol", "show", "hostnames", environment.get("SLURM_JOB_NODELIST", "")],
        env=dict(environment),
        capture_output=True,
        text=True,
    ).stdout.split()
    ranks = int(environment.get("SLURM_NTASKS", "0"))
    # --overlap lets job steps share cores: a job step that has lost a node may still occupy the
    # cores of its other nodes for a while
    options = ["--kill-on-bad-exit=0", "--wait=60", "--no-kill", "--overlap"]
    if "SLURM_MPI_TYPE" not in environment and not any(word.startswith("--mpi") for word in asked):
        options.append(f"--mpi={_plugin(environment)}")
    if cores := environment.get("SLURM_CPUS_PER_TASK"):
        # since Slurm 22.05, srun does not inherit the option --cpus-per-task from sbatch
        options.append(f"--cpus-per-task={cores}")
    share = math.ceil(ranks / max(1, len(names)))
    return LaunchPlace(
        "srun", tuple(LaunchHost(name, share) for name in names), tuple(options), ranks
    )


def _plugin(environment: Mapping[str, str]) -> str:
    """Return the name of Slurm's plugin for the MPI library: pmix for Open MPI, pmi2 for MPICH and
    libraries derived from MPICH, and cray_shasta for Cray's machines, which have no mpirun."""
    if not shutil.which("mpirun", path=environment.get("PATH")):
        return "cray_shasta"
    return "pmix" if "Open MPI" in _version("mpirun", environment) else "pmi2"


def _version(program: str, environment: Mapping[str, str]) -> str:
    asked = subprocess.run(
        [program, "--version"], env=dict(environment), capture_output=True, text=True
    )
    return asked.stdout + asked.stderr
