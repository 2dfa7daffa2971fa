"""AdamW, clipping, the learning rate and the loss scale: PyTorch's own, to the bit."""

import math

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ptdmpi.comm.world import World
from ptdmpi.config import InputError, OptimizerConfig, PrecisionConfig
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.engine import updates
from ptdmpi.engine.optimizer import LossScale, Optimizer, learning_rate
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import Portion
from ptdmpi.model.parameters import data_types, declare
from ptdmpi.model.state import Counters, Kept, State
from tests._configs import layout
from tests._engines import (
    build,
    from_root,
    logical,
    microbatches,
    whole_gradients,
    whole_weights,
)
from tests._layers import CPU
from tests.parallel import parallel


def small_buffer(precision: str = "fp32") -> ParameterBuffer:
    named = [("a", declare(1, (37, 11), 0.1)), ("b", declare(1, (37,), "ones"))]
    buffer = ParameterBuffer(named, data_types(precision), CPU, Portion())
    buffer.initialise(0)
    return buffer


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_update_is_that_of_torch(clip_norm, precision):
    """Fused AdamW and clip_grad_norm_ on the same flat tensors."""
    config = OptimizerConfig(clip_norm=clip_norm, weight_decay=0.3, beta2=0.97, eps=1e-7)
    buffer = small_buffer(precision)
    state = State(buffer, {kind: Kept() for kind in config.moments})
    optimizer = Optimizer(config, state)
    stop = buffer.entries["b"].start  # which does not decay
    parts = slice(0, stop), slice(stop, None)
    flat = [torch.nn.Parameter(buffer.masters[0][part].clone()) for part in parts]
    groups = [
        {"params": [tensor], "weight_decay": decay}
        for tensor, decay in zip(flat, (0.3, 0.0), strict=True)
    ]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.97), eps=1e-7, fused=True)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        gradients = torch.randn(len(buffer.masters[0]), generator=generator, dtype=torch.float64)
        buffer.gradients.copy_(gradients)
        for tensor, part in zip(flat, parts, strict=True):
            tensor.grad = buffer.gradients[part].clone()
        bound = clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(flat, bound)
        for group in adam.param_groups:
            group["lr"] = 0.01 * (step + 1)
        adam.step()
        optimizer.step(0.01 * (step + 1), float(norm))
        state.changed()
        for tensor, part in zip(flat, parts, strict=True):
            assert torch.equal(buffer.masters[0][part], tensor)
        assert torch.equal(buffer.weights, buffer.masters[0].to(data_types(precision).compute))
    assert state.counters.updates == 4
    for kind in config.moments:
        whole = torch.cat([adam.state[tensor][kind] for tensor in flat])
        for entry in buffer.entries.values():
            assert torch.equal(state.view(kind, entry.name), entry.view(whole).flatten())


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)], ids=str
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sgd_is_that_of_torch(precision, momentum, nesterov):
    """torch.optim.SGD on each parameter by itself, as anybody would call it: flat buffers round no
    element otherwise."""
    changed = {"kind": "sgd", "momentum": momentum, "nesterov": nesterov}
    config = OptimizerConfig(clip_norm=0.0, weight_decay=0.3, **changed)
    buffer = small_buffer(precision)
    state = State(buffer, {kind: Kept() for kind in config.moments})
    optimizer = Optimizer(config, state)
    masters = {name: entry.view(buffer.masters[0]) for name, entry in buffer.entries.items()}
    theirs = {name: torch.nn.Parameter(master.clone()) for name, master in masters.items()}
    groups = [
        {"params": [one], "weight_decay": 0.3 * buffer.entries[name].declaration.decay}
        for name, one in theirs.items()
    ]
    sgd = torch.optim.SGD(groups, lr=1.0, momentum=momentum, nesterov=nesterov)
    for step in range(4):
        buffer.gradients.normal_(generator=torch.Generator().manual_seed(step))
        for name, one in theirs.items():
            one.grad = buffer.entries[name].view(buffer.gradients).clone()
        for group in sgd.param_groups:
            group["lr"] = 0.01 * (step + 1)
        sgd.step()
        optimizer.step(0.01 * (step + 1), 0.0)
        for name, one in theirs.items():
            assert torch.equal(masters[name], one)
    assert tuple(state.kinds) == (("weights", "momentum_buffer") if momentum else ("weights",))
    for kind in config.moments:
        for name, one in theirs.items():
            assert torch.equal(state.view(kind, name), sgd.state[one][kind].flatten())


class PlainLion:
    """Lion as its authors wrote it (google/automl, lion_pytorch.py), a parameter at a time."""

    def __init__(self, weights, betas: tuple[float, float]) -> None:
        self.weights, self.betas = weights, betas
        self.momentum = {name: torch.zeros_like(one) for name, one in weights.items()}

    def step(self, gradients, rates, decays) -> None:
        first, second = self.betas
        for name, weight in self.weights.items():
            gradient, momentum = gradients[name], self.momentum[name]
            weight.mul_(1 - rates[name] * decays[name])
            update = momentum * first + gradient * (1 - first)
            weight.add_(torch.sign(update), alpha=-rates[name])
            momentum.mul_(second).add_(gradient, alpha=1 - second)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lion_by_groups_with_an_average_is_that_of_the_references(precision, monkeypatch):
    """Each parameter by itself: Lion's published program with rates and decays of its own, and
    torch's AveragedModel of the weights. Pieces of an update change no bit."""
    monkeypatch.setattr(updates, "PIECE", 256)
    groups = [{"names": ["b"], "learning_rate_factor": 0.5}]
    groups.append({"names": ["x", "a*"], "learning_rate_factor": 2.0, "weight_decay_factor": 0.25})
    config = OptimizerConfig(
        kind="lion", clip_norm=0.0, weight_decay=0.3, ema_decay=0.75, groups=groups
    )
    assert (config.beta1, config.beta2) == (0.9, 0.99)
    assert config.moments == ("exp_avg", "ema")
    buffer = small_buffer(precision)
    state = State(buffer, {"exp_avg": Kept(), "ema": Kept(begins="weights")})
    optimizer = Optimizer(config, state)
    masters = {name: entry.view(buffer.masters[0]) for name, entry in buffer.entries.items()}
    theirs = PlainLion({name: one.clone() for name, one in masters.items()}, (0.9, 0.99))
    model = torch.nn.ParameterList(theirs.weights.values())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    average.update_parameters(model)  # its first call copies: the weights of step 0
    for step in range(4):
        buffer.gradients.normal_(generator=torch.Generator().manual_seed(step))
        gradients = {n: e.view(buffer.gradients).clone() for n, e in buffer.entries.items()}
        rate = 0.01 * (step + 1)
        theirs.step(gradients, {"a": 2 * rate, "b": 0.5 * rate}, {"a": 0.25 * 0.3, "b": 0.0})
        with torch.no_grad():
            for mine, one in zip(model, theirs.weights.values(), strict=True):
                mine.copy_(one)
        average.update_parameters(model)
        optimizer.step(rate, 0.0)
        for name, one in theirs.weights.items():
            # the sum of two products is rounded once or twice, by how torch vectorises a tensor
            assert torch.allclose(masters[name], one, rtol=1e-6, atol=1e-7)
    for name, mean in zip(theirs.weights, average.module, strict=True):
        assert torch.allclose(state.view("exp_avg", name), theirs.momentum[name].flatten())
        assert torch.allclose(state.view("ema", name), mean.detach().flatten(), rtol=1e-6)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (3, 10), (10, 10), (1, 1)])
@pytest.mark.parametrize("low", [0.0, 1e-5])
def test_learning_rate_is_that_of_torch(warmup, steps, low):
    peak = 3e-4
    config = OptimizerConfig(learning_rate=peak, min_learning_rate=low, warmup_steps=warmup)
    rates = [learning_rate(config, step, steps) for step in range(steps)]
    assert rates[:warmup] == [peak * (step + 1) / warmup for step in range(warmup)]
    weight = torch.nn.Parameter(torch.zeros(1))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.SGD([weight], lr=peak), T_max=max(1, steps - warmup), eta_min=low
    )
    for step in range(warmup, steps):
        cosine.last_epoch = step - warmup
        assert rates[step] == cosine._get_closed_form_lr()[0]
    assert max(rates) == peak


def test_learning_rate_decays_linearly_or_not_at_all():
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=2)
    linear = config.model_copy(update={"decay": "linear"})
    assert [learning_rate(linear, k, 6) for k in range(6)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]
    )
    constant = config.model_copy(update={"decay": "constant"})
    assert [learning_rate(constant, k, 6) for k in range(6)] == [0.5, 1, 1, 1, 1, 1]


def test_warm_up_stable_decay():
    """Half the steps at the peak, then torch's LinearLR."""
    config = OptimizerConfig(
        learning_rate=1.0, min_learning_rate=0.2, warmup_steps=2, decay="wsd", decay_steps=4
    )
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates[:6] == [0.5, 1, 1, 1, 1, 1]
    weight = torch.nn.Parameter(torch.zeros(1))
    linear = torch.optim.lr_scheduler.LinearLR(torch.optim.SGD([weight], lr=1.0), 1.0, 0.2, 4)
    for step in range(6, 10):
        linear.last_epoch = step - 6
        assert rates[step] == pytest.approx(linear._get_closed_form_lr()[0], abs=1e-15)
    share = config.model_copy(update={"decay_steps": 0.4})
    assert [learning_rate(share, step, 10) for step in range(10)] == rates
    # the stable part does not know how long the run is: a longer one goes on from it
    assert [learning_rate(config, step, 100) for step in range(6)] == rates[:6]


GROUPS = [
    {"names": ["layers.1.*"], "learning_rate_factor": 0.5, "weight_decay_factor": 2.0},
    {"names": ["*.bias", "embedding.*"], "learning_rate_factor": 3.0},
]
TUNED = {"optimizer.groups": GROUPS, "optimizer.ema_decay": 0.5, "optimizer.eps": 1e-3}
# a sign may be that of a sum's last bit: Lion is compared where all bits are equal
BITS = {"optimizer.kind": "lion", "optimizer.eps": None, "run.reproducible": True}


@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
def test_groups_and_average_are_the_same_in_every_layout(comm):
    """Groups and the average of the weights, under Lion to the bits of one rank, under AdamW within
    rounding; the average is that of the weights that were."""
    layouts = {
        2: [
            layout(d=2) | BITS,
            layout(p=2) | BITS,
            layout(t=2),
            layout(d=2) | {"parallel.zero": 3},
        ],
        4: [layout(p=2, d=2) | BITS | {"parallel.zero": 1, "parallel.offload": "optimizer"}],
    }[comm.size]
    expected = {key: averaged(comm, key) for key in ({}, BITS) for key in [tuple(key.items())]}
    for where in layouts:
        weights, average = averaged(comm, tuple(where.items()))
        for name, value in weights[-1].items():
            exact = where.get("run.reproducible", False)
            wanted, wanted_average = expected[tuple((BITS if exact else {}).items())]
            near = 0.0 if exact else 1e-5
            assert torch.allclose(value, wanted[-1][name], rtol=0, atol=near), (where, name)
            assert torch.allclose(average[name], wanted_average[name], rtol=0, atol=near), name
    for weights, average in expected.values():
        for name, value in weights[0].items():
            for one in weights[1:]:
                value = torch.lerp(value, one[name], 0.5)
            assert torch.equal(average[name], value), name
    where = layout(p=min(2, comm.size), d=max(1, comm.size // 2))
    with pytest.raises(InputError, match=r'names = \["layers.9.*no parameter that trains'):
        build(World(comm), {"optimizer.groups": [{"names": ["layers.9.*"]}]} | where)


def averaged(comm, changes):
    """The weights before and after each of three steps, and what was kept of their average."""
    where = dict(changes)
    axes = [where.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "data")]
    world = World(comm).first(math.prod(axes))
    found = None
    if world is not None:
        engine = build(world, TUNED | where)
        weights = [whole_weights(engine)]
        for step in range(3):
            engine.step(step, microbatches(engine.config, step, engine.axes["data"].rank))
            weights.append(whole_weights(engine))
        pieces = (piece for piece in engine.state.pieces() if piece.kind == "ema")
        found = weights, logical(engine, pieces)
    return from_root(comm, found)


def test_loss_scale_halves_and_doubles():
    config = PrecisionConfig(compute="fp16", initial_loss_scale=8.0, loss_scale_window=2)
    scale = LossScale(config, Counters())
    seen = []
    for overflow in (False, True, False, False, False, True, True, True, True, True, True):
        scale.update(overflow)
        seen.append(scale.value)
    # one good step before an overflow does not count towards the window
    assert seen == [8, 4, 4, 8, 8, 4, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("compute", ["bf16", "fp32", "fp64"])
def test_other_types_have_no_loss_scale(compute):
    scale = LossScale(PrecisionConfig(compute=compute, initial_loss_scale=8.0), Counters())
    assert not scale.dynamic
    scale.update(True)
    assert scale.value == 1.0


FP16 = {
    "precision.compute": "fp16",
    "precision.initial_loss_scale": 2.0**40,
    "precision.loss_scale_window": 2,
}


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_every_rank_skips_the_steps_that_overflow(comm):
    where = {1: {}, 2: layout(p=2), 4: layout(t=2, d=2)}[comm.size]
    engine = build(World(comm), FP16 | where)
    config, rank = engine.config, engine.axes["data"].rank
    fresh = engine.buffer.masters[0].clone()
    results = []
    for step in range(40):
        before = engine.buffer.masters[0].clone(), engine.buffer.weights.clone()
        updates = engine.state.counters.updates
        result = engine.step(step, microbatches(config, step, rank))
        results.append((result.skipped, result.loss_scale, result.loss))
        if result.skipped:
            assert torch.equal(engine.buffer.masters[0], before[0])
            assert torch.equal(engine.buffer.weights, before[1])
            assert engine.state.counters.updates == updates
            if updates == 0:
                moments = [engine.state.kinds[kind] for kind in config.optimizer.moments]
                assert not any(moment.parts[0].any() for moment in moments)
        else:
            assert engine.state.counters.updates == updates + 1
            if updates >= 2:
                break
    assert comm.allgather(results) == [results] * comm.size
    assert results[0][0] and not results[-1][0]
    scales = [scale for _, scale, _ in results]
    assert scales[:3] == [2.0**40, 2.0**39, 2.0**38]
    assert all(torch.isfinite(torch.tensor(loss)) for _, _, loss in results)
    assert not torch.equal(engine.buffer.masters[0], fresh)


@parallel(ranks=[1])
def test_loss_scale_leaves_the_gradient_as_it_is(comm):
    """A power of two that overflows nowhere changes no bit of the update, denormals apart."""
    runs = []
    for scale in (2.0**10, 2.0**12):
        changes = FP16 | {"precision.initial_loss_scale": scale, "model.hidden": 16}
        engine = build(World(comm), changes)
        result = engine.step(0, microbatches(engine.config, 0, 0))
        assert not result.skipped
        runs.append((result.grad_norm, whole_gradients(engine)))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-3)
    expected = build(World(comm), {"model.hidden": 16})
    result = expected.step(0, microbatches(expected.config, 0, 0))
    assert runs[0][0] == pytest.approx(result.grad_norm, rel=1e-2)
