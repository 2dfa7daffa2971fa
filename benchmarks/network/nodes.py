"""Several simulated nodes on one machine: Linux namespaces with a link between them, and mpirun
across these nodes.

A node has its own network, host name and /dev/shm, and shares the machine's files. Therefore MPI
sees several nodes, and messages between nodes cross the link by TCP. After the benchmark, nothing
of the nodes remains on the machine, even if the benchmark is killed. The switch between the nodes
is the first process of a process namespace that contains all nodes. The standard input of the
switch ends when the program that made the nodes ends. Then the switch also ends. The kernel then
ends all processes of the namespace and removes the network of the nodes.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks import launch
from benchmarks.network.switch import Port, Switch, card

TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
# A node consists of the namespaces of its first process. The first process writes its process id,
# so that other processes can enter the namespaces.
NODE = """\
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
ip link set lo up
echo $$ > "$2/agent.$1"
echo ready
exec sleep infinity
"""
# mpirun starts this script instead of ssh. The first argument is the host, and the others are a
# shell command.
AGENT = """\
#!/bin/sh
pid=$(cat "$0.$1")
shift
exec nsenter --target "$pid" --net --uts --mount sh -c "$*"
"""


class NoNodes(Exception):
    """The error for a machine that cannot simulate nodes. The message gives the reason."""


@dataclass(frozen=True)
class NodeLink:
    """The link between nodes: the rate of each node's network card in Mbit/s, and the travel time
    of a network frame in microseconds."""

    # 0 means that a bridge of the Linux kernel connects the nodes, with full speed and no delay
    rate_mbit: float
    delay_us: float = 0.0

    def __str__(self) -> str:
        if not self.rate_mbit:
            return "unshaped"
        return f"{self.rate_mbit:g} Mbit/s, {self.delay_us:g} us"


class Nodes:
    """A context manager that makes `count` nodes n1, n2, ..., which are connected by `link`.
    Entering the context raises NoNodes if this machine cannot simulate nodes."""

    def __init__(self, count: int, link: NodeLink) -> None:
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.link = link

    def __enter__(self) -> "Nodes":
        if why := _what_is_missing():
            raise NoNodes(why)
        with contextlib.ExitStack() as stack:
            self.place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ptdmpi-")))
            self._write()
            holder = subprocess.Popen(
                [
                    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--"),
                    *(sys.executable, "-m", "benchmarks.network.nodes", str(self.place)),
                    *(f"{self.link.rate_mbit:g}", f"{self.link.delay_us:g}", *self.names),
                ],
                cwd=launch.ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, holder)
            if holder.stdout.readline() != "ready\n":
                raise NoNodes(holder.communicate()[1].strip().rpartition("\n")[2])
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
            self.first_process = children.read_text().strip()
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def _write(self) -> None:
        lines = [f"{address} {name}\n" for name, address in _addresses(self.names).items()]
        (self.place / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        self.agent = self.place / "agent"
        self.agent.write_text(AGENT)
        self.agent.chmod(0o755)

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` inside the node `name`."""
        enter = ["nsenter", "--target", self.first_process, "--pid", "--mount", "--"]
        return [*enter, str(self.agent), name, shlex.join(["exec", *command])]

    def start(
        self, ranks_per_node: int, words: Sequence[str], output: IO[str] | int
    ) -> subprocess.Popen[str]:
        """Start `python WORDS...` on the ranks of all nodes, as `launch.start` does."""
        hosts = ",".join(f"{name}:{ranks_per_node}" for name in self.names)
        options = ["--prtemca", "plm_ssh_agent", str(self.agent), "--host", hosts]
        # With this option, each node gets `ranks_per_node` ranks. Without this option, one node
        # could get all ranks, because jobs/mpi-env.sh allows more ranks than cores.
        options += ["--map-by", f"ppr:{ranks_per_node}:node:oversubscribe"]
        options += ["--mca", "btl_tcp_if_include", "eth0"]
        command = launch.mpirun(ranks_per_node * len(self.names), words, options)
        return launch.start(self.inside(self.names[0], command), output)


def answer(
    ranks_per_node: int, words: Sequence[str], link: NodeLink, limit_s: float = 600.0
) -> dict:
    """Run `python WORDS...` on the ranks of two nodes connected by `link`, and return the JSON
    object in the last line that the program prints. The key "nodes" of the object must have the
    number of nodes that MPI sees.

    Raises NoNodes if this machine cannot simulate nodes, RuntimeError if the ranks fail or MPI does
    not see two nodes, and subprocess.TimeoutExpired. When the function returns, all ranks have
    ended, because removing the simulated nodes ends their processes.
    """
    with Nodes(2, link) as nodes:
        process = nodes.start(ranks_per_node, words, subprocess.PIPE)
        try:
            text, _ = process.communicate(timeout=limit_s)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"the ranks ended with exit code {process.returncode}")
    results = json.loads(text.splitlines()[-1])
    if results["nodes"] != 2:
        raise RuntimeError(f"two nodes were made, but MPI sees {results['nodes']}")
    return results


def _what_is_missing() -> str:
    """Return the reason why this machine cannot simulate nodes; "" if it can simulate them."""
    if os.geteuid():
        return "only root can make namespaces"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"no {missing[0]}"
    version, _ = launch.start(["mpirun", "--version"], subprocess.PIPE).communicate()
    numbered = re.search(r"\(Open MPI\) (\d+)", version)
    # Only Open MPI has an option that replaces ssh by another program. Other launchers start ranks
    # on nodes in other ways.
    if numbered and int(numbered[1]) >= 5:
        return ""
    return "mpirun does not belong to Open MPI 5 or newer"


def _addresses(names: Sequence[str]) -> dict[str, str]:
    return {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}


def _end(holder: subprocess.Popen[str]) -> None:
    with contextlib.suppress(BrokenPipeError):
        holder.stdin.close()
    try:
        holder.wait(10.0)
    except subprocess.TimeoutExpired:
        holder.kill()  # the program unshare then kills its child process, the switch
        holder.wait()
    holder.stdout.close()
    holder.stderr.close()


def hold(place: str, link: NodeLink, names: Sequence[str]) -> None:
    """Create the nodes `names` and connect them by `link`. Each node writes its process id into a
    file in the folder `place`. This function runs in the first process of the process namespace
    that contains the nodes. Return when standard input ends."""
    ports = []
    for name, address in _addresses(names).items():
        node = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", NODE, "sh", name, place],
            stdout=subprocess.PIPE,
        )
        if node.stdout.readline() != b"ready\n":
            sys.exit(f"node {name} did not start")
        ports.append(f"to-{name}")
        _run(f"ip link add {ports[-1]} type veth peer name eth0 netns {node.pid}")
        _run(f"ip link set {ports[-1]} up")
        enter = f"nsenter --target {node.pid} --net"
        _run(f"{enter} ip addr add {address}/24 dev eth0")
        _run(f"{enter} ip link set eth0 up")
    if link.rate_mbit:
        ends = [Port(card(port)) for port in ports]
        switch = Switch(ends, link.rate_mbit * 1e6 / 8, link.delay_us / 1e6)
        print("ready", flush=True)
        switch.run()
        return
    _run("ip link add bridge type bridge")
    _run("ip link set bridge up")
    for port in ports:
        _run(f"ip link set {port} master bridge")
    print("ready", flush=True)
    sys.stdin.read()


def _run(command: str) -> None:
    if done := subprocess.run(command.split()).returncode:
        sys.exit(f"{command}: exit code {done}")


if __name__ == "__main__":
    hold(sys.argv[1], NodeLink(float(sys.argv[2]), float(sys.argv[3])), sys.argv[4:])
