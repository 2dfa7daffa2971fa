"""The table of data-parallel methods by name (`METHODS`), and the choice of a run's method from its
configuration."""

from ptdmpi.base.plugins import built_in
from ptdmpi.config import SharedInputError
from ptdmpi.engine.data_parallel.method import DataParallel, Replica
from ptdmpi.plan.layout.grid import DATA, LOSSES

# Name of a method -> its class, as "module:class". The class is imported only when a run uses the
# method.
METHODS = {
    "all_reduce": "ptdmpi.engine.data_parallel.reduce:AllReduce",
    "sharded": "ptdmpi.engine.data_parallel.reduce:Sharded",
    "tree": "ptdmpi.engine.data_parallel.reduce:TreeSum",
    "parameter_server": "ptdmpi.engine.data_parallel.pairwise:ParameterServer",
    "ring": "ptdmpi.engine.data_parallel.pairwise:Ring",
    "decentralized": "ptdmpi.engine.data_parallel.decentralized:Decentralized",
    "choco": "ptdmpi.engine.data_parallel.choco:Choco",
    "local": "ptdmpi.engine.data_parallel.local:Local",
    "compressed": "ptdmpi.engine.data_parallel.compressed:Compressed",
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
    kind: type[DataParallel] = built_in(METHODS[method])
    return kind(replica)


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
