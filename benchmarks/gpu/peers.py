"""Other trainers on one GPU, with the best that each of them has: torch.compile, fused attention,
torch's fused AdamW, float32 weights that are multiplied in bfloat16."""

import importlib
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.launch import PEERS
from ptdmpi.config import ModelConfig

STEPS = 6
compiled: Callable[[Any], Any] = torch.compile
Ids = Iterator[list[Tensor]]  # of each step the microbatches, int64 [b, s] on the device
Side = Callable[[torch.device, ModelConfig, int, Ids], dict[str, Any]]


class Skipped(Exception):
    """A part, or a row of it, that was not measured; the text says why."""


def _timed(
    device: torch.device, ids: Ids, loss_of: Callable[[Tensor], Tensor], model: torch.nn.Module
) -> dict[str, Any]:
    """Steps of a model; the first ones, which compile, do not count."""
    update = torch.optim.AdamW(model.parameters(), fused=True)
    module, times, tokens, losses = torch.get_device_module(device), [], 0, []
    for _ in range(STEPS):
        batch = next(ids)
        module.synchronize()
        begin = time.perf_counter()
        found = []
        for one in batch:
            loss = loss_of(one) / len(batch)
            loss.backward()
            found.append(loss.detach())
        update.step()
        update.zero_grad()
        module.synchronize()
        times.append(time.perf_counter() - begin)
        tokens = sum(one.numel() for one in batch)
        losses.append(float(sum(found)))
    step_s = statistics.median(times[2:])
    return {"step_s": step_s, "tokens_per_s": tokens / step_s, "first_loss": losses[0]}


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean over the tokens that have a next one: logits [b, s, V], ids [b, s]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def transformers_side(
    device: torch.device, model: ModelConfig, vocab_size: int, ids: Ids
) -> dict[str, Any]:
    """The shape by transformers, as a whole compiled, under autocast."""
    try:
        import transformers
    except ImportError:
        raise Skipped("transformers is not installed") from None
    if model.kind == "llama":
        shape = transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=model.hidden,
            intermediate_size=model.ffn_hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
        )
    else:
        shape = transformers.GPT2Config(
            vocab_size=vocab_size,
            n_embd=model.hidden,
            n_layer=model.layers,
            n_head=model.heads,
            n_positions=model.seq_length,
        )
    with device:
        made = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    forward = compiled(made)

    def loss_of(one: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return forward(input_ids=one, labels=one, use_cache=False).loss

    return _timed(device, ids, loss_of, made) | {"version": transformers.__version__}


def torchtitan_side(
    device: torch.device, model: ModelConfig, vocab_size: int, ids: Ids
) -> dict[str, Any]:
    """The shape by torchtitan's LLaMA: blocks compiled one by one, FSDP2 over the one rank for its
    bfloat16, as its trainer has them. Attention is its SDPA, for there are no documents to mask."""
    place = PEERS / "torchtitan"
    if not place.is_dir():
        raise Skipped(
            "torchtitan is not here: `python -m benchmarks.speed.bench --rows d2zero3-bf16 --peers "
            "torchtitan` puts it into .peers, which is carried along"
        )
    sys.path.insert(0, str(place))
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    fsdp: Any = importlib.import_module("torchtitan.distributed.fsdp")
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with device:
            made = _titan(model, vocab_size)
            made.init_states(buffer_device=device)
        loss = _next_token_loss
        if device.type != "cpu":
            loss = torch.compile(loss)
            for block in made.layers.values():
                block.compile(backend="inductor", fullgraph=True)
        fsdp.apply_fsdp_to_decoder(
            made,
            init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",)),
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            pp_enabled=False,
        )
        found = _timed(device, ids, lambda one: loss(made(one), one), made)
    finally:
        dist.destroy_process_group()
    return found | {"version": importlib.metadata.version("torchtitan")}


def _titan(model: ModelConfig, vocab_size: int) -> Any:
    common: Any = importlib.import_module("torchtitan.models.common")
    made_by: Any = importlib.import_module("torchtitan.models.common.config_utils")
    attention: Any = importlib.import_module("torchtitan.models.common.attention")
    llama: Any = importlib.import_module("torchtitan.models.llama3.model")
    h, std = model.hidden, {"weight": lambda weight: torch.nn.init.normal_(weight, std=0.02)}

    def norm() -> Any:
        return common.RMSNorm.Config(normalized_shape=h, param_init={"weight": torch.nn.init.ones_})

    layers = [
        llama.Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=made_by.make_gqa_config(
                dim=h,
                n_heads=model.heads,
                wqkv_param_init=std,
                wo_param_init=std,
                inner_attention=attention.ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=common.ComplexRoPE.Config(dim=h // model.heads, max_seq_len=model.seq_length),
            ),
            feed_forward=made_by.make_ffn_config(
                dim=h, hidden_dim=model.ffn_hidden, w1_param_init=std, w2w3_param_init=std
            ),
        )
        for _ in range(model.layers)
    ]
    return llama.Llama3Model.Config(
        dim=h,
        vocab_size=vocab_size,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=h, param_init=std
        ),
        norm=norm(),
        lm_head=common.Linear.Config(in_features=h, out_features=vocab_size, param_init=std),
        layers=layers,
    ).build()


SIDES: dict[str, Side] = {"transformers": transformers_side, "torchtitan": torchtitan_side}
