"""The planner's account of modules for multi-token prediction: what they keep, compute and send,
their parameters, and the memory and the messages of whole steps."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.model.batch import MicrobatchPass
from ptdmpi.model.output.losses import ahead_name
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.stage import TIED_NAME
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer.account import FusedAttention
from ptdmpi.plan.layer.ahead import modules
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.shape import parameters
from tests._configs import layout
from tests._ends import ENDS, VOCAB_SIZE, B, Ends, H, S, ends_of, positions, wrong_ends
from tests._engines import HALVES, build, microbatches
from tests._layers import random_tensor, tensor_axis
from tests._rows import LATENT, SHAPES
from tests.ahead.test_parity import LLAMA, MIXED, TIED
from tests.engine.test_traffic import closed_forms
from tests.experts.test_expert_parallel import dealt
from tests.parallel import parallel
from tests.train.test_memory import check_one

CPU = torch.device("cpu")
AHEAD = {
    "gpt": {"model.mtp_depth": 1},
    "llama": {**SHAPES["llama"], "model.mtp_depth": 2},
    "tied llama": {**SHAPES["llama"], "model.mtp_depth": 2, "model.tie_embeddings": True},
    "latent": {**LATENT, "model.mtp_depth": 1},
    "experts": {**SHAPES["experts"], "model.mtp_depth": 1},
    "dropout": {"model.mtp_depth": 1, "model.dropout": 0.1},
    "wide llama": {**SHAPES["llama"], "model.mtp_depth": 2, "model.mup_base_hidden": 8},
}


class EndsAhead(Ends):
    """The ends of a model with modules for multi-token prediction."""

    def descriptions(self) -> dict[str, tuple[Operator, ...]]:
        """Return the rows of the head, with those of the modules."""
        return {"head": modules.head(self.sizes.model, VOCAB_SIZE)}

    def run(self, end: str) -> Tensor:
        """Return the sum of all losses."""
        stage, batch = self.stage, self.batch
        whole = random_tensor("x", (S, B, H), self.sizes.precision)
        here = self.context.positions.of(whole)
        x = positions(here, self.placed.axis).clone().requires_grad_()
        losses = stage.output.losses(batch, stage.output.normalized(x), self.context)
        weights = {ahead_name(k): 0.5 for k in range(self.sizes.model.mtp_modules)}
        return MicrobatchPass(0, batch, weights=weights).take(losses)

    def given(self) -> set[int]:
        """Also return the storages of the rotary tables, and of the numbers of the samples."""
        tensors = [] if self.context.stream is None else [self.context.stream.samples]
        for step in self.stage.output.extra[0].steps:
            tensors += getattr(step.compute, "rotary", None) or ()
        return super().given() | {x.untyped_storage().data_ptr() for x in tensors}


def ends_ahead(name: str, axis: TensorAxis, precision: str = "fp32", **how) -> EndsAhead:
    """Return the ends of a model of the table, and a microbatch with tokens further ahead."""
    with mock.patch.dict(ENDS, AHEAD):
        ends = ends_of(name, axis, precision, **how)
    model = ends.sizes.model
    ends.stage.place_tables(model, CPU)
    shape = (model.mtp_modules + 1, *ends.batch.labels.shape)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB_SIZE, shape, generator=generator)
    weights = torch.ones(shape)[1:].clone()
    ahead = ends.batch.with_ahead(model.mtp_modules).ahead
    batch = replace(ends.batch, ahead=replace(ahead, ids=ids, weights=weights))
    return EndsAhead(ends.placed, ends.sizes, batch, ends.context, ends.comm)


# PyTorch's counter does not know the kernel of attention on the host
UNCOUNTED = mock.patch.object(FusedAttention, "flops", 0.0)


@pytest.mark.parametrize("name", AHEAD)
def test_modules_do_what_their_rows_say(name):
    """Kept bytes and FLOPs."""
    axis = tensor_axis(MPI.COMM_SELF, False)
    with UNCOUNTED:
        for precision in ("fp32", "bf16"):
            assert list(wrong_ends(ends_ahead(name, axis, precision))) == []


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", AHEAD)
def test_modules_do_what_their_rows_say_on_two_ranks(comm, name):
    """Kept bytes, FLOPs and messages; without sequence parallelism and with it."""
    with UNCOUNTED:
        for divides in (False, True):
            assert list(wrong_ends(ends_ahead(name, tensor_axis(comm, divides)))) == []


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", ["llama", "experts"])
def test_modules_do_what_their_rows_say_at_some_positions(comm, name):
    """A context axis cuts the sequence; the FLOPs of attention are not compared."""
    context = ContextAxis(MpiCommunicator(comm), "all_gather")
    with UNCOUNTED:
        ends = ends_ahead(name, TensorAxis(OneRank()), context=context)
        assert [text for text in wrong_ends(ends) if "FLOPs" not in text] == []


@pytest.mark.parametrize("name", AHEAD)
def test_parameters_are_those_of_the_rows(name):
    """By name, with the shared table once."""
    ends = ends_ahead(name, tensor_axis(MPI.COMM_SELF, False))
    model = ends.sizes.model
    parts = parameters.head(model, VOCAB_SIZE)
    last = f"{'head' if model.tie_embeddings else 'mtp.word'}.weight"
    said = {
        (TIED_NAME if f"{part}.{leaf}" == last else f"{part}.{leaf}"): count
        for part, row in parts.items()
        for leaf, count in zip(("weight", "bias"), row.weights(1), strict=False)
    }
    named = ends.stage.named_logical_parameters()
    at_end = [(n, w) for n, w in named if not n.startswith(("layers.", "embedding.position"))]
    found = {n.replace("router.balance", "router.bias"): w.numel() for n, w in at_end}
    assert found == said
    assert Counter(n for n, _ in at_end)[TIED_NAME] == 2
    count = sum(weight.numel() for _, weight in {n: (n, w) for n, w in named}.values())
    assert parameters.parameter_count(model, VOCAB_SIZE) == count


DIVIDED = {"parallel.sequence_parallel": True}
# every token has all experts, so that every rank sends as many rows to each rank
EVERY = {**MIXED, "model.experts_per_token": 4, "model.router_top_groups": 2}
STEPS = [
    LLAMA | layout(t=2) | DIVIDED,
    TIED | layout(p=2),
    LLAMA | layout(p=2),
    LLAMA | layout(p=2) | {"parallel.schedule": "zb-h1"},
    LLAMA | layout(d=2) | {"parallel.zero": 1},
    LLAMA | layout(d=2) | {"parallel.zero": 3, "recompute.mode": "full"},
    LLAMA | {"parallel.context": 2},
    EVERY | dealt(2, d=2),
    EVERY | dealt(2, d=2) | {"parallel.zero": 3},
    EVERY | layout(t=2) | DIVIDED,
    EVERY | layout(t=2) | DIVIDED | {"parallel.expert_tensor": 1},
    EVERY | dealt(2, d=2) | {"parallel.zero": 1, "optimizer.kind": "muon"},
]


@parallel(ranks=[2], limit_s=180.0)
def test_a_step_sends_what_is_foreseen(comm):
    """To the byte and to the message, in every group."""
    for changes in STEPS:
        engine = build(World(comm), {**changes, "precision.compute": "fp32"})
        axes, here = engine.axes, engine.context.positions
        expected = closed_forms(engine).of(axes["pipeline"].rank, axes["shards"].rank)
        batches = microbatches(engine.config, 0, axes["data"].rank)
        found = engine.step(0, [batch.at(here) for batch in batches]).traffic
        assert found.sent_bytes == expected.sent_bytes, changes
        assert found.messages == expected.messages, changes


MEMORY = [
    {**AHEAD["llama"], "precision.compute": "fp32"},
    {**AHEAD["llama"], "model.tie_embeddings": True, "recompute.mode": "full"},
    {**AHEAD["gpt"], "model.dropout": 0.1, "recompute.mode": "selective"},
    {**LATENT, "model.mtp_depth": 2},
]


@parallel(ranks=[1])
def test_the_memory_of_a_step_is_as_foreseen(comm):
    for changes in MEMORY:
        check_one(comm, changes, HALVES[0])


@pytest.mark.long
@parallel(ranks=[2])
def test_the_memory_of_two_ranks_is_as_foreseen(comm):
    for where in (layout(p=2), layout(d=2) | {"parallel.zero": 3}, layout(t=2) | DIVIDED):
        check_one(comm, AHEAD["llama"] | where, HALVES[0])
