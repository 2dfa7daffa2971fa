"""Measure PTD-P and ZeRO-3 across a slow link, and write docs/explanation/ptd-vs-zero3.md.

    python -m benchmarks.network.ptd_zero3

Needs root and Open MPI 5; takes some minutes. At 2 and 4 ranks on two nodes, with the shaped link
and without, both ways train the same batches in turn; results/ptd_zero3.json keeps what was
measured, and the page gets its table and pictures from that (`benchmarks.network.page`).
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Mapping, Sequence
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
    """What `benchmarks.network.train` says of `ranks` ranks on two nodes joined by `link`.

    `messages`: those that the link is measured by, bytes -> how often. Raises as `answer` does.
    """
    job = json.dumps({"case": asdict(case), "messages": list(messages.items())})
    found = answer(ranks // NODES, ["-m", "benchmarks.network.train", job], link)
    return {"ranks": ranks, "link": asdict(link), **found}


def check_sent(case: Compared, found: dict[str, Any]) -> None:
    """Raises RuntimeError where much less crossed the link than ZeRO-3 sends: then the weights were
    not sharded. (A fifth less is what not gathering the last layer and the table again saves.)"""
    for row in found["rows"]:
        sent = row["ways"][ZERO_3]["sent_bytes"]
        if sent < 0.8 * case.zero_bytes:
            raise RuntimeError(
                f"batch {row['batch']}: {sent / 1e6:.2f} MB crossed the link in a step of "
                f"{ZERO_3}, which sends {case.zero_bytes / 1e6:.2f} MB"
            )


def story(found: dict[str, Any]) -> str:
    """What a person reads of one `measure`."""
    lines = [f"\n{found['ranks']} ranks on {NODES} nodes; asked: {NodeLink(**found['link'])}"]
    lines.append(table(found["one_way_s"]))
    for row in found["rows"]:
        for way, of_way in row["ways"].items():
            rates, sent = of_way["tokens_per_s"], of_way["sent_bytes"]
            lines.append(
                f"  batch {row['batch']:>3}  {way:<8} {of_way['layout']:<22} "
                f"{spread(rates):>36} tokens/s  {sent / 1e6:8.2f} MB across the link in a step"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=Compared.rounds)
    case = Compared(rounds=parser.parse_args(arguments).rounds)
    begin = time.monotonic()
    runs = []
    for ranks in RANKS:
        for link in LINKS:
            try:
                runs.append(measure(case, ranks, link))
            except NoNodes as error:
                sys.exit(f"no nodes on this machine: {error}")
            print(story(runs[-1]), flush=True)
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
