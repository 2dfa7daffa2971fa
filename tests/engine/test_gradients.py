"""The gradient of the global batch: its norm, its sums, and the tied table."""

import pytest
import torch

from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.engine.data_parallel.method import Replica
from ptdmpi.engine.data_parallel.reduce import TreeSum
from ptdmpi.model.batch import MicrobatchPass
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import build as build_schedule
from tests._configs import layout
from tests._engines import build, steps_of, train, whole_gradients, whole_weights
from tests._layers import difference
from tests.parallel import parallel

TABLE = "embedding.word.weight"
NO_CLIPPING = {"optimizer.clip_norm": 0.0}


@parallel(ranks=[1])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("tied", [True, False])
def test_norm_is_that_of_torch(comm, precision, tied):
    changes = {"precision.compute": precision, "model.tie_embeddings": tied}
    engine = build(World(comm), changes | NO_CLIPPING)
    result = steps_of(engine, 2)[-1]
    gradients = whole_gradients(engine)
    weights = [torch.nn.Parameter(gradients[name]) for name in sorted(gradients)]
    for weight in weights:
        weight.grad = weight.detach().clone()
    expected = torch.nn.utils.clip_grad_norm_(weights, 1.0)
    rounding = 1e-6 if precision == "fp32" else 1e-15  # torch adds up tensors, not their rows
    assert result.grad_norm == pytest.approx(float(expected), rel=4 * rounding)


@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_norm_counts_each_parameter_once(comm, tied, sequence_parallel):
    """To the bit over p, to rounding over t: replicas and the tied table count once."""
    changes = {"model.tie_embeddings": tied} | NO_CLIPPING
    alone = train(comm, changes, steps=1)
    for where in (layout(p=2), layout(p=3)):
        assert train(comm, changes | where, steps=1).norms == alone.norms
    form = {"parallel.sequence_parallel": sequence_parallel}
    for where in (layout(t=2, p=2), layout(t=4), layout(t=2, d=2)):
        found = train(comm, changes | where | form, steps=1)
        assert found.norms[0] == pytest.approx(alone.norms[0], rel=1e-6)
        true = torch.cat([g.flatten().double() for g in found.gradients.values()]).norm()
        assert found.norms[0] == pytest.approx(float(true), rel=1e-6)


@parallel(ranks=[1, 4], limit_s=120)
def test_gradients_do_not_depend_on_the_layout(comm):
    changes = {"precision.compute": "fp64"} | NO_CLIPPING
    wheres = [layout(t=2, p=2), layout(p=2, d=2), layout(d=4)] if comm.size == 4 else [{}]
    alone = train(comm, changes, steps=1)
    for where in wheres:
        found = train(comm, changes | where, steps=1)
        for name, gradient in found.gradients.items():
            if not name.endswith("qkv.bias"):  # the keys' part is rounding around zero
                assert difference(gradient, alone.gradients[name]) < 1e-12, name


@parallel(ranks=[1, 2])
def test_tied_table_gets_both_contributions(comm):
    """embedding + head, in this order: the bits of the untied model's two gradients, added."""
    where = layout(p=comm.size) | NO_CLIPPING
    tied = build(World(comm), where)
    untied = build(World(comm), where | {"model.tie_embeddings": False})
    if "head.weight" in untied.buffer.entries:
        table = whole_weights(tied)[TABLE]
        untied.buffer.entries["head.weight"].view(untied.buffer.masters[0]).copy_(table)
    else:
        whole_weights(tied)  # a collective
    steps_of(tied, 1)
    steps_of(untied, 1)
    both = whole_gradients(untied)
    found = whole_gradients(tied)[TABLE]  # asserts that both ends hold the same
    assert torch.equal(found, both[TABLE] + both["head.weight"])
    for engine, copies in ((tied, 0), (untied, 1)):
        every = engine.axes["pipeline"].all_gather_object(engine.reduction.counted)
        names = [name for of_rank in every for name in of_rank]
        assert len(names) == len(set(names))
        assert names.count("head.weight") == copies and names.count(TABLE) == 1


class OneStage:
    """What the tree needs of a stage: parameters with a main_grad."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(5))
        self.weight.main_grad = torch.zeros(5)

    def trained_parameters(self):
        return [("w", self.weight)]


def tree_of(leaves: list[torch.Tensor]) -> torch.Tensor:
    """The fixed binary tree, by its definition: neighbours in pairs, level by level."""
    while len(leaves) > 1:
        pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
        leaves = [sum(pair[1:], pair[0]) for pair in pairs]
    return leaves[0]


@parallel(ranks=[1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8])
def test_tree_sum_follows_the_tree(comm, microbatches):
    total = microbatches * comm.size
    generator = torch.Generator().manual_seed(total)
    leaves = [torch.randn(5, generator=generator) * 10.0 ** (i % 5) for i in range(total)]
    stage = OneStage()
    schedule = build_schedule("gpipe", 1, 1, microbatches)
    axes = {"data": MpiCommunicator(comm)}
    tree = TreeSum(Replica(None, axes, None, {0: stage}, schedule))
    for _ in range(2):  # nothing of the first step is left in the second
        for i in range(microbatches):
            stage.weight.main_grad += leaves[comm.rank * microbatches + i]
            for letter in "FB":
                tree.end(Op(letter, 0, i), MicrobatchPass(i, None))
            assert not stage.weight.main_grad.any()
        tree.reduce()
        assert torch.equal(stage.weight.main_grad, tree_of(list(leaves)))
        stage.weight.main_grad.zero_()
