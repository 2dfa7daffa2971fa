"""Context parallelism trains like one rank: losses, norms and weights of the same global batches,
in every combination of the context axis with the others; and no token sees what it must not."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, ModelConfig
from ptdmpi.config.choices import CONTEXT_METHODS
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.sequence.positions import Positions
from ptdmpi.parity import probe
from tests._configs import layout, small
from tests._engines import build, from_root, microbatches, whole_weights
from tests.context._rows import BASE, LLAMA, ROWS, SIX_HEADS, context, ulysses
from tests.parallel import names, parallel

MEAN_DOCUMENT = 6


def batches_of(engine: Engine, step: int) -> list[Microbatch]:
    """The microbatches of a rank, at its positions; with documents if the data has them."""
    batches = microbatches(engine.config, step, engine.axes["data"].rank)
    if engine.config.data.document_boundaries:
        batches = [in_documents(batch) for batch in batches]
    return [batch.at(engine.context.positions) for batch in batches]


def in_documents(batch: Microbatch) -> Microbatch:
    numbers = (batch.inputs.t() % MEAN_DOCUMENT == 0).cumsum(1)
    return replace(batch, documents=Documents.of(numbers))


def trained(world: World, changes, steps: int):
    """Losses and norms of some steps on all ranks of `world`, with a last loss of a validation, and
    whole weights."""
    engine = build(world, changes)
    results = [engine.step(k, batches_of(engine, k)) for k in range(steps)]
    curve = [value for result in results for value in (result.loss, result.grad_norm)]
    validated = engine.evaluate(batches_of(engine, steps))["task"]
    model = engine.config.model
    weights = {name: moved(model, name, whole) for name, whole in whole_weights(engine).items()}
    return torch.tensor([*curve, validated.mean], dtype=torch.float64), weights


def moved(model: ModelConfig, name: str, whole: torch.Tensor) -> torch.Tensor:
    """The weights that have a gradient. A key bias adds the same number to all scores of a query,
    so its gradient is rounding alone, which Adam makes a step of."""
    if not name.endswith("attention.qkv.bias") or model.attention_softcap:
        return whole
    keys = model.kv_heads * model.head_size
    query, _, value = whole.split([len(whole) - 2 * keys, keys, keys])
    return torch.cat((query, value))


def check(comm, name: str, steps: int) -> None:
    ranks, changes = ROWS[name]
    part = World(comm).first(ranks)
    found = None if part is None else trained(part, {**BASE, **changes}, steps)
    alone = World(comm).first(1)
    axes = {key: None for key in changes if key.startswith("parallel.")}
    if alone is not None:
        curve, weights = trained(alone, {**BASE, **changes, **axes}, steps)
        torch.testing.assert_close(found[0], curve, rtol=1e-12, atol=0)
        for key, values in weights.items():
            error = (found[1][key] - values).abs().max() / values.abs().max()
            assert error < 1e-12, (key, float(error))
    from_root(comm, None)


# Of each method, and of each thing that goes with it, one.
FEW = ("c2 documents", "c2 dropout", "c2 bert", "c3", "t2 c2 sequence", "c2 p2 zero bubble")
FEW += ("c2 d2 zero 3", "ulysses c2 documents, window", "ulysses c2 d2 zero 3")
FEW += ("ring c2 documents, window", "ring c2 d2 zero 3")


@pytest.mark.cases(6)
@parallel(ranks=[4])
@names(ROWS, short=FEW)
def test_parity_with_one_rank(comm, name):
    check(comm, name, 3)


@parallel(ranks=[4])
@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_parity_after_twenty_steps(comm, name):
    check(comm, name, 20)


BITS = {"c2 d2": layout(d=2), "c2 t2": layout(t=2), "c2 p2": layout(p=2)}
NAMED = ["c2 d2", pytest.param("c2 t2", marks=pytest.mark.long), "c2 p2"]


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize("name", NAMED)
def test_shards_of_the_state_do_not_change_the_bits(comm, name):
    """ZeRO 1 sums over the same ranks in the same order as ZeRO 0."""
    changes = {**BASE, **BITS[name], "parallel.context": 2}
    plain, weights = trained(World(comm), changes, 3)
    sharded, same = trained(World(comm), {**changes, "parallel.zero": 1}, 3)
    assert torch.equal(plain, sharded)
    assert all(torch.equal(same[key], values) for key, values in weights.items())


# Rounding of half types moves a loss of about 4.6 nats by less than this, relative.
HALF_BARS = {"bf16": 2e-3, "fp16": 5e-4, "fp8": 5e-3}


@pytest.mark.cases(3)
@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("compute", HALF_BARS)
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_half_types_are_within_their_rounding(comm, method, compute, widens):
    """Multiplied as by a processor with units for them, and in float32."""
    changes = {**BASE, **LLAMA, "precision.compute": compute}
    axis = context(method, comm.size, {"parallel.zero": 3})
    with patch.object(Kernels, "widens", lambda kernels, device, dtype: widens):
        found, _ = trained(World(comm), {**changes, **axis}, 3)
        alone = World(comm).first(1)
        if alone is not None:
            curve, _ = trained(alone, changes, 3)
            losses = [0, 2, 4, 6]
            assert (found / curve - 1).abs()[losses].max() < HALF_BARS[compute]
    from_root(comm, None)


RIGHT_AT = Microbatch.at
RIGHT_COUNTS = Engine._counts


def shifted_after_the_cut(batch: Microbatch, positions: Positions) -> Microbatch:
    here = RIGHT_AT(batch, positions)
    return replace(here, labels=here.inputs.roll(-1, 0))


def without_documents(batch: Microbatch, positions: Positions) -> Microbatch:
    return replace(RIGHT_AT(batch, positions), documents=None)


def counts_of_one_rank(engine: Engine, batches: list[Microbatch]) -> dict[str, float]:
    return {name: n / engine.context.size for name, n in RIGHT_COUNTS(engine, batches).items()}


FAULTS = {
    "labels are shifted after the cut": (Microbatch, "at", shifted_after_the_cut),
    "documents see each other": (Microbatch, "at", without_documents),
    "losses are scaled by c": (Engine, "_counts", counts_of_one_rank),
}


@parallel(ranks=[2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(comm, name):
    changes = {**BASE, **ROWS["c2 documents"][1]}
    world = World(comm)
    right, _ = trained(world, changes, 2)
    with patch.object(*FAULTS[name]):
        wrong, _ = trained(world, changes, 2)
    assert (wrong / right - 1).abs().max() > 1e-6


def probed_batch(engine: Engine, in_several: bool) -> Microbatch:
    """One sample, in two documents or in one."""
    batch = microbatches(engine.config, 0, 0, masked=False)[0]
    numbers = torch.tensor([[0] * 5 + [1] * 7] if in_several else [[0] * 12])
    return replace(batch, documents=Documents.of(numbers) if in_several else None)


PROBED = {**BASE, **LLAMA, "batch.micro_size": 1, "model.seq_length": 12}


@parallel(ranks=[1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("in_several", [False, True])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_a_perturbed_token_changes_the_losses_that_see_it(comm, method, in_several):
    """Its own as a label, and those from it to the end of its document, and no other."""
    axis = {"parallel.context": comm.size, "parallel.context_method": method}
    engine = build(World(comm), {**PROBED, **SIX_HEADS, **axis})
    batch = probed_batch(engine, in_several)
    for token, end in ((1, 5), (4, 5), (5, 12), (8, 12)):
        expected = list(range(token - 1, end if in_several else 12))
        assert probe.seen_by(batch, token) == expected
    assert probe.faults(engine, batch, (1, 4, 5, 8)) == []


@parallel(ranks=[2])
@pytest.mark.parametrize("name", ["labels are shifted after the cut", "documents see each other"])
def test_the_probe_finds_a_planted_fault(comm, name):
    engine = build(World(comm), {**PROBED, "parallel.context": 2})
    batch = probed_batch(engine, in_several=True)
    with patch.object(*FAULTS[name]):
        assert probe.faults(engine, batch, (1, 3, 5, 9))  # 3 and 9 begin slices


@parallel(ranks=[1, pytest.param(4, marks=pytest.mark.long)])
def test_probes_of_doctor_are_green(comm):
    wanted = probe.cases(comm.size)
    rows = probe.run(World(comm), wanted, wire=wire_named())
    assert [row.faults for row in rows] == [[] for _ in wanted if comm.rank == 0]


@parallel(ranks=[2])
def test_a_rank_that_was_given_whole_sequences_says_so(comm):
    engine = build(World(comm), {**BASE, "parallel.context": 2})
    with pytest.raises(ValueError, match="inputs must have 12 positions"):
        engine.step(0, microbatches(engine.config, 0, 0))


REFUSED = {
    "length": ({"model.seq_length": 22}, "2 \\* parallel.context = 4 does not divide"),
    "more ranks than positions": (
        {"parallel.context": 4, "model.seq_length": 2},
        "= 8 does not divide model.seq_length = 2; legal nearby: seq_length 8",
    ),
    "sequence": (
        {**layout(t=2), "parallel.sequence_parallel": True, "model.seq_length": 20},
        "2 \\* parallel.context \\* tensor = 8 does not divide",
    ),
    "tree": ({"run.reproducible": True}, "run.reproducible = true sums"),
    "graph": ({"run.compile": True}, "compiles only layers that send no messages"),
    "ring": ({"data_parallel.method": "ring", **layout(d=2)}, "only over the data axis"),
    "noise": (
        {"log.gradient_noise_every_steps": 2, **layout(d=2)},
        "gradient_noise_every_steps = 0",
    ),
    "heads": (
        {**ulysses(4), "model.heads": 6, "model.hidden": 48, "model.kv_heads": 2},
        "context = 4 does not divide the 6 heads of a tensor rank; legal nearby: context 2 or 3 or",
    ),
    "heads of a tensor rank": (
        {**layout(t=2), **ulysses(2), "model.heads": 2},
        "context = 2 does not divide the 1 head of a tensor rank; legal nearby: context 1, or",
    ),
    "ranks": ({"parallel.tensor": 3, "model.heads": 3}, "tensor \\* context \\* pipeline"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_one_line(name):
    changes, line = REFUSED[name]
    with pytest.raises(InputError, match=line):
        small({"model.seq_length": 24, "parallel.context": 2, **changes}, 4)
