"""The attention of Hugging Face's DeepSeek-V3 with the same weights: output, the input's gradient,
and every weight's."""

import pytest
import torch
from mpi4py import MPI
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from ptdmpi.model.operators import Context
from ptdmpi.model.transformer import rotary_table
from tests._configs import small
from tests._layers import CPU, Placed, difference, random_tensor, tensor_axis
from tests.model.test_transformer import Part

S, B, H = 12, 3, 32
CLOSE = 1e-5
SIZES = {
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "kv_lora_rank": 10,
    "attn_implementation": "eager",
}
OURS = {
    "model.kind": "deepseek",
    "model.hidden": H,
    "model.head_size": 10,
    "model.rope_head_size": 4,
    "model.value_head_size": 7,
    "model.kv_lora_rank": 10,
    "model.seq_length": S,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 8,
}
CASES = {
    "compressed": ({"q_lora_rank": 14}, {"model.q_lora_rank": 14}),
    "direct": ({"q_lora_rank": None}, {}),
    "yarn": (
        {"q_lora_rank": 14, "rope_parameters": YARN},
        {
            "model.q_lora_rank": 14,
            "model.rope_scaling": "yarn",
            "model.rope_factor": 4.0,
            "model.rope_original_length": 8,
            "model.rope_attention_factor": 1.0,
            "model.rope_mscale": 1.0,
        },
    ),
}


def their_tensors(block: DeepseekV3Attention, read) -> dict[str, Tensor]:
    """Their tensors by our names; `read` takes one of their parameters."""
    down = read(block.kv_a_proj_with_mqa.weight)
    tensors = {
        "attention.kv_norm.weight": read(block.kv_a_layernorm.weight),
        "attention.kv_up.weight": read(block.kv_b_proj.weight),
        "attention.out.weight": read(block.o_proj.weight),
    }
    if block.q_lora_rank is None:
        tensors["attention.q.weight"] = read(block.q_proj.weight)
    else:
        down = torch.cat((read(block.q_a_proj.weight), down))
        tensors["attention.q_norm.weight"] = read(block.q_a_layernorm.weight)
        tensors["attention.q_up.weight"] = read(block.q_b_proj.weight)
    return tensors | {"attention.down.weight": down}


@pytest.mark.parametrize("name", CASES)
def test_theirs_computes_the_same(name):
    changes, ours_changes = CASES[name]
    config = DeepseekV3Config(**SIZES, **changes, max_position_embeddings=4 * S)
    theirs = DeepseekV3Attention(config, 0)
    for key, weight in theirs.named_parameters():
        weight.data = 0.3 * random_tensor(key, tuple(weight.shape), "fp32")
    model = small({**OURS, **ours_changes}).model
    axis = tensor_axis(MPI.COMM_SELF, False)
    ours = Placed(Part("attention", model, axis), axis, "fp32")
    ours.layer.place_rotary(rotary_table(model, CPU))
    weights = their_tensors(theirs, lambda weight: weight.detach())
    assert weights.keys() == ours.buffer.entries.keys()
    for key, entry in ours.buffer.entries.items():
        entry.view(ours.buffer.masters[0]).copy_(weights[key])
    ours.buffer.refresh_weights()

    x, dy = (random_tensor(each, (S, B, H), "fp32") for each in ("x", "dy"))
    mine = x.clone().requires_grad_()
    their = x.transpose(0, 1).contiguous().requires_grad_()
    y = ours.layer(mine, Context())
    angles = DeepseekV3RotaryEmbedding(config)(their, torch.arange(S)[None])
    future = torch.full((S, S), -torch.inf).triu(1)[None, None]
    expected = theirs(their, angles, future)[0].transpose(0, 1)
    y.backward(dy)
    expected.backward(dy)
    assert difference(y, expected) < CLOSE
    assert difference(mine.grad, their.grad.transpose(0, 1)) < CLOSE
    gradients = their_tensors(theirs, lambda weight: weight.grad)
    for key, gradient in ours.gradients().items():
        assert difference(gradient, gradients[key]) < CLOSE, key
