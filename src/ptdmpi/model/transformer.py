"""The transformer, described by data: one block for GPT, LLaMA and BERT shapes, written once.

Everything is given a tensor axis; with an axis of size 1 it is the serial model. Activations are
[s, b, h], or this rank's positions of it between blocks under sequence parallelism.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ptdmpi.config import ModelConfig, RecomputeConfig
from ptdmpi.model import built
from ptdmpi.model.cache import KeyValueCache
from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import Computing, Kernels, compiler
from ptdmpi.model.kernels.activation import gated, gelu
from ptdmpi.model.kernels.attention import AttentionCore, hidden_keys
from ptdmpi.model.kernels.blocks import Scores
from ptdmpi.model.kernels.norm import rms_norm, soft_cap
from ptdmpi.model.kernels.rope import rotate
from ptdmpi.model.parameters import declare
from ptdmpi.model.random import RandomStream, dropout
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.describe import WORD_TABLE
from ptdmpi.plan.layer.parts import Parts
from ptdmpi.plan.shape import parameters


@dataclass(frozen=True)
class Context:
    """What a forward pass knows besides its input: the random stream, None where nothing drops;
    the documents, None where each sequence is one; the rotary angles, where they are not those of
    all positions; and the cache of what came before.
    """

    stream: RandomStream | None = None
    documents: Documents | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    cache: KeyValueCache | None = None

    def of_adapters(self, layer: int) -> RandomStream | None:
        """The stream of what a layer's adapters drop."""
        return None if self.stream is None else self.stream.at(layer, 3)


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dim."""

    def __init__(
        self,
        model: ModelConfig,
        shared_gradient: bool = True,
        size: int | None = None,
        partial_gradient: bool = False,
    ) -> None:
        """`shared_gradient`: the input is divided where the sequence is, `partial_gradient`: where
        the heads are (see `Declaration`). `size` is that of the last dim; None: hidden."""
        super().__init__()
        self.eps = model.norm_eps
        self.shape = (model.hidden if size is None else size,)
        self.zero_centered = model.zero_centered_norm
        sums = {"shared_gradient": shared_gradient, "partial_gradient": partial_gradient}
        self.weight = declare(1, self.shape, "zeros" if self.zero_centered else "ones", **sums)
        shift = describe.norm_part(model).shift
        self.bias = declare(1, self.shape, "zeros", **sums) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.zero_centered:  # in float32: a half type cannot tell 1 + w from 1 + 1.01 w
            weight = 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        if self.bias is None:
            return rms_norm(x, weight, self.eps)
        return F.layer_norm(x, self.shape, weight.to(x.dtype), self.bias, self.eps)


def rotary_table(model: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [s, 1, 1, head size] of RoPE's angles (Su et al. 2021, arXiv 2104.09864).

    float32. Pairs are (i, i + head size / 2), as in the published LLaMA weights of Hugging Face.
    """
    size = model.head_size
    # float32 under every compute type: bfloat16 has no integers between 256 and 258
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    positions = torch.arange(model.seq_length, device=device, dtype=torch.float32)
    frequencies = 1.0 / model.rope_theta**exponents
    if model.rope_scaling == "llama3":
        frequencies = _stretched(frequencies, model)
    angles = torch.outer(positions, frequencies)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    return angles.cos(), angles.sin()


def _stretched(frequencies: Tensor, model: ModelConfig) -> Tensor:
    """RoPE's frequencies for longer contexts, as Llama 3.1 has them: what turns less than
    `rope_low_factor` times within the original length turns `rope_factor` times slower, what turns
    more than `rope_high_factor` times stays, and between the two it goes over linearly.

    Dubey et al. 2024 do not print it; it is `apply_scaling` of Meta's llama-models.
    """
    turns = model.rope_original_length * frequencies / (2 * math.pi)
    low, high = model.rope_low_factor, model.rope_high_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / model.rope_factor)


class Attention(Computing):
    """Self-attention, causal or of both sides, its heads divided over the tensor axis."""

    def __init__(self, model: ModelConfig, axis: TensorAxis, layer: int, selective: bool) -> None:
        super().__init__()
        self.axis, self.layer = axis, layer
        self.head_size = model.head_size
        # ranks beyond the key heads share one, each for its own queries
        self.heads, self.kv_heads = model.heads // axis.size, max(1, model.kv_heads // axis.size)
        self.rate = model.attention_dropout
        self.scores = Scores(
            model.attention_scale,
            model.attention == "causal",
            model.window_of(layer),
            model.attention_softcap,
        )
        self.attend = AttentionCore(self.scores)
        self.selective = selective
        parts = parameters.layer(model, layer)
        self.qkv = built.column_linear(parts, "attention.qkv", axis)
        self.query_norm = self.key_norm = None
        if "attention.query_norm" in parts:
            self.query_norm, self.key_norm = (
                Norm(model, False, model.head_size, partial_gradient=True) for _ in range(2)
            )
        self.out = built.row_linear(parts, "attention.out", axis)
        self.rotary: tuple[Tensor, Tensor] | None = None

    def take(self, kernels: Kernels) -> None:
        """Compute by these kernels from now on."""
        super().take(kernels)
        self.attend = AttentionCore(self.scores, kernels)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        adapted = context.of_adapters(self.layer)
        # [s, b, (a + 2 kv) / t, head size]
        qkv = self.qkv(x, adapted).unflatten(-1, (-1, self.head_size))
        rotary = context.rotary or self.rotary
        normed = self.query_norm is not None and self.key_norm is not None
        if rotary is not None and not normed:
            both, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
            q, k = rotate(both, *rotary).split([self.heads, self.kv_heads], dim=2)
        else:
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
            q, k = (q, k) if rotary is None else (rotate(q, *rotary), rotate(k, *rotary))
        if rotary is not None:
            v = v.clone()  # a view of all of qkv, which would stay only for its sake
        # heads in front, for a product per head; [s, b, ...] outside (see `tensor_parallel`)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))  # [b, a/t, s, head size]
        if context.cache is not None:
            core = context.cache.attend(self.layer, q, k, v, self.attend)
        elif self.selective:
            # Korthikanti et al. 2022, section 5: the core is cheap to compute, dear to keep
            core = checkpoint(
                self._core, q, k, v, context, use_reentrant=False, preserve_rng_state=False
            )
        else:
            core = self._core(q, k, v, context)
        return self.out(core.permute(2, 0, 1, 3).flatten(2), adapted)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        if context.stream is None or self.rate == 0.0:
            return self.attend(q, k, v, context.documents)
        if self.kv_heads != self.heads:
            group = self.heads // self.kv_heads
            # whole copies: products of batches know no groups
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = self.kernels.product(q, k.transpose(-1, -2)) * self.scores.scale
        if self.scores.softcap:
            scores = soft_cap(scores, self.scores.softcap)
        hidden = hidden_keys(q.shape[2], self.scores, context.documents, q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        # a sum of s exponentials in a half type loses the small ones
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        weights = scores.softmax(-1, dtype=wide).to(v.dtype)
        stream = context.stream.at(self.layer, 2, first_head=self.axis.rank * self.heads)
        keep = stream.attention_mask(weights.shape, self.rate)
        return self.kernels.product(dropout(weights, keep, self.rate), v)


class Mlp(Computing):
    """Two linears around GELU, or a gated unit (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, model: ModelConfig, axis: TensorAxis, layer: int) -> None:
        super().__init__()
        self.activation = model.activation
        self.gated = model.gates == 2
        parts = parameters.layer(model, layer)
        self.up = built.column_linear(parts, "mlp.up", axis)
        self.down = built.row_linear(parts, "mlp.down", axis)

    def forward(self, x: Tensor, adapted: RandomStream | None = None) -> Tensor:
        """`adapted`: the stream of what its adapters drop."""
        x = self.up(x, adapted)
        if self.gated:
            return self.down(gated(x, self.activation, self.kernels), adapted)
        return self.down(gelu(x, self.activation, self.kernels), adapted)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on what is added; "post":
    norm(x + attention(x)), then norm(x + mlp(x)), the order of Vaswani et al. 2017 and BERT;
    "sandwich": as "pre", with another norm of what is added (Ding et al. 2021, arXiv 2105.13290).
    """

    def __init__(
        self, model: ModelConfig, axis: TensorAxis, layer: int, recompute: RecomputeConfig
    ) -> None:
        super().__init__()
        self.axis, self.layer = axis, layer
        self.rate = model.dropout
        self.post = model.block_norm == "post"
        # the first of the model, not of each stage: what is recomputed does not depend on p or v
        limit = model.layers if recompute.layers == "all" else recompute.layers
        self.recompute = recompute.mode == "full" and layer < limit
        self.partition = recompute.partition_activations and axis.size > 1
        self.attention_norm = Norm(model)
        self.attention = Attention(model, axis, layer, recompute.mode == "selective")
        self.mlp_norm = Norm(model)
        self.mlp = Mlp(model, axis, layer)
        self._compiled: Callable[[Tensor, Context], Tensor] | None = None
        self.attention_post_norm = self.mlp_post_norm = None
        if model.block_norm == "sandwich":
            self.attention_post_norm, self.mlp_post_norm = Norm(model), Norm(model)

    def compiled_by(self, backend: str) -> None:
        """From now on train as one graph there and one back, by a backend of torch.compile. Layers
        of one shape share it. Raises in the first forward where something breaks the graph."""
        # loads torch's compiler, which takes seconds: only here
        compiler.settle(torch.compiler.assume_constant_result)
        self._compiled = torch.compile(
            self._forward, fullgraph=True, dynamic=False, backend=backend
        )

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Layer by layer for now: a graph calls none of the modules in it, nor their hooks."""
        compiled, self._compiled = self._compiled, None
        try:
            yield
        finally:
            self._compiled = compiled

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if not torch.is_grad_enabled():
            return self._forward(x, context)
        run = self._forward if self._compiled is None else self._compiled
        if self.recompute:
            with self._keeping():
                # no generator to put back: masks follow from coordinates (model/random.py)
                return checkpoint(run, x, context, use_reentrant=False, preserve_rng_state=False)
        return run(x, context)

    def _keeping(self) -> AbstractContextManager[object]:
        """How recomputation keeps the one tensor that it does, its input: as it is, or 1/t of it on
        each rank of the tensor axis, gathered when the backward pass comes to it (the P_a of
        Rajbhandari et al. 2020, arXiv 1910.02054, section 6.1)."""
        if not self.partition:
            return nullcontext()
        # the checkpoint's own hooks, inside of these, see what the layer would keep
        return saved_tensors_hooks(
            lambda x: (self.axis.share(x).clone(), x.shape),  # a view would hold all of x
            lambda kept: self.axis.from_shares(kept[0]).view(kept[1]),
        )

    def _forward(self, x: Tensor, context: Context) -> Tensor:
        if self.post:
            x = self.attention_norm(x + self._drop(self.attention(x, context), context, 0))
            return self.mlp_norm(x + self._drop(self._mlp(x, context), context, 1))
        y = self.attention(self.attention_norm(x), context)
        y = y if self.attention_post_norm is None else self.attention_post_norm(y)
        x = x + self._drop(y, context, 0)
        y = self._mlp(self.mlp_norm(x), context)
        y = y if self.mlp_post_norm is None else self.mlp_post_norm(y)
        return x + self._drop(y, context, 1)

    def _mlp(self, x: Tensor, context: Context) -> Tensor:
        return self.mlp(x, context.of_adapters(self.layer))

    def _drop(self, x: Tensor, context: Context, place: int) -> Tensor:
        return drop_hidden(x, context, self.rate, (self.layer, place), self.axis)


def drop_hidden(
    x: Tensor, context: Context, rate: float, place: tuple[int, ...], axis: TensorAxis
) -> Tensor:
    """Dropout on [s, b, h], or on this rank's positions of it."""
    if context.stream is None or rate == 0.0:
        return x
    first = axis.rank * x.shape[0] if axis.divides_sequence else 0
    stream = context.stream.at(*place, first_position=first)
    return dropout(x, stream.hidden_mask(x.shape, rate), rate)


class Embedding(nn.Module):
    """Token ids [s, b], of types [s, b] -> activations [s, b, h]: word embedding, learned
    positions, token types, norm, dropout."""

    def __init__(self, model: ModelConfig, axis: TensorAxis, vocab_size: int) -> None:
        super().__init__()
        self.axis = axis
        self.rate = model.dropout
        parts = parameters.embedding(model, vocab_size)
        self.word = built.word_embedding(parts[WORD_TABLE], axis)
        self.scale = math.sqrt(model.hidden) if model.scale_embedding else None
        self.position = built.table(parts["position"]) if "position" in parts else None
        self.token_type = built.table(parts["token_type"]) if "token_type" in parts else None
        self.norm = Norm(model) if "norm" in parts else None

    def forward(self, ids: Tensor, context: Context, types: Tensor | None = None) -> Tensor:
        x = self.word(ids)
        if self.scale is not None:  # rounded to the type of x, as Gemma was trained
            x = x * torch.tensor(self.scale, dtype=x.dtype).item()
        here = self.axis.local_positions(ids.shape[0])
        if self.position is not None and context.cache is not None:
            x = x + self.position(context.cache.positions)
        elif self.position is not None and context.documents is not None:
            x = x + self.position(context.documents.positions[here])
        elif self.position is not None:
            x = x + self.position(here)[:, None, :]
        if self.token_type is not None:
            assert types is not None, "a model that tells segments apart needs to know them"
            x = x + self.token_type(types[here])
        if self.norm is not None:
            x = self.norm(x)
        # the embedding counts as the layer before the first
        return drop_hidden(x, context, self.rate, (-1, 0), self.axis)


class MaskedTransform(Computing):
    """What BERT puts before its output head: linear, GELU, norm, on [..., h] that every rank of the
    tensor axis holds (Devlin et al. 2019)."""

    def __init__(self, model: ModelConfig, parts: Parts) -> None:
        super().__init__()
        self.activation = model.activation
        self.dense = built.replicated_linear(parts["mlm.dense"])
        self.norm = Norm(model, shared_gradient=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(gelu(self.dense(x), self.activation, self.kernels))


class SentenceOrder(nn.Module):
    """First positions [b, h] -> logits [b, 2] of two segments in their order, or swapped.

    The pooler of Devlin et al. 2019 with the objective of Lan et al. 2020 (arXiv 1909.11942).
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.pooler = built.replicated_linear(parts["sentence.pooler"])
        self.order = built.replicated_linear(parts["sentence.order"])

    def forward(self, x: Tensor) -> Tensor:
        return self.order(self.pooler(x).tanh())


class Classes(nn.Module):
    """Activations at one position of each sequence [1, b, h] -> a score for each class [1, b, n],
    or for the sequence as one of several candidates (n = 1).

    Of a masked model behind the pooler and dropout (Devlin et al. 2019, sections 4.1, 4.4).
    """

    def __init__(self, model: ModelConfig, parts: Parts, axis: TensorAxis) -> None:
        super().__init__()
        self.rate, self.place = model.dropout, (model.layers, 0)  # the layer behind the last one
        self.axis = TensorAxis(axis.comm)  # each rank sees all of the few positions
        self.pooler = None
        if "sentence.pooler" in parts:
            self.pooler = built.replicated_linear(parts["sentence.pooler"])
        self.classes = built.replicated_linear(parts["sentence.classes"])

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.pooler is not None:
            x = self.pooler(x).tanh()
            x = drop_hidden(x, context, self.rate, self.place, self.axis)
        return self.classes(x)
