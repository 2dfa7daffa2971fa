"""The time of a verification of the training state (`run.verify_every`), and of steps with and
without a verification, measured alternately.

    mpirun -n 2 python -m benchmarks.faults.corruption --rounds 10

Data ranks, which all have the same state, train a GPT on random tokens. A verification computes
hashes of the state after an update, computes them again before the next update, and compares the
hashes of all ranks. If `run.verify_every` is N, every N-th step takes this additional time.
"""

import argparse
import statistics
import time

import torch
from mpi4py import MPI

from benchmarks import turns
from ptdmpi.comm.world import World
from ptdmpi.config import Layout, synthetic_config
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.plan.layout.grid import grid_of

MODEL = {"layers": 4, "hidden": 512, "heads": 8, "seq_length": 512}
VOCAB_SIZE = 8192
MICROBATCHES, MICRO_SIZE = 4, 2


def built(ranks: int) -> Engine:
    """Return this rank's training engine. All ranks call this function."""
    layout = Layout(1, 1, ranks, micro_size=MICRO_SIZE)
    config = synthetic_config(layout, {**MODEL, "vocab_size": VOCAB_SIZE})
    size = ranks * MICROBATCHES * MICRO_SIZE
    config = config.replace("batch", global_size=size).replace("run", steps=1_000_000)
    world = World()
    return Engine(config, world.split(grid_of(config)), VOCAB_SIZE)


def batches(rank: int) -> list[Microbatch]:
    """Return the microbatches of one rank."""
    generator = torch.Generator().manual_seed(rank)
    shape = (MODEL["seq_length"] + 1, MICRO_SIZE)
    samples = torch.arange(MICRO_SIZE)
    made = []
    for _ in range(MICROBATCHES):
        ids = torch.randint(VOCAB_SIZE, shape, generator=generator)
        made.append(Microbatch.of_ids(ids, samples))
    return made


def main() -> None:
    """Do the measurement on all ranks, and print the results on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    engine = built(comm.size)
    given = batches(comm.rank)
    steps = iter(range(1_000_000))
    verifying_s: list[float] = []

    def timed(every: int) -> float:
        """Return the seconds of one training step with `run.verify_every` = `every` (0: without
        verification), measured between two barriers of all ranks."""
        engine.verification.every = every
        comm.Barrier()
        begin = time.perf_counter()
        engine.step(next(steps), given)
        comm.Barrier()
        return time.perf_counter() - begin

    def verified() -> float:
        """Return the seconds of one verification."""
        engine.verification.every = 1
        comm.Barrier()
        begin = time.perf_counter()
        engine.verification.after_update(0)
        engine.verification.before_save()
        comm.Barrier()
        return time.perf_counter() - begin

    with_s: list[float] = []
    without_s: list[float] = []
    for number in range(rounds + 1):
        done = turns.round_of({"without": lambda: timed(0), "with": lambda: timed(1)}, number)
        took_s = verified()
        if number:  # leave out the first round, which is a warm-up
            with_s.append(done["with"])
            without_s.append(done["without"])
            verifying_s.append(took_s)
    if comm.rank == 0:
        size = sum(one.values.nbytes for one in engine.state.residents())
        step_s = statistics.median(without_s)
        share = 100 * statistics.median(verifying_s) / step_s
        ratios = [a / b for a, b in zip(with_s, without_s, strict=True)]
        print(f"state of a rank: {size / 1e6:.0f} MB; step {turns.spread(without_s, ' s')}")
        print(f"a verification: {turns.spread(verifying_s, ' s')}, {share:.2f} % of a step")
        print(f"step with a verification / step without: {turns.spread(ratios)}")


if __name__ == "__main__":
    main()
