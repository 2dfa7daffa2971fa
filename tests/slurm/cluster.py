"""A real Slurm on one machine, thrown away afterwards: several virtual nodes, no systemd.

Each node is a slurmd in UTS, mount and PID namespaces of its own: own host name, /etc/hosts,
/dev/shm and process table. So ranks on two nodes share nothing but files and the loopback network,
and the end of one process takes a whole node down, as a power cut does. All daemons are children of
this process, end with it (parent-death signal), and listen on the loopback interface only.

Debian: apt-get install slurmctld slurmd slurm-client munge libpmix-dev (the last one for the link
`libpmix.so`, which Slurm's pmix plugin opens).
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "unshare", "setpriv")
NAMESPACES = ("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
# Daemons live in /usr/sbin, which is not on every user's path.
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# What a node does before it becomes slurmd: own name, names of all nodes, own shared memory.
NODE = """
hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs shm /dev/shm || exit 1
slurmd -D -N "$0" & wait $!
"""

# No cgroups, no accounting database, no systemd. `cred_expire` is how long a requeued job waits
# (120 s by default), SlurmdTimeout how long a node may be silent (300 s), KillWait the grace
# between SIGTERM and SIGKILL (30 s). TmpFS: two nodes' PMIx directories would collide in /tmp.
# NoInAddrAny: listen on the node's address, which is 127.0.0.1, and not on every interface.
CONFIGURATION = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
TmpFS={folder}/%n/tmp
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
PlugStackConfig={folder}/plugstack.conf
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
GresTypes=gpu
SlurmdTimeout=10
KillWait={kill_wait_s}
MinJobAge=600
ReturnToService=2
EnforcePartLimits=ALL
NodeName=DEFAULT CPUs={cores} CoresPerSocket={cores} RealMemory=1000 Gres=gpu:{gpus} Feature=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 DefaultTime=5 State=UP
"""


def missing() -> str:
    """Why a Slurm cannot be started on this machine; empty if it can."""
    if os.geteuid() != 0:
        return "a node is a set of namespaces, which only root may make"
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: `make test-slurm` installs them on Debian"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def wait_until(condition: Callable[[], object], limit_s: float, what: str) -> float:
    """Wait for a true `condition()`; the seconds it took. Raises TimeoutError that says `what`."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > limit_s:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.05)
    return time.monotonic() - begin


class Cluster:
    """Nodes n1, n2, ... and their controller, in a scratch folder; a context manager.

    Cores and GPUs of the nodes are pretended, so that a template for big nodes is accepted.
    """

    def __init__(
        self, folder: Path, nodes: int = 4, cores: int = 288, gpus: int = 8, kill_wait_s: int = 20
    ) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True)
        (folder / "state").mkdir()
        (folder / "plugstack.conf").touch()
        # slurmd 22.05 stops where it finds neither cgroups nor systemd, though nothing uses them.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in self.nodes:
            (folder / name / "spool").mkdir(parents=True)
            (folder / name / "tmp").mkdir()
            (folder / name / "tmp").chmod(0o1777)
        for number in range(gpus):
            (folder / f"gpu{number}").symlink_to("/dev/null")  # a plain file is refused
        files = f"File={folder}/gpu[0-{gpus - 1}]"
        names = f"n[1-{nodes}]"
        (folder / "gres.conf").write_text(
            f"NodeName={names} Name=gpu Flags=nvidia_gpu_env {files}\n"
        )
        host = socket.gethostname().partition(".")[0]
        hosts = [f"127.0.0.1 {name}" for name in ("localhost", host, *self.nodes)]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        control_port, *ports = _free_ports(nodes + 1)
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port}"
            for name, port in zip(self.nodes, ports, strict=True)
        ]
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host,
                control_port=control_port,
                folder=folder,
                cores=cores,
                gpus=gpus,
                kill_wait_s=kill_wait_s,
                nodes="\n".join(lines),
            )
        )
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        options = [
            f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")
        ]
        socket_path = self.folder / "munge.socket"
        self._spawn(
            "munged", "munged", "--foreground", "--force", f"--socket={socket_path}", *options
        )
        wait_until(socket_path.exists, 20, "munged")
        self._spawn("slurmctld", "slurmctld", "-D", "-c")
        for name in self.nodes:
            self.restore(name)
        self.wait_for_nodes(self.nodes)

    def _spawn(self, name: str, *command: str) -> None:
        """Start a daemon that ends when this process ends, however that happens."""
        with open(self.folder / f"{name}.out", "ab") as output:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End everything that was started, nodes first."""
        for name in [*self.nodes, "slurmctld", "munged"]:
            daemon = self.daemons.pop(name, None)
            if daemon is None:
                continue
            if name not in self.nodes:  # a node is ended by its kernel, as a whole
                daemon.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
            daemon.kill()
            daemon.wait()

    def cut(self, node: str) -> None:
        """Power off: every process of the node dies at once."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def restore(self, node: str) -> None:
        """Start a node again."""
        hosts = str(self.folder / "hosts")
        self._spawn(node, *NAMESPACES, "--", "bash", "-c", NODE, node, hosts)

    def wait_for_nodes(self, nodes: Sequence[str], limit_s: float = 60) -> None:
        """Wait until Slurm calls these nodes idle."""

        def idle() -> bool:
            found = self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False)
            return set(nodes) <= set(found.stdout.split())

        wait_until(idle, limit_s, f"nodes {' '.join(nodes)} up; logs in {self.folder}")

    def run(
        self,
        *command: str,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a client of Slurm, such as `scontrol`; `env` is added to the environment."""
        done = subprocess.run(
            command,
            env={**os.environ, **(env or {}), "SLURM_CONF": self.environment["SLURM_CONF"]},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{done.stderr}")
        return done

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, such as JobState, NodeList, Restarts."""
        shown = self.run("scontrol", "show", "job", "-o", job).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def hosts_of(self, job: str) -> list[str]:
        """The nodes of a running job; the batch script runs on the first."""
        listed = self.job(job)["NodeList"]
        return self.run("scontrol", "show", "hostnames", listed).stdout.split()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
