"""Latency and bandwidth of a link, measured with MPI messages from the first to the last rank and
back.

    python -m benchmarks.network.pingpong [RATE_MBIT DELAY_US]

This command simulates two nodes with one rank each, connected by a link of 1000 Mbit/s and 200 us
by default.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping

from benchmarks.network.nodes import NodeLink, NoNodes, answer

# maps the size of a message in bytes to the number of times that it is sent
MESSAGES = {8: 40, 65_536: 20, 1 << 20: 8, 1 << 24: 3}


def one_way_s(control, sizes: dict[int, int]) -> dict[int, float]:
    """Return half of the median round-trip time in seconds for each size of message. The first and
    the last rank exchange messages. On all other ranks, the times are 0. All ranks of the MPI
    communicator call this function.

    `sizes` maps the size of a message in bytes to the number of times that it is sent.
    """
    import numpy

    seconds = {}
    rank = control.Get_rank()
    last = control.Get_size() - 1
    for size, times in sizes.items():
        message = numpy.zeros(size, dtype=numpy.uint8)
        taken = []
        control.Barrier()
        repeats = times + 1 if rank in (0, last) else 0  # the first round trip connects the ranks
        for _ in range(repeats):
            begin = time.perf_counter()
            if rank == 0:
                control.Send(message, last)
                control.Recv(message, last)
            else:
                control.Recv(message, 0)
                control.Send(message, 0)
            taken.append(time.perf_counter() - begin)
        seconds[size] = statistics.median(taken[1:]) / 2 if taken else 0.0
        control.Barrier()
    return seconds


def rank_main() -> None:
    """Run one rank. The first rank prints the times and the number of nodes that MPI sees, as
    JSON."""
    from ptdmpi.comm import launch

    launch.prepare()
    from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        seconds = one_way_s(world.control, MESSAGES)
        if world.rank == 0:
            print(json.dumps({"nodes": world.nodes, "one_way_s": seconds}))


def table(one_way: Mapping[str, float]) -> str:
    """Return a text with a line for each size of message: bytes, one-way time, rate."""
    return "\n".join(
        f"{size:>10} bytes {seconds * 1e6:>10.0f} us {int(size) * 8e-6 / seconds:>9.1f} Mbit/s"
        for size, seconds in one_way.items()
    )


def main() -> None:
    """Measure the link that the command line describes, or run one rank of the measurement."""
    words = sys.argv[1:]
    if words == ["rank"]:
        rank_main()
        return
    link = NodeLink(1000.0, 200.0)
    if words:
        link = NodeLink(*map(float, words))
    print(f"link: {link}", flush=True)
    try:
        results = answer(1, ["-m", "benchmarks.network.pingpong", "rank"], link)
    except NoNodes as error:
        sys.exit(f"no nodes on this machine: {error}")
    print(table(results["one_way_s"]))


if __name__ == "__main__":
    main()
