"""Mixtral, Qwen3-MoE and OLMoE of Hugging Face, both ways: the same bytes, and the same logits."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ptdmpi.comm.world import World
from ptdmpi.config import AdaptConfig, InputError
from ptdmpi.convert import check
from ptdmpi.convert.adapters import load_adapter, merge
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.peft.export import export
from ptdmpi.convert.peft.form import CONFIG_FILE, WEIGHTS_FILE
from ptdmpi.convert.peft.read import import_peft
from ptdmpi.convert.reference import FORWARD, Question
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.stored import open_model
from tests import _stored
from tests._engines import logits_of, microbatches
from tests._layers import difference
from tests.convert._hugging_face import V, model, saved
from tests.convert.test_adapters import asked, engine_over, kept
from tests.convert.test_convert import contents
from tests.parallel import parallel

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4,
}
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
    "deepseek": ("deepseek_v3", {**LATENT, "attention_bias": True, "v_head_dim": 10}),
    "deepseek-yarn": (
        "deepseek_v3",
        {**LATENT, "rope_parameters": YARN, "norm_topk_prob": False, "shard": "15KB"},
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


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_gives_the_same_bytes(tmp_path, case):
    family, changes = CASES[case]
    source = saved(tmp_path / "hf", family, **changes)
    done = from_hf(source, tmp_path / "ours")
    theirs = model(family, **{k: v for k, v in changes.items() if k != "shard"})
    assert done.difference < 1e-5
    biases = [x for name, x in theirs.named_buffers() if name.endswith("correction_bias")]
    assert done.parameters == theirs.num_parameters() + sum(x.numel() for x in biases)
    ours = open_model(tmp_path / "ours").config().model
    assert (ours.experts, ours.experts_per_token) == (
        theirs.config.num_local_experts,
        theirs.config.num_experts_per_tok,
    )
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.parametrize(
    "case", ["mixtral-window-sharded", "qwen3", "qwen3-dense-layers", "olmoe", "deepseek-yarn"]
)
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


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path, case):
    """The whole model in float32 computes what their own code computes."""
    family, changes = CASES[case]
    source = saved(tmp_path / "hf", family, **changes)
    theirs = model(family, **{k: v for k, v in changes.items() if k != "shard"})
    from_hf(source, tmp_path / "ours")
    opened, _ = open_inference(tmp_path / "ours", World(), None, None)
    ids = check.prompts(theirs.config.vocab_size, 16)
    with torch.no_grad():
        expected = theirs(ids).logits
    found = asked(opened, ids.t())
    assert found.dtype == expected.dtype == torch.float32
    assert difference(found, expected.transpose(0, 1)) < 1e-5


def test_transformers_loads_a_deepseek_of_our_own(tmp_path):
    keys = {
        "kind": "deepseek",
        "head_size": 12,
        "rope_head_size": 4,
        "q_lora_rank": 14,
        "kv_lora_rank": 10,
        "experts": 4,
        "experts_per_token": 2,
        "expert_hidden": 16,
        "shared_experts": 1,
        "dense_layers": 1,
        "router": "sigmoid",
        "rope_scaling": "yarn",
        "rope_attention_factor": 1.0,
        "rope_mscale": 0.7,
        "tie_embeddings": False,
    }
    run = _stored.stored(tmp_path / "run", V, **keys)
    done = to_hf(run, tmp_path / "hf")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert done.difference < 1e-5 and not any(info.values()), info
    assert from_hf(tmp_path / "hf", tmp_path / "again").difference < 1e-6
    again = open_model(tmp_path / "again").config().model
    assert {key: getattr(again, key) for key in keys} == keys


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"rope_interleave": False}, "rope_interleave = False is not supported; legal: True"),
        ({"q_lora_rank": None}, "q_lora_rank = null .* is not supported"),
    ],
)
def test_another_deepseek_is_refused(tmp_path, keys, line):
    source = saved(tmp_path / "hf", "deepseek_v3", **LATENT)
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with pytest.raises(InputError, match=line):
        from_hf(source, tmp_path / "ours")


def test_dense_layers_that_are_not_the_first_are_refused(tmp_path):
    source = saved(tmp_path / "hf", "qwen3_moe", num_experts=4, mlp_only_layers=[1])
    with pytest.raises(InputError, match="mlp_only_layers"):
        from_hf(source, tmp_path / "ours")


# family -> its module of expert 2's second linear in layer 1, and the short names of linears
IN_PEFT = {
    "mixtral": ("model.layers.1.block_sparse_moe.experts.2.w2", ["w1", "w2", "w3"]),
    "qwen3_moe": (
        "model.layers.1.mlp.experts.2.down_proj",
        ["down_proj", "gate_proj", "up_proj"],
    ),
}


@parallel(ranks=[1])
@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_adapters_of_experts_are_merged_and_named_as_in_peft(comm, tmp_path, family):
    """Each expert has its own A and B, under its own name."""
    count = {"num_local_experts": 4}
    if family != "mixtral":
        count = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    base, lora = tmp_path / "base", AdaptConfig(method="lora", rank=3, alpha=6.0)
    from_hf(saved(tmp_path / "hf", family, **count), base)
    engine = engine_over(comm, base, lora)
    adapter = kept(engine, base, tmp_path / "adapter")
    batch = microbatches(engine.config, 0, 0, vocab_size=V)[0]
    expected = logits_of(engine, batch)
    for names in ({"adapter": adapter}, {}):
        where = base
        if not names:
            merge(base, adapter, tmp_path / "merged")
            where = tmp_path / "merged"
        opened, _ = open_inference(where, World(comm), None, None, **names)
        assert difference(asked(opened, batch.inputs), expected) < 1e-5
    export(adapter, tmp_path / "peft")
    module, short = IN_PEFT[family]
    tensors = load_file(tmp_path / "peft" / WEIGHTS_FILE)
    a, b = (tensors[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
    own = load_adapter(adapter).tensors
    assert torch.equal(a, own["layers.1.mlp.experts.2.down.lora_down.a"])
    assert torch.equal(b, own["layers.1.mlp.experts.2.down.lora_down.b"])
    config = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    attention = ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["target_modules"] == sorted([*short, *attention])
    import_peft(tmp_path / "peft", base, tmp_path / "again")
    again = load_adapter(tmp_path / "again")
    assert again.adapted.adapt.targets == "all" and again.tensors.keys() == own.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in own.items())
    fewer = {name: tensor for name, tensor in tensors.items() if ".experts.2." not in name}
    save_file(fewer, tmp_path / "peft" / WEIGHTS_FILE)
    with pytest.raises(InputError, match=r"not all layers from 0 .* the same linears"):
        import_peft(tmp_path / "peft", base, tmp_path / "wrong")
