"""The modules of a transformer. Models such as GPT, LLaMA and BERT all use one class of layers
(`Block`), which computes the operators that `plan.layer.describe` lists.

All modules use a tensor axis; with an axis of size 1 the model is serial. Activations are [s, b,
h], for b sequences of s positions and the hidden size h. Under sequence parallelism, activations
outside attention and MLP have only this rank's positions.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ptdmpi.config import ModelConfig, RecomputeConfig
from ptdmpi.model import built
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.experts.routing import Chosen
from ptdmpi.model.kernels import Computing, Kernels, compiler
from ptdmpi.model.kernels.activation import gelu
from ptdmpi.model.kernels.fused.steps import fused_steps
from ptdmpi.model.kernels.norm import Norm
from ptdmpi.model.kernels.rope import Rotating
from ptdmpi.model.operators import (
    Build,
    Context,
    RowStep,
    install,
    run,
)
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sequence.dropout import HiddenDropout
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.describe import WORD_TABLE
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layer.parts import Parts
from ptdmpi.plan.shape import parameters


def rotary_table(model: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin [s, 1, 1, d] of RoPE's angles (Su et al. 2021, arXiv 2104.09864), where d
    is the number of rotated elements of a head.

    Both returned tensors are float32. The rotated pairs are the channels (i, i + d / 2), as in the
    LLaMA weights in Hugging Face's format; in latent attention, a rotated pair consists of
    neighbouring channels.
    """
    size = model.rotary_size
    # compute in float32 for every compute type, because bfloat16 cannot represent large positions,
    # such as 257, exactly
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    positions = torch.arange(model.seq_length, device=device, dtype=torch.float32)
    frequencies = 1.0 / model.rope_theta**exponents
    length = 1.0  # factor by which the rotation changes the length of vectors
    if model.rope_scaling == "llama3":
        frequencies = _stretched(frequencies, model)
    elif model.rope_scaling == "yarn":
        frequencies = _stretched_by_dimension(frequencies, model)
        length = model.rope_attention_factor or 0.1 * math.log(max(1.0, model.rope_factor)) + 1.0
    angles = torch.outer(positions, frequencies)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    return length * angles.cos(), length * angles.sin()


def _stretched(frequencies: Tensor, model: ModelConfig) -> Tensor:
    """Return RoPE's frequencies, changed for longer contexts as in Llama 3.1.

    Frequencies with fewer than `rope_low_factor` turns within the original context length
    (`rope_original_length`) are divided by `rope_factor`. Frequencies with more than
    `rope_high_factor` turns do not change. For other frequencies, the rule interpolates between
    these two results, with a weight that is linear in the number of turns. This rule of Llama 3.1
    is not in Dubey et al. 2024; its source is `apply_scaling` in Meta's repository llama-models.
    """
    turns = model.rope_original_length * frequencies / (2 * math.pi)
    low, high = model.rope_low_factor, model.rope_high_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / model.rope_factor)


def _stretched_by_dimension(frequencies: Tensor, model: ModelConfig) -> Tensor:
    """Return RoPE's frequencies, changed for longer contexts as in YaRN (Peng et al. 2023, arXiv
    2309.00071, section 3.2).

    Frequencies with fewer than `rope_low_factor` turns within the original context length
    (`rope_original_length`) are divided by `rope_factor`. Frequencies with more than
    `rope_high_factor` turns do not change. For other frequencies, the rule interpolates between
    these two results. The weight is linear in the index of the frequency, between two integer
    indices, as in the authors' code and in the package `transformers`. In the paper itself, the
    weight is linear in the number of turns.
    """

    def dimension(turns: float) -> float:
        """Return the index of the frequency that makes `turns` turns within the original context
        length. This index need not be an integer."""
        ratio = model.rope_original_length / (2 * math.pi * turns)
        return model.rotary_size * math.log(ratio) / (2 * math.log(model.rope_theta))

    first = max(0, math.floor(dimension(model.rope_high_factor)))
    last = min(model.rotary_size - 1, math.ceil(dimension(model.rope_low_factor)))
    numbers = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    divided = ((numbers - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequencies * (1.0 - divided) + frequencies / model.rope_factor * divided


class Layered(Computing):
    """The base class of modules that compute the operators of a layer: the layers of the model, and
    the modules for multi-token prediction. `plain_steps` computes each operator by its own
    function. In `steps`, some functions compute several operators at once, if the chosen kernels
    can do so."""

    plain_steps: tuple[RowStep, ...]
    steps: tuple[RowStep, ...]

    def take(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        super().take(kernels)
        self.steps = fused_steps(self.plain_steps, kernels)

    def place_rotary(self, rotary: tuple[Tensor, Tensor]) -> None:
        """Store the cosines and sines of the rotary angles of this rank's positions, [s, 1, 1,
        rotated elements] each, in the steps of the layer."""
        for step in self.steps:
            if isinstance(step.compute, Rotating):
                step.compute.rotary = rotary


class Block(Layered):
    """A transformer layer. It computes the operators that `plan.layer.describe` lists, in their
    order."""

    def __init__(
        self,
        model: ModelConfig,
        axis: TensorAxis,
        layer: int,
        recompute: RecomputeConfig,
        *,
        context: ContextAxis | None = None,
        experts: ExpertAxis | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        # `recompute.layers` counts from the first layer of the whole model. If it counted from the
        # first layer of each stage, the recomputed layers would depend on the numbers of ranks and
        # model chunks.
        limit = model.layers if recompute.layers == "all" else recompute.layers
        self.recompute = recompute.mode == "full" and layer < limit
        self.partition = recompute.partition_activations and axis.size > 1
        self.chooses = model.mixes(layer)
        selective = recompute.mode == "selective"
        build = Build(
            model=model,
            axis=axis,
            layer=layer,
            selective=selective,
            context=context or ContextAxis(),
            experts=experts or ExpertAxis(),
        )
        self.plain_steps = install(self, operators(describe.layer(model, layer)), build)
        self.steps = self.plain_steps
        self._compiled: Callable[[Tensor, Context], Tensor] | None = None

    def take(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        if self._compiled is None:
            super().take(kernels)
        else:  # the compiled graph does not change
            self.kernels = kernels

    def compiled_by(self, backend: str) -> None:
        """Compile the layer's training pass to one forward and one backward graph, with the given
        `backend` of torch.compile. Layers of the same shape use the same two graphs. The first
        forward raises an exception if an operation cannot be part of the graph."""
        # loading torch's compiler takes seconds, so it is loaded only here
        compiler.settle(torch.compiler.assume_constant_result)
        self._compiled = torch.compile(
            self._forward, fullgraph=True, dynamic=False, backend=backend
        )
        self.steps = self.plain_steps

    @property
    def is_compiled(self) -> bool:
        """Return True if the layer's training pass is a compiled graph."""
        return self._compiled is not None

    def uncompile(self) -> None:
        """Compute the layer without a compiled graph from now on."""
        self._compiled = None
        self.take(self.kernels)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Return a context in which the layer runs without its compiled graph, because a compiled
        graph does not call the hooks of modules."""
        compiled, self._compiled = self._compiled, None
        try:
            yield
        finally:
            self._compiled = compiled

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return the layer's output for the input x. The input and the output are [s, b, h]; under
        sequence parallelism, both have only this rank's positions."""
        if not torch.is_grad_enabled():
            return self._forward(x, context)
        run = self._forward if self._compiled is None else self._compiled
        if self.recompute:
            if self.chooses:
                context = replace(context, chosen=Chosen())
            with self._keeping():
                # recomputation needs no state of a random generator, because dropout masks are
                # hashes of coordinates (model/random.py)
                return checkpoint(run, x, context, use_reentrant=False, preserve_rng_state=False)
        return run(x, context)

    def _keeping(self) -> AbstractContextManager[object]:
        """Return a context that determines how recomputation saves the layer's input. By default,
        each of the t tensor ranks saves the full input. If `partition` is True, each rank saves
        only 1/t of the input, and the full input is gathered in the backward pass (P_a in
        Rajbhandari et al. 2020, arXiv 1910.02054, section 6.1)."""
        if not self.partition:
            return nullcontext()
        # torch's checkpoint adds its own hooks for the tensors that the layer would save, so the
        # hooks below are applied only to the layer's input
        return saved_tensors_hooks(
            # copy this rank's share of x, because a view would keep the memory of all of x
            lambda x: (self.axis.share(x).clone(), x.shape),
            lambda kept: self.axis.from_shares(kept[0]).view(kept[1]),
        )

    def _forward(self, x: Tensor, context: Context) -> Tensor:
        return run(self.steps, {"x": x}, context)["x"]


class Embedding(nn.Module):
    """The embedding of token ids [s, b] and token types [s, b] as activations [s, b, h]: the sum of
    word embedding, learned positions and token types, then norm and dropout. A model may lack some
    of these modules, for example the learned positions and the norm."""

    def __init__(self, model: ModelConfig, axis: TensorAxis, vocab_size: int) -> None:
        super().__init__()
        self.axis = axis
        # the random stream of this dropout needs a layer number that no layer has: -1
        self.dropout = HiddenDropout(model.dropout, (-1, 0), axis)
        parts = parameters.embedding(model, vocab_size)
        self.word = built.word_embedding(parts[WORD_TABLE], axis)
        self.scale = math.sqrt(model.hidden) if model.scale_embedding else None
        self.position = built.table(parts["position"]) if "position" in parts else None
        self.token_type = built.table(parts["token_type"]) if "token_type" in parts else None
        self.norm = Norm(model) if "norm" in parts else None

    def forward(self, ids: Tensor, context: Context, types: Tensor | None = None) -> Tensor:
        """Return the input of the first layer for the tokens `ids`, [s, b, h]; under sequence
        parallelism, only at this rank's positions. `types` has the segment of each token."""
        x = self.word(ids)
        if self.scale is not None:  # round the factor to the type of x, as in the training of Gemma
            x = x * torch.tensor(self.scale, dtype=x.dtype).item()
        between = self.axis.between_blocks(context.positions)
        if self.position is not None and context.cache is not None:
            x = x + self.position(context.cache.positions)
        elif self.position is not None and context.documents is not None:
            x = x + self.position(between.of(context.documents.positions))
        elif self.position is not None:
            rows = self.position.first(ids.shape[0] * context.positions.parts)
            x = x + between.of(rows)[:, None, :]
        if self.token_type is not None:
            assert types is not None, "a model with segment embeddings needs the segments"
            x = x + self.token_type(self.axis.between_blocks().of(types))
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x, context.stream, context.positions)


class MaskedTransform(Computing):
    """BERT's modules before its output head: linear, GELU and norm (Devlin et al. 2019). Every rank
    of the tensor axis has the full input [..., h] and computes the full output."""

    def __init__(self, model: ModelConfig, parts: Parts) -> None:
        super().__init__()
        self.activation = model.activation
        self.dense = built.replicated_linear(parts["mlm.dense"])
        self.norm = Norm(model, shared_gradient=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the output head, [..., h]."""
        return self.norm(gelu(self.dense(x), self.activation, self.kernels))


class SentenceOrder(nn.Module):
    """The prediction of the order of two segments, from the activations [b, h] at the first
    position of each sequence. The two logits of a sequence, [b, 2], are for segments in their
    original order and for swapped segments.

    The module has the pooler of Devlin et al. 2019, and is trained with the objective of Lan et al.
    2020 (arXiv 1909.11942).
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.pooler = built.replicated_linear(parts["sentence.pooler"])
        self.order = built.replicated_linear(parts["sentence.order"])

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [b, 2] for the activations [b, h] at the first positions."""
        return self.order(self.pooler(x).tanh())


class Classes(nn.Module):
    """The linear that computes scores [1, b, n] of sequences from the activations [1, b, h] at one
    position of each sequence. A sequence has a score for each of n classes. If sequences are
    candidate answers, each sequence has one score (n = 1).

    In a masked language model, a pooler and dropout come before the linear (Devlin et al. 2019,
    sections 4.1, 4.4).
    """

    def __init__(self, model: ModelConfig, parts: Parts, axis: TensorAxis) -> None:
        super().__init__()
        # the random stream of this dropout needs a layer number that no layer has: the number of
        # layers
        place = (model.layers, 0)
        undivided = TensorAxis(axis.comm)  # without sequence parallelism
        self.dropout = HiddenDropout(model.dropout, place, undivided)
        self.pooler = None
        if "sentence.pooler" in parts:
            self.pooler = built.replicated_linear(parts["sentence.pooler"])
        self.classes = built.replicated_linear(parts["sentence.classes"])

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return the scores [1, b, n] of activations [1, b, h]."""
        if self.pooler is not None:
            x = self.pooler(x).tanh()
            x = self.dropout(x, context.stream, context.positions)
        return self.classes(x)
