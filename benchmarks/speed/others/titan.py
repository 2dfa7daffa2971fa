"""torchtitan on CPU over gloo: torchtitan's decoder, attention, linear layers, shardings, pipeline
and loss, combined as in torchtitan's trainer, with the initial weights of `plain_torch`'s GPT and
torch's fused AdamW.

torchtitan's trainer needs a CUDA device. Before torchtitan is imported, the function
`for_torchtitan` in `stand_ins.py` makes the CPU the device that torchtitan finds, and replaces a
module of Triton kernels, which torch for CPUs does not have. torchtitan does not have three modules
that this GPT needs: learned positions, an MLP of two matrices, and attention without rotary
positions. The benchmark makes these three modules by small changes to torchtitan's own classes.
"""

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import decoder_sharding as shardings
from torchtitan.models.common.attention import (
    FusedQKVLinear,
    GQAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from benchmarks.speed.case import Row, Variant
from benchmarks.speed.gpt_torch import Gpt
from benchmarks.speed.plain_torch import Optimizer, connect_alone, layers_of_stages, microbatches

# torchtitan's default backend for sharding needs a newer torch (parameters with types instead of
# DTensors)
BACKEND = "partial_dtensor"
SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
# two tables that map names of torchtitan to names in `plain_torch`: in a layer, and outside layers
PARTS = {
    "attention_norm": "attention_norm",
    "attention.qkv_linear.wqkv": "attention.qkv",
    "attention.wo": "attention.out",
    "ffn_norm": "mlp_norm",
    "feed_forward.w1": "mlp.up",
    "feed_forward.w2": "mlp.down",
}
ENDS = {
    "tok_embeddings.weight": "embedding.word.weight",
    "tok_embeddings.position": "embedding.position.weight",
    "norm.weight": "final_norm.weight",
    "norm.bias": "final_norm.bias",
    "lm_head.weight": "head.weight",
}


class PositionedEmbedding(Embedding):
    """torchtitan's embedding, to which a learned vector for each position is added."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        """The configuration of the embedding; `length` is the number of positions."""

        length: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.position = nn.Parameter(torch.empty(config.length, config.embedding_dim))

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings [batch, tokens, hidden] of the ids `input` [batch, tokens]."""
        position = self.position
        if isinstance(position, DTensor):
            position = position.to_local()
        # the results of the tensor ranks are added up later, so each rank adds only a fraction of
        # the position vectors
        if self.tp_group is not None:
            position = position / dist.get_world_size(self.tp_group)
        return super().forward(input) + position


class Unrotated(Module):
    """A stand-in for rotary positions that rotates nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The configuration of `Unrotated`, the stand-in for rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return queries and keys unchanged."""
        return q, k


class Mlp(Module):
    """An MLP: two linear layers of torchtitan with tanh GELU between them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The configuration of the MLP."""

        w1: Linear.Config
        w2: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = config.w1.build()
        self.w2 = config.w2.build()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the input `x`; both are [batch, tokens, hidden]."""
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class TitanTrainer:
    """The trainer of torchtitan on one rank.

    Losses are sums over tokens, divided by the number of tokens in the complete batch. Parameters
    are sharded over the data ranks, even if there is only one data rank, because torchtitan
    computes in bf16 with float32 master weights only if parameters are sharded. Gradients are
    reduced into shards after each microbatch; with a pipeline, once per step.
    """

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        connect_alone()
        self.row = row
        self.rank = rank
        sizes = row.sizes
        self.data_rank = rank if sizes.data > 1 else 0
        set_spmd_backend(BACKEND)
        dims = _dims(row)
        dims.build_mesh()
        config = _model_config(row, variant)
        model = config.build()
        _load(model, row)
        loss = CrossEntropyLoss(CrossEntropyLoss.Config(global_vocab_size=row.case.vocab_size))
        tokens = torch.tensor(row.case.tokens)
        self.loss = lambda logits, labels: loss(logits, labels, tokens)
        settings = _settings(row, variant) | {"parallel_dims": dims}
        self.schedule = None
        self.first = True
        self.last = True
        if sizes.pipeline > 1:
            self.schedule, self.models, self.first, self.last = pipeline_llm(
                model,
                **settings,
                device=torch.device("cpu"),
                model_config=config,
                parallelize_fn=parallelize_llama,
                loss_fn=self.loss,
            )
        else:
            self.models = [parallelize_llama(model, **settings)]
        parameters = []
        for part in self.models:
            parameters += part.parameters()
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    # torchtitan sets FSDP's gradient divide factor to 1. Without this setting, the
                    # reduce-scatter of the gradients would therefore use ReduceOp.PREMUL_SUM, which
                    # gloo does not support.
                    module.set_force_sum_reduction_for_comms(True)
        self.optimizer = Optimizer(row.config, parameters, masters=False, divided=False)

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's microbatches for a step."""
        return microbatches(self.row, self.data_rank, step)

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float | None:
        """Train a step. Return the loss of the step on a rank of the last stage."""
        losses = self._accumulated(batch) if self.schedule is None else self._piped(batch)
        self.optimizer.step()
        if not losses:
            return None
        # each loss is a sum over the tokens of this rank only
        return float(torch.stack(losses).double().sum()) * self.row.sizes.data

    def _accumulated(self, batch: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        losses = []
        for inputs, labels in batch:
            loss, _ = self.loss(self.models[0](inputs), labels)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _piped(self, batch: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        losses: list[Tensor] = []
        inputs, labels = (torch.cat(parts) for parts in zip(*batch, strict=True))
        arguments = [inputs] if self.first else []
        targets = {"target": labels, "losses": losses} if self.last else {}
        self.schedule.step(*arguments, **targets, return_outputs=False)
        return losses


def _dims(row: Row) -> ParallelDims:
    sizes = row.sizes
    return ParallelDims(
        dp_replicate=1,
        dp_shard=sizes.data,
        cp=1,
        tp=sizes.tensor,
        pp=sizes.pipeline,
        ep=1,
        world_size=sizes.ranks,
        spmd_backend=BACKEND,
    )


def _settings(row: Row, variant: Variant) -> dict[str, Any]:
    """Return torchtitan's configuration, as arguments of parallelize_llama and pipeline_llm."""
    case = row.case
    sizes = row.sizes
    parallelism = ParallelismConfig(
        spmd_backend=BACKEND,
        data_parallel_shard_degree=sizes.data,
        tensor_parallel_degree=sizes.tensor,
        enable_sequence_parallel=variant.sequence_parallel,
        pipeline_parallel_degree=sizes.pipeline,
    )
    if sizes.pipeline > 1:
        parallelism.pipeline_parallel_schedule = SCHEDULES[sizes.schedule]
        parallelism.pipeline_parallel_microbatch_size = case.micro_size
        parallelism.module_fqns_per_model_part = _cut(row)
    return {
        "training": TrainingConfig(
            local_batch_size=case.global_size // sizes.data,
            mixed_precision_param="bfloat16" if variant.cast == "policy" else "float32",
        ),
        "parallelism": parallelism,
        "compile_config": CompileConfig(enable=False),
        "ac_config": None,
        "dump_folder": "",
    }


def _cut(row: Row) -> list[list[str]]:
    """Return the names of the modules of each stage. The stages have the same layers as ptdmpi's
    stages."""
    stages = [[f"layers.{layer}" for layer in layers] for layers in layers_of_stages(row)]
    return [["tok_embeddings", *stages[0]], *stages[1:-1], [*stages[-1], "norm", "lm_head"]]


def _model_config(row: Row, variant: Variant) -> Llama3Model.Config:
    model = row.config.model
    vocab_size = row.case.vocab_size
    divided = variant.sequence_parallel
    if divided:
        between = shardings.dense_sequence_parallel_placement()
    else:
        between = shardings.dense_activation_placement(tp=spmd.I)
    embedding = PositionedEmbedding.Config(
        num_embeddings=vocab_size, embedding_dim=model.hidden, length=model.seq_length
    )
    head = Linear.Config(in_features=model.hidden, out_features=vocab_size)
    config = Llama3Model.Config(
        dim=model.hidden,
        vocab_size=vocab_size,
        tok_embeddings=embedding,
        norm=_norm(row),
        lm_head=head,
        layers=[_block(row, between, divided) for _ in range(model.layers)],
    )
    shardings.set_decoder_sharding_config(config, enable_sp=divided)
    whole = shardings.dense_param_placement(tp=spmd.R)
    config.tok_embeddings.sharding_config.state_shardings["position"] = whole
    _with_bias(config.norm)
    return config


def _block(row: Row, between: Any, divided: bool) -> Llama3TransformerBlock.Config:
    model = row.config.model
    hidden = model.hidden
    inner = model.ffn_hidden
    heads = {"head_dim": model.head_size, "n_heads": model.heads, "n_kv_heads": model.heads}
    qkv = Linear.Config(in_features=hidden, out_features=3 * hidden, bias=True)
    attention = GQAttention.Config(
        n_heads=model.heads,
        dim=hidden,
        qkv_linear=FusedQKVLinear.Config(**heads, wqkv=qkv),
        wo=Linear.Config(in_features=hidden, out_features=hidden, bias=True),
        inner_attention=ScaledDotProductAttention.Config(),
        rope=Unrotated.Config(),
    )
    shardings.set_gqa_attention_sharding(attention, enable_sp=divided)
    shardings.set_gqa_inner_attention_local_map(attention.inner_attention)
    mlp = Mlp.Config(
        w1=Linear.Config(in_features=hidden, out_features=inner, bias=True),
        w2=Linear.Config(in_features=inner, out_features=hidden, bias=True),
    )
    mlp.sharding_config = ShardingConfig(
        in_src_shardings={"x": between},
        in_dst_shardings={"x": shardings.dense_activation_placement(tp=spmd.R)},
    )
    mlp.w1.sharding_config = shardings.colwise_config()
    mlp.w2.sharding_config = shardings.rowwise_config(output_sp=divided)
    norms = {}
    for name in ("attention_norm", "ffn_norm"):
        norms[name] = _norm(row)
        norms[name].sharding_config = shardings.norm_config(enable_sp=divided)
        _with_bias(norms[name])
    return Llama3TransformerBlock.Config(attention=attention, feed_forward=mlp, **norms)


def _norm(row: Row) -> LayerNorm.Config:
    model = row.config.model
    return LayerNorm.Config(normalized_shape=model.hidden, eps=model.norm_eps)


def _with_bias(norm: LayerNorm.Config) -> None:
    """Set the sharding of a norm's bias to the sharding of its weight. torchtitan's norms have no
    bias, so torchtitan has no rule for the sharding of a bias."""
    states = norm.sharding_config.state_shardings
    states["bias"] = states["weight"]


@torch.no_grad()
def _load(model: nn.Module, row: Row) -> None:
    """Load the initial weights of the GPT in `plain_torch`. Both torchtitan and `plain_torch` order
    the rows of the weight for queries, keys and values (qkv) by heads."""
    config = row.config
    whole = Gpt(config, range(config.model.layers), row.case.vocab_size, autocast=False)
    weights = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        ours = ENDS.get(name)
        if ours is None:
            layers, number, rest = name.split(".", 2)
            module, kind = rest.rsplit(".", 1)
            ours = f"{layers}.{number}.{PARTS[module]}.{kind}"
        parameter.copy_(weights[ours])
