"""Training with ZB-H1 and ZB-V, whose weight gradients are put off: the bits of 1F1B."""

import time

import pytest
import torch

from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.engine.runner import Runner
from ptdmpi.model.stage import Boundary
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.program import programs
from ptdmpi.plan.schedule.simulate import Costs, simulate
from ptdmpi.watch.stopwatch import Place, Stopwatch
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, microbatches, whole_weights
from tests.parallel import parallel

SIZES = {"model.layers": 8, "model.hidden": 16, "model.seq_length": 8, "batch.micro_size": 1}
DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
STEPS = 2
OP_S = 0.03
BERT = {"model.kind": "bert"}
LLAMA = {"model.kind": "llama", "model.kv_heads": 2, "model.tie_embeddings": True}


def trained(comm, schedule: str, tensor: int, **changes) -> tuple:
    """(losses and norms, parameters, kinds of spans) after `STEPS` steps."""
    virtual = 2 if schedule == "zb-v" else 1
    sizes = layout(t=tensor, p=comm.size // tensor, v=virtual)
    config = small({**SIZES, **changes, **sizes, "parallel.schedule": schedule}, comm.size)
    engine = Engine(config, World(comm).split(grid_of(config)), VOCAB_SIZE)
    results = [engine.step(k, microbatches(config, k, 0)) for k in range(STEPS)]
    for stage in engine.stages.values():
        assert stage.in_flight == 0 and not stage._put_off
    told = [(result.loss, result.grad_norm, result.loss_scale) for result in results]
    return told, whole_weights(engine), {span.kind for span in results[-1].spans}


def check(comm, tensor: int = 1, **changes) -> None:
    expected = trained(comm, "1f1b", tensor, **changes)
    for schedule in ("zb-h1", "zb-v"):
        told, weights, spans = trained(comm, schedule, tensor, **changes)
        assert told == expected[0]
        assert weights.keys() == expected[1].keys()
        for name, values in weights.items():
            assert torch.equal(values, expected[1][name]), name
        assert {"inputs", "weights"} <= spans and "backward" not in spans


@parallel(ranks=[1, 2, 4], limit_s=120)
def test_same_bits_as_1f1b(comm):
    """With a tied table, which in a V stands on one rank, and dropout."""
    check(comm, **DROPOUT)


@parallel(ranks=[2])
@pytest.mark.parametrize(
    "changes",
    [
        {"recompute.mode": "full"} | DROPOUT,
        {"recompute.mode": "selective", "precision.compute": "bf16"},
        {"precision.compute": "fp16"} | LLAMA,
        {"precision.compute": "fp64"} | BERT,
        {"run.reproducible": True},
    ],
)
def test_same_bits_in_other_settings(comm, changes):
    check(comm, **changes)


@parallel(ranks=[2, 4], limit_s=120)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_same_bits_with_a_tensor_axis(comm, sequence_parallel):
    changes = {"parallel.sequence_parallel": sequence_parallel, "recompute.mode": "full"}
    check(comm, tensor=2, **changes, **DROPOUT)


class Sleeper:
    """A stage whose ops sleep."""

    in_flight = 0

    def __init__(self, number: int, stages: int) -> None:
        self.number, self.stages = number, stages
        self.boundary = Boundary((4, 1, 8), TensorAxis(OneRank()), False)

    def forward_microbatch(self, microbatch, x):
        time.sleep(OP_S)
        return None if self.number == self.stages - 1 else torch.zeros(4, 1, 8)

    def input_microbatch(self, microbatch, dy):
        time.sleep(OP_S)
        return torch.zeros(4, 1, 8) if self.number else None

    def weight_microbatch(self, microbatch, nothing):
        time.sleep(OP_S)


@pytest.mark.long
@parallel(ranks=[2, 4], limit_s=120)
def test_stages_that_sleep_take_at_least_what_is_simulated(comm):
    """How much longer than the simulation depends on the machine: it is printed, not judged."""
    for kind, virtual in (("zb-h1", 1), ("zb-v", 2)):
        schedule = build(kind, comm.size, virtual, 8)
        config = small({**SIZES, **layout(p=comm.size)}, comm.size)
        axes = World(comm).split(grid_of(config))
        own = schedule.stages_of(comm.rank)
        stages = {number: Sleeper(number, schedule.stages) for number in own}
        runner = Runner(stages, axes["pipeline"], torch.float32, torch.device("cpu"))
        program = programs(schedule)[comm.rank]
        comm.Barrier()
        began_s = time.monotonic()
        runner.run(schedule, program, Stopwatch(comm.rank, Place(), axes.clock))
        comm.Barrier()
        taken_s = time.monotonic() - began_s
        foreseen_s = simulate(schedule, Costs(OP_S, 2 * OP_S)).makespan_s
        assert taken_s >= foreseen_s
        if comm.rank == 0:
            print(f"{kind}, p={comm.size}: {taken_s:.3f} s, simulated {foreseen_s:.3f} s")
