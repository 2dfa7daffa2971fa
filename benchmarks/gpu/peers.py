"""Other trainers on one GPU, each in several settings: with bfloat16 weights or autocast, and with
or without compilation. Each setting uses the largest microbatch that fits. All trainers use fused
attention and torch's fused AdamW."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import timing
from benchmarks.gpu.reasons import Left, Skipped
from benchmarks.gpu.timing import OUT_OF_MEMORY, Row, first_that_fits, rates
from benchmarks.launch import PEERS
from ptdmpi.config import ModelConfig

STEPS = 6


class Workload(NamedTuple):
    """A model that the trainers train. ptdmpi trains the model with `sequences` sequences per step,
    in microbatches of `micro_size` sequences."""

    device: torch.device
    model: ModelConfig
    vocab_size: int
    sequences: int
    micro_size: int


class Setting(NamedTuple):
    """A setting with which another trainer is measured. If `half` is True, the weights and the
    optimizer's state are bfloat16. If `half` is False, they are float32, and matrix multiplications
    are computed in bfloat16."""

    half: bool
    compiled: bool


Size = tuple[int, str]  # size of a microbatch, and the mode of recomputation
WAYS = {
    "autocast": Setting(half=False, compiled=False),
    "autocast, compiled": Setting(half=False, compiled=True),
    "bf16 weights": Setting(half=True, compiled=False),
    "bf16 weights, compiled": Setting(half=True, compiled=True),
}
Side = Callable[[Workload], Iterator[Row]]
T = TypeVar("T")
# A function that measures a model. Its third argument computes the loss of a microbatch of tokens.
Measure = Callable[[Workload, Size, Callable[[Tensor], Tensor], torch.nn.Module], T]


def sizes(workload: Workload) -> list[Size]:
    """Return the microbatch sizes and recomputation modes to try. The sizes without recomputation
    come first, from twice ptdmpi's size downwards, and then the sizes with full recomputation."""
    tried = []
    size = min(2 * workload.micro_size, workload.sequences)
    while size:
        if workload.sequences % size == 0:
            tried.append((size, "none"))
        size //= 2
    recomputed = dict.fromkeys((workload.micro_size, 1))
    return [*tried, *((size, "full") for size in recomputed)]


def ids_of(workload: Workload, micro_size: int, step: int) -> list[Tensor]:
    """Return the microbatches of a training step: random tokens [sequences, tokens] on the device
    of the workload, with `micro_size` sequences in each microbatch. A step has the same tokens for
    all microbatch sizes."""
    generator = torch.Generator().manual_seed(step)
    shape = (workload.sequences, workload.model.seq_length)
    whole = torch.randint(workload.vocab_size, shape, generator=generator).to(workload.device)
    return list(whole.split(micro_size))


def one_step(
    microbatches: Sequence[Tensor], loss_of: Callable[[Tensor], Tensor], update: torch.optim.AdamW
) -> Tensor:
    """Do one training step on microbatches of tokens, and return the mean loss. `loss_of` computes
    the loss of one microbatch, and the optimizer `update` changes the weights."""
    parts = []
    for ids in microbatches:
        loss = loss_of(ids) / len(microbatches)
        loss.backward()
        parts.append(loss.detach())
    update.step()
    update.zero_grad()
    return torch.stack(parts).sum()


def timed(
    workload: Workload, size: Size, loss_of: Callable[[Tensor], Tensor], model: torch.nn.Module
) -> dict[str, Any]:
    """Train some steps of `model`, and return the measured rates, the peak memory and the loss of
    the first step. `loss_of` computes the loss of a microbatch of tokens. The first steps, in which
    the model is compiled, are not timed."""
    update = torch.optim.AdamW(model.parameters(), fused=True)
    module = torch.get_device_module(workload.device)
    times = []
    losses = []
    for step in range(STEPS):
        microbatches = ids_of(workload, size[0], step)
        module.synchronize()
        begin = time.perf_counter()
        loss = one_step(microbatches, loss_of, update)
        module.synchronize()
        times.append(time.perf_counter() - begin)
        losses.append(float(loss))
    numbers = rates(
        workload.device,
        workload.model,
        workload.vocab_size,
        tokens=workload.sequences * workload.model.seq_length,
        step_s=statistics.median(times[2:]),
    )
    return {"micro_size": size[0], "recompute": size[1], **numbers, "first_loss": losses[0]}


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean loss over all tokens that have a next token, for `logits` [sequences, tokens,
    vocabulary] and `ids` [sequences, tokens]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def transformers_way(
    workload: Workload, setting: Setting, size: Size, measure: Measure[T] = timed
) -> T:
    """Train the model of the workload with transformers in one setting, and return the result of
    `measure`."""
    transformers: Any = importlib.import_module("transformers")
    dtype = torch.bfloat16 if setting.half else torch.float32
    with workload.device:
        model = transformers.AutoModelForCausalLM.from_config(
            _transformers_shape(workload), attn_implementation="sdpa", dtype=dtype
        )
    model.train()
    if size[1] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    forward = timing.compiled(model) if setting.compiled else model

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast(workload.device.type, torch.bfloat16, enabled=not setting.half):
            return forward(input_ids=ids, labels=ids, use_cache=False).loss

    return measure(workload, size, loss_of, model)


def _transformers_shape(workload: Workload) -> Any:
    """Return transformers' configuration for the workload's model."""
    transformers: Any = importlib.import_module("transformers")
    model = workload.model
    if model.kind == "llama":
        return transformers.LlamaConfig(
            vocab_size=workload.vocab_size,
            hidden_size=model.hidden,
            intermediate_size=model.ffn_hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
        )
    return transformers.GPT2Config(
        vocab_size=workload.vocab_size,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        n_positions=model.seq_length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def transformers_side(workload: Workload, only: str = "") -> Iterator[Row]:
    """Yield rows for the settings of transformers, or for the setting `only`. Each row uses the
    largest microbatch that fits into memory. Raises Skipped if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    fits: dict[bool, list[Size]] = {}
    for name, setting in WAYS.items():
        if only in ("", name):
            yield name, partial(_largest_that_fits, workload, setting, fits)


def _largest_that_fits(
    workload: Workload, setting: Setting, fits: dict[bool, list[Size]]
) -> dict[str, Any]:
    """Return the measured numbers of a setting, for the largest microbatch that fits.

    `fits` maps a value of `Setting.half` to the microbatch sizes that fit into memory. This
    function adds the sizes that fit in this setting to `fits`. A compiled model needs about as much
    memory as the same model without compilation. So sizes that did not fit without compilation are
    not tried with compilation.
    """
    tried = fits.get(setting.half, sizes(workload))
    numbers = first_that_fits(workload.device, tried, partial(transformers_way, workload, setting))
    if numbers is None:
        return {"skipped": OUT_OF_MEMORY}
    first = tried.index((numbers["micro_size"], numbers["recompute"]))
    fits[setting.half] = tried[first:]
    return numbers


def torchtitan_folder() -> Path:
    """Return the folder into which torchtitan is installed, if it is installed."""
    return PEERS / "torchtitan"


def torchtitan_side(workload: Workload) -> Iterator[Row]:
    """Yield the table row for torchtitan's LLaMA. Raises Left if torchtitan is not installed.

    As in torchtitan's trainer, the model's blocks are compiled one by one. FSDP2 over a single rank
    casts the parameters to bfloat16. torchtitan's model uses scaled dot product attention (SDPA),
    because there are no documents to mask.
    """
    if not torchtitan_folder().is_dir():
        raise Left(
            "torchtitan is not here: `python -m benchmarks.speed.bench --rows d2zero3-bf16 --peers "
            "torchtitan` puts it into .peers, which is carried along"
        )
    yield "compiled", partial(_torchtitan, workload)


def _torchtitan(workload: Workload) -> dict[str, Any]:
    compiled = workload.device.type != "cpu"
    with alone_in_torchtitan(workload.device):
        tried = [size for size in sizes(workload) if size[1] == "none"]
        numbers = first_that_fits(
            workload.device, tried, lambda size: torchtitan_way(workload, size, compiled=compiled)
        )
    if numbers is None:
        return {"skipped": OUT_OF_MEMORY}
    return numbers | {"version": importlib.metadata.version("torchtitan")}


@contextlib.contextmanager
def alone_in_torchtitan(device: torch.device) -> Iterator[None]:
    """Return a context in which torchtitan can be imported. In this context, torch.distributed has
    a process group, which torchtitan needs; this process is its only rank."""
    sys.path.insert(0, str(torchtitan_folder()))
    import torch.distributed as dist

    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def torchtitan_way(
    workload: Workload, size: Size, measure: Measure[T] = timed, *, compiled: bool
) -> T:
    """Train torchtitan's LLaMA with one microbatch size, with compiled blocks if `compiled` is
    True, and return the result of `measure`. This function must be called inside the context
    `alone_in_torchtitan`."""
    from torch.distributed.device_mesh import init_device_mesh

    device = workload.device
    fsdp: Any = importlib.import_module("torchtitan.distributed.fsdp")
    with device:
        made = _titan(workload.model, workload.vocab_size)
        made.init_states(buffer_device=device)
    loss = _next_token_loss
    if compiled:
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
    return measure(workload, size, lambda ids: loss(made(ids), ids), made)


def _titan(model: ModelConfig, vocab_size: int) -> Any:
    """Return torchtitan's LLaMA with the given shape, not initialized."""
    common: Any = importlib.import_module("torchtitan.models.common")
    made_by: Any = importlib.import_module("torchtitan.models.common.config_utils")
    attention: Any = importlib.import_module("torchtitan.models.common.attention")
    llama: Any = importlib.import_module("torchtitan.models.llama3.model")
    h = model.hidden
    std = {"weight": lambda weight: torch.nn.init.normal_(weight, std=0.02)}

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
