"""Random small configurations of `transformers`, converted: logits, loss and every gradient are
theirs."""

import filecmp
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.comm.world import World
from ptdmpi.convert.decoders import DECODERS
from ptdmpi.convert.families import FAMILIES
from ptdmpi.convert.family import counterparts
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.inference.stored import StoredModel, declarations, open_model
from ptdmpi.model.batch import Microbatch
from ptdmpi.plan.shape.parameters import parameter_count
from tests._engines import build, load, logits_of, whole_gradients
from tests._layers import difference
from tests.engine.test_engine_bert import microbatches, samples

GELUS = ["gelu", "gelu_new", "gelu_pytorch_tanh"]
# `transformers` multiplies experts only in sizes that are multiples of 16 bytes, and stores them in
# other tensors than its files. They are compared in tests/experts/test_hugging_face.py, and in
# tests/convert.
WITHOUT_EXPERTS = [
    name
    for name, family in FAMILIES.items()
    if not any("{e}" in module for module in family.modules)
]
HEADS = {"gpt2": ["LMHeadModel"], **{family: ["ForCausalLM"] for family in DECODERS}}
EPS = [1e-12, 1e-6, 1e-5, 1e-2]


def random_shape(family: str, chosen: random.Random) -> dict[str, Any]:
    """Keys of a config.json: sizes that little divides, and whatever else changes the function."""
    heads = chosen.choice([1, 2, 3, 4, 6])
    hidden = heads * chosen.choice([8, 10, 14] if heads < 3 else [2, 4, 6])
    layers, ffn = chosen.choice([1, 2, 3]), chosen.choice([5, 17, 30, 48])
    length, vocab_size = chosen.choice([8, 11, 16]), chosen.choice([13, 37, 50, 64])
    common = {"vocab_size": vocab_size, "tie_word_embeddings": chosen.choice([True, False])}
    if family == "gpt2":
        return common | {
            "n_layer": layers,
            "n_embd": hidden,
            "n_head": heads,
            "n_positions": length,
            "n_inner": chosen.choice([None, ffn]),
            "activation_function": chosen.choice(GELUS),
            "layer_norm_epsilon": chosen.choice(EPS),
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
        }
    common |= {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": length,
    }
    if family in DECODERS:
        return common | random_decoder(family, heads, layers, chosen)
    return common | {
        "type_vocab_size": chosen.choice([1, 2, 3]),
        "layer_norm_eps": chosen.choice(EPS),
        "hidden_act": chosen.choice(GELUS),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0),
        "pad_token_id": None,  # or the gradient of its embedding would be left out
    }


def random_decoder(family: str, heads: int, layers: int, chosen: random.Random) -> dict[str, Any]:
    """What LLaMA and its descendants have besides; windows shorter than a sample, or none."""
    rope = {"rope_type": "default", "rope_theta": chosen.choice([7.5, 1e4])}
    if chosen.choice([True, False]):
        # at these lengths: some angles stay, some are slower, some lie between
        rope |= {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 0.3,
            "high_freq_factor": 1.5,
            "original_max_position_embeddings": 6,
        }
    shape = {
        "num_key_value_heads": chosen.choice([n for n in (1, 2, 3, heads) if heads % n == 0]),
        "head_dim": chosen.choice([2, 4, 10]),
        "rms_norm_eps": chosen.choice(EPS),
        "rope_parameters": rope,
    }
    window = chosen.choice([None, 2, 3, 5])
    if family == "llama":
        shape |= {key: chosen.choice([True, False]) for key in ("attention_bias", "mlp_bias")}
    elif family == "mistral":
        shape |= {"sliding_window": window}
    elif family == "gemma2":
        shape |= {
            "sliding_window": window or 100,
            "attention_bias": chosen.choice([True, False]),
            "query_pre_attn_scalar": chosen.choice([3, 256]),
            "attn_logit_softcapping": chosen.choice([None, 0.2, 50.0]),
            "final_logit_softcapping": chosen.choice([None, 0.5, 30.0]),
            "pad_token_id": None,  # or the gradient of its embedding would be left out
        }
    else:
        shape |= {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": chosen.choice(range(layers + 1)),
        }
    if family == "qwen3":
        shape |= {"attention_bias": chosen.choice([True, False])}
    return shape


def theirs(family: str, shape: Mapping[str, Any], kind: str):
    """Their model, with weights large enough that every gradient matters."""
    import transformers

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[FAMILIES[family].model_type](**shape)
    name = type(config).__name__.removesuffix("Config")
    model = getattr(transformers, name + kind)(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.train()


def weights_of(stored: StoredModel) -> dict[str, Tensor]:
    whole = {}
    with stored.reader() as reader:
        for name, one in declarations(stored.config(), stored.vocab_size).items():
            values = np.empty(one.shape, np.float32)
            reader.read(f"weights/{name}", Box.whole(one.shape), values)
            whole[name] = torch.from_numpy(values)
    return whole


def next_tokens(model, length: int) -> tuple[Tensor, Tensor, list[Microbatch]]:
    """Their logits of the first two samples [2, s, V] and loss; all four as microbatches."""
    ids = torch.randint(model.config.vocab_size, (4, length + 1))
    logits = model(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    batches = [
        Microbatch(two[:, :-1].t().contiguous(), two[:, 1:].t().contiguous(), None, torch.arange(2))
        for two in ids.split(2)
    ]
    return logits[:2], loss, batches


def masked_tokens(model, length: int) -> tuple[Tensor, Tensor, list[Microbatch]]:
    """The same at the masked positions [2, k, V], with padding, and with both heads' loss."""
    shape = {"vocab_size": model.config.vocab_size, "seq_length": length}
    ids, types, lengths, labels, _ = samples(shape, 4)
    order = torch.tensor([0, 0, 1, 0])  # as many of both would leave a gradient of rounding errors
    types = (types + torch.randint(9, types.shape)) % model.config.type_vocab_size
    words = {"next_sentence_label": order} if hasattr(model.cls, "seq_relationship") else {}
    seen = (torch.arange(length) < lengths[:, None]).long()
    out = model(ids, seen, types, labels=labels, **words)
    batches = microbatches((ids, types, lengths, labels, order), 2)
    if not words:
        batches = [replace(batch, order=None) for batch in batches]
    columns = batches[0].masked.t()[..., None].expand(-1, -1, shape["vocab_size"])
    logits = out.prediction_logits if words else out.logits
    return logits[:2].gather(1, columns), out.loss, batches


def gradients_of(model, family: str, stored: StoredModel) -> dict[str, Tensor]:
    """Theirs by our names; `FAMILIES` says where they stand, as for the weights."""
    one, found = FAMILIES[family], {}
    by_name = {one.base(name): weight.grad for name, weight in model.named_parameters()}
    if not model.config.tie_word_embeddings:  # then only the second of two biases is used
        by_name |= {other: by_name[name] for name, other in one.again.items()}
    config = stored.config()
    needed = declarations(config, stored.vocab_size)
    for place in counterparts(one, config.model.layers, needed):
        gradient = by_name[place.theirs]
        whole = found.setdefault(place.ours, torch.zeros(place.whole))
        whole[place.box.index] = gradient.t() if place.transposed else gradient
    return found


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 8))]
)
@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_equals_transformers(tmp_path, family, seed):
    chosen = random.Random(f"{family} {seed}")
    check(tmp_path, family, random_shape(family, chosen), chosen)


# At these lengths some angles stay, some are slower, some lie between.
YARN = {"rope_type": "yarn", "rope_theta": 7.5, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 30, "beta_fast": 2.5, "beta_slow": 0.5}
SCALED = {
    "llama": YARN,
    "mistral": YARN | {"attention_factor": 1.75, "beta_fast": None},
    "qwen2": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    "qwen3": YARN | {"beta_slow": None, "rope_theta": 1e4},
}


@pytest.mark.parametrize("family", SCALED)
def test_yarn_equals_transformers(tmp_path, family):
    chosen = random.Random(family)
    shape = random_shape(family, chosen)
    check(tmp_path, family, shape | {"head_dim": 10, "rope_parameters": SCALED[family]}, chosen)


def check(tmp_path, family: str, shape: dict[str, Any], chosen: random.Random) -> None:
    """The model of `shape`, converted and back; its logits, loss and every gradient."""
    masked = "bert" in family
    heads = HEADS.get(family, ["ForPreTraining", "ForMaskedLM"])
    model = theirs(family, shape, chosen.choice(heads))
    model.save_pretrained(tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(tmp_path / "hf" / name, tmp_path / "back" / name, shallow=False)
    stored = open_model(tmp_path / "ours")
    changes = {f"model.{key}": value for key, value in stored.tree["model"].items()}
    changes |= {"optimizer.clip_norm": 0.0, "batch.global_size": 4}
    changes["recompute.mode"] = chosen.choice(["none", "selective", "full"])
    engine = build(World(MPI.COMM_SELF), changes, stored.vocab_size)
    load(engine, weights_of(stored))

    count = sum(math.prod(entry.declaration.shape) for entry in engine.buffer.entries.values())
    assert parameter_count(engine.config.model, stored.vocab_size) == count
    ask = masked_tokens if masked else next_tokens
    expected, loss, batches = ask(model, engine.config.model.seq_length)
    loss.backward()
    found = logits_of(engine, batches[0]).transpose(0, 1)
    kept = batches[0].weights.t() > 0 if masked else ...
    assert difference(found[kept], expected[kept]) < 1e-5
    assert engine.step(0, batches).loss == pytest.approx(float(loss.detach()), rel=1e-5)
    gradients = gradients_of(model, family, stored)
    ours = whole_gradients(engine)
    assert ours.keys() == gradients.keys()
    for key, gradient in ours.items():
        one = gradients[key]
        if key.endswith("qkv.bias"):  # the keys' true gradient is zero, but for rotated ones
            size = engine.config.model.kv_heads * engine.config.model.head_size
            without = [*range(len(one) - 2 * size), *range(len(one) - size, len(one))]
            gradient, one = gradient[without], one[without]
        assert difference(gradient, one) < 1e-5, key
