"""Steps across a slow link: the global average beside averages with neighbours, in turn.

    python -m benchmarks.network.neighbours [--nodes 4] [--rate 100] [--delay 2000] [--rounds 5]

Every replica is a node of its own (`benchmarks.network.nodes`); the same ranks train the same GPT
by every method, a few steps of each in turn. An overlapped exchange is paid by the step after it,
so a turn has several steps and ends when nothing is under way.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.network.nodes import NodeLink, Nodes
from benchmarks.network.train import sent_bytes
from benchmarks.turns import round_of, spread
from ptdmpi.comm import launch
from ptdmpi.config import Config, Layout, synthetic_config

GOSSIP = {"method": "decentralized", "consensus_every": 0}
REMEMBERS = {"error_feedback": "mem_sgd"}
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
    "local, local_steps = 8": {"method": "local", "local_steps": 8, "consensus_every": 0},
    "top_k 1 %, mem_sgd": {"method": "compressed", "compressor": "top_k", **REMEMBERS},
    "ring, top_k 1 % (CHOCO-SGD)": {**GOSSIP, "compressor": "top_k"},
}
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "seq_length": 64}
VOCAB_SIZE = 256
STEPS = 8  # of a turn: whole periods of 2 to 8 nodes' one-peer graphs


def config_of(side: str, ranks: int) -> Config:
    return synthetic_config(
        Layout(tensor=1, pipeline=1, data=ranks, micro_size=2),
        MODEL,
        run={"steps": 10_000, "threads": 1},
        precision={"compute": "fp32"},
        data_parallel=SIDES[side],
    )


class Averaging:
    """One rank's engine of one side."""

    def __init__(self, side: str, world, axes) -> None:
        from ptdmpi.engine.engine import Engine

        self.world, self.done = world, 0
        self.config = config_of(side, world.size)
        self.engine = Engine(self.config, axes, VOCAB_SIZE)

    def measure(self) -> dict:
        """Some steps: seconds of one, bytes that left this node in one, the last loss."""
        control = self.world.control
        control.Barrier()
        before, begin = sent_bytes(), time.perf_counter()
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

        from ptdmpi.model.stage import Batch

        generator = torch.Generator().manual_seed(self.done * self.world.size + self.world.rank)
        shape = (MODEL["seq_length"] + 1, 2)
        ids = torch.randint(VOCAB_SIZE, shape, generator=generator)
        samples = torch.arange(2) + 2 * (self.done * self.world.size + self.world.rank)
        return Batch(ids[:-1].contiguous(), ids[1:].contiguous(), None, samples)


def rank(rounds: int) -> None:
    """One rank of the measurement; the first prints what was found."""
    launch.prepare()
    from ptdmpi.comm.world import World, fail_together
    from ptdmpi.plan.layout.grid import grid_of

    world = World()
    with fail_together(world):
        import torch

        torch.set_num_threads(1)
        axes = world.split(grid_of(config_of("all_reduce", world.size)))
        turns = {side: Averaging(side, world, axes) for side in SIDES}
        sides = {side: one.measure for side, one in turns.items()}
        found = [round_of(sides, number) for number in range(rounds + 1)][1:]
        if world.rank == 0:
            size = turns["all_reduce"].engine.buffer.size
            print(json.dumps({"nodes": world.nodes, "parameters": size, "rounds": found}))


def measured(nodes: int, link: NodeLink, rounds: int) -> dict:
    """What was found on so many nodes, one rank each. Raises NoNodes where there can be none."""
    with Nodes(nodes, link) as made:
        words = ["-m", "benchmarks.network.neighbours", "rank", str(rounds)]
        process = made.start(1, words, subprocess.PIPE)
        text, _ = process.communicate(timeout=600)
    if process.returncode:
        sys.exit(f"the ranks ended with exit code {process.returncode}")
    return json.loads(text.splitlines()[-1])


def row(found: dict, side: str) -> list[str]:
    """A side in numbers: s a step, times as quick as the global average, bytes from a node."""
    mine = [one[side] for one in found["rounds"]]
    ratios = [one["all_reduce"]["step_s"] / one[side]["step_s"] for one in found["rounds"]]
    sent = statistics.median(one["sent_bytes"] for one in mine)
    seconds = statistics.median(one["step_s"] for one in mine)
    return [f"{seconds:.3f}", spread(ratios), f"{sent:,.0f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s; 0: not shaped")
    parser.add_argument("--delay", type=float, default=2000.0, help="us, one way")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(arguments)
    link = NodeLink(asked.rate, asked.delay)
    found = measured(asked.nodes, link, asked.rounds)
    print(f"{found['nodes']} nodes, {link}, {found['parameters']:,} parameters in float32")
    print("| method | s a step | times as quick | bytes from a node |")
    print("|---|---|---|---|")
    for side in SIDES:
        print(f"| {side} | {' | '.join(row(found, side))} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]))
    else:
        main()
