"""GPT-2 and LLaMA of Hugging Face `transformers`, with the same weights: logits, loss and every
gradient."""

import pytest
import torch
import transformers
from torch import Tensor

from ptdmpi.comm.world import World
from tests._configs import layout
from tests._engines import build, load, logits_of, microbatches, tokens, whole_gradients
from tests._layers import difference
from tests.parallel import parallel

L, H, HEADS, S, V, FFN = 3, 32, 4, 16, 50, 48  # t = 2 does not divide everything that is padded
COMMON = {
    "model.layers": L,
    "model.hidden": H,
    "model.heads": HEADS,
    "model.seq_length": S,
    "optimizer.clip_norm": 0.0,
    "batch.global_size": 4,
}
SHAPES = {
    "gpt2": {"model.kind": "gpt"},
    "llama": {"model.kind": "llama", "model.ffn_hidden": FFN, "model.norm_eps": 1e-6},
    "llama-gqa": {
        "model.kind": "llama",
        "model.ffn_hidden": FFN,
        "model.norm_eps": 1e-6,
        "model.kv_heads": 2,
    },
}
LAYER_NAMES = {
    "gpt2": {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    "llama": {
        "attention_norm": "input_layernorm",
        "attention.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.down": "mlp.down_proj",
    },
}


def theirs(name: str):
    """Their model, with weights large enough that every gradient matters."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "sdpa"}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=L,
            n_embd=H,
            n_head=HEADS,
            vocab_size=V,
            n_positions=S,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            **ids,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=L,
            hidden_size=H,
            num_attention_heads=HEADS,
            num_key_value_heads=2 if name == "llama-gqa" else HEADS,
            intermediate_size=FFN,
            vocab_size=V,
            max_position_embeddings=S,
            **ids,
        )
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.train()


def gpt2_names(get) -> dict[str, Tensor]:
    """Our logical tensors of `get(their name)`; their linears hold [inputs, outputs]."""
    tensors = {
        "embedding.word.weight": get("transformer.wte.weight"),
        "embedding.position.weight": get("transformer.wpe.weight"),
    }
    places = {"final_norm": "transformer.ln_f"}
    for i in range(L):
        for ours, their in LAYER_NAMES["gpt2"].items():
            places[f"layers.{i}.{ours}"] = f"transformer.h.{i}.{their}"
    for ours, their in places.items():
        weight = get(f"{their}.weight")
        tensors[f"{ours}.weight"] = weight.t() if weight.dim() > 1 else weight
        tensors[f"{ours}.bias"] = get(f"{their}.bias")
    return tensors


def llama_names(get) -> dict[str, Tensor]:
    tensors = {
        "embedding.word.weight": get("model.embed_tokens.weight"),
        "final_norm.weight": get("model.norm.weight"),
        "head.weight": get("lm_head.weight"),
    }
    for i in range(L):
        ours, their = f"layers.{i}", f"model.layers.{i}"
        for name, their_name in LAYER_NAMES["llama"].items():
            tensors[f"{ours}.{name}.weight"] = get(f"{their}.{their_name}.weight")
        qkv = [get(f"{their}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"{ours}.attention.qkv.weight"] = torch.cat(qkv)
        up = [get(f"{their}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{ours}.mlp.up.weight"] = torch.cat(up)
    return tensors


@pytest.mark.cases(4)
@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)], limit_s=120)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("vocab_share", [1, 3])
def test_equals_transformers(comm, name, vocab_share):
    layouts = {1: [{}], 2: [layout(t=2), layout(p=2)], 4: [layout(t=2, p=2)]}[comm.size]
    names = gpt2_names if name == "gpt2" else llama_names
    model = theirs(name)
    if vocab_share == 3:  # a vocabulary that t does not divide
        model.resize_token_embeddings(V - 1, mean_resizing=False)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    for where in layouts:
        model.zero_grad()
        engine = build(World(comm), COMMON | SHAPES[name] | where, vocab_size)
        load(engine, names(lambda key: model.get_parameter(key).detach()))
        ids, mask = tokens(engine.config, 0, vocab_size)
        expected = model(ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(
            expected.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        loss = (losses * mask.flatten()).sum() / mask.sum()
        loss.backward()
        gradients = names(lambda key: model.get_parameter(key).grad)

        batches = microbatches(engine.config, 0, 0, vocab_size=vocab_size)
        found = logits_of(engine, batches[0])
        if found is not None:
            assert difference(found.transpose(0, 1), expected[: found.shape[1]]) < 1e-5
        result = engine.step(0, batches)
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        ours = whole_gradients(engine)
        assert ours.keys() == gradients.keys()
        for key, gradient in ours.items():
            assert difference(gradient, gradients[key]) < 1e-5, key
