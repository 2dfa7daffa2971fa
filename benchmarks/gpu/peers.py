"""Other trainers on one GPU, each by the best of several settings: what is multiplied in bfloat16,
whether it is compiled, and the largest microbatch that fits; with fused attention and torch's fused
AdamW in all."""

import importlib
import importlib.metadata
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import timing
from benchmarks.gpu.reasons import Left, Skipped, why_not
from benchmarks.gpu.timing import OUT_OF_MEMORY, Row, first_that_fits, rates
from benchmarks.launch import PEERS
from ptdmpi.config import ModelConfig

STEPS = 6


class Workload(NamedTuple):
    """What is trained: a shape, of which ours takes `sequences` a step in microbatches of
    `micro_size`."""

    device: torch.device
    model: ModelConfig
    vocab_size: int
    sequences: int
    micro_size: int


class Setting(NamedTuple):
    """A setting of a trainer. `half`: weights and the optimizer's state in bfloat16, not float32
    that is multiplied in bfloat16."""

    half: bool
    compiled: bool


Size = tuple[int, str]  # of a microbatch, and which recomputation
WAYS = {
    "autocast": Setting(half=False, compiled=False),
    "autocast, compiled": Setting(half=False, compiled=True),
    "bf16 weights": Setting(half=True, compiled=False),
    "bf16 weights, compiled": Setting(half=True, compiled=True),
}
Side = Callable[[Workload], Iterator[Row]]


def sizes(asked: Workload) -> list[Size]:
    """Twice ours first, then smaller; recomputing everything where not even one sequence fits."""
    found, size = [], min(2 * asked.micro_size, asked.sequences)
    while size:
        if asked.sequences % size == 0:
            found.append((size, "none"))
        size //= 2
    again = dict.fromkeys((asked.micro_size, 1))
    return [*found, *((one, "full") for one in again)]


def _ids(asked: Workload, micro_size: int, step: int) -> list[Tensor]:
    """The microbatches of a step: random tokens [b, s] on the device, the same for all sizes."""
    generator = torch.Generator().manual_seed(step)
    shape = (asked.sequences, asked.model.seq_length)
    whole = torch.randint(asked.vocab_size, shape, generator=generator).to(asked.device)
    return list(whole.split(micro_size))


def _timed(
    asked: Workload, size: Size, loss_of: Callable[[Tensor], Tensor], model: torch.nn.Module
) -> dict[str, Any]:
    """Steps of a model; the first ones, which compile, do not count."""
    update = torch.optim.AdamW(model.parameters(), fused=True)
    module, times, losses = torch.get_device_module(asked.device), [], []
    for step in range(STEPS):
        batch = _ids(asked, size[0], step)
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
        losses.append(float(sum(found)))
    tokens = asked.sequences * asked.model.seq_length
    step_s = statistics.median(times[2:])
    found_rates = rates(asked.device, asked.model, asked.vocab_size, tokens, step_s)
    return {"micro_size": size[0], "recompute": size[1], **found_rates, "first_loss": losses[0]}


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean over the tokens that have a next one: logits [b, s, V], ids [b, s]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def transformers_way(asked: Workload, way: Setting, size: Size) -> dict[str, Any]:
    """The shape by transformers in one setting."""
    transformers: Any = importlib.import_module("transformers")
    model = asked.model
    if model.kind == "llama":
        shape = transformers.LlamaConfig(
            vocab_size=asked.vocab_size,
            hidden_size=model.hidden,
            intermediate_size=model.ffn_hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
        )
    else:
        shape = transformers.GPT2Config(
            vocab_size=asked.vocab_size,
            n_embd=model.hidden,
            n_layer=model.layers,
            n_head=model.heads,
            n_positions=model.seq_length,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    dtype = torch.bfloat16 if way.half else torch.float32
    with asked.device:
        made = transformers.AutoModelForCausalLM.from_config(
            shape, attn_implementation="sdpa", dtype=dtype
        )
    made.train()
    if size[1] == "full":
        made.gradient_checkpointing_enable({"use_reentrant": False})
    forward = timing.compiled(made) if way.compiled else made

    def loss_of(one: Tensor) -> Tensor:
        with torch.autocast(asked.device.type, torch.bfloat16, enabled=not way.half):
            return forward(input_ids=one, labels=one, use_cache=False).loss

    return _timed(asked, size, loss_of, made)


def transformers_side(asked: Workload, only: str = "") -> Iterator[Row]:
    """The shape by transformers in all settings, or `only` one of them; each with the largest
    microbatch for which there is memory."""
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    fits: dict[bool, list[Size]] = {}
    for name, way in WAYS.items():
        if only not in ("", name):
            continue
        # compiled, it takes hardly more than it does otherwise: what did not fit is not compiled
        tried = fits.get(way.half, sizes(asked))
        try:
            found = first_that_fits(asked.device, tried, partial(transformers_way, asked, way))
            if found is not None:
                first = tried.index((found["micro_size"], found["recompute"]))
                fits[way.half] = tried[first:]
            yield name, {"skipped": OUT_OF_MEMORY} if found is None else found
        except RuntimeError as error:  # such as what its compiler refuses
            yield name, why_not(error)


def torchtitan_side(asked: Workload) -> Iterator[Row]:
    """The shape by torchtitan's LLaMA: blocks compiled one by one, FSDP2 over the one rank for its
    bfloat16, as its trainer has them. Attention is its SDPA, for there are no documents to mask."""
    place = PEERS / "torchtitan"
    if not place.is_dir():
        raise Left(
            "torchtitan is not here: `python -m benchmarks.speed.bench --rows d2zero3-bf16 --peers "
            "torchtitan` puts it into .peers, which is carried along"
        )
    sys.path.insert(0, str(place))
    import torch.distributed as dist

    backend = "gloo" if asked.device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        tried = [one for one in sizes(asked) if one[1] == "none"]
        found = first_that_fits(asked.device, tried, partial(_titan_size, asked))
    finally:
        dist.destroy_process_group()
    version = importlib.metadata.version("torchtitan")
    yield "compiled", {"skipped": OUT_OF_MEMORY} if found is None else found | {"version": version}


def _titan_size(asked: Workload, size: Size) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    device = asked.device
    fsdp: Any = importlib.import_module("torchtitan.distributed.fsdp")
    with device:
        made = _titan(asked.model, asked.vocab_size)
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
    return _timed(asked, size, lambda one: loss(made(one), one), made)


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
