"""Functions that start torch.distributed with the backend "ptdmpi". MPI determines the ranks, and
the key-value store works over MPI.
"""

import atexit
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from ptdmpi.comm import launch
from ptdmpi.comm.c10d.group import BACKEND, TransportGroup

if TYPE_CHECKING:
    from ptdmpi.comm.world import Axes

# the dimensions of a run's DeviceMesh; ranks along the last dimension have consecutive numbers
MESH = ("pipeline", "data", "context", "tensor")


class MpiSession:
    """The MPI objects that torch.distributed uses in this process: the world of all ranks, its
    key-value store, and the transport.
    """

    now: ClassVar["MpiSession | None"] = None

    def __init__(self) -> None:
        from ptdmpi.comm.store import MpiStore
        from ptdmpi.comm.wires import preferred, wire_named
        from ptdmpi.comm.world import World

        self.world = World()
        self.store = MpiStore(self.world.control)
        device = self.world.device()
        name, _ = preferred(device)
        if name == "torch":  # this transport needs torch.distributed
            name = "mpi"
        self.wire = wire_named(name, device)
        self.wire.open(self.world.control)

    @classmethod
    def begun(cls) -> "MpiSession":
        """Return the session of this process, and create it at the first call. All ranks must
        create the session together.
        """
        if cls.now is None:
            launch.prepare()
            cls.now = cls()
            atexit.register(cls.now.close)
        return cls.now

    def group(self, ranks: Sequence[int], name: str) -> TransportGroup:
        """Return the process group of the given world ranks; only these ranks call this method. The
        group uses the transport of the session: NCCL if the ranks have NVIDIA GPUs and `nccl4py` is
        installed, otherwise MPI.
        """
        from mpi4py import MPI

        everyone = self.world.control
        assert isinstance(everyone, MPI.Intracomm)
        # MPI needs different tags only for groups that are made at the same time. All ranks make
        # groups in the same order, so every call of Create_group can use the default tag.
        control = everyone.Create_group(everyone.Get_group().Incl(list(ranks)))
        return TransportGroup(self.wire.connect(control, name), name)

    def close(self) -> None:
        """End the store's thread before MPI is finalized. All ranks call this method."""
        self.store.leave()
        self.store.join()


def _create(options: Any, _: Any) -> TransportGroup:
    """Create a process group when torch requests a new group. An empty list
    `options.global_ranks_in_group` means the group of all ranks.
    """
    session = MpiSession.begun()
    ranks = list(options.global_ranks_in_group) or list(range(session.world.size))
    return session.group(ranks, options.group_id)


def _meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield the store, the rank of this process and the number of ranks, all from MPI.
    torch.distributed calls this function as a rendezvous handler."""
    session = MpiSession.begun()
    yield session.store, session.world.rank, session.world.size


def mesh_of(axes: "Axes") -> DeviceMesh:
    """Return the process grid of a run (`Run.axes`) as a DeviceMesh of torch with four dimensions:
    "pipeline", "data", "context" and "tensor". Each has the ranks of the communicator of the same
    name: `mesh.get_group("data")` has the ranks of `axes["data"]`.

    All ranks call this function. If torch.distributed has not been started yet, it is started with
    the backend "ptdmpi". The groups of the mesh have communicators of their own, so their messages
    cannot be confused with those of the run. Raises ValueError if torch.distributed has another
    number of ranks than the run.
    """
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)
    grid = axes.grid
    if dist.get_world_size() != grid.size:
        raise ValueError(
            f"the run has {grid.size} ranks, and torch.distributed has {dist.get_world_size()}"
        )
    # the ranks of a tensor group have consecutive numbers, so "tensor" is the last dimension of the
    # mesh
    ranks = torch.arange(grid.size).view([axes[name].size for name in MESH])
    device = MpiSession.begun().world.device()
    return DeviceMesh(device.type, ranks, mesh_dim_names=MESH)


def register() -> None:
    """Register the backend and its rendezvous handlers in torch.distributed. With the init_method
    `ptdmpi://`, torch.distributed takes the ranks from MPI. Without an init_method,
    torch.distributed does the same if no rank is given and the environment variable RANK is not
    set, as under plain mpirun."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous_handler(BACKEND, _meet)
    by_environment = _rendezvous_handlers["env"]

    def meet_by_environment(url: str, **given: Any) -> Iterator[tuple[Store, int, int]]:
        """Use torch's own rendezvous if the environment has the variable RANK, or if the
        init_method `url` gives the rank ("rank="). Otherwise take the ranks from MPI.
        """
        if "RANK" in os.environ or "rank=" in url:
            return by_environment(url, **given)
        return _meet(url)

    _rendezvous_handlers["env"] = meet_by_environment
