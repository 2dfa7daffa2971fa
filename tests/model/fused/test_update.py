"""AdamW's update by the kernel in Triton, in one pass over memory: the values of torch.optim.AdamW
and of the operations that the kernel replaces, in whole trainings, and the bytes of the account."""

import importlib.util
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

from ptdmpi.comm.world import World
from ptdmpi.config import OptimizerConfig
from ptdmpi.engine.engine import Engine
from ptdmpi.model.kernels.agreement import DeviceChoice
from ptdmpi.plan.cost.update import one_pass_bytes
from ptdmpi.plan.layout.grid import grid_of
from tests._configs import layout, small
from tests._engines import microbatches
from tests._layers import DTYPES, difference
from tests.engine.data_parallel.test_methods import SETTINGS
from tests.model.fused._interpreted import ENVIRONMENT, NEEDS_TRITON, PROCESS, counted
from tests.model.fused._rounding import rounded_as_on_devices
from tests.parallel import parallel

__all__ = ["ENVIRONMENT", "PROCESS"]  # of the ranks that run these tests
pytestmark = NEEDS_TRITON

CONFIG = OptimizerConfig(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3, ema_decay=0.9)
RATE, FACTOR = 0.05, 0.37
CLOSE = {"fp64": 1e-13, "fp32": 3e-7}  # of all state, as fractions of its largest magnitude
LENGTHS = (1, 37, 64)  # of a block of 32: less than one, not whole, whole


class Flats:
    """The flat tensors of an update, with random values. `by` is the module that updates them."""

    def __init__(self, length: int, *, compute: str, master: str, by: ModuleType) -> None:
        generator = torch.Generator().manual_seed(length)
        values = torch.randn(5, length, generator=generator, dtype=torch.float64)
        values[3].square_()  # the second moment is a mean of squares
        self.master, self.gradient, *self.moments = values.to(DTYPES[master])
        self.weights = None
        if compute != master:
            self.weights = self.master.to(DTYPES[compute])
        self.by = by

    def update(self, config: OptimizerConfig, updates: int) -> None:
        moments = self.moments if config.ema_decay else self.moments[:2]
        self.by.update(
            config,
            self.master,
            self.gradient,
            moments,
            weights=self.weights,
            step=self.by.UpdateNumbers(FACTOR, RATE, config.weight_decay, updates),
        )


def fused() -> ModuleType:
    return importlib.import_module("ptdmpi.model.kernels.fused.update")


def steps_of_torch(flats: Flats, gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the master weights, the moments and the moving average after steps of
    torch.optim.AdamW, from moments of zero."""
    weight = torch.nn.Parameter(flats.master.to(dtype, copy=True))
    average = flats.moments[2].to(dtype, copy=True)
    rule = torch.optim.AdamW(
        [weight], RATE, (CONFIG.beta1, CONFIG.beta2), CONFIG.eps, CONFIG.weight_decay
    )
    for gradient in gradients:
        weight.grad = gradient.to(dtype) * FACTOR
        rule.step()
        average.lerp_(weight.detach(), 1 - CONFIG.ema_decay)
    state = rule.state[weight]
    return [weight.detach(), state["exp_avg"], state["exp_avg_sq"], average]


def check_values(by: ModuleType, master: str, exact: str) -> None:
    """Do three steps from moments of zero, in sizes that fill no block, and compare."""
    for length in LENGTHS:
        flats = Flats(length, compute=master, master=master, by=by)
        for moment in flats.moments[:2]:
            moment.zero_()
        given = [flats.gradient * k for k in (1.0, -2.0, 0.25)]
        expected = steps_of_torch(flats, given, DTYPES[exact])
        with mock.patch.object(by, "BLOCK", 32):
            for number, gradient in enumerate(given):
                flats.gradient.copy_(gradient)
                flats.update(CONFIG, number)
                assert not flats.gradient.any()
        close = max(CLOSE[master], CLOSE[exact])
        for mine, theirs in zip((flats.master, *flats.moments), expected, strict=True):
            assert difference(mine, theirs.to(mine.dtype)) < close


def check_weights(by: ModuleType, compute: str) -> None:
    """Compare the bits of the weights with those of the rounded master weights."""
    flats = Flats(300, compute=compute, master="fp32", by=by)
    with rounded_as_on_devices():
        flats.update(CONFIG, 3)
    assert torch.equal(flats.weights, flats.master.to(flats.weights.dtype))
    truncated = (flats.master.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()
    assert not torch.equal(flats.weights, truncated)


@parallel(ranks=[1])
@pytest.mark.parametrize(
    ("master", "exact"), [("fp64", "fp64"), ("fp32", "fp64"), ("fp32", "fp32")]
)
def test_values_of_torch(comm, master, exact):
    check_values(fused(), master, exact)


@parallel(ranks=[1])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_weights_have_the_bits_of_the_rounded_masters(comm, compute):
    check_weights(fused(), compute)


def altered(path: Path, old: str, new: str) -> ModuleType:
    """Return the module of the kernel, of which the text `old` is replaced."""
    text = Path(fused().__file__).read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("altered", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ERRORS = {
    "no clipping": ("g *= tl.cast(factor, WIDE)", "g *= 1.0"),
    "first moment": ("(1.0 - BETA1) * (g - u)", "(1.0 - BETA1) * g - u"),
    "second moment": ("v = BETA2 * v", "v = BETA1 * v"),
    "decay after the step": ("(root + EPS)", "(root + EPS) * (1.0 - tl.cast(decay, WIDE))"),
    "eps": ("(root + EPS)", "tl.sqrt(root * root + EPS)"),
    "bias of the second moment": ("math.sqrt(1.0 - config.beta2**number)", "1.0"),
    "bias one step late": ("step.updates + 1", "step.updates + 2"),
    "numbers in float32": ("return near, exact - near", "return near, 0.0"),
    "average of other numbers": ("* (m - a), mask", "* (m - u - a), mask"),
    "gradients kept": ("tl.zeros_like(g)", "g"),
    "past the end": ("inside = at < length", "inside = at < length - 1"),
    "weights of the moments": ("m.to(weights", "u.to(weights"),
}


@pytest.mark.cases(4)
@parallel(ranks=[1])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_found(comm, tmp_path, error):
    # a name of its own: python keeps what it has read of a file
    by = altered(tmp_path / f"{error.replace(' ', '_')}.py", *ERRORS[error])
    with pytest.raises(AssertionError):
        check_values(by, "fp64", "fp64")
        check_weights(by, "bf16")


@parallel(ranks=[1])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("averages", [False, True])
def test_bytes_of_the_account(comm, compute, averages):
    """34 for each parameter in bf16; torch's operations move 46."""
    flats = Flats(300, compute=compute, master="fp32", by=fused())
    config = CONFIG if averages else CONFIG.model_copy(update={"ema_decay": 0.0})
    with counted() as moves:
        flats.update(config, 0)
    assert moves.launches == 1
    assert moves.bytes == 300 * one_pass_bytes(2 + averages, DTYPES[compute].itemsize)
    assert one_pass_bytes(2, 2) == 34 and one_pass_bytes(2, 4) == 32


# -- whole trainings -------------------------------------------------------------------------------

VOCAB_SIZE = 29
TINY = {
    "model.kind": "llama",
    "model.hidden": 16,
    "model.heads": 2,
    "model.layers": 2,
    "model.ffn_hidden": 24,
    "model.seq_length": 8,
    "batch.global_size": 2,
    "batch.micro_size": 1,
    "precision.compute": "fp32",
    "optimizer.learning_rate": 0.01,
    "optimizer.clip_norm": 0.5,  # below the norms of these models, so that gradients are clipped
    "optimizer.eps": 1e-4,  # the update of tiny gradients is not mostly their sign
    "run.verify_every": 1,
}
BF16 = {"precision.compute": "bf16"}
TIED = {"model.tie_embeddings": True}
KINDS = {
    "fp32": {},
    "bf16": BF16,
    # the scale doubles after a step, so the second step overflows and is skipped
    "fp16": {"precision.compute": "fp16", "precision.loss_scale_window": 1},
    "average": BF16 | {"optimizer.ema_decay": 0.9},
    "no decay": TIED | {"optimizer.groups": [{"names": ["*mlp*"], "weight_decay_factor": 0.0}]},
    "lora": BF16 | {"adapt.method": "lora", "adapt.rank": 2},
    "experts": {"model.experts": 3, "model.experts_per_token": 2},
}


def method(name: str) -> dict:
    """Return the changes that select a data-parallel method."""
    given = {"method": name, **SETTINGS[name]}
    return {f"data_parallel.{key}": value for key, value in given.items()}


LAYOUTS = {
    **{f"zero {stage}": layout(d=2) | BF16 | {"parallel.zero": stage} for stage in range(4)},
    "tied": layout(p=2) | TIED,
    "sums early": layout(d=2) | {"run.on_failure": "shrink"},
    "compressed": layout(d=2) | method("compressed") | {"run.verify_every": 0},
}
# kinds of training of which separate operations do the update
PLAIN = {
    "local": layout(d=2) | method("local"),
    "gossip": layout(d=2) | method("decentralized"),
    "offload": layout(d=2) | BF16 | {"parallel.offload": "optimizer"},
    "muon": layout(d=2) | {"optimizer.kind": "muon"},
    "lion": layout(d=2) | {"optimizer.kind": "lion", "optimizer.eps": None},
}
STEPS = 3


def trained(comm, changes: dict, choice: DeviceChoice | None) -> tuple[Engine, list[float]]:
    """Return the engine after a few steps, and the losses and norms of these steps."""
    config = small(TINY | changes, comm.size)
    engine = Engine(config, World(comm).split(grid_of(config)), VOCAB_SIZE)
    engine.compute_by(choice)
    rank = engine.axes["data"].rank
    results = []
    for step in range(STEPS):
        batches = microbatches(config, step, rank, vocab_size=VOCAB_SIZE)
        result = engine.step(step, batches)
        results += [result.loss, result.grad_norm]
    return engine, results


def state(engine: Engine) -> dict[str, Tensor]:
    """Return the state of the engine, and the weights with which it computes."""
    return {f"{some.kind} {some.name}": some.values for some in engine.state.residents()}


def check(comm, changes: dict, one_pass: bool) -> None:
    with counted() as moves, rounded_as_on_devices():
        fused, results = trained(comm, changes, DeviceChoice(triton=("update",)))
    assert bool(moves.launches) == one_pass
    plain, expected = trained(comm, changes, None)
    close = 1e-5 if changes.get("precision.compute", "fp32") == "fp32" else 1e-2
    assert results == pytest.approx(expected, rel=close, nan_ok=True)
    of_plain = state(plain)
    for name, values in state(fused).items():
        assert values.isfinite().all()
        assert difference(values, of_plain[name]) < (10 * close if one_pass else 1e-12), name
    buffer = fused.buffer
    if not buffer.one_type and not buffer.portion.shards_weights:
        for weights, masters in zip(buffer.weight_parts, buffer.masters, strict=True):
            assert torch.equal(weights, masters.to(weights.dtype))
    assert fused.state.counters.updates == STEPS - ("precision.loss_scale_window" in changes)
    fused.optimizer.clear()
    assert not buffer.gradients.any()


@pytest.mark.cases(2)
@parallel(ranks=[1])
@pytest.mark.parametrize("kind", KINDS)
def test_trainings(comm, kind):
    check(comm, KINDS[kind], True)


@pytest.mark.cases(2)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(comm, name):
    check(comm, LAYOUTS[name], True)


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", PLAIN)
def test_other_updates_are_not_in_one_pass(comm, name):
    check(comm, PLAIN[name], False)
