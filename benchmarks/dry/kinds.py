"""Counts of launches, waits, bytes, FLOPs and memory in one training step on the null GPU, for
every kind of training that the tests run on a simulated device. Some kinds are counted again with
compiled layers and with kernels in Triton, which the simulated device does not have."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.dry.bounds import CUDNN, PEAK, PLANNED_PEAK
from benchmarks.dry.build import FOLDER
from benchmarks.dry.steps import (
    DEVICE,
    Counts,
    begin,
    counted,
    offered_attention,
    planned_bytes,
)
from benchmarks.gpu.timing import Numbers, Row
from benchmarks.gpu.training import drawn_there, engine_on
from ptdmpi.config import Config, resolve
from ptdmpi.engine.data_parallel.compressed import Compressed
from ptdmpi.model.batch import Placing
from ptdmpi.model.kernels.agreement import DeviceChoice
from ptdmpi.model.kernels.fused import KINDS
from tests._configs import small, tree
from tests._engines import VOCAB_SIZE, microbatches
from tests.context.test_parity import in_documents
from tests.device import test_engine, test_kinds

# a model with large tensors, whose sizes hardly change when the allocator rounds them up
LARGE = {
    "model.layers": 4,
    "model.hidden": 1024,
    "model.heads": 8,
    "model.seq_length": 1024,
    "batch.micro_size": 4,
}
LARGE_VOCAB = 32000
_overflows = Compressed._overflows
COMPILED = ("gpt bf16", "llama bf16")  # kinds that are also counted with compiled layers
BY_TRITON = ("gpt bf16", "llama bf16", "dropout")  # kinds that are also counted in Triton
DOCUMENTS = {"data.document_boundaries": True, "precision.compute": "bf16"}
OFFLOADED = test_kinds.TWO | {"run.dir": str(FOLDER / "run")}
# kinds of training that are counted on two ranks in addition to the kinds in the tests' tables
MORE_OF_TWO = {
    "offload": OFFLOADED | {"parallel.offload": "optimizer"},
    "offload to disk": OFFLOADED | {"parallel.offload": "disk"},
    "consensus": test_kinds.CONSENSUS,
}


def of_step(config: Config, vocab_size: int, triton: Sequence[str] = ()) -> Counts:
    """Run a training step twice on the null GPU of this rank, and return the counts (launches,
    bytes, memory, ...) of the second run (see `counted`). `triton` has the kinds of kernels that
    are computed in Triton."""
    begin()
    with drawn_there():
        engine = engine_on(config, vocab_size, DEVICE, wire="mpi")
    engine.compute_by(DeviceChoice(triton=tuple(triton)))
    placing = Placing(DEVICE)
    parts = microbatches(config, 0, engine.axes["data"].rank, vocab_size=vocab_size)
    if config.data.document_boundaries:
        parts = [in_documents(part) for part in parts]
    steps = itertools.count()
    with mock.patch.object(Compressed, "_overflows", _asks_only), offered_attention():
        counts = counted(
            lambda: engine.step(next(steps), placing.place(parts)),
            by_operator=not (config.run.compile is True or triton),
        )
    # A data-parallel method may still receive messages after a step. Wait for these messages: MPI
    # writes them into the memory of this engine, which is freed before the next row is counted.
    engine.policy.settle()
    return counts


def _asks_only(method: Compressed, gradients: Tensor) -> bool:
    """Compute whether `gradients` overflow, so that this work is counted, but return False. A null
    GPU computes nothing, so the computed answer is arbitrary, and could make the engine skip the
    step."""
    _overflows(method, gradients)
    return False


def alone(changes: Mapping[str, Any], triton: Sequence[str] = ()) -> Numbers:
    """Run a step of one kind of training on one rank, and return its counts (launches, bytes,
    memory, ...) as a row of the table. `changes` are the keys of the configuration in which this
    kind differs from the default model, and `triton` has the kinds of kernels that are computed in
    Triton. If layers are compiled, or computed in Triton, the row has no bytes and FLOPs, which
    cannot be counted."""
    config = resolve(tree(LARGE | changes), 1)
    counts = of_step(config, LARGE_VOCAB, triton)
    planned = planned_bytes(config, LARGE_VOCAB, triton)
    of_operators = {
        "GB moved": counts.moved_bytes / 1e9,
        "GB outside of products": counts.other_bytes / 1e9,
    }
    if not config.data.document_boundaries:  # the FLOPs depend on the lengths of documents
        of_operators["TFLOP"] = counts.flops / 1e12
    return {
        "launches": round(counts.launches),
        CUDNN: round(counts.cudnn),
        "syncs": round(counts.syncs),
        **(of_operators if not (config.run.compile is True or triton) else {}),
        PEAK: counts.peak_bytes / 1e9,
        PLANNED_PEAK: planned / 1e9,
        "peak / planned": counts.peak_bytes / planned,
    }


def of_two(changes: Mapping[str, Any]) -> Numbers:
    """Run a step of one kind of training on two ranks, and return its counts (launches, bytes,
    memory, ...) as a row of the table. The model is the small model of the tests, because messages
    between ranks are really sent, which takes time. `changes` are the keys of the configuration in
    which this kind differs from the default model."""
    counts = of_step(small(changes, 2), VOCAB_SIZE)
    return {"launches": round(counts.launches), "syncs": round(counts.syncs)}


def rows() -> Iterator[Row]:
    """Yield, for each kind of training that needs one rank, its name and a function that returns
    its row of counts."""
    kinds = test_engine.KINDS | test_kinds.KINDS | {"documents": DOCUMENTS}
    for name, changes in kinds.items():
        yield name, partial(alone, changes)
    for name in COMPILED:
        yield f"{name}, compiled", partial(alone, kinds[name] | {"run.compile": True})
    for name in BY_TRITON:
        yield f"{name}, by Triton", partial(alone, kinds[name], KINDS)


def rows_of_two() -> Iterator[Row]:
    """Yield, for each kind of training that needs two ranks, its name and a function that returns
    its row of counts. All ranks call this function."""
    layouts = test_engine.LAYOUTS | test_kinds.LAYOUTS | MORE_OF_TWO | test_kinds.CODES
    for name, changes in layouts.items():
        yield name, partial(of_two, changes)
