"""The table of data-parallel methods by name (`METHODS`), and the choice of a run's method from its
configuration."""

from ptdmpi.engine.data_parallel.choco import Choco
from ptdmpi.engine.data_parallel.compressed import Compressed
from ptdmpi.engine.data_parallel.decentralized import Decentralized
from ptdmpi.engine.data_parallel.local import Local
from ptdmpi.engine.data_parallel.method import DataParallel, Replica
from ptdmpi.engine.data_parallel.pairwise import ParameterServer, Ring
from ptdmpi.engine.data_parallel.reduce import AllReduce, Sharded, TreeSum

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
