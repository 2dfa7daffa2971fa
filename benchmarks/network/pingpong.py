"""What a link does for MPI: messages there and back between the first and the last rank.

    python -m benchmarks.network.pingpong [RATE_MBIT DELAY_US]

makes two nodes with a rank each; 1000 Mbit/s and 200 us unless said otherwise.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping

from benchmarks.network.nodes import NodeLink, NoNodes, answer

# bytes -> how often
MESSAGES = {8: 40, 65_536: 20, 1 << 20: 8, 1 << 24: 3}


def one_way_s(control, sizes: dict[int, int]) -> dict[int, float]:
    """Bytes of a message -> half the median time there and back; called by all ranks of an MPI
    communicator, of whom the first and the last take part."""
    import numpy

    found = {}
    rank, last = control.Get_rank(), control.Get_size() - 1
    for size, times in sizes.items():
        message = numpy.zeros(size, dtype=numpy.uint8)
        taken = []
        control.Barrier()
        for _ in range(times + 1 if rank in (0, last) else 0):  # the first one connects
            begin = time.perf_counter()
            if rank == 0:
                control.Send(message, last)
                control.Recv(message, last)
            else:
                control.Recv(message, 0)
                control.Send(message, 0)
            taken.append(time.perf_counter() - begin)
        found[size] = statistics.median(taken[1:]) / 2 if taken else 0.0
        control.Barrier()
    return found


def rank_main() -> None:
    """On each rank; the first prints what was found, and how many nodes MPI sees."""
    from ptdmpi.comm import launch

    launch.prepare()
    from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        found = one_way_s(world.control, MESSAGES)
        if world.rank == 0:
            print(json.dumps({"nodes": world.nodes, "one_way_s": found}))


def table(found: Mapping[str, float]) -> str:
    """Bytes, one-way time and rate, a line each."""
    return "\n".join(
        f"{size:>10} bytes {seconds * 1e6:>10.0f} us {int(size) * 8e-6 / seconds:>9.1f} Mbit/s"
        for size, seconds in found.items()
    )


def main() -> None:
    words = sys.argv[1:]
    if words == ["rank"]:
        rank_main()
        return
    link = NodeLink(*map(float, words)) if words else NodeLink(1000.0, 200.0)
    print(f"asked: {link}", flush=True)
    try:
        found = answer(1, ["-m", "benchmarks.network.pingpong", "rank"], link)
    except NoNodes as error:
        sys.exit(f"no nodes on this machine: {error}")
    print(table(found["one_way_s"]))


if __name__ == "__main__":
    main()
