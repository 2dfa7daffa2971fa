"""Delayed scales of products in 8-bit floating point: codes are those of a reference in numpy, to
the bit; the scales follow from the steps before, in every layout and after a resume."""

import functools
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch._subclasses.fake_tensor import FakeTensorMode

from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.kernels import Kernels, host
from ptdmpi.model.kernels.delayed import DelayedKernels
from ptdmpi.model.low_bit.delayed import (
    HISTORY,
    OPERANDS,
    DelayedScales,
    chosen,
    decoded,
    encoded,
    extended,
)
from tests._configs import layout, small
from tests._engines import (
    assert_same_bits,
    build,
    course,
    greatest_difference,
    microbatches,
    steps_of,
    train,
    whole_weights,
)
from tests.float8.test_codes import E4M3, E5M2, FORMATS, exponent, matrix, nearest
from tests.float8.test_training import FLOAT8, NEAR
from tests.parallel import parallel

DELAYED = FLOAT8 | {"precision.fp8": "delayed", "optimizer.learning_rate": 1e-3}
PARTS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
EXPONENTS = {"input": 3, "weight": -2, "gradient": 9}
LONG = functools.partial(pytest.param, marks=pytest.mark.long)


def reference(x: torch.Tensor, k: int, kind: torch.dtype) -> np.ndarray:
    """Return the values of a tensor after rounding with the scale 2^-k."""
    most = FORMATS[kind][3]
    return nearest((x.double().numpy() * 2.0**k).clip(-most, most), kind) / 2.0**k


def rounded(x: torch.Tensor, k: int, kind: torch.dtype) -> torch.Tensor:
    """Return the values of the codes of a tensor."""
    return decoded(encoded(x, k, kind, x.abs().max()), k, x.dtype)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("k", [-20, -3, 0, 7, 100])
def test_codes_are_those_of_the_definition(kind, k):
    """Also where numbers are limited, and where small ones become 0."""
    x = matrix(130, 128)
    assert np.array_equal(rounded(x, k, kind).double().numpy(), reference(x, k, kind))
    assert encoded(x, k, kind, x.abs().max()).dtype == kind


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_that_are_not_finite_are_not_lost(kind):
    for bad in (math.inf, -math.inf, math.nan):
        x = matrix(128, 256)
        x[3, 7] = bad
        assert not rounded(x, 4, kind).isfinite().any()


def kernels_with(scales: DelayedScales, keeps_codes: bool) -> DelayedKernels:
    """Return the kernels of a linear."""
    plain = Kernels(precision=PRECISIONS["fp8"])
    return DelayedKernels(plain, scales, keeps_codes=keeps_codes)


@pytest.mark.parametrize("keeps_codes", [True, False])
@pytest.mark.parametrize("exponents", [EXPONENTS, {}], ids=["known", "first step"])
def test_each_product_uses_the_operands_of_the_definition(keeps_codes, exponents):
    """And the greatest magnitude of each operand is seen, over several microbatches."""
    x, weight, dy = matrix(192, 256), matrix(384, 256, "weight"), matrix(192, 384, "gradient")
    given, scales = [], DelayedScales()
    scales.begin(exponents)
    kernels = kernels_with(scales, keeps_codes)

    def taken(self, *operands):
        given.append(operands)

    with (
        mock.patch.object(Kernels, "linear", taken),
        mock.patch.object(Kernels, "input_gradient", taken),
        mock.patch.object(
            Kernels, "add_weight_gradient", lambda self, *rest: taken(self, *rest[1:])
        ),
    ):
        for factor in (0.5, 1.0):
            given.clear()
            entered, kept = kernels.entering(factor * x.view(2, 96, 256))
            kernels.linear(entered, weight)
            kernels.input_gradient(factor * dy, weight)
            again = kernels.entered(kept, torch.bfloat16)
            kernels.add_weight_gradient(torch.zeros(384, 256), factor * dy, again)
    values = reference(x, exponents.get("input", 0), E4M3)
    weights, gradients = weight.double().numpy(), dy.double().numpy()
    if exponents:
        weights = reference(weight, exponents["weight"], E4M3)
        gradients = reference(dy, exponents["gradient"], E5M2)
    expected = [(values, weights), (gradients, weights), (gradients, values)]
    for operands, right in zip(given, expected, strict=True):
        for operand, value in zip(operands, right, strict=False):  # after them comes the bias
            assert np.array_equal(operand.double().numpy().reshape(value.shape), value)
    assert [tensor.dtype for tensor in kept] == [E4M3 if keeps_codes else torch.bfloat16]
    seen = {name: float(greatest) for name, greatest in scales.seen.items()}
    expected = {"input": x, "weight": weight, "gradient": dy}
    assert seen == {name: float(value.abs().max()) for name, value in expected.items()}


def products(kernels: DelayedKernels, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor):
    """Return y = x W^T + b, dx = dy W and dW = dy^T x, in the order of a linear."""
    bias = torch.zeros(len(weight), dtype=x.dtype, device=x.device)
    entered, kept = kernels.entering(x)
    y = kernels.linear(entered, weight, bias)
    dx = kernels.input_gradient(dy, weight)
    total = torch.zeros(weight.shape, device=x.device)
    kernels.add_weight_gradient(total, dy, kernels.entered(kept, x.dtype))
    return y, dx, total


def test_the_call_of_a_gpu_multiplies_the_same_numbers():
    """PyTorch has the call on CPUs, too. Only the order of the sums differs."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"x": (3, 16, 64), "weight": (96, 64), "dy": (3, 16, 96)}
    given = {name: torch.randn(s, generator=draw).bfloat16() for name, s in shapes.items()}
    scales = DelayedScales()
    scales.begin({"input": 6, "weight": 5, "gradient": 10})
    kernels = kernels_with(scales, keeps_codes=True)
    expected = products(kernels, **given)
    with (
        mock.patch.object(host, "multiplies_codes", lambda device: True),
        mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as call,
    ):
        found = products(kernels, **given)
    assert call.call_count == 3
    for values, right in zip(found, expected, strict=True):
        assert values.dtype == right.dtype and values.shape == right.shape
        assert (values - right).abs().max() <= 2**-7 * right.abs().max()


def on_a_gpu(value: object) -> object:
    """Return a tensor without values on a GPU, of the same type, shape and strides."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


@pytest.mark.long
def test_the_call_of_a_gpu_obeys_its_rules():
    """The checks of PyTorch's meta kernel for CUDA: types, layouts and shapes, without a GPU. Sizes
    that are no multiples of 16 are multiplied as bfloat16."""
    scales = DelayedScales()
    scales.begin(EXPONENTS)
    kernels = kernels_with(scales, keeps_codes=True)
    for rows, count in ((16, 3), (15, 2)):  # positions are summed over in dW alone
        given = {"x": (rows, 1, 64), "weight": (96, 64), "dy": (rows, 1, 96)}
        operands = {name: torch.ones(shape).bfloat16() for name, shape in given.items()}
        with (
            mock.patch.object(host, "multiplies_codes", lambda device: True),
            mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as call,
        ):
            products(kernels, **operands)
        assert call.call_count == count
        with FakeTensorMode():
            for made in call.call_args_list:
                given = [on_a_gpu(value) for value in made.args]
                named = {name: on_a_gpu(value) for name, value in made.kwargs.items()}
                torch._scaled_mm(*given, **named)
                wrong = torch.empty(given[1].shape, dtype=given[1].dtype, device="cuda")
                with pytest.raises(RuntimeError, match="mat2 must be col_major"):
                    torch._scaled_mm(given[0], wrong, *given[2:], **named)


def test_the_least_exponent_of_the_last_steps_is_chosen():
    history: tuple[int, ...] = ()
    for k in [-3, *range(20)]:
        history = extended(history, k)
    assert history == tuple(range(20 - HISTORY, 20)) and chosen(history) == 4
    # a step in which all numbers are zero says nothing about the scale
    assert extended(history, exponent(0.0, E4M3)) == history


def exponents_of(engine: Engine) -> dict[str, tuple[int, ...]]:
    return dict(engine.state.counters.exponents)


def make_the_last_rank_see_most(engine: Engine, axis: str, here: list[Microbatch]) -> None:
    """Change the weights so that the greatest weight, or the greatest input of a linear, is on the
    last rank of an axis."""
    last = engine.axes[axis].rank == engine.axes[axis].size - 1
    if axis == "tensor" and last:
        engine.state.view("weights", "layers.0.mlp.up.weight")[-1] = 2.0
    if axis in ("context", "data"):
        of_ranks = MPI.COMM_WORLD.allgather(
            {int(x) for batch in here for x in batch.inputs.view(-1)}
        )
        (token, *_) = of_ranks[-1].difference(*of_ranks[:-1])
        table = engine.state.view("weights", "embedding.word.weight")
        table[token * engine.config.model.hidden] = 100.0
    engine.state.changed()


@parallel(ranks=[2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("axis", ["tensor", "context", *map(LONG, ("data", "pipeline"))])
def test_the_scales_of_a_step_follow_from_all_ranks_and_microbatches(comm, axis):
    """Those of the weights are known: the weights are the same in all microbatches. A wrong group
    of ranks is found."""
    engine = build(World(comm), DELAYED | {f"parallel.{axis}": comm.size})
    batches = microbatches(engine.config, 0, engine.axes["data"].rank)
    here = [batch.at(engine.context.positions) for batch in batches]
    make_the_last_rank_see_most(engine, axis, here)
    before = whole_weights(engine)
    engine.step(0, here)
    found = exponents_of(engine)
    names = [f"layers.{n}.{part}" for n in range(2) for part in PARTS]
    assert found.keys() == {f"{name}.{operand}" for name in names for operand in OPERANDS}
    for name in names:
        greatest = before[f"{name}.weight"].bfloat16().abs().max()
        assert found[f"{name}.weight"] == (exponent(float(greatest), E4M3),)
    # all ranks have all scales, and those of the first rank alone would be others
    assert all(other == found for other in comm.allgather(found))
    seen = comm.allgather(
        {
            f"{name}.{operand}": float(greatest)
            for name, scales in engine.scales._mine.items()
            for operand, greatest in scales.seen.items()
        }
    )
    assert found == of_magnitudes(seen) and (comm.size == 1 or found != of_magnitudes(seen[:1]))
    # no tensor has been limited, because the second step is like the first
    (name, scales), *_ = engine.scales._mine.items()
    engine.scales.begin()
    assert scales.exponents == {operand: found[f"{name}.{operand}"][0] for operand in OPERANDS}


def of_magnitudes(seen: list[dict[str, float]]) -> dict[str, tuple[int, ...]]:
    """Return the exponents that follow from the greatest magnitudes that some ranks have seen."""
    return {
        name: (exponent(most, E5M2 if name.endswith("gradient") else E4M3),)
        for name in {name for of_rank in seen for name in of_rank}
        for most in [max(of_rank.get(name, 0.0) for of_rank in seen)]
    }


@pytest.mark.long
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize("name", ["d and p", "schedules", "gathered weights"])
def test_layouts_have_the_same_bits(comm, name):
    changes = DELAYED | {"model.layers": 3, "batch.global_size": 4, "batch.micro_size": 1}
    cases = [layout(d=2), layout(p=2), layout(p=2, d=2)]
    if name == "d and p":
        changes["run.reproducible"] = True
    elif name == "schedules":
        cases = [
            layout(p=2) | {"recompute.mode": "full"},
            layout(p=3) | {"parallel.schedule": "zb-h1"},
            {"recompute.mode": "selective"},
        ]
    else:
        changes |= layout(d=2) | {"parallel.zero": 2}
        cases = [{"parallel.zero": 3}]
    expected = train(comm, changes, steps=3)
    for where in cases:
        assert_same_bits(train(comm, changes | where, steps=3), expected)


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize(
    "where",
    [
        layout(t=2),
        layout(t=2) | {"parallel.sequence_parallel": True},
        {"parallel.context": 2},
    ],
    ids=["t2", "t2 sequence", "c2"],
)
def test_ranks_train_as_one_rank(comm, where):
    """Within the rounding of the types; also where tensor ranks would cut a block of 128."""
    changes = DELAYED | {"model.hidden": 64, "model.ffn_hidden": 192}
    engine = build(World(comm), changes | where)
    losses = []
    for step in range(4):
        batches = microbatches(engine.config, step, 0)
        here = [batch.at(engine.context.positions) for batch in batches]
        losses.append(engine.step(step, here).loss)
    alone = train(comm, changes, steps=4).losses
    half = {"precision.compute": "bf16", "precision.fp8": "block"}
    plain = train(comm, changes | half, steps=4).losses
    assert greatest_difference(losses, alone) < NEAR
    assert greatest_difference(losses, plain) < NEAR
    assert losses != plain


def checkpoints_of(engine: Engine, path: Path) -> Checkpoints:
    return Checkpoints(path, engine.state, engine.axes, course(engine.config))


@parallel(ranks=[2])
def test_a_run_resumes_in_another_layout(comm, tmp_path):
    """With the scales of the steps before, and so with the same bits. A checkpoint with scales for
    blocks has none of them: the next step then has other bits."""
    world, changes = World(comm), DELAYED | {"run.reproducible": True}
    first = build(world, changes | layout(p=2))
    steps_of(first, 2)
    kept = exponents_of(first)
    checkpoints_of(first, tmp_path / "delayed").save(2)
    expected = first.step(2, microbatches(first.config, 2, 0))

    def resumed(fp8: str, folder: str) -> Engine:
        engine = build(world, changes | layout(d=2) | {"precision.fp8": fp8})
        checkpoints_of(engine, tmp_path / folder).resume("auto")
        return engine

    def is_expected(engine: Engine) -> bool:
        found = engine.step(2, microbatches(engine.config, 2, engine.axes["data"].rank))
        return found.loss == expected.loss and found.grad_norm == expected.grad_norm

    second = resumed("delayed", "delayed")
    assert exponents_of(second) == kept
    assert is_expected(second)
    blocks = resumed("block", "delayed")
    assert exponents_of(blocks) == {}
    checkpoints_of(blocks, tmp_path / "block").save(2)
    assert not is_expected(resumed("delayed", "block"))
    assert all(len(history) == 2 for history in kept.values())


def test_a_skipped_step_changes_no_scale():
    engine = build(World(MPI.COMM_SELF), DELAYED)
    steps_of(engine, 1)
    before = exponents_of(engine)
    engine.state.view("weights", "layers.0.mlp.up.weight")[0] = math.inf
    engine.state.changed()
    (result,) = steps_of(engine, 1)
    assert result.skipped and exponents_of(engine) == before


def test_a_validation_changes_no_scale():
    """And it computes with the scales of the state."""
    engine = build(World(MPI.COMM_SELF), DELAYED)
    steps_of(engine, 1)
    batches = microbatches(engine.config, 1, 0)
    before = exponents_of(engine)
    loss = engine.evaluate(batches)["task"]
    assert exponents_of(engine) == before and engine.evaluate(batches)["task"] == loss
    engine.state.counters.exponents = {}
    assert engine.evaluate(batches)["task"] != loss


def test_scales_of_another_precision_are_refused():
    with pytest.raises(InputError, match=r'precision\.fp8 = "delayed" has an effect only'):
        small({"precision.fp8": "delayed", "precision.compute": "bf16"})
