"""AdamW, clipping, the learning rate and the loss scale: PyTorch's own, to the bit."""

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.config import OptimizerConfig, PrecisionConfig
from ptdmpi.engine.optimizer import MOMENTS, LossScale, Optimizer, learning_rate
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import Portion
from ptdmpi.model.parameters import PRECISIONS, declare
from ptdmpi.model.state import Counters, State
from tests._configs import layout
from tests._engines import build, microbatches, whole_gradients
from tests._layers import CPU
from tests.parallel import parallel


def small_buffer(precision: str = "fp32") -> ParameterBuffer:
    named = [("a", declare(1, (37, 11), 0.1)), ("b", declare(1, (37,), "ones"))]
    buffer = ParameterBuffer(named, PRECISIONS[precision], CPU, Portion())
    buffer.initialise(0)
    return buffer


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_update_is_that_of_torch(clip_norm, precision):
    """Fused AdamW and clip_grad_norm_ on the same flat tensors."""
    config = OptimizerConfig(clip_norm=clip_norm, weight_decay=0.3, beta2=0.97, eps=1e-7)
    buffer = small_buffer(precision)
    state = State(buffer, MOMENTS)
    optimizer = Optimizer(config, state)
    parts = slice(0, buffer.units[0].decay_stop), slice(buffer.units[0].decay_stop, None)
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
        optimizer.step(0.01 * (step + 1), norm)
        state.changed()
        for tensor, part in zip(flat, parts, strict=True):
            assert torch.equal(buffer.masters[0][part], tensor)
        assert torch.equal(buffer.weights, buffer.masters[0].to(PRECISIONS[precision].compute))
    assert state.counters.updates == 4
    for kind in MOMENTS:
        whole = torch.cat([adam.state[tensor][kind] for tensor in flat])
        for entry in buffer.entries.values():
            assert torch.equal(state.view(kind, entry.name), entry.view(whole).flatten())


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


@parallel(ranks=[1, 2, 4])
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
                assert not any(engine.state.kinds[kind].parts[0].any() for kind in MOMENTS)
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
