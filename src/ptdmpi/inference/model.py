"""A trained model for inference: forward passes over the tensor axis and the pipeline axis.

The ranks with the same data rank have one complete model, divided over the tensor axis and the
pipeline axis. Different groups of ranks, each with one complete model, compute different batches.
There are no gradients, no optimizer and no schedule: each stage sends its activations to the next
stage, and then computes its next batch. The weights of the model are loaded from the checkpoint of
a run or of a conversion.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptdmpi.checkpoint.load import load_frozen, load_tensors
from ptdmpi.checkpoint.manifest import Manifest
from ptdmpi.comm.communicator import Handle
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import Axes, World
from ptdmpi.config import Config, InputError, SharedInputError
from ptdmpi.config import layout as layouts
from ptdmpi.inference.stored import (
    StoredAdapter,
    StoredModel,
    manifest_of,
    open_adapter,
    open_model,
)
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.cache import Cache, KeyValueCache
from ptdmpi.model.flat import Portion
from ptdmpi.model.latent.cache import LatentCache
from ptdmpi.model.operators import Context
from ptdmpi.model.output.cross_entropy import token_log_probabilities
from ptdmpi.model.output.distillation import top_log_probabilities
from ptdmpi.model.parameters import DataTypes, data_types
from ptdmpi.model.stage import Stage
from ptdmpi.model.state import WEIGHTS, State
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.layout.stages import split_model
from ptdmpi.plan.schedule import orders as schedules
from ptdmpi.plan.schedule.orders import Placement
from ptdmpi.plan.shape.parameters import task_head


class InferenceModel:
    """The part of a model that is on this rank: its pipeline stages, each with this rank's
    tensor-parallel slices of the weights. All ranks with the same data rank call the methods
    together.

    `device` and `dtype` are the device and the type of the weights, and `axis` is the model's
    tensor axis.
    """

    def __init__(
        self,
        config: Config,
        axes: Axes,
        vocab_size: int,
        *,
        stages: Mapping[int, Stage],
        placement: Placement,
    ) -> None:
        """Store this rank's part of the model. `stages` has this rank's pipeline stages, with
        loaded weights, by stage number. `placement` says which pipeline rank has which stage."""
        self.config = config
        self.axes = axes
        self.vocab_size = vocab_size
        self.stages = dict(sorted(stages.items()))
        self.placement = placement
        first = next(iter(self.stages.values()))
        weight = next(first.parameters())
        self.device = weight.device
        self.dtype = weight.dtype
        self.axis = first.axis
        for stage in self.stages.values():
            stage.place_tables(config.model, self.device)
        self._head = next((stage for stage in self.stages.values() if stage.last), None)
        self._leaving: list[tuple[Handle, Tensor]] = []

    @property
    def seq_length(self) -> int:
        """Return the maximum length of a sequence, in tokens."""
        return self.config.model.seq_length

    @property
    def decides(self) -> bool:
        """Return True on the one rank of the model that makes decisions from the logits for all
        ranks of the model, for example which token comes next."""
        return self._head is not None and self.axis.rank == 0

    def share(self, value: Any) -> Any:
        """Return, on all ranks of this model, the `value` of the one rank that decides (see
        `decides`)."""
        if self._head is not None:
            value = self.axes["tensor"].broadcast_object(value)
        last = self.placement.rank_of(self.placement.stages - 1)
        return self.axes["pipeline"].broadcast_object(value, last)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """Return an empty cache for `rows` sequences of up to `capacity` tokens."""
        model = self.config.model
        layers = (int(number) for stage in self.stages.values() for number in stage.layers)
        rank = model.kv_lora_rank
        if model.latent:
            whole = (rows, capacity, rank + model.rope_head_size)
            return LatentCache(layers, whole, self.dtype, self.device, values=rank)
        kv_heads = max(1, model.kv_heads // self.axis.size)
        shape = (rows, capacity, kv_heads, model.head_size)
        return KeyValueCache(layers, shape, self.dtype, self.device)

    def hidden(self, ids: Tensor, cache: Cache | None = None) -> Tensor | None:
        """Return the activations [positions, sequences, hidden size] of the last layer for the ids
        [positions, sequences]. Ranks without the last stage return None.

        With a cache, the ids follow the tokens in the cache, and attend to these tokens. Without a
        cache, each column of the ids begins with the first token of its sequence.
        """

        def advance(stage: Stage, x: Tensor | None) -> Tensor:
            """Return the output of one stage for its input `x`, which is None in the first
            stage."""
            context = Context(rotary=_rotary(stage, ids, cache), cache=cache)
            return stage.advance(ids, x, context)

        return self._through(ids, advance)

    def scores(self, batch: Microbatch) -> Tensor | None:
        """Return the scores [samples, number of classes or candidates]. Ranks without the last
        stage return None.

        The model needs a head for a task. Call `finish` after the last call of this method.
        """
        x = self._through(batch.inputs, lambda stage, x: stage.hidden(batch, x, None))
        if x is None or self._head is None:
            return None
        with torch.no_grad():
            return self._head.scores(batch, x, None)

    def _through(
        self, ids: Tensor, advance: Callable[[Stage, Tensor | None], Tensor]
    ) -> Tensor | None:
        """Pass ids [positions, sequences] through all stages. `advance` computes the output of a
        stage from the output of the stage before it.

        Return the output of the last stage; None on other ranks.
        """
        pipeline = self.axes["pipeline"]
        last = self.placement.stages - 1
        x: Tensor | None = None
        for number, stage in self.stages.items():
            if not stage.first and self.placement.rank_of(number - 1) != pipeline.rank:
                shape = (*ids.shape, self.config.model.hidden)
                x = torch.empty(shape, dtype=self.dtype, device=self.device)
                pipeline.recv(x, self.placement.rank_of(number - 1))
            with torch.no_grad():
                x = advance(stage, x)
            if number < last and self.placement.rank_of(number + 1) != pipeline.rank:
                self._send(x.contiguous(), self.placement.rank_of(number + 1))
        if self._head is None:
            return None
        return x

    def _send(self, x: Tensor, following: int) -> None:
        """Send activations to pipeline rank `following` without waiting, because the next stage may
        still compute an earlier batch."""
        while self._leaving and (len(self._leaving) > 2 or self._leaving[0][0].done()):
            self._leaving.pop(0)[0].wait()
        self._leaving.append((self.axes["pipeline"].isend(x, following), x))

    def finish(self) -> None:
        """Wait until all activations that this rank sends have been sent. Call `finish` before the
        model is deleted."""
        for handle, _ in self._leaving:
            handle.wait()
        self._leaving = []

    def next_logits(self, ids: Tensor, cache: Cache, last: Tensor) -> Tensor | None:
        """Return the logits of the next token, float32 [sequences, vocabulary]. Ranks without the
        last stage return None.

        The ids are [positions, sequences]. `last` [sequences] has, for each sequence, the index of
        its last id, which the next token follows. All ids are added to the cache.
        """
        x = self.hidden(ids, cache)
        if x is None or self._head is None:
            return None
        with torch.no_grad():
            chosen = x[last, torch.arange(x.shape[1], device=x.device)][None]  # [1, rows, hidden]
            columns = self._head.heads(chosen)[0][0].float().t().contiguous()  # [local vocab, rows]
            return self.axes["tensor"].all_gather(columns)[: self.vocab_size].t()

    def log_probabilities(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the log probabilities of labels. Ranks without the last stage return None.

        ids and labels are [positions, sequences]. The result is two tensors of this shape. The
        first tensor has the log probabilities in nats. The second tensor is True where no token is
        more probable than the label. Call `finish` after the last call of this method.
        """
        x = self.hidden(ids)
        if x is None or self._head is None:
            return None
        with torch.no_grad():
            return token_log_probabilities(self._head.heads(x)[0], labels, self.axis)

    def label_log_probabilities(self, batch: Microbatch) -> Tensor | None:
        """Return the log probabilities of a batch's labels in nats, [labels, sequences]. Ranks
        without the last stage return None. As in training, no token attends to another document.
        Call `finish` after the last call of this method."""
        logits = self._label_logits(batch)
        if logits is None:
            return None
        return token_log_probabilities(logits, batch.labels, self.axis)[0]

    def top_log_probabilities(self, batch: Microbatch, count: int) -> tuple[Tensor, Tensor] | None:
        """Return the ids of the `count` most probable tokens at the position of each label, and
        their log probabilities in nats, both [labels, sequences, count]. Ranks without the last
        stage return None. As in training, no token attends to another document. Call `finish` after
        the last call of this method."""
        logits = self._label_logits(batch)
        if logits is None:
            return None
        return top_log_probabilities(logits, count, self.axis)

    def _label_logits(self, batch: Microbatch) -> Tensor | None:
        """Return this rank's columns of the logits (its part of the vocabulary) at the positions of
        all labels of a batch. Ranks without the last stage return None."""
        x = self._through(batch.inputs, lambda stage, x: stage.hidden(batch, x, None))
        if x is None or self._head is None:
            return None
        with torch.no_grad():
            return self._head.heads(x)[0]


def _rotary(stage: Stage, ids: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor] | None:
    """Return (cos, sin) of the rotary angles at the positions of the ids. Return None if the model
    has no rotary position embedding."""
    if stage.rotary is None:
        return None
    cos, sin = stage.rotary
    if cache is not None:
        # [positions, 1, 1, head size] -> [positions, sequences, 1, head size]
        return cos[cache.positions, 0], sin[cache.positions, 0]
    return cos[: ids.shape[0]], sin[: ids.shape[0]]


def new_stages(
    config: Config, axes: Axes, vocab_size: int, placement: Placement
) -> dict[int, Stage]:
    """Return this rank's stages by number, without weights.

    Every rank has complete sequences, even if the training run divided sequences over the context
    axis. Generation computes one new token at a time, so there is nothing to divide.
    """
    layers = split_model(config.model, vocab_size, placement)
    axis = TensorAxis(axes["tensor"])
    return {
        number: Stage(config, vocab_size, layers[number], axis)
        for number in placement.stages_of(axes["pipeline"].rank)
    }


def open_inference(
    path: Path,
    world: World,
    layout: str | None,
    precision: str | None,
    *,
    classifies: bool = False,
    adapter: Path | None = None,
    kind: str = WEIGHTS,
) -> tuple[InferenceModel, StoredModel]:
    """Load the model at `path` on all ranks of `world`. Every rank calls this function.

    `layout` is text such as "t=2,p=2". If `layout` is None, the model has the tensor and pipeline
    sizes of the training run. If these sizes do not fit the number of ranks, every rank has a
    complete model. If `precision` is None, the precision of the training run is used. `classifies`
    is True if the model must have a head for a task, and False if it must predict tokens. `adapter`
    is the path of adapters that are added to the model. `kind` selects the stored values that are
    loaded as weights: the trained weights, or the moving average of the weights. With `adapter`,
    `kind` selects the values of the adapters, and the trained weights of the base model are loaded.

    Return the model, and the description of its files. Raise InputError on every rank if the model
    cannot be loaded.
    """
    opened = world.on_root(
        lambda: _opened(
            path,
            world.size,
            layout=layout,
            precision=precision,
            classifies=classifies,
            adapter=adapter,
            kind=kind,
        )
    )
    stored = opened.stored
    config = opened.config
    torch.set_num_threads(stored.tree.get("run", {}).get("threads", 1))
    device = world.device()
    axes = world.split(grid_of(config), wire_named(device=device))
    placement = schedules.placement("forward", config.parallel.pipeline, 1)
    stages = new_stages(config, axes, stored.vocab_size, placement)
    compute = data_types(config.precision.compute).compute
    buffer = ParameterBuffer(
        [named for stage in stages.values() for named in stage.named_logical_parameters()],
        DataTypes(compute, compute),  # inference updates no weights, so it has no master weights
        device,
        Portion(axes["tensor"].rank, axes["tensor"].size),
        trains=False,
    )
    state = State(buffer)
    checkpoint = stored.checkpoint
    if opened.adapter is not None:
        _require(load_frozen(state, axes.world, checkpoint, head=task_head(config.model)))
        checkpoint = opened.adapter.checkpoint
    read = partial(manifest_of, kind=kind)
    _require(load_tensors(state, axes.world, checkpoint, read=read))
    model = InferenceModel(config, axes, stored.vocab_size, stages=stages, placement=placement)
    return model, stored


class _Opened(NamedTuple):
    """A model on the disk, the adapters that are added to it, and a configuration for both."""

    stored: StoredModel
    adapter: StoredAdapter | None
    config: Config


def _opened(
    path: Path,
    ranks: int,
    *,
    layout: str | None,
    precision: str | None,
    classifies: bool,
    adapter: Path | None,
    kind: str,
) -> _Opened:
    """Read everything that `open_inference` needs, except the weights. Raise InputError if there
    is no model at the given path, or if the model does not fit the arguments."""
    stored = open_model(path, kind if adapter is None else WEIGHTS)
    trained = stored.tree.get("precision", {}).get("compute", "fp32")
    sizes = _sizes(stored, ranks, layout)
    config = stored.config(ranks, precision or trained, **sizes)
    opened: StoredAdapter | None = None
    if adapter is not None:
        opened = open_adapter(adapter)
        config = opened.over(stored, config)
    elif classifies:
        config = config.model_copy(update={"task": stored.task})
    if config.model.classifies != classifies:
        raise InputError(
            f"{adapter or stored.path} has a head for a task, and predicts no tokens; "
            "`ptdmpi evaluate --tasks FILE` measures its accuracy"
        )
    if config.model.masked and not classifies:
        raise InputError(
            f"{stored.path} sees both sides of a token: it cannot predict the next token"
        )
    return _Opened(stored, opened, config)


def _require(loaded: Manifest | str) -> None:
    """Raise InputError on every rank if loading has returned an error message instead of a
    manifest."""
    if isinstance(loaded, str):
        raise SharedInputError(loaded)


def _sizes(stored: StoredModel, ranks: int, layout: str | None) -> dict[str, int]:
    """Return the axis sizes that `layout` names. If `layout` is None, return the tensor and
    pipeline sizes of the training run, or {} if these sizes do not fit `ranks`."""
    if layout is not None:
        sizes = layouts.parse(layout)
        extra = sizes.keys() - {"tensor", "pipeline", "data"}
        if extra:
            raise InputError(
                f"layout {layout}: legal: t, p and d; every rank has whole sequences, and "
                "all experts of its layers"
            )
        return sizes
    parallel = stored.tree.get("parallel", {})
    sizes = {axis: parallel.get(axis, 1) for axis in ("tensor", "pipeline")}
    if ranks % (sizes["tensor"] * sizes["pipeline"]):
        return {}
    return sizes
