"""A trained model that is asked, not trained: forward passes on a tensor and a pipeline axis.

Every data rank holds a whole model (over its tensor and pipeline ranks) and may be asked something
else. No gradients, optimizer or schedule: stages pass activations on, one after the other, while
the first ones go on with the next batch. The weights are a checkpoint's, or those of a run.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

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
from ptdmpi.model.batch import Batch
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.cache import KeyValueCache
from ptdmpi.model.flat import Portion
from ptdmpi.model.loss import token_log_probabilities
from ptdmpi.model.parameters import DataTypes, data_types
from ptdmpi.model.stage import Stage
from ptdmpi.model.state import WEIGHTS, State
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import Context
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.layout.stages import split_model
from ptdmpi.plan.schedule import orders as schedules
from ptdmpi.plan.schedule.orders import Placement
from ptdmpi.plan.shape.parameters import task_head


class InferenceModel:
    """This rank's part of a model. All ranks of a data rank call its methods together."""

    def __init__(
        self,
        config: Config,
        axes: Axes,
        vocab_size: int,
        stages: Mapping[int, Stage],
        placed: Placement,
    ) -> None:
        """`stages`: those that `placed` puts on this rank, with their weights; of `new_stages`."""
        self.config, self.axes, self.vocab_size = config, axes, vocab_size
        self.stages, self.placed = dict(sorted(stages.items())), placed
        some = next(iter(self.stages.values()))
        weight = next(some.parameters())
        self.device, self.dtype, self.axis = weight.device, weight.dtype, some.axis
        for stage in self.stages.values():
            stage.place_tables(config.model, self.device)
        self._head = next((stage for stage in self.stages.values() if stage.last), None)
        self._leaving: list[tuple[Handle, Tensor]] = []

    @property
    def seq_length(self) -> int:
        return self.config.model.seq_length

    @property
    def decides(self) -> bool:
        """Whether this is the one of a data rank's ranks that sees logits and may speak for it."""
        return self._head is not None and self.axis.rank == 0

    def share(self, value: Any) -> Any:
        """The deciding rank's `value` on all ranks of this data rank."""
        if self._head is not None:
            value = self.axes["tensor"].broadcast_object(value)
        last = self.placed.rank_of(self.placed.stages - 1)
        return self.axes["pipeline"].broadcast_object(value, last)

    def new_cache(self, rows: int, capacity: int) -> KeyValueCache:
        model = self.config.model
        kv_heads = max(1, model.kv_heads // self.axis.size)
        shape = (rows, capacity, kv_heads, model.head_size)
        layers = (int(one) for stage in self.stages.values() for one in stage.layers)
        return KeyValueCache(layers, shape, self.dtype, self.device)

    def hidden(self, ids: Tensor, cache: KeyValueCache | None = None) -> Tensor | None:
        """ids [s, b] -> activations [s, b, h] for the head on the last stage; None on others.

        With a cache the ids stand at its positions and see what it keeps; else each column is a
        sequence from its beginning.
        """

        def advance(stage: Stage, x: Tensor | None) -> Tensor:
            context = Context(rotary=_rotary(stage, ids, cache), cache=cache)
            return stage.advance(ids, x, context)

        return self._through(ids, advance)

    def scores(self, batch: Batch) -> Tensor | None:
        """Scores [samples, n] of the classes or candidates, of a model with a head for a task, on
        the last stage; None on others. After the last call comes `finish`."""
        x = self._through(batch.inputs, lambda stage, x: stage.hidden(batch, x, None))
        if x is None or self._head is None:
            return None
        with torch.no_grad():
            return self._head.scores(batch, x, None)

    def _through(
        self, ids: Tensor, advance: Callable[[Stage, Tensor | None], Tensor]
    ) -> Tensor | None:
        """What the last stage makes of ids [s, b], each stage by `advance`; None on other ranks."""
        pipeline, last = self.axes["pipeline"], self.placed.stages - 1
        x: Tensor | None = None
        for number, stage in self.stages.items():
            if not stage.first and self.placed.rank_of(number - 1) != pipeline.rank:
                shape = (*ids.shape, self.config.model.hidden)
                x = torch.empty(shape, dtype=self.dtype, device=self.device)
                pipeline.recv(x, self.placed.rank_of(number - 1))
            with torch.no_grad():
                x = advance(stage, x)
            if number < last and self.placed.rank_of(number + 1) != pipeline.rank:
                self._send(x.contiguous(), self.placed.rank_of(number + 1))
        return x if self._head is not None else None

    def _send(self, x: Tensor, following: int) -> None:
        """Send activations on without waiting: the next stage may be busy with those before."""
        while self._leaving and (len(self._leaving) > 2 or self._leaving[0][0].done()):
            self._leaving.pop(0)[0].wait()
        self._leaving.append((self.axes["pipeline"].isend(x, following), x))

    def finish(self) -> None:
        """Wait until all that was sent has arrived. To be called before the model is let go."""
        for handle, _ in self._leaving:
            handle.wait()
        self._leaving = []

    def next_logits(self, ids: Tensor, cache: KeyValueCache, last: Tensor) -> Tensor | None:
        """float32 [b, V] behind the token at place `last` [b] of the ids [s, b] on the ranks of the
        last stage; None on others. Keeps all ids in the cache."""
        x = self.hidden(ids, cache)
        if x is None or self._head is None:
            return None
        with torch.no_grad():
            chosen = x[last, torch.arange(x.shape[1], device=x.device)][None]  # [1, b, h]
            columns = self._head.heads(chosen)[0][0].float().t().contiguous()  # [V/t, b]
            return self.axes["tensor"].all_gather(columns)[: self.vocab_size].t()

    def log_probabilities(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """ids and labels [s, b]: log probabilities [s, b] of the labels, and where no label is more
        probable, on the last stage; None on others. After the last call comes `finish`."""
        x = self.hidden(ids)
        if x is None or self._head is None:
            return None
        with torch.no_grad():
            return token_log_probabilities(self._head.heads(x)[0], labels, self.axis)


def _rotary(stage: Stage, ids: Tensor, cache: KeyValueCache | None) -> tuple[Tensor, Tensor] | None:
    """The angles of the ids' places, where the model has such."""
    if stage.rotary is None:
        return None
    cos, sin = stage.rotary
    if cache is not None:
        # [s, 1, 1, head size] -> [s, b, 1, head size]
        return cos[cache.positions, 0], sin[cache.positions, 0]
    return cos[: ids.shape[0]], sin[: ids.shape[0]]


def new_stages(config: Config, axes: Axes, vocab_size: int, placed: Placement) -> dict[int, Stage]:
    """This rank's stages without weights. Sequences are whole on every rank, also where the run
    divides them: a text to be continued has one new token at a time."""
    layers = split_model(config.model, vocab_size, placed)
    axis = TensorAxis(axes["tensor"])
    return {
        number: Stage(config, vocab_size, layers[number], axis)
        for number in placed.stages_of(axes["pipeline"].rank)
    }


def device_of(world: World) -> torch.device:
    """A GPU of this rank's node, where it has any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def open_inference(
    path: Path,
    world: World,
    layout: str | None,
    precision: str | None,
    classifies: bool = False,
    adapter: Path | None = None,
    kind: str = WEIGHTS,
) -> tuple[InferenceModel, StoredModel]:
    """The model at `path` with its weights, on all ranks of `world`: one that is asked for tokens,
    or that `classifies`, with a head for a task; with the adapters at `adapter`, where given.

    `layout` such as "t=2,p=2"; None: that of the run, where it fits these ranks, else one rank for
    each model. `precision` None: as it was trained. `kind` of its state stands for its
    weights, such as their average; of the adapters' state, where given. Raises InputError on every
    rank.
    """

    def prepare() -> tuple[StoredModel, StoredAdapter | None, Config]:
        stored = open_model(path, kind if adapter is None else WEIGHTS)
        trained = stored.tree.get("precision", {}).get("compute", "fp32")
        sizes = _sizes(stored, world.size, layout)
        config = stored.config(world.size, precision or trained, **sizes)
        beside = None if adapter is None else open_adapter(adapter)
        if beside is not None:
            config = beside.over(stored, config)
        elif classifies:
            config = config.model_copy(update={"task": stored.task})
        if config.model.classifies != classifies:
            raise InputError(
                f"{adapter or stored.path} has a head for a task: it gives no tokens, but its "
                "accuracy: ptdmpi evaluate --tasks FILE"
            )
        if config.model.masked and not classifies:
            raise InputError(
                f"{stored.path} sees both sides of a token: it cannot be asked for the next one"
            )
        return stored, beside, config

    stored, beside, config = world.on_root(prepare)
    threads = stored.tree.get("run", {}).get("threads", 1)
    torch.set_num_threads(threads)
    device = device_of(world)
    axes = world.split(grid_of(config), wire_named(device=device))
    placed = schedules.placement("forward", config.parallel.pipeline, 1)
    stages = new_stages(config, axes, stored.vocab_size, placed)
    compute = data_types(config.precision.compute).compute
    buffer = ParameterBuffer(
        [one for stage in stages.values() for one in stage.named_logical_parameters()],
        DataTypes(compute, compute),  # nothing is updated: no masters beside the weights
        device,
        Portion(axes["tensor"].rank, axes["tensor"].size),
        trains=False,
    )
    state = State(buffer)
    if beside is not None:
        _load(load_frozen(state, axes.world, stored.checkpoint, head=task_head(config.model)))
    read = partial(manifest_of, kind=kind)
    _load(load_tensors(state, axes.world, (beside or stored).checkpoint, read=read))
    return InferenceModel(config, axes, stored.vocab_size, stages, placed), stored


def _load(loaded: Manifest | str) -> None:
    if isinstance(loaded, str):
        raise SharedInputError(loaded)


def _sizes(stored: StoredModel, ranks: int, layout: str | None) -> dict[str, int]:
    if layout is not None:
        sizes = layouts.parse(layout)
        extra = sizes.keys() - {"tensor", "pipeline", "data"}
        if extra:
            raise InputError(f"layout {layout}: here only t, p and d count")
        return sizes
    parallel = stored.tree.get("parallel", {})
    sizes = {axis: parallel.get(axis, 1) for axis in ("tensor", "pipeline")}
    return sizes if ranks % (sizes["tensor"] * sizes["pipeline"]) == 0 else {}
