"""The table of data-parallel methods by name (`METHODS`), and the choice of a run's method from its
configuration."""

from ptdmpi.config import SharedInputError
from ptdmpi.engine.data_parallel.choco import Choco
from ptdmpi.engine.data_parallel.compressed import Compressed
from ptdmpi.engine.data_parallel.decentralized import Decentralized
from ptdmpi.engine.data_parallel.local import Local
from ptdmpi.engine.data_parallel.method import DataParallel, Replica
from ptdmpi.engine.data_parallel.pairwise import ParameterServer, Ring
from ptdmpi.engine.data_parallel.reduce import AllReduce, Sharded, TreeSum
from ptdmpi.plan.layout.grid import DATA, LOSSES

METHODS: dict[str, type[DataParallel]] = {
    "all_reduce": AllReduce,
    "sharded": Sharded,
    "tree": TreeSum,
    "parameter_server": ParameterServer,
    "ring": Ring,
    "decentralized": Decentralized,
    "choco": Choco,
    "local": Local,
    "compressed": Compressed,
}


def data_parallel(replica: Replica) -> DataParallel:
    """Return the data-parallel method that the configuration of `replica` names."""
    config = replica.config
    section = replica.config.data_parallel
    method: str = section.method
    if config.run.reproducible:
        method = "tree"
    elif replica.buffer.portion.shards_state:
        method = "sharded"
    elif method == "decentralized" and section.compressor != "none":
        method = "choco"
    return METHODS[method](replica)


def method_of(replica: Replica) -> DataParallel:
    """Return the data-parallel method of a run. Raise SharedInputError, on all ranks, if the method
    would sum gradients over the wrong ranks."""
    policy = data_parallel(replica)
    axes = replica.axes
    apart = any(unit.apart for unit in replica.buffer.units)
    more = axes[LOSSES].size > axes[DATA].size
    if any(axes.world.all_gather_object(apart or more)) and not policy.by_unit:
        raise SharedInputError(
            "this data_parallel.method sums the gradients of all parameters over the data axis "
            'only, but this run needs sums over other ranks, too; legal here: "all_reduce"'
        )
    return policy
