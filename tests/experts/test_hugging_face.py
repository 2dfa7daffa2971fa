"""The mixtures of Hugging Face `transformers`, with the same weights: Mixtral's, Qwen3-MoE's,
OLMoE's and DeepSeek-V3's. Output, the input's gradient, and every weight's."""

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from transformers import DeepseekV3Config, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ptdmpi.model.operators import Context
from tests._configs import small
from tests._layers import Placed, difference, random_tensor, tensor_axis
from tests.model.test_transformer import Part

S, B, H, WIDTH = 12, 3, 32, 24
CLOSE = 1e-5  # theirs compute scores in float32
SIZES = {"hidden_size": H, "moe_intermediate_size": WIDTH, "hidden_act": "silu"}
BLOCKS = {
    "mixtral": (
        MixtralSparseMoeBlock,
        MixtralConfig(hidden_size=H, intermediate_size=WIDTH, num_local_experts=4),
        {"model.experts": 4, "model.experts_per_token": 2},
    ),
    "qwen3": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False),
        {
            "model.experts": 8,
            "model.experts_per_token": 3,
            "model.router_normalize": False,
        },
    ),
    "olmoe": (
        OlmoeSparseMoeBlock,
        OlmoeConfig(hidden_size=H, intermediate_size=WIDTH, num_experts=8, num_experts_per_tok=4),
        {
            "model.experts": 8,
            "model.experts_per_token": 4,
            "model.router_normalize": False,
        },
    ),
    "deepseek": (
        DeepseekV3MoE,
        DeepseekV3Config(
            **SIZES,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
        ),
        {
            "model.experts": 8,
            "model.experts_per_token": 3,
            "model.shared_experts": 2,
            "model.router": "sigmoid",
            "model.router_scale": 2.5,
            "model.router_groups": 4,
            "model.router_top_groups": 2,
        },
    ),
}


def their_tensors(block: nn.Module, read) -> dict[str, Tensor]:
    """Their tensors by our names; `read` takes one of their parameters."""
    experts = block.experts
    tensors = {"mlp.router.weight": read(block.gate.weight)}
    for number in range(len(experts.gate_up_proj)):
        tensors[f"mlp.experts.{number}.up.weight"] = read(experts.gate_up_proj)[number]
        tensors[f"mlp.experts.{number}.down.weight"] = read(experts.down_proj)[number]
    shared = getattr(block, "shared_experts", None)
    if shared is not None:
        both = [read(shared.gate_proj.weight), read(shared.up_proj.weight)]
        tensors["mlp.shared.up.weight"] = torch.cat(both)
        tensors["mlp.shared.down.weight"] = read(shared.down_proj.weight)
    return tensors


def fill(block: nn.Module) -> None:
    """Give their weights random values."""
    for name, weight in block.named_parameters():
        weight.data = 0.2 * random_tensor(name, tuple(weight.shape), "fp32")


@pytest.mark.parametrize("name", BLOCKS)
def test_theirs_computes_the_same(name):
    kind, config, changes = BLOCKS[name]
    theirs = kind(config)
    fill(theirs)
    sizes = {"model.kind": "llama", "model.hidden": H, "model.expert_hidden": WIDTH}
    sizes |= {"model.balance": "none"}
    model = small({**sizes, **changes}).model
    axis = tensor_axis(MPI.COMM_SELF, False)
    ours = Placed(Part("mlp", model, axis), axis, "fp32")
    weights = their_tensors(theirs, lambda weight: weight.detach())
    assert weights.keys() == ours.buffer.entries.keys()
    for key, entry in ours.buffer.entries.items():
        entry.view(ours.buffer.masters[0]).copy_(weights[key])
    ours.buffer.refresh_weights()

    x, dy = (random_tensor(each, (S, B, H), "fp32") for each in ("x", "dy"))
    mine, their = (
        each.clone(memory_format=torch.contiguous_format) for each in (x, x.transpose(0, 1))
    )
    mine.requires_grad_()
    their.requires_grad_()
    y, expected = ours.layer(mine, Context()), theirs(their).transpose(0, 1)
    y.backward(dy)
    expected.backward(dy)
    assert difference(y, expected) < CLOSE
    assert difference(mine.grad, their.grad.transpose(0, 1)) < CLOSE
    gradients = their_tensors(theirs, lambda weight: weight.grad)
    for key, gradient in ours.gradients().items():
        assert difference(gradient, gradients[key]) < CLOSE, key
