"""Data-parallel methods in matrix form: n workers simulated in numpy, and by the trainer."""

from collections.abc import Callable

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from ptdmpi.comm.world import World
from tests._engines import build, load, microbatches, steps_of
from tests._layers import assemble

Matrix = NDArray[np.float64]
STEPS = 4
RATE = 0.1
TINY = {"model.layers": 2, "model.hidden": 16, "model.heads": 2, "model.seq_length": 8}
TINY |= {"batch.micro_size": 1, "batch.global_size": 8, "run.steps": STEPS, "run.seed": 11}
SGD = {"optimizer.kind": "sgd", "optimizer.learning_rate": RATE, "optimizer.warmup_steps": 0}
SGD |= {"optimizer.weight_decay": 0.0, "optimizer.clip_norm": 0.0, "optimizer.decay": "constant"}
EXACT = {**TINY, **SGD, "precision.compute": "fp64"}


def flat(weights: dict[str, torch.Tensor]) -> Matrix:
    """Return all weights in one row, in the order of their names."""
    return torch.cat([weights[name].flatten() for name in sorted(weights)]).double().numpy()


def own_weights(engine) -> dict[str, torch.Tensor]:
    """Return a replica's weights; this rank has them whole."""
    return assemble(one for one in engine.state.pieces() if one.kind == "weights")


def simulated(comm, changes: dict, update: Callable[[Matrix, Matrix, int], Matrix]) -> Matrix:
    """Return the weights [n, parameters] after STEPS steps of the matrix form.

    Row i is worker i. A serial engine on rank i computes its gradients: those of its own samples,
    which are n times their part of the whole batch's. `update(X, gradients, step)` returns X of the
    next step, in numpy.
    """
    n = comm.size
    share = {"batch.global_size": TINY["batch.global_size"] // n, "parallel.data": 1}
    serial = {
        key: value for key, value in {**changes, **share}.items() if "data_parallel" not in key
    }
    worker = build(World(MPI.COMM_SELF), serial)
    whole = build(World(comm), {**EXACT, "parallel.data": n}).config
    names = sorted(own_weights(worker))
    x = np.stack([flat(own_weights(worker))] * n)
    for step in range(STEPS):
        mine, start = own_weights(worker), 0
        for name in names:
            size = mine[name].numel()
            mine[name].copy_(
                torch.from_numpy(x[comm.rank, start : start + size]).view_as(mine[name])
            )
            start += size
        load(worker, mine)
        batches = microbatches(whole, step, comm.rank, masked=False)
        worker.accumulate(step, batches, worker.stopwatch())
        worker.reduction.reduce()
        gradient = flat(assemble(worker.state.gradients()))
        x = update(x, np.stack(comm.allgather(gradient)), step)
    return x


def trained(comm, changes: dict) -> Matrix:
    """Return the weights [n, parameters] of all replicas after STEPS steps of the trainer."""
    engine = build(World(comm), {**changes, "parallel.data": comm.size})
    steps_of(engine, STEPS, masked=False)
    return np.stack(comm.allgather(flat(own_weights(engine))))
