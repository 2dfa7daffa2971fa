"""Nodes of this machine for Open MPI's mpirun: namespaces with a host name and a /dev/shm each.

mpirun starts its daemons by a stand-in for ssh. The processes of a node are those in its
namespace, whatever their session is. Namespaces need root.
"""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

SSH = """#!/bin/bash
# mpirun's daemon on the node HOST, in namespaces that end with it
while [[ $1 == -* ]]; do shift; done
host=$1 folder=$(dirname "$0")
shift
[ ! -e "$folder/down-$host" ] || exit 255
mkdir -p "$folder/shm-$host"
starts='readlink /proc/self/ns/uts >> "$0/spaces-$1" && hostname "$1"'
starts+=' && mount --bind "$0/shm-$1" /dev/shm && shift && exec bash -c "$*"'
exec setsid --wait unshare --uts --mount bash -c "$starts" "$folder" "$host" "$@"
"""


class VirtualNodes:
    """Nodes that mpirun can be told to use by any names; they can be lost, and come back."""

    def __init__(self, folder: Path) -> None:
        """Prepare the nodes in `folder`; skip the test if this machine lets nobody make them."""
        if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode:
            pytest.skip("namespaces need root")
        self.folder = folder
        (folder / "ssh").write_text(SSH)
        (folder / "ssh").chmod(0o755)
        self.environment = {"PRTE_MCA_plm_ssh_agent": str(folder / "ssh")}

    def lose(self, host: str) -> None:
        """Kill all processes of a node; from now on nothing can be started there."""
        (self.folder / f"down-{host}").touch()
        spaces = (self.folder / f"spaces-{host}").read_text().split()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns/uts") in spaces:
                    os.kill(int(process.name), signal.SIGKILL)

    def restore(self, host: str) -> None:
        """Let programs start on a lost node again."""
        (self.folder / f"down-{host}").unlink()
