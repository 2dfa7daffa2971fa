"""Muon on the layers' matrices and AdamW on the rest: torch's own values, in every layout."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.planning.allocated import measured
from ptdmpi.checkpoint import examine
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.engine import muon
from ptdmpi.engine.engine import Engine
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.kernels import USUAL
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.cost.methods import MethodTimes
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.cost.stage_memory import Cut
from ptdmpi.plan.layer.parts import aligned
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.machine.cluster import Model, load_cluster
from ptdmpi.plan.shape import matrices
from tests._configs import layout, small
from tests._engines import (
    VOCAB_SIZE,
    build,
    course,
    foreseen_by,
    from_root,
    microbatches,
    steps_of,
    whole_gradients,
    whole_weights,
)
from tests.parallel import parallel

MUON = {"optimizer.kind": "muon", "optimizer.clip_norm": 0.0, "optimizer.weight_decay": 0.3}
# query, key and value, gate and what it gates are a matrix each; these sizes are all different
LLAMA = {"model.kind": "llama", "model.kv_heads": 2, "model.ffn_hidden": 44}
PARTS = {"qkv": (32, 16, 16), "up": (44, 44)}
LORA = {"adapt.method": "lora", "adapt.rank": 3}
AXES = ("tensor", "pipeline", "data")
LONG = pytest.mark.long
VARIANTS = {
    "llama": LLAMA,
    "bf16": LLAMA | {"precision.compute": "bf16"},
    "original": LLAMA | {"optimizer.muon_scale": "original", "optimizer.nesterov": False},
    "lora": LLAMA | LORA,
    "gpt": {"optimizer.momentum": 0.8, "optimizer.ema_decay": 0.5},
}


class Torch:
    """torch.optim.Muon on the layers' matrices as a Hugging Face file has them, and AdamW."""

    def __init__(self, config, weights: dict[str, Tensor]) -> None:
        settings, self.rows = config.optimizer, dict[str, tuple[int, ...]]()
        # AdamW wants to have something, and beside adapters there is nothing else
        spare = {"params": [torch.nn.Parameter(torch.zeros(1))]}
        self.weights, groups = {}, ([spare], [])
        for name, weight in weights.items():
            matrix = name.startswith("layers.") and weight.dim() == 2
            leaf = name.split(".")[-2]
            parts = PARTS if config.model.kind == "llama" else {"qkv": (32, 32, 32)}
            self.rows[name] = parts.get(leaf, weight.shape[:1]) if matrix else weight.shape[:1]
            own = [torch.nn.Parameter(one.clone()) for one in weight.split(self.rows[name])]
            self.weights[name] = own
            decay = settings.weight_decay * (weight.dim() > 1)
            groups[matrix].append({"params": own, "weight_decay": decay})
        self.muon = torch.optim.Muon(
            groups[True],
            lr=1.0,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            adjust_lr_fn=settings.muon_scale,
        )
        betas = (settings.beta1, settings.beta2)
        self.adamw = torch.optim.AdamW(groups[False], lr=1.0, betas=betas, eps=settings.eps)

    def step(self, gradients: dict[str, Tensor], rate: float) -> None:
        for name, own in self.weights.items():
            for one, gradient in zip(own, gradients[name].split(self.rows[name]), strict=True):
                one.grad = gradient.clone()
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()


@pytest.mark.cases(2)
@parallel(ranks=[1])
@pytest.mark.parametrize(
    "variant",
    [pytest.param(one, marks=LONG if one in ("bf16", "original") else []) for one in VARIANTS],
)
def test_muon_is_that_of_torch(comm, variant):
    """Five steps: matrices to the bit, the rest within the rounding of an element. Where bfloat16
    is multiplied in float32, sums have another order than torch's: there matrices are close."""
    same = close if USUAL.widens("cpu", torch.bfloat16) else torch.equal
    engine = build(World(comm), MUON | VARIANTS[variant])
    theirs = Torch(engine.config, whole_weights(engine))
    average = whole_weights(engine)
    for result in steps_with(engine, theirs):
        assert not result.skipped
        for name, one in whole_weights(engine).items():
            average[name] = average[name].lerp(one, 0.5)
    found = whole_weights(engine)
    for name, weight in found.items():
        wanted = torch.cat([one.detach() for one in theirs.weights[name]])
        if name.startswith("layers.") and weight.dim() == 2:
            assert same(weight, wanted), name
            momentum = [theirs.muon.state[one]["momentum_buffer"] for one in theirs.weights[name]]
            assert torch.equal(
                engine.state.view("momentum_buffer", name), torch.cat(momentum).flatten()
            )
            assert name not in engine.state.kinds["exp_avg"].held
        else:
            assert torch.allclose(weight, wanted, rtol=1e-6, atol=1e-7), name
            (own,) = theirs.weights[name]
            for kind in ("exp_avg", "exp_avg_sq"):
                near = engine.state.view(kind, name)
                assert torch.allclose(near, theirs.adamw.state[own][kind].flatten(), rtol=1e-5)
            assert name not in engine.state.kinds["momentum_buffer"].held
        if engine.config.optimizer.ema_decay:
            assert torch.equal(engine.state.view("ema", name), average[name].flatten()), name


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """As far as products do that are rounded to bfloat16."""
    return bool((one - other).norm() < 1e-3 * other.norm())


def steps_with(engine: Engine, theirs: Torch, count: int = 5):
    """The results of some steps; after each of them the reference has done the same."""
    for step in range(count):
        result = engine.step(step, microbatches(engine.config, step, 0))
        theirs.step(whole_gradients(engine), result.learning_rate)
        yield result


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5), (1, 7)])
def test_an_orthogonal_update_has_the_singular_vectors_of_its_matrix(shape):
    """In float64; singular values come to between 0.65 and 1.25, from however far below."""
    generator = torch.Generator().manual_seed(3)
    u, s, v = torch.linalg.svd(
        torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False
    )
    s = torch.logspace(0, -2, len(s), dtype=torch.float64)
    found = u.mT @ muon.orthogonal(u @ torch.diag(s) @ v) @ v.mT
    values = found.diagonal()
    assert torch.allclose(found, torch.diag(values), atol=1e-9)
    assert float(values.min()) > 0.65 and float(values.max()) < 1.25
    assert not muon.orthogonal(torch.zeros(shape)).any()


LAYOUTS = {
    2: [layout(t=2), layout(t=2) | {"parallel.sequence_parallel": True}, layout(p=2), layout(d=2)],
    # key heads are copied by neighbours
    4: [layout(t=4), layout(t=2, d=2), layout(t=2, p=2) | {"parallel.schedule": "zb-h1"}],
}
LAYOUTS[2] += [layout(d=2) | {"parallel.zero": 2}]
LAYOUTS[4] += [
    layout(t=2, d=2) | {"parallel.zero": 3},
    layout(p=2, d=2) | {"parallel.zero": 1},
    layout(d=4) | {"parallel.zero": 2, "parallel.shard_group": 2},
]


@parallel(ranks=[2, pytest.param(4, marks=LONG)])
@pytest.mark.parametrize(
    "kind", [LLAMA, pytest.param(LLAMA | LORA, marks=LONG)], ids=["llama", "lora"]
)
def test_every_layout_makes_the_same_update(comm, kind):
    """Clipped, by groups, with an average: in float64 within its rounding; with `run.reproducible`
    and without a tensor axis to the bit, in bfloat16's iteration, too."""
    groups = [{"names": ["layers.1.*"], "learning_rate_factor": 0.5, "weight_decay_factor": 2.0}]
    base = MUON | kind | {"optimizer.groups": groups, "optimizer.clip_norm": 0.5}
    base |= {"optimizer.ema_decay": 0.5, "optimizer.eps": 1e-4}
    exact = {"run.reproducible": True}
    bits = {2: [layout(p=2), layout(d=2)], 4: [layout(p=2, d=2)]}[comm.size]
    bits += [bits[-1] | {"parallel.zero": 1}]
    cases = [({"precision.compute": "fp64"}, LAYOUTS[comm.size], 1e-10), (exact, bits, 0.0)]
    for changes, layouts, near in cases:
        wanted = trained(comm, base | changes)
        for where in layouts:
            found = trained(comm, base | changes | where)
            assert found.keys() == wanted.keys()
            for name, value in found.items():
                assert torch.allclose(value, wanted[name], rtol=0, atol=near), (where, name)


def trained(comm, changes) -> dict[str, Tensor]:
    """Weights after three steps on as many of the first ranks as the layout has."""
    count = math.prod(changes.get(f"parallel.{axis}", 1) for axis in AXES)
    world = World(comm).first(count)
    found = None
    if world is not None:
        engine = build(world, changes)
        steps_of(engine, 3)
        found = whole_weights(engine)
    return from_root(comm, found)


@parallel(ranks=[2])
def test_a_run_that_goes_on_has_the_same_bits(comm, tmp_path):
    """From a checkpoint, in the same layout; and what another one reads and writes is equal."""
    world, changes = World(comm), MUON | LLAMA | {"run.steps": 4}

    def checkpoints(engine: Engine, path) -> Checkpoints:
        return Checkpoints(path, engine.state, engine.axes, course(engine.config))

    first = build(world, changes | layout(t=2))
    steps_of(first, 2)
    checkpoints(first, tmp_path / "first").save(2)
    there = tmp_path / "first" / "step-00000002"
    again, other = build(world, changes | layout(t=2)), build(world, changes | layout(p=2))
    for engine in (again, other):
        progress, _ = checkpoints(engine, tmp_path / "x").resume(str(there))
        assert progress.step == 2
    for step in (2, 3):
        batches = microbatches(first.config, step, 0)
        assert first.step(step, batches).loss == again.step(step, batches).loss
    for one, two in zip(first.state.flats, again.state.flats, strict=True):
        assert torch.equal(one, two)
    checkpoints(other, tmp_path / "second").save(2)
    differences = world.on_root(
        lambda: [str(d) for d in examine.differences(there, tmp_path / "second" / there.name)]
    )
    assert differences == []


@pytest.mark.cases(1)
@parallel(ranks=[1, 2])
@pytest.mark.parametrize(
    ("compute", "half"),
    [
        pytest.param("fp32", "native", marks=LONG),
        ("bf16", "native"),
        pytest.param("bf16", "widened", marks=LONG),
        ("fp64", "native"),
    ],
)
def test_memory_is_what_the_account_says(comm, compute, half):
    """State to the element, but for where parameters begin; and the most that the update needs
    while it runs, which no backward of this model does."""
    # so that what oneDNN's half-type products take beside their results is 2 %, or 16 % with AMX
    hidden = 128 if compute == "fp64" else 512
    sizes = {"model.hidden": hidden, "model.seq_length": 4, "batch.micro_size": 1}
    sizes |= {"precision.compute": compute, "batch.global_size": 2, "model.layers": 1}
    engine = build(World(comm), MUON | layout(t=comm.size) | sizes, half=half)
    steps_of(engine, 1)
    config = engine.config
    widens = engine.kernels.widens("cpu", torch.bfloat16)
    memory = foreseen_by(engine)
    foreseen = memory.peak(config.layout, 0, config.microbatches)
    wide = 8 if compute == "fp64" else 4
    kept = sum(part.nbytes for part in engine.state.flats)
    kept -= (compute != "bf16") * sum(part.nbytes for part in engine.buffer.masters)
    assert foreseen.optimizer <= kept <= foreseen.optimizer + 3 * wide * padding(engine.buffer)
    left, most = measured(lambda: engine.optimizer._muon.step(1e-3))
    every = matrices.wholes(config.model, comm.size)
    how = {"compute_bytes": 8 if compute == "fp64" else 4, "widens": widens}
    room = max(matrices.room_bytes(one, one.local, comm.size, **how) for one in every)
    limit = 1.03 if compute == "fp64" or widens else 1.2
    assert left == 0 and room <= most <= limit * room
    assert room <= foreseen.activations + foreseen.working


def padding(buffer: ParameterBuffer) -> int:
    """Elements of no parameter."""
    return sum(aligned(one.elements) - one.elements for one in buffer.entries.values())


def test_guard_and_plan_agree_to_the_byte():
    cluster = load_cluster("cpu-avx2")
    device = cluster.device.model_copy(update={"runtime_bytes": 0.0})
    cluster = cluster.model_copy(update={"device": device, "measured": None})
    shared = layout(d=4) | {"parallel.zero": 1}, layout(t=2, d=2) | {"parallel.zero": 3}
    cases = ("gpt", {}), ("llama", layout(t=2)), ("llama", layout(p=2)), ("gpt", shared[0])
    for kind, where in (*cases, ("llama", shared[1]), ("llama", shared[1] | LORA)):
        changes = where | {"model.kind": kind, "optimizer.ema_decay": 0.9}
        ranks = math.prod(where.get(f"parallel.{axis}", 1) for axis in AXES)
        config, adamw = (small(more | changes, ranks) for more in (MUON, {}))
        model = Model("m", config.model, VOCAB_SIZE)
        pricer = Pricer(MethodTimes(cluster, model, "fp32", RunMethod.of(config)), 8)
        memory = MemoryModel.of(config, VOCAB_SIZE, on_host=cluster.on_host)
        where, m = config.layout, config.microbatches
        rank, needed = memory.largest(where, m)
        assert pricer.footprint(where).total == needed.total
        how = (Cut.of(where), where.tensor, rank, where.sharing)
        fewer = 4 * min(one.elements for one in memory.stages.dealt(*how))
        more = MemoryModel.of(adamw, VOCAB_SIZE).peak(where, rank, m).optimizer
        assert more - needed.optimizer == fewer
        assert pricer.rough_bound_s(where) <= pricer.bound_s(where)
        assert pricer.times.matrices_s(where, [0]) > 0


def test_products_of_an_update():
    """An iteration on an m x n matrix, m <= n, takes m^2 n multiplications twice and m^3."""
    model = small(LLAMA).model
    shapes = [(32, 32), (16, 32), (16, 32), (32, 32), (44, 32), (44, 32), (32, 44)]
    each = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    every = matrices.wholes(model, 1)
    found = sum(math.prod(sizes) for one in every for sizes in matrices.products(one))
    assert found == 5 * sum(each) == 5 * sum(matrices.effort(one.shapes) for one in every)
