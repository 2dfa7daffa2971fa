"""Layers as compiled graphs: one for all of a shape, with the bits of the layers themselves."""

import contextlib
from unittest import mock

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.engine.engine import Engine
from ptdmpi.model.kernels import compiler, host
from ptdmpi.model.kernels.choice import BY_LIBRARY, HostChoice, OneDnnLinears
from ptdmpi.model.transformer import Block
from ptdmpi.train.nonfinite import examine
from tests._configs import small
from tests._engines import build, microbatches, steps_of, whole_weights
from tests.device._fused import ADDED, adding
from tests.parallel import mpirun, parallel

PROCESS = "compiler"  # loading it, a backward comes before any pretended device
LLAMA = {"model.kind": "llama", "model.kv_heads": 2}
KINDS = {
    "llama bf16": LLAMA | {"precision.compute": "bf16", "model.layers": 4},
    "llama bf16, as CUDA adds": LLAMA | {"precision.compute": "bf16", "model.layers": 4},
    "gpt": {"model.layers": 4},
    "recomputed": LLAMA | {"recompute.mode": "full"},
    "selective": {"recompute.mode": "selective"},
    "sandwich": LLAMA | {"model.block_norm": "sandwich", "model.qk_norm": True},
}
SHORT = ("gpt",)


def compiled(comm, changes: dict) -> Engine:
    """With each layer as the graph that is traced, run by torch's own operations."""
    with mock.patch.object(compiler, "BACKEND", "aot_eager"):
        return build(World(comm), changes | {"run.compile": True})


@pytest.mark.cases(1)
@parallel(ranks=[1])
@pytest.mark.parametrize(
    "kind", [one if one in SHORT else pytest.param(one, marks=pytest.mark.long) for one in KINDS]
)
def test_one_graph_for_all_layers_with_their_bits(comm, kind):
    """Forward and backward, of weights whose gradients the graph adds itself, over two steps of
    four microbatches."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    with adding() if "adds" in kind else contextlib.nullcontext():
        ADDED.clear()
        expected = build(World(comm), KINDS[kind])
        known = [(one.loss, one.grad_norm) for one in steps_of(expected, 2)]
        added = list(ADDED)
        reset()
        counters.clear()
        engine = compiled(comm, KINDS[kind])
        assert [(one.loss, one.grad_norm) for one in steps_of(engine, 2)] == known
    weights = whole_weights(expected)
    for name, values in whole_weights(engine).items():
        assert torch.equal(values, weights[name]), name
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    # four matrices of each of four layers, and the head's, in two steps of four microbatches; by
    # the graph as often
    assert len(added) == (2 * 4 * (4 * 4 + 1) if "adds" in kind else 0)
    assert 2 * added == ADDED


@pytest.mark.long
@parallel(ranks=[1])
def test_what_is_not_finite_is_named_within_a_layer(comm):
    """A graph calls none of its modules; afterwards layers are compiled as before."""
    engine = compiled(comm, {"model.layers": 2})
    steps_of(engine, 1)
    weight = dict(engine.stages[0].named_logical_parameters())["layers.1.mlp.up.weight"]
    weight.data.fill_(3e38)  # finite itself, what is multiplied by it is not
    graphs = [one._compiled for one in engine.stages[0].modules() if isinstance(one, Block)]
    finding = examine(engine, 1, microbatches(engine.config, 1, 0))
    assert finding is not None and finding.what.startswith("output of layers.1.mlp"), finding
    now = [one._compiled for one in engine.stages[0].modules() if isinstance(one, Block)]
    assert now == graphs and len(graphs) == 2 and all(graphs)


@pytest.mark.long
@parallel(ranks=[1])
def test_a_graph_takes_attention_whole(comm):
    """Not in the blocks of queries that a CPU is quicker with: equal to rounding."""
    for more in ({}, {"model.sliding_window": 50}):
        changes = LLAMA | {"model.seq_length": 256} | more
        known = [one.loss for one in steps_of(build(World(comm), changes), 2)]
        engine = compiled(comm, changes)
        assert [one.loss for one in steps_of(engine, 2)] == pytest.approx(known, rel=1e-5)


@pytest.mark.long
@pytest.mark.skipif(bool(compiler.missing("cpu")), reason="no C++ compiler")
@parallel(ranks=[1], limit_s=180)
def test_the_backend_of_a_run(comm):
    """Inductor itself, which fuses and rounds less often: five steps of a GPT and a LLaMA, whatever
    this processor takes for linears."""
    choice = HostChoice(linear=OneDnnLinears(0, 0)) if host.has_fused(torch.float32) else BY_LIBRARY
    for changes, precision, near in (({}, "fp32", 1e-5), (LLAMA, "fp32", 1e-5), ({}, "bf16", 2e-3)):
        asked = changes | {"model.hidden": 64, "precision.compute": precision}
        known = build(World(comm), asked)
        engine = build(World(comm), asked | {"run.compile": True})
        for one in (known, engine):
            one.compute_by(choice)
        losses = [one.loss for one in steps_of(known, 5)]
        assert [one.loss for one in steps_of(engine, 5)] == pytest.approx(losses, rel=near)


@pytest.mark.long
@parallel(ranks=[2])
def test_two_replicas(comm):
    for changes in (LLAMA, LLAMA | {"parallel.zero": 1}, {"parallel.pipeline": 2}):
        known = [one.loss for one in steps_of(build(World(comm), changes), 2)]
        engine = compiled(comm, changes)
        assert [one.loss for one in steps_of(engine, 2)] == known


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.tensor": 2},
        {"parallel.zero": 2},
        {"parallel.schedule": "zb-h1", "parallel.pipeline": 2},
        {"model.dropout": 0.1},
        {"model.attention_softcap": 5.0},
        {"data.document_boundaries": True},
        {"adapt.method": "lora"},
    ],
)
def test_what_is_no_part_of_a_graph_is_refused(changes):
    with pytest.raises(InputError, match="= true cannot be combined with"):
        small({"run.compile": True, **changes}, 2)


@parallel(ranks=[2])
def test_a_rank_without_a_compiler(comm):
    with (
        mock.patch.object(compiler.shutil, "which", lambda name: None if comm.rank else name),
        pytest.raises(
            SharedInputError, match=r"rank 1 has no C\+\+ compiler .* run.compile = false"
        ),
    ):
        build(World(comm), {"run.compile": True})


@pytest.mark.long
def test_the_compiler_is_loaded_where_it_is_asked_for_alone():
    words = "import sys; import ptdmpi.train.loop; print('torch._dynamo' in sys.modules)"
    assert mpirun(1, ["-c", words], timeout_s=60).stdout.strip() == "False"
