"""Small random models of `transformers`, saved as model directories."""

from pathlib import Path

COMMON = {"bos_token_id": 0, "eos_token_id": 0}
V = 50
GPT2 = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": V}
LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "vocab_size": V,
}
DECODERS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "olmoe": "Olmoe",
    "deepseek_v3": "DeepseekV3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
}
BERT = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "vocab_size": V,
}


def model(family: str, dtype: str = "float32", masked_only: bool = False, **changes):
    """A random model with weights large enough that each of them matters. `masked_only`: a BERT
    without the head for two segments."""
    import torch
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**COMMON, **GPT2 | changes))
    elif family in DECODERS:
        name = DECODERS[family]
        config = getattr(transformers, f"{name}Config")(**COMMON, **LLAMA | changes)
        made = getattr(transformers, f"{name}ForCausalLM")(config)
    else:
        name = "Bert" if family == "bert" else "MegatronBert"
        kind = f"{name}For{'MaskedLM' if masked_only else 'PreTraining'}"
        config = getattr(transformers, f"{name}Config")(**BERT | changes)
        made = getattr(transformers, kind)(config)
    return with_large_weights(made).to(getattr(torch, dtype)).eval()


def with_large_weights(made):
    """Return the model after adding noise to its weights, so that every one matters."""
    import torch

    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return made


def task_model(name: str, **changes):
    """A random model with a head for a task, by its name in `transformers`."""
    import torch
    import transformers

    torch.manual_seed(0)
    family = name.partition("For")[0]
    sizes = BERT if "Bert" in family else COMMON | (GPT2 if family == "GPT2" else LLAMA)
    config = getattr(transformers, f"{family}Config")(**sizes | {"pad_token_id": 0} | changes)
    return with_large_weights(getattr(transformers, name)(config)).eval()


def saved(path: Path, family: str, shard: str = "1GB", **changes) -> Path:
    """Write a random model of a family to `path`, and return `path`."""
    model(family, **changes).save_pretrained(path, max_shard_size=shard)
    return path
