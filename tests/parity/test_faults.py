"""Faults put in on purpose: each turns a row red that is not red without it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from torch import Tensor

from ptdmpi.comm.communicator import DONE, Handle
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.engine.data_parallel.reduce import AllReduce, Sharded
from ptdmpi.engine.gradients import PartialSum, TiedTable
from ptdmpi.engine.runner import Runner
from ptdmpi.model.output import heads
from ptdmpi.model.output.positions import select_positions
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sharded import GatheredWeights, ReducedGradients, Walk
from ptdmpi.model.stage import Stage
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.parity import suite
from ptdmpi.parity.layouts import GLOBAL_SIZE, Case, ComparedLayout, ComparedModel
from ptdmpi.parity.suite import Comparison
from ptdmpi.plan.schedule import orders as schedules
from ptdmpi.plan.schedule.ops import Op
from tests.parallel import parallel

LONG = pytest.mark.long
STEPS = 2
MODEL = ComparedModel(layers=4, dropout=True)  # tied, masked, a vocabulary that 2 does not divide
PIPELINE = ComparedLayout(pipeline=2, data=2, schedule="1f1b", micro_size=2)
CHUNKS = ComparedLayout(tensor=2, pipeline=2, virtual=2, schedule="interleaved", micro_size=4)
SEQUENCE = ComparedLayout(tensor=2, data=2, sequence_parallel=True, micro_size=4)
NO_SUM = ComparedLayout(tensor=2, pipeline=2, micro_size=4)
GROUPS = ComparedLayout(data=4, micro_size=2, zero=2, shard_group=2)
GATHERED = ComparedLayout(tensor=2, data=2, micro_size=4, zero=3)


def red(comm, layout: ComparedLayout, model: ComparedModel = MODEL, wire: str = "mpi") -> list[str]:
    """The broken bars of one row; on every rank."""
    case = Case(layout, model)
    comparison = Comparison(suite.COVERING, case, replace(case, layout=layout.base))
    rows = suite.run(World(comm), [comparison], STEPS, wire=wire_named(wire))
    assert all((row.bits == {}) == (wire == "torch") for row in rows)  # it promises none
    return comm.bcast(rows[0].red() if rows else None, root=0)


@pytest.mark.long
@parallel(ranks=[4])
@pytest.mark.parametrize(
    "layout",
    [
        CHUNKS,
        *(
            pytest.param(layout, marks=LONG)
            for layout in (GATHERED, PIPELINE, SEQUENCE, NO_SUM, GROUPS)
        ),
    ],
)
def test_no_row_is_red_without_a_fault(comm, layout):
    assert red(comm, layout) == []


@LONG
@parallel(ranks=[4])
@pytest.mark.parametrize("layout", [PIPELINE, SEQUENCE, GATHERED])
def test_no_row_is_red_on_torchs_own_groups(comm, layout):
    """Over gloo: other sums, the same training within the bars."""
    assert red(comm, layout, wire="torch") == []


@pytest.mark.long
@parallel(ranks=[4])
def test_no_row_of_masked_models_and_documents_is_red_without_a_fault(comm):
    model = replace(MODEL, kind="bert", documents=True)
    assert red(comm, replace(CHUNKS, sequence_parallel=True, recompute="full"), model) == []


@contextlib.contextmanager
def forgotten_gather_of_masked_positions() -> Iterator[None]:
    """Every tensor rank takes its own positions for the masked ones."""

    def wrong(x, positions, axis):
        return select_positions(x, positions % len(x), TensorAxis(axis.comm))

    with patch.object(heads, "select_positions", wrong):
        yield


@pytest.mark.long
@parallel(ranks=[4])
def test_fault_of_masked_models_turns_a_row_red(comm):
    with forgotten_gather_of_masked_positions():
        faults = red(comm, SEQUENCE, replace(MODEL, kind="bert", documents=True))
    assert any(line.startswith("fp64 loss") for line in faults), faults


@contextlib.contextmanager
def forgotten_tensor_all_reduce() -> Iterator[None]:
    def alone(axis: TensorAxis, partial: Tensor) -> tuple[Tensor, Handle]:
        return partial.contiguous(), DONE

    with patch.object(TensorAxis, "reduce_begin", alone):
        yield


@contextlib.contextmanager
def forgotten_tensor_sum_of_gradients() -> Iterator[None]:
    """Fault: parameters of which each rank sees its positions only are not summed."""
    with patch.object(PartialSum, "reduce", lambda step: None):
        yield


@contextlib.contextmanager
def forgotten_data_all_reduce() -> Iterator[None]:
    with patch.object(AllReduce, "reduce", lambda policy: None):
        yield


@contextlib.contextmanager
def mean_of_means() -> Iterator[None]:
    """Each microbatch's mean over its own tokens, averaged over the microbatches."""
    right = Stage.backward_microbatch

    def wrong(stage, microbatch, dy):
        weights = microbatch.batch.weights
        microbatches = GLOBAL_SIZE // weights.shape[1]
        microbatch.scale = 1.0 / (float(weights.sum()) * microbatches)
        return right(stage, microbatch, dy)

    with patch.object(Stage, "backward_microbatch", wrong):
        yield


@contextlib.contextmanager
def microbatches_off_by_one() -> Iterator[None]:
    """A schedule that begins at microbatch 1 and ends with 0: the right sum in another order."""
    right = dict(schedules.KINDS)

    def shifted(kind: str):
        def generate(rank: int, chunks: Sequence[int], pipeline: int, microbatches: int):
            for op in right[kind].generate(rank, chunks, pipeline, microbatches):
                yield Op(op.kind, op.stage, (op.microbatch + 1) % microbatches)

        return schedules.ScheduleKind(generate)

    with patch.dict(
        schedules.KINDS, {"1f1b": shifted("1f1b"), "interleaved": shifted("interleaved")}
    ):
        yield


@contextlib.contextmanager
def labels_off_by_one() -> Iterator[None]:
    """The last stage takes the labels of the next microbatch."""
    right = Runner.run

    def wrong(runner, schedule, program, passes, watch):
        if any(stage.last and not stage.first for stage in runner.stages.values()):
            batches = [one.batch for one in passes]
            for one, other in zip(passes, [*batches[1:], batches[0]], strict=True):
                one.batch = other
        right(runner, schedule, program, passes, watch)

    with patch.object(Runner, "run", wrong):
        yield


@contextlib.contextmanager
def dropped_tied_gradient() -> Iterator[None]:
    with patch.object(TiedTable, "reduce", lambda step: None):
        yield


@contextlib.contextmanager
def tied_gradient_counted_twice() -> Iterator[None]:
    right = TiedTable.reduce

    def wrong(step):
        right(step)
        right(step)

    with patch.object(TiedTable, "reduce", wrong):
        yield


@contextlib.contextmanager
def dropout_by_local_position() -> Iterator[None]:
    """Every tensor rank draws the mask of the first positions."""
    right = RandomStream.at

    def wrong(stream, *place, positions=None, first_head=0):
        return right(stream, *place, first_head=first_head)

    with patch.object(RandomStream, "at", wrong):
        yield


@contextlib.contextmanager
def forgotten_sum_over_groups() -> Iterator[None]:
    """Each group with a copy uses its own gradients; within a group the walk sums them."""
    with patch.object(Sharded, "reduce", lambda policy: None):
        yield


@contextlib.contextmanager
def forgotten_sum_of_the_second_table() -> Iterator[None]:
    right = ReducedGradients.finish

    def wrong(gradients):
        right(gradients)
        gradients.buffer.reduced[-1].zero_()

    with patch.object(ReducedGradients, "finish", wrong):
        yield


@contextlib.contextmanager
def weights_of_the_step_before() -> Iterator[None]:
    """The weights that are gathered at the end of a step are not dropped after the update."""
    with patch.object(GatheredWeights, "drop", lambda weights: None):
        yield


@contextlib.contextmanager
def shards_in_the_wrong_order() -> Iterator[None]:
    right = GatheredWeights._gather

    def wrong(weights, number):
        right(weights, number)
        flat, handle = weights._there[number]
        handle.wait()
        flat.copy_(flat.view(weights.buffer.portion.shards, -1).flip(0).flatten())

    with patch.object(GatheredWeights, "_gather", wrong):
        yield


@contextlib.contextmanager
def weights_that_are_not_there() -> Iterator[None]:
    """Nothing is gathered for the forward pass, which reads NaN."""
    with patch.object(Walk, "forward", lambda walk, place: None):
        yield


@parallel(ranks=[4])
@pytest.mark.parametrize(
    ("fault", "layout", "seen_in"),
    [
        pytest.param(forgotten_tensor_all_reduce, NO_SUM, "fp64 loss", marks=LONG),
        pytest.param(mean_of_means, PIPELINE, "fp64 gradients", marks=LONG),
        (microbatches_off_by_one, CHUNKS, "fp32 bits"),
        pytest.param(shards_in_the_wrong_order, GATHERED, "fp64 loss", marks=LONG),
        pytest.param(forgotten_tensor_sum_of_gradients, SEQUENCE, "fp64 gradients", marks=LONG),
        pytest.param(forgotten_data_all_reduce, PIPELINE, "fp64 gradients", marks=LONG),
        pytest.param(microbatches_off_by_one, PIPELINE, "fp32 bits", marks=LONG),
        pytest.param(labels_off_by_one, CHUNKS, "fp64 loss", marks=LONG),
        pytest.param(
            dropped_tied_gradient,
            CHUNKS,
            "fp64: copies of embedding.word.weight differ",
            marks=LONG,
        ),
        pytest.param(tied_gradient_counted_twice, CHUNKS, "fp64 gradients", marks=LONG),
        pytest.param(dropout_by_local_position, SEQUENCE, "fp64 loss", marks=LONG),
        pytest.param(forgotten_sum_over_groups, GROUPS, "fp64 gradients", marks=LONG),
        pytest.param(forgotten_sum_of_the_second_table, GROUPS, "fp64 gradients", marks=LONG),
        pytest.param(weights_of_the_step_before, GATHERED, "fp64 loss", marks=LONG),
        pytest.param(weights_that_are_not_there, GATHERED, "fp64 loss", marks=LONG),
    ],
)
def test_fault_turns_a_row_red(comm, fault, layout, seen_in):
    with fault():
        faults = red(comm, layout)
    assert any(line.startswith(seen_in) for line in faults), faults


@LONG
@parallel(ranks=[4])
def test_reproducible_run_has_the_bits_of_one_data_rank_and_others_have_not(comm):
    layout = replace(PIPELINE, reproducible=True)
    assert red(comm, layout) == []
    world = World(comm)
    plain = Case(PIPELINE, MODEL)
    comparison = Comparison(suite.REPRODUCIBLE, plain, Case(replace(PIPELINE.base, data=1), MODEL))
    rows = suite.run(world, [comparison], STEPS)
    if world.rank == 0:
        assert rows[0].bits["fp32"] is not None
