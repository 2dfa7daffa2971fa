"""Measure PTD-P and ZeRO-3 over a slow link, and write docs/explanation/ptd-vs-zero3.md.

    python -m benchmarks.network.ptd_zero3

The benchmark needs root and Open MPI 5, and takes some minutes. PTD-P and ZeRO-3 train the same
batches alternately, on 2 and 4 ranks of two nodes. Here PTD-P has tensor parallelism within a node
and a pipeline across the nodes. The measurement is repeated with a slow link and with an unlimited
link between the nodes. The results are stored in results/ptd_zero3.json, from which
`benchmarks.network.page` makes the tables and the pictures of the page.
"""

import datetime
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.network import page
from benchmarks.network.case import NODES, ZERO_3, Compared
from benchmarks.network.nodes import NodeLink, NoNodes, answer
from benchmarks.network.pingpong import MESSAGES, table
from benchmarks.speed.rounds import machine
from benchmarks.turns import spread
from ptdmpi.base.disk import write_whole

RANKS = (2, 4)
LINKS = (NodeLink(1000.0, 200.0), NodeLink(0.0))


def measure(
    case: Compared, ranks: int, link: NodeLink, messages: Mapping[int, int] = MESSAGES
) -> dict[str, Any]:
    """Return the results of `benchmarks.network.train` on `ranks` ranks of two nodes joined by
    `link`.

    `messages` maps the size of a message in bytes to the number of times that it is sent, in order
    to measure the link. Raises the errors that `answer` raises.
    """
    job = json.dumps({"case": asdict(case), "messages": list(messages.items())})
    results = answer(ranks // NODES, ["-m", "benchmarks.network.train", job], link)
    return {"ranks": ranks, "link": asdict(link), **results}


def check_sent(case: Compared, run: dict[str, Any]) -> None:
    """Raise RuntimeError if less than 0.8 of `case.zero_bytes` crossed the link in a step of
    ZeRO-3, which would mean that the weights were not sharded. The limit is below 1, because ZeRO-3
    does not gather the last layer and the embedding table a second time, which saves a fifth of the
    bytes."""
    for row in run["rows"]:
        sent = row["ways"][ZERO_3]["sent_bytes"]
        if sent < 0.8 * case.zero_bytes:
            raise RuntimeError(
                f"batch {row['batch']}: {sent / 1e6:.2f} MB crossed the link in a step of "
                f"{ZERO_3}, which sends {case.zero_bytes / 1e6:.2f} MB"
            )


def summary(run: dict[str, Any]) -> str:
    """Return the results of one call of `measure` as text."""
    lines = [f"\n{run['ranks']} ranks on {NODES} nodes; link: {NodeLink(**run['link'])}"]
    lines.append(table(run["one_way_s"]))
    for row in run["rows"]:
        for way, numbers in row["ways"].items():
            lines.append(
                f"  batch {row['batch']:>3}  {way:<8} {numbers['layout']:<22} "
                f"{spread(numbers['tokens_per_s']):>36} tokens/s  "
                f"{numbers['sent_bytes'] / 1e6:8.2f} MB across the link in a step"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure with each number of ranks and each link, and write the results and the page."""
    case = Compared()
    begin = time.monotonic()
    runs = []
    for ranks in RANKS:
        for link in LINKS:
            try:
                runs.append(measure(case, ranks, link))
            except NoNodes as error:
                sys.exit(f"no nodes on this machine: {error}")
            print(summary(runs[-1]), flush=True)
            check_sent(case, runs[-1])
    results = {
        "machine": machine(),
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "case": asdict(case),
        "runs": runs,
    }
    page.RESULTS.parent.mkdir(exist_ok=True)
    write_whole(page.RESULTS, json.dumps(results, indent=1) + "\n")
    page.main()
    print(f"measured in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
