"""Step times over a slow link, measured alternately for methods that average over all replicas and
for methods that average with neighbours.

    python -m benchmarks.network.neighbours [--nodes 4] [--rounds 5]

Every replica is on its own simulated node (`benchmarks.network.nodes`). The same ranks train the
same GPT with every method, one method after another. A turn of a method has several steps, because
a method that overlaps messages with computation sends the messages of a step during the next step.
A turn ends when no message is in flight.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.marks import table
from benchmarks.network.nodes import NodeLink, Nodes
from benchmarks.network.train import sent_bytes
from benchmarks.turns import round_of, spread
from ptdmpi.comm import launch
from ptdmpi.config import Config, Layout, synthetic_config

GOSSIP = {"method": "decentralized", "consensus_every": 0}
LINK = NodeLink(rate_mbit=100.0, delay_us=2000.0)
SIDES: dict[str, dict[str, object]] = {
    "all_reduce": {},
    "ring": GOSSIP,
    "one_peer_exponential": {**GOSSIP, "topology": "one_peer_exponential"},
    "one_peer_exponential, overlap": {
        **GOSSIP,
        "topology": "one_peer_exponential",
        "overlap": True,
    },
    "one_peer_exponential, average_every = 8": {
        **GOSSIP,
        "topology": "one_peer_exponential",
        "average_every": 8,
    },
}
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "seq_length": 64}
VOCAB_SIZE = 256
# number of steps in a turn, which is a multiple of `average_every` and of the period (1 or 2 steps)
# of a one-peer graph of 2 to 4 nodes
STEPS = 8


def config_of(side: str, ranks: int) -> Config:
    """Return the configuration for the method `side` on `ranks` replicas."""
    return synthetic_config(
        Layout(tensor=1, pipeline=1, data=ranks, micro_size=2),
        MODEL,
        run={"steps": 10_000, "threads": 1},
        precision={"compute": "fp32"},
        data_parallel=SIDES[side],
    )


class Averaging:
    """The training engine of one method, on one rank."""

    def __init__(self, side: str, world, axes) -> None:
        from ptdmpi.engine.engine import Engine

        self.world = world
        self.done = 0
        self.config = config_of(side, world.size)
        self.engine = Engine(self.config, axes, VOCAB_SIZE)

    def measure(self) -> dict:
        """Train for one turn, which has STEPS steps. Return the mean seconds of a step, the mean
        bytes that left a node in a step, and the last loss."""
        control = self.world.control
        control.Barrier()
        before = sent_bytes()
        begin = time.perf_counter()
        for _ in range(STEPS):
            loss = self.engine.step(self.done, [self._batch()]).loss
            self.done += 1
        self.engine.policy.settle()
        control.Barrier()
        step_s = (time.perf_counter() - begin) / STEPS
        sent = control.allreduce(sent_bytes() - before) / self.world.size / STEPS
        return {"step_s": step_s, "sent_bytes": sent, "loss": loss}

    def _batch(self):
        import torch

        from ptdmpi.model.batch import Microbatch

        generator = torch.Generator().manual_seed(self.done * self.world.size + self.world.rank)
        shape = (MODEL["seq_length"] + 1, 2)
        ids = torch.randint(VOCAB_SIZE, shape, generator=generator)
        samples = torch.arange(2) + 2 * (self.done * self.world.size + self.world.rank)
        return Microbatch.of_ids(ids, samples)


def rank(rounds: int) -> None:
    """Train with all methods in `rounds` rounds on this rank. The first rank prints the
    measurements of the rounds as JSON."""
    launch.prepare()
    from ptdmpi.comm.world import World, fail_together
    from ptdmpi.plan.layout.grid import grid_of

    world = World()
    with fail_together(world):
        import torch

        torch.set_num_threads(1)
        axes = world.split(grid_of(config_of("all_reduce", world.size)))
        turns = {side: Averaging(side, world, axes) for side in SIDES}
        sides = {side: averaging.measure for side, averaging in turns.items()}
        measured_rounds = [round_of(sides, number) for number in range(rounds + 1)]
        if world.rank == 0:
            size = turns["all_reduce"].engine.buffer.size
            counted = measured_rounds[1:]  # leave out the first round, which is a warm-up
            print(json.dumps({"nodes": world.nodes, "parameters": size, "rounds": counted}))


def measured(nodes: int, rounds: int) -> dict[str, Any]:
    """Return the output of `rank` on `nodes` nodes with one rank each. Raises NoNodes if this
    machine cannot simulate nodes."""
    with Nodes(nodes, LINK) as made:
        words = ["-m", "benchmarks.network.neighbours", "rank", str(rounds)]
        process = made.start(1, words, subprocess.PIPE)
        text, _ = process.communicate(timeout=600)
    if process.returncode:
        sys.exit(f"the ranks ended with exit code {process.returncode}")
    results: dict[str, Any] = json.loads(text.splitlines()[-1])
    return results


def row(rounds: Sequence[dict[str, Any]], side: str) -> list[str]:
    """Return a row of the table for the method `side`: its name, the seconds of a step, the
    speed-up relative to averaging over all replicas, and the bytes that leave a node in a step."""
    mine = [sides[side] for sides in rounds]
    ratios = [sides["all_reduce"]["step_s"] / sides[side]["step_s"] for sides in rounds]
    sent = statistics.median(turn["sent_bytes"] for turn in mine)
    seconds = statistics.median(turn["step_s"] for turn in mine)
    return [side, f"{seconds:.3f}", spread(ratios), f"{sent:,.0f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all methods on the nodes, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=4, help="each with one replica")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each method")
    options = parser.parse_args(arguments)
    results = measured(options.nodes, options.rounds)
    print(f"{results['nodes']} nodes, {LINK}, {results['parameters']:,} parameters in float32")
    head = ("method", "s per step", "speed-up", "bytes sent per node")
    print("\n".join(table(head, [row(results["rounds"], side) for side in SIDES])))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]))
    else:
        main()
