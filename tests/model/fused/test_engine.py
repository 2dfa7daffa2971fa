"""Whole trainings with all kernels in Triton, by its interpreter on the host: the results of
torch's operations, and the launches and bytes of the account."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.engine.result import StepResult
from ptdmpi.model.kernels import Kernels, compute_by
from ptdmpi.model.kernels.agreement import DeviceChoice
from ptdmpi.model.kernels.fused import KINDS
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.attention.heads import SplitHeads
from ptdmpi.plan.layer.elementwise import Activate, AddResidual, Normalize
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layout.grid import grid_of
from tests._configs import layout, small
from tests._engines import microbatches, whole_weights
from tests._layers import difference, random_tensor
from tests.model.fused._interpreted import ENVIRONMENT, NEEDS_TRITON, PROCESS, counted
from tests.model.layer.test_rows import B, H, S, layer_of
from tests.parallel import parallel

__all__ = ["ENVIRONMENT", "PROCESS"]  # of the ranks that run these tests
pytestmark = NEEDS_TRITON

VOCAB_SIZE = 29
# few and short rows, each of which is a program of the interpreter
TINY = {
    "model.hidden": 16,
    "model.heads": 2,
    "model.layers": 2,
    "model.seq_length": 8,
    "batch.global_size": 2,
    "batch.micro_size": 1,
    "precision.compute": "fp32",
    "optimizer.learning_rate": 1.0,  # weights of which the update can be seen
    "optimizer.kind": "sgd",  # its update is the gradient, scaled: AdamW's is mostly its sign
}
LLAMA = {"model.kind": "llama", "model.ffn_hidden": 24}
KINDS_OF_MODELS = {
    "gpt": {"model.dropout": 0.1},
    "llama": LLAMA,
    "bert": {"model.kind": "bert", "model.sentence_order": True},  # norms after sums
    "gemma": {"model.kind": "gemma2", "model.sliding_window": 4},  # norms before and after
    "llama bf16": LLAMA | {"precision.compute": "bf16"},
    "recomputed": LLAMA | {"recompute.mode": "full"},
    # frozen norms
    "lora": LLAMA | {"adapt.method": "lora", "adapt.rank": 2, "adapt.dropout": 0.2},
}
LAYOUTS = {
    "tensor": layout(t=2) | LLAMA | {"parallel.sequence_parallel": True},
    "split backward": layout(p=2) | LLAMA | {"parallel.schedule": "zb-h1"},
    "zero": layout(d=2) | {"parallel.zero": 3, "model.norm": "layernorm"},
}
# Largest relative difference of losses and norms, and of the update of the weights
CLOSE = {"fp32": (2e-6, 1e-4), "bf16": (5e-3, 5e-2)}


def trained(comm, changes: dict, choice: DeviceChoice | None) -> tuple[StepResult, dict]:
    """Return the result of a training's first step, and its update of each whole weight."""
    config = small(TINY | changes, comm.size)
    engine = Engine(config, World(comm).split(grid_of(config)), VOCAB_SIZE)
    engine.compute_by(choice)
    rank = engine.axes["data"].rank
    batches = microbatches(config, 0, rank, vocab_size=VOCAB_SIZE)
    before = {name: values.clone() for name, values in whole_weights(engine).items()}
    result = engine.step(0, batches)
    return result, {name: values - before[name] for name, values in whole_weights(engine).items()}


def check_training(comm, changes: dict) -> None:
    with counted() as moves:
        fused, updates = trained(comm, changes, DeviceChoice(triton=KINDS))
    assert moves.launches
    assert any(update.any() for update in updates.values())
    plain, expected = trained(comm, changes, None)
    close, of_updates = CLOSE[changes.get("precision.compute", "fp32")]
    assert fused.loss == pytest.approx(plain.loss, rel=close)
    assert fused.grad_norm == pytest.approx(plain.grad_norm, rel=10 * close)
    for name, update in updates.items():
        assert difference(update, expected[name]) < of_updates, name


@pytest.mark.cases(2)
@parallel(ranks=[1])
@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
def test_models(comm, kind):
    check_training(comm, KINDS_OF_MODELS[kind])


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(comm, name):
    check_training(comm, LAYOUTS[name])


class Sums(TorchDispatchMode):
    """The number of sums of activations that torch's own operation computes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.add.Tensor and args[0].numel() >= S * B * H
        return func(*args, **(kwargs or {}))


@pytest.mark.cases(2)
@parallel(ranks=[1])
@pytest.mark.parametrize("name", ["llama", "gpt", "bert", "gemma2"])
def test_a_layer_moves_the_bytes_of_its_account(comm, name):
    """Its norms, the sums before them, gated units, GELU and rotations, without vectors, statistics
    and angles."""
    placed, sizes, context = layer_of(name, TensorAxis(MpiCommunicator(comm)), "fp32")
    software = sizes.software.model_copy(update={"triton": KINDS})
    sizes = dataclasses.replace(sizes, software=software)
    compute_by(placed.layer, Kernels(precision=placed.layer.kernels.precision, triton=KINDS))
    rows = operators(describe.layer(sizes.model, 0))
    x = random_tensor("x", (S, B, H), "fp32").requires_grad_()
    with counted() as forward, Sums() as by_torch:
        y = placed.layer(x, context)
    with counted() as backward:
        y.backward(torch.ones_like(y))
    counts, vectors = [[0, 0], [0, 0]], 4 * 2 * S * B * 4 * len(rows)
    for before, row in zip((None, *rows), rows, strict=False):
        gelu = isinstance(row, Activate) and row.bias != "none"
        if isinstance(row, Normalize) or gelu or (isinstance(row, Activate) and row.gates == 2):
            backwards = list(row.backward(sizes))
            # torch's operations add up the partial sums of the gradients of a norm's weights
            kernels = [list(row.forward(sizes)), backwards if gelu else backwards[:1]]
            if gelu:
                vectors += S * B * row.width * 4  # each row reads the bias
            if isinstance(row, Normalize) and row.follows_sum:
                assert isinstance(before, AddResidual)
                kernels[0] += before.forward(sizes)
        elif isinstance(row, SplitHeads):
            kernels = [list(row.rotations(sizes))] * 2
        else:
            continue
        for count, some in zip(counts, kernels, strict=True):
            count[0] += sum(kernel.launches for kernel in some)
            count[1] += sum(moved(kernel) for kernel in some)
    assert [forward.launches, backward.launches] == [counts[0][0], counts[1][0]]
    for moves, (_, said) in zip((forward, backward), counts, strict=True):
        assert said <= moves.bytes <= 1.15 * said + vectors
    joined = sum(isinstance(row, Normalize) and row.follows_sum for row in rows)
    sums = sum(isinstance(row, AddResidual) for row in rows)
    assert by_torch.count == sums - joined


def moved(kernel) -> float:
    """Return the bytes of a kernel of an account."""
    if hasattr(kernel, "moved_bytes"):
        return kernel.moved_bytes
    return kernel.elements * sum(kernel.element_bytes)
