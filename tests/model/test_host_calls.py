"""The host's work for a layer: calls of Python functions, which bound small microbatches."""

import sys
from pathlib import Path

import pytest

import ptdmpi
from ptdmpi.comm.world import World
from ptdmpi.model.kernels.choice import BY_LIBRARY
from tests._engines import build, steps_of
from tests.parallel import parallel

SOURCE = str(Path(ptdmpi.__file__).parent)
LLAMA = {"model.kind": "llama", "model.kv_heads": 2}
# calls of this package's functions for one layer and microbatch, forward and backward
BUDGET = {"gpt": 295, "llama": 289}


def calls(comm, changes: dict) -> int:
    """Return the number of calls of this package's functions in the second step of a training."""
    engine = build(World(comm), changes)
    engine.compute_by(BY_LIBRARY)
    steps_of(engine, 1)
    count = 0

    def counts(frame, event, arg):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(SOURCE)

    sys.setprofile(counts)
    try:
        steps_of(engine, 1)
    finally:
        sys.setprofile(None)
    return count


@parallel(ranks=[1])
@pytest.mark.parametrize("kind", BUDGET)
def test_calls_of_a_layer(comm, kind):
    few, more = (
        calls(comm, (LLAMA if kind == "llama" else {}) | {"model.layers": layers})
        for layers in (2, 3)
    )
    assert (more - few) / 4 <= BUDGET[kind], (more, few)
