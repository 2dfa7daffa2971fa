"""Megatron-Core on CPU over gloo: Megatron-Core's layers, schedules, gradient buffers and
reductions, with the initial weights of `plain_torch`'s GPT, and torch's fused AdamW.

Megatron-Core calls a CUDA device in many places. `stand_in` replaces the functions of torch that
these calls use. In Megatron-Core itself, only the two functions that get and set the state of
CUDA's random generator are replaced, by functions that do nothing. With these replacements, the
ranks compute as on a GPU, but with Megatron-Core's implementations in plain torch instead of its
CUDA kernels (Apex, Transformer Engine).
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.case import Row, Variant
from benchmarks.speed.gpt_torch import Gpt
from benchmarks.speed.plain_torch import (
    adam_settings,
    connect_alone,
    groups,
    layers_of_stages,
    microbatches,
)

# Two tables that map module names of Megatron-Core to ptdmpi's names: in a layer, and outside
# layers.
PARTS = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}
ENDS = {
    "embedding.word_embeddings": "embedding.word",
    "embedding.position_embeddings": "embedding.position",
    "decoder.final_layernorm": "final_norm",
    "output_layer": "head",
}


class _Nothing:
    """A stand-in for a stream, an event or a guard of a device that does not exist: every method
    does nothing."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _ignored

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _ignored(*arguments: Any, **settings: Any) -> None:
    return None


def stand_in() -> None:
    """Replace torch's functions for CUDA devices in this process by functions for the CPU."""
    # without this setting Megatron-Core's small fused functions would be compiled, and there may be
    # no compiler
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    cuda: Any = torch.cuda
    for name in ("Stream", "Event", "stream"):
        setattr(cuda, name, _Nothing)
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *device: _Nothing())
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(cuda, name, _ignored)
    cuda.current_device = lambda: "cpu"
    cuda.device_count = lambda: 1
    # a step uses no random numbers, so the state of the random generator is not needed
    cuda.get_rng_state = lambda *device: torch.empty(0, dtype=torch.uint8)
    for name in ("zeros", "empty", "ones", "tensor", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, **settings: Any) -> Tensor:
        if "cuda" in str(settings.get("device", "")):
            settings["device"] = "cpu"
        return make(*arguments, **settings)

    return made


class MegatronTrainer:
    """The trainer of Megatron-Core on one rank. Weights are bf16 or fp32. The gradients of the
    weights are added up in float32 buffers, which are reduced after the last microbatch."""

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        stand_in()
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import random

        self.row = row
        self.rank = rank
        sizes = row.sizes
        connect_alone()
        random._set_cuda_rng_state = random._get_cuda_rng_state = _ignored
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        )
        random.model_parallel_cuda_manual_seed(row.config.run.seed)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.config = _transformer_config(row, variant)
        self.chunks = _chunks(row, self.config)
        self.forward_backward = get_forward_backward_func()
        self.weights = [weight for chunk in self.chunks for weight in chunk.parameters()]
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        settings = {**adam_settings(row.config), "fused": True}
        self.adam = torch.optim.AdamW(groups(row.config, self.masters), **settings)

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's microbatches for a step."""
        return microbatches(self.row, self.data_rank, step)

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float | None:
        """Train a step. Return the loss of the step on a rank of the last stage."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        case = self.row.case
        model: Any = self.chunks
        data: Any = [iter(batch) for _ in self.chunks]
        if len(self.chunks) == 1:
            (model,) = model
            (data,) = data
        losses = self.forward_backward(
            forward_step_func=_forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=len(batch),
            seq_length=case.seq_length,
            micro_batch_size=case.micro_size,
            forward_only=False,
        )
        self._update()
        if not self.last:
            return None
        return float(torch.stack([result["loss"] for result in losses]).double().mean())

    @torch.no_grad()
    def _update(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.main_grad
        self.adam.step()
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)


def _forward_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Return the model's output for the next microbatch, and the loss function, as the schedules of
    Megatron-Core require."""
    inputs, labels = next(data)
    length = inputs.shape[1]
    positions = torch.arange(length)[None].expand(len(inputs), -1)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu_(1)

    def loss(of_tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = of_tokens.float().mean()
        # copy the loss, because the schedule divides the first returned value in place
        return mean, {"loss": mean.detach().clone()}

    return model(inputs, positions, hidden, labels=labels), loss


def _cut(row: Row) -> list[list[str]]:
    """Return Megatron-Core's pipeline layout: the modules of each stage. The stages have the same
    layers as ptdmpi's stages."""
    stages = [["decoder"] * len(layers) for layers in layers_of_stages(row)]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _transformer_config(row: Row, variant: Variant) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    model = row.config.model
    sizes = row.sizes
    dtype = torch.bfloat16 if variant.cast == "masters" else torch.float32
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        ffn_hidden_size=model.ffn_hidden,
        layernorm_epsilon=model.norm_eps,
        activation_func=functools.partial(F.gelu, approximate="tanh"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        pipeline_model_parallel_layout=_cut(row) if sizes.pipeline > 1 else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        # disable fused functions: in Megatron-Core they are CUDA kernels, or need a compiler
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        # with two pipeline ranks, the next and the previous rank are the same rank, and
        # Megatron-Core mixes up batched messages to it
        batch_p2p_comm=sizes.virtual == 1,
        overlap_p2p_comm=sizes.virtual > 1,
        finalize_model_grads_func=finalize_model_grads,
    )


def _chunks(row: Row, config: Any) -> list[Any]:
    """Return this rank's chunks of the model, each wrapped together with its gradient buffers."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    whole = Gpt(row.config, range(config.num_layers), row.case.vocab_size, autocast=False)
    weights = dict(whole.named_parameters())
    chunks = []
    for number in range(row.sizes.virtual):
        place = {"ignore_virtual": False, "vp_stage": number if row.sizes.virtual > 1 else None}
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="LayerNorm"),
            row.case.vocab_size,
            row.case.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=False,
            position_embedding_type="learned_absolute",
            vp_stage=place["vp_stage"],
        )
        _load(chunk, weights, parallel_state.get_tensor_model_parallel_rank(), row.sizes.tensor)
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        chunks.append(DistributedDataParallel(config, buffers, chunk.to(config.params_dtype)))
    return chunks


@torch.no_grad()
def _load(chunk: Any, weights: dict[str, nn.Parameter], rank: int, ranks: int) -> None:
    """Load this rank's slices of the weights of `plain_torch`. Both Megatron-Core and `plain_torch`
    order the rows of the weight for queries, keys and values (qkv) by heads."""
    # in each chunk, the names of layers count from 0
    first = chunk.decoder.layers[0].layer_number - 1
    for name, parameter in chunk.named_parameters():
        module, kind = name.rsplit(".", 1)
        if module in ENDS:
            whole = weights[f"{ENDS[module]}.{kind}"]
        else:
            number, part = module.removeprefix("decoder.layers.").split(".", 1)
            whole = weights[f"layers.{first + int(number)}.{PARTS[part]}.{kind}"]
        if getattr(parameter, "tensor_model_parallel", False):
            whole = whole.chunk(ranks, parameter.partition_dim)[rank]
        parameter.copy_(whole)
