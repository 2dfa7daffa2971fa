"""The transformer. One block class, which a table of operators describes, serves models like GPT,
LLaMA and BERT.

All modules use a tensor axis; with an axis of size 1 the model is serial. Activations are [s, b,
h]; between blocks under sequence parallelism, they have only this rank's positions.
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
from ptdmpi.model.kernels import Computing, compiler
from ptdmpi.model.kernels.activation import gelu
from ptdmpi.model.operators import Build, Context, Heads, Norm, drop_hidden, install, run
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.describe import WORD_TABLE
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layer.parts import Parts
from ptdmpi.plan.shape import parameters


def rotary_table(model: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin [s, 1, 1, head size] of RoPE's angles (Su et al. 2021, arXiv 2104.09864).

    Both are float32. The rotated pairs are the channels (i, i + head size / 2), as in the LLaMA
    weights that Hugging Face publishes.
    """
    size = model.head_size
    # float32 for every compute type, because bfloat16 cannot represent 257
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    positions = torch.arange(model.seq_length, device=device, dtype=torch.float32)
    frequencies = 1.0 / model.rope_theta**exponents
    length = 1.0  # the factor by which rotation changes the length of vectors
    if model.rope_scaling == "llama3":
        frequencies = _stretched(frequencies, model)
    elif model.rope_scaling == "yarn":
        frequencies = _stretched_by_dimension(frequencies, model)
        length = model.rope_attention_factor or 0.1 * math.log(max(1.0, model.rope_factor)) + 1.0
    angles = torch.outer(positions, frequencies)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    return length * angles.cos(), length * angles.sin()


def _stretched(frequencies: Tensor, model: ModelConfig) -> Tensor:
    """Return RoPE's frequencies for longer contexts, as in Llama 3.1.

    Frequencies with fewer than `rope_low_factor` turns within the original length are divided by
    `rope_factor`, those with more than `rope_high_factor` turns do not change, and those in between
    are interpolated linearly. This rule is not in Dubey et al. 2024; its source is `apply_scaling`
    in Meta's llama-models.
    """
    turns = model.rope_original_length * frequencies / (2 * math.pi)
    low, high = model.rope_low_factor, model.rope_high_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / model.rope_factor)


def _stretched_by_dimension(frequencies: Tensor, model: ModelConfig) -> Tensor:
    """Return RoPE's frequencies for longer contexts, as in YaRN (Peng et al. 2023, arXiv
    2309.00071, section 3.2).

    Frequencies with fewer than `rope_low_factor` turns within the original length are divided by
    `rope_factor`, those with more than `rope_high_factor` turns do not change. Frequencies in
    between are interpolated linearly in the number of their dimension, between two integer
    dimensions, as in the authors' code and in `transformers`. The paper interpolates linearly in
    the number of turns.
    """

    def dimension(turns: float) -> float:
        """Return the number of the dimension whose frequency makes `turns` turns; it is not an
        integer in general."""
        ratio = model.rope_original_length / (2 * math.pi * turns)
        return model.head_size * math.log(ratio) / (2 * math.log(model.rope_theta))

    first = max(0, math.floor(dimension(model.rope_high_factor)))
    last = min(model.head_size - 1, math.ceil(dimension(model.rope_low_factor)))
    numbers = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    divided = ((numbers - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequencies * (1.0 - divided) + frequencies / model.rope_factor * divided


class Block(nn.Module):
    """A layer, which runs the rows of its sublayers (`plan.layer.describe`) in order."""

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
        # recompute the first layers of the model, not of each stage, so that recomputation does not
        # depend on the pipeline size p or the number of chunks v
        limit = model.layers if recompute.layers == "all" else recompute.layers
        self.recompute = recompute.mode == "full" and layer < limit
        self.partition = recompute.partition_activations and axis.size > 1
        self.chooses = model.experts > 0
        selective = recompute.mode == "selective"
        build = Build(
            model=model,
            axis=axis,
            layer=layer,
            selective=selective,
            context=context or ContextAxis(),
            experts=experts or ExpertAxis(),
        )
        self.steps = install(self, operators(describe.layer(model, layer)), build)
        self._compiled: Callable[[Tensor, Context], Tensor] | None = None

    def place_rotary(self, rotary: tuple[Tensor, Tensor]) -> None:
        """Store the rotary angles of all positions, cos and sin [s, 1, 1, head size]."""
        for step in self.steps:
            if isinstance(step.compute, Heads):
                step.compute.rotary = rotary

    def compiled_by(self, backend: str) -> None:
        """Compile the layer's training pass to one forward and one backward graph, by a backend of
        torch.compile. Layers of the same shape share the graphs. The first forward raises an
        exception if an operation breaks the graph."""
        # loading torch's compiler takes seconds, so it is loaded only here
        compiler.settle(torch.compiler.assume_constant_result)
        self._compiled = torch.compile(
            self._forward, fullgraph=True, dynamic=False, backend=backend
        )

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run the layer without its compiled graph within the context, because a compiled graph
        does not call the hooks of modules."""
        compiled, self._compiled = self._compiled, None
        try:
            yield
        finally:
            self._compiled = compiled

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return the layer's output for the input x. Both are [s, b, h], or this rank's positions
        of that."""
        if not torch.is_grad_enabled():
            return self._forward(x, context)
        run = self._forward if self._compiled is None else self._compiled
        if self.recompute:
            if self.chooses:
                context = replace(context, chosen=Chosen())
            with self._keeping():
                # recomputation needs no generator's state, because dropout masks are hashes of
                # coordinates (model/random.py)
                return checkpoint(run, x, context, use_reentrant=False, preserve_rng_state=False)
        return run(x, context)

    def _keeping(self) -> AbstractContextManager[object]:
        """Return a context that decides how recomputation saves the block's input. Each tensor rank
        saves the full input, or only 1/t of it, which is gathered in the backward pass (the P_a of
        Rajbhandari et al. 2020, arXiv 1910.02054, section 6.1)."""
        if not self.partition:
            return nullcontext()
        # torch's checkpoint adds its own hooks inside these, for the tensors that the layer would
        # save
        return saved_tensors_hooks(
            lambda x: (self.axis.share(x).clone(), x.shape),  # copy: a view keeps all of x
            lambda kept: self.axis.from_shares(kept[0]).view(kept[1]),
        )

    def _forward(self, x: Tensor, context: Context) -> Tensor:
        return run(self.steps, {"x": x}, context)["x"]


class Embedding(nn.Module):
    """The embedding of token ids [s, b] with token types [s, b] as activations [s, b, h]: word
    embedding, learned positions, token types, norm and dropout."""

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
        """Return the input of the first layer [s, b, h], or this rank's positions of it."""
        x = self.word(ids)
        if self.scale is not None:  # round the factor to the type of x, as in Gemma's training
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
        # for random numbers, the embedding has the number of the layer before the first
        return drop_hidden(x, context, self.rate, place=(-1, 0), axis=self.axis)


class MaskedTransform(Computing):
    """BERT's modules before its output head: linear, GELU and norm (Devlin et al. 2019). Every rank
    of the tensor axis has the input [..., h] and computes all of it."""

    def __init__(self, model: ModelConfig, parts: Parts) -> None:
        super().__init__()
        self.activation = model.activation
        self.dense = built.replicated_linear(parts["mlm.dense"])
        self.norm = Norm(model, shared_gradient=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the output head, [..., h]."""
        return self.norm(gelu(self.dense(x), self.activation, self.kernels))


class SentenceOrder(nn.Module):
    """The prediction of the order of two segments. Activations [b, h] at the first positions ->
    logits [b, 2] for segments in order or swapped.

    It has the pooler of Devlin et al. 2019 and the objective of Lan et al. 2020 (arXiv 1909.11942).
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.pooler = built.replicated_linear(parts["sentence.pooler"])
        self.order = built.replicated_linear(parts["sentence.order"])

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [b, 2] of the activations [b, h] at the first positions."""
        return self.order(self.pooler(x).tanh())


class Classes(nn.Module):
    """The scores of sequences: activations [1, b, h] at one position of each sequence -> scores [1,
    b, n]. There is a score for each of n classes, or one score (n = 1) for a sequence that is one
    of several candidates.

    In a masked language model, pooler and dropout come before the linear for the scores (Devlin et
    al. 2019, sections 4.1, 4.4).
    """

    def __init__(self, model: ModelConfig, parts: Parts, axis: TensorAxis) -> None:
        super().__init__()
        self.rate = model.dropout
        self.place = (model.layers, 0)  # numbered as the layer after the last
        self.axis = TensorAxis(axis.comm)  # each rank has all of the few positions
        self.pooler = None
        if "sentence.pooler" in parts:
            self.pooler = built.replicated_linear(parts["sentence.pooler"])
        self.classes = built.replicated_linear(parts["sentence.classes"])

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return the scores [1, b, n] of activations [1, b, h]."""
        if self.pooler is not None:
            x = self.pooler(x).tanh()
            x = drop_hidden(x, context, self.rate, place=self.place, axis=self.axis)
        return self.classes(x)
