"""Mixtral, Qwen3-MoE and OLMoE of Hugging Face, both ways: the same bytes, and the same logits."""

import pytest
import torch
from safetensors.torch import load_file

from ptdmpi.config import InputError
from ptdmpi.convert import check
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.reference import FORWARD, Question
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.inference.stored import open_model
from tests.convert._hugging_face import model, saved
from tests.convert.test_convert import contents

CASES = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral-window-sharded": (
        "mixtral",
        {"num_local_experts": 3, "sliding_window": 5, "shard": "15KB"},
    ),
    "qwen3": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "qwen3-normalized": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 24,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen3-dense-layers": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 5,
            "mlp_only_layers": [0, 1],
            "decoder_sparse_step": 2,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_gives_the_same_bytes(tmp_path, case):
    family, changes = CASES[case]
    source = saved(tmp_path / "hf", family, **changes)
    done = from_hf(source, tmp_path / "ours")
    theirs = model(family, **{k: v for k, v in changes.items() if k != "shard"})
    assert done.difference < 1e-5
    assert done.parameters == theirs.num_parameters()
    ours = open_model(tmp_path / "ours").config().model
    assert (ours.experts, ours.experts_per_token) == (
        theirs.config.num_local_experts,
        theirs.config.num_experts_per_tok,
    )
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.parametrize("case", ["mixtral-window-sharded", "qwen3", "qwen3-dense-layers", "olmoe"])
def test_the_reference_is_transformers(tmp_path, case):
    """The reference of the self-check computes the same as their own code."""
    family, changes = CASES[case]
    source = saved(tmp_path / "hf", family, **changes)
    theirs = model(family, **{k: v for k, v in changes.items() if k != "shard"})
    ids = check.prompts(theirs.config.vocab_size, 16)
    tensors = {}
    for file in source.glob("*.safetensors"):
        tensors |= {k.removeprefix("model."): v.double() for k, v in load_file(file).items()}
    with torch.no_grad():
        (logits,) = FORWARD[family](theirs.config.to_dict(), tensors.__getitem__, Question(ids))
        expected = theirs(ids).logits
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5


def test_dense_layers_that_are_not_the_first_are_refused(tmp_path):
    source = saved(tmp_path / "hf", "qwen3_moe", num_experts=4, mlp_only_layers=[1])
    with pytest.raises(InputError, match="mlp_only_layers"):
        from_hf(source, tmp_path / "ours")
