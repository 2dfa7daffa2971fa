"""Attention, MLP and block on the tensor axis equal plain PyTorch's, gradients included."""

import pytest
import torch
from torch import Tensor

from ptdmpi.config import ModelConfig, RecomputeConfig
from ptdmpi.model.kernels.rope import rotate
from ptdmpi.model.operators import Build, Context, install, run
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.transformer import Block, rotary_table
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.elementwise import AddResidual
from ptdmpi.plan.layer.folds import operators
from tests import _reference as reference
from tests._configs import small
from tests._layers import (
    CPU,
    TOLERANCES,
    Placed,
    difference,
    positions,
    random_tensor,
    tensor_axis,
)
from tests.parallel import parallel

S, B, H = 8, 3, 32
EXPERTS = {"model.kind": "llama", "model.expert_hidden": 24, "model.experts_per_token": 2}
SHAPES = {
    "gpt": {"model.kind": "gpt"},
    "gpt-gqa": {"model.kind": "gpt", "model.kv_heads": 4},
    "llama": {"model.kind": "llama", "model.ffn_hidden": 48},
    "llama-gqa": {"model.kind": "llama", "model.ffn_hidden": 48, "model.kv_heads": 4},
    "rope-with-bias": {"model.kind": "gpt", "model.positions": "rope"},
    "bert": {"model.kind": "bert"},
    # key heads that t > 2 does not divide: two ranks share one
    "qwen2": {"model.kind": "qwen2", "model.kv_heads": 2, "model.ffn_hidden": 48},
    "qwen3": {"model.kind": "qwen3", "model.kv_heads": 2, "model.head_size": 6},
    "multi-query": {"model.kind": "qwen3", "model.kv_heads": 1, "model.ffn_hidden": 48},
    "mistral": {"model.kind": "mistral", "model.sliding_window": 3},
    "gemma2": {
        "model.kind": "gemma2",
        "model.kv_heads": 2,
        "model.head_size": 6,
        "model.ffn_hidden": 48,
        "model.sliding_window": 3,
        "model.attention_softcap": 0.3,
        "model.query_scalar": 7.0,
    },
    "experts": {**EXPERTS, "model.experts": 4},
    "gpt-experts": {
        **EXPERTS,
        "model.kind": "gpt",
        "model.bias": "attention",
        "model.experts": 3,
        "model.experts_per_token": 1,
        "model.router_normalize": False,
    },
    "latent": {
        "model.kind": "deepseek",
        "model.head_size": 10,
        "model.rope_head_size": 4,
        "model.value_head_size": 7,
        "model.q_lora_rank": 14,
        "model.kv_lora_rank": 12,
    },
    # queries that are not compressed, biases, and values as large as queries
    "latent-direct": {
        "model.kind": "deepseek",
        "model.head_size": 10,
        "model.rope_head_size": 6,
        "model.kv_lora_rank": 12,
        "model.bias": "attention",
        "model.rope_scaling": "yarn",
        "model.rope_original_length": 4,
        "model.rope_mscale": 0.7,
    },
    # as in DeepSeek-V3: experts of the best groups, next to one that is shared
    "grouped-experts": {
        **EXPERTS,
        "model.experts": 8,
        "model.experts_per_token": 3,
        "model.shared_experts": 1,
        "model.router": "sigmoid",
        "model.router_scale": 2.5,
        "model.router_groups": 4,
        "model.router_top_groups": 2,
    },
}
each_way = pytest.mark.parametrize(
    ("precision", "sequence_parallel"), [("fp32", False), ("fp64", True)]
)
NONE = RecomputeConfig()


def shape(name: str) -> ModelConfig:
    sizes = {"model.hidden": H, "model.heads": 8, "model.seq_length": S, "model.layers": 2}
    return small({**sizes, **SHAPES[name]}).model


def check(placed: Placed, serial_forward, precision: str, within: str | None = None) -> None:
    """The layer's output, input gradient and weight gradients against `serial_forward(leaves, x)`,
    which is batch first. `within` is the precision whose tolerance applies."""
    within = within or precision
    axis = placed.axis
    x = random_tensor("x", (S, B, H), precision).requires_grad_()
    dy = random_tensor("dy", (S, B, H), precision)
    serial = reference.leaves(placed.whole)
    y = serial_forward(serial, x.transpose(0, 1)).transpose(0, 1)
    y.backward(dy)

    mine = positions(x.detach(), axis).clone().requires_grad_()
    found = placed.layer(mine, Context())
    found.backward(positions(dy, axis))

    assert difference(found, positions(y, axis)) < TOLERANCES[within]
    assert difference(mine.grad, positions(x.grad, axis)) < TOLERANCES[within]
    placed.check_gradients(serial, within)


class Part(Block):
    """A sublayer of the first layer alone, without its norms and its residual sum."""

    def __init__(self, name: str, model: ModelConfig, axis, selective: bool = False) -> None:
        torch.nn.Module.__init__(self)
        inner = [
            row
            for row in operators(describe.layer(model, 0))
            if row.name.startswith(f"{name}.") and not isinstance(row, AddResidual)
        ]
        self.source = inner[0].inputs[0]
        self.steps = install(self, inner, Build(model, axis, 0, selective, ContextAxis()))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return run(self.steps, {self.source: x}, context)["y"]


def named(weights, prefix: str):
    return {f"{prefix}.{name}": value for name, value in weights.items()}


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@each_way
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("selective", [False, True])
def test_attention_matches_serial(comm, precision, sequence_parallel, name, selective):
    model, axis = shape(name), tensor_axis(comm, sequence_parallel)
    placed = Placed(Part("attention", model, axis, selective), axis, precision)
    if model.positions == "rope":
        placed.layer.place_rotary(rotary_table(model, CPU))
    check(
        placed,
        lambda w, x: reference.attention(w, "attention", x, model),
        precision,
        # the angles of RoPE are float32, and the reference rounds those of YaRN in another order
        within="fp32" if model.rope_scaling == "yarn" else precision,
    )


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@each_way
@pytest.mark.parametrize(
    "name", ["gpt", "llama", "bert", "gemma2", "experts", "gpt-experts", "grouped-experts"]
)
def test_mlp_matches_serial(comm, precision, sequence_parallel, name):
    model, axis = shape(name), tensor_axis(comm, sequence_parallel)
    placed = Placed(Part("mlp", model, axis), axis, precision)
    check(placed, lambda w, x: reference.mlp(w, "mlp", x, model), precision)


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@each_way
@pytest.mark.parametrize(
    "name", ["gpt", "llama-gqa", "bert", "qwen3", "gemma2", "experts", "latent"]
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_block_matches_serial(comm, precision, sequence_parallel, name, recompute):
    model, axis = shape(name), tensor_axis(comm, sequence_parallel)
    placed = Placed(Block(model, axis, 0, RecomputeConfig(mode=recompute)), axis, precision)
    if model.positions == "rope":
        placed.layer.place_rotary(rotary_table(model, CPU))
    check(placed, lambda w, x: reference.block(named(w, "b"), "b", x, model), precision)


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_dropout_in_a_block_is_the_same_in_every_layout(comm, mode):
    """The explicit attention path, its masks and those of the residual stream, to the bit with and
    without recomputation, and to rounding over the tensor axis."""
    from mpi4py import MPI

    from ptdmpi.model.random import RandomStream

    rates = {"model.dropout": 0.2, "model.attention_dropout": 0.3}
    sizes = {"model.hidden": H, "model.heads": 8, "model.seq_length": S, "model.layers": 2}
    model = small({**sizes, **rates}).model
    context = Context(RandomStream.of(7, 3, torch.tensor([5, 11, 2])))
    x = random_tensor("x", (S, B, H), "fp64")
    results = []
    for group, sequence_parallel, recompute in (
        (MPI.COMM_SELF, False, "none"),
        (MPI.COMM_SELF, False, mode),
        (comm, False, mode),
        (comm, True, mode),
    ):
        axis = tensor_axis(group, sequence_parallel)
        layer = Block(model, axis, 1, RecomputeConfig(mode=recompute))
        placed = Placed(layer, axis, "fp64")
        mine = positions(x, axis).clone().requires_grad_()
        y = placed.layer(mine, context)
        y.backward(positions(x.cos(), axis))
        rows = axis.between_blocks().numbers(S // axis.between_blocks().parts, CPU)
        results.append((rows, y.detach(), mine.grad, placed.gradients()))
    (_, y, dx, gradients), same, *others = results
    assert torch.equal(y, same[1]) and torch.equal(dx, same[2])
    assert all(torch.equal(gradients[name], same[3][name]) for name in gradients)
    for rows, found, found_dx, found_gradients in others:
        assert difference(found, y[rows]) < 1e-12
        assert difference(found_dx, dx[rows]) < 1e-12
        for name, gradient in found_gradients.items():
            assert difference(gradient, gradients[name]) < 1e-12, name


def test_attention_with_a_rate_of_nearly_zero_equals_the_fused_one():
    """The explicit path of attention dropout is the same attention."""
    from mpi4py import MPI

    from ptdmpi.model.random import RandomStream

    axis = tensor_axis(MPI.COMM_SELF, False)
    sizes = {"model.hidden": H, "model.heads": 8, "model.kv_heads": 4, "model.seq_length": S}
    x = random_tensor("x", (S, B, H), "fp64")
    outputs = []
    for rate in (0.0, 1e-15):  # rounds to a threshold of 0: nothing is dropped
        model = small({**sizes, "model.attention_dropout": rate, "model.layers": 2}).model
        placed = Placed(Part("attention", model, axis), axis, "fp64")
        stream = RandomStream.of(0, 0, torch.arange(B))
        outputs.append(placed.layer(x, Context(stream)).detach())
    assert difference(outputs[1], outputs[0]) < 1e-12


@pytest.mark.parametrize("count", [0, 1, 2, "all"])
def test_full_recomputation_covers_the_first_layers(count):
    from mpi4py import MPI

    axis = tensor_axis(MPI.COMM_SELF, False)
    model = shape("gpt")
    config = NONE if count == 0 else RecomputeConfig(mode="full", layers=count)
    blocks = [Block(model, axis, layer, config) for layer in range(2)]
    assert [block.recompute for block in blocks].count(True) == (2 if count == "all" else count)


def by_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_turning_has_the_bits_of_its_formula(dtype):
    """RoPE there and back, beside what autograd makes of the formula."""
    model = small({"model.kind": "llama"}).model
    angles = [one.to(dtype) for one in rotary_table(model, CPU)]
    generator = torch.Generator().manual_seed(1)
    shape = (model.seq_length, 2, 3, model.head_size)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in "ab")
    found = []
    for turn in (rotate, by_formula):
        leaf = x.clone().requires_grad_()
        y = turn(leaf, *angles)
        y.backward(dy)
        found += [y.detach(), leaf.grad]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
