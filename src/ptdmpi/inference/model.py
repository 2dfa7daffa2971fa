"""A trained model that is asked, not trained: forward passes on a tensor and a pipeline axis.

Every data rank holds a whole model (over its tensor and pipeline ranks) and may be asked something
else. No gradients, optimizer or schedule: stages pass activations on, one after the other, while
the first ones go on with the next batch.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptdmpi.checkpoint.load import load_tensors
from ptdmpi.comm.communicator import Handle
from ptdmpi.comm.world import Axes, World
from ptdmpi.config import Config, InputError, SharedInputError
from ptdmpi.config import layout as layouts
from ptdmpi.inference.stored import StoredModel, open_model
from ptdmpi.model.cache import KeyValueCache
from ptdmpi.model.loss import token_log_probabilities
from ptdmpi.model.parameters import PRECISIONS, ParameterBuffer, Precision
from ptdmpi.model.stage import Stage
from ptdmpi.model.state import State
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import Context
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.layout.stages import split_model
from ptdmpi.plan.schedule import orders as schedules


class InferenceModel:
    """This rank's part of a model. All ranks of a data rank call its methods together."""

    def __init__(
        self, config: Config, axes: Axes, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.axes, self.vocab_size = config, axes, vocab_size
        self.device = torch.device(device)
        self.dtype = PRECISIONS[config.precision.compute].compute
        self.axis = TensorAxis(axes["tensor"])
        model, pipeline = config.model, axes["pipeline"]
        self.placed = schedules.placement("forward", pipeline.size, 1)
        layers = split_model(model, vocab_size, self.placed)
        (self.number,) = self.placed.stages_of(pipeline.rank)
        self.stage = Stage(config, vocab_size, layers[self.number], self.axis)
        self.buffer = ParameterBuffer(
            self.stage.named_logical_parameters(),
            Precision(self.dtype, self.dtype),  # nothing is updated: no masters beside the weights
            self.device,
            self.axis.rank,
            self.axis.size,
            trains=False,
        )
        self.stage.place_tables(model, self.device)
        self._leaving: list[tuple[Handle, Tensor]] = []

    @property
    def seq_length(self) -> int:
        return self.config.model.seq_length

    @property
    def decides(self) -> bool:
        """Whether this is the one of a data rank's ranks that sees logits and may speak for it."""
        return self.stage.last and self.axis.rank == 0

    def share(self, value: Any) -> Any:
        """The deciding rank's `value` on all ranks of this data rank."""
        if self.stage.last:
            value = self.axes["tensor"].broadcast_object(value)
        last = self.placed.rank_of(self.placed.stages - 1)
        return self.axes["pipeline"].broadcast_object(value, last)

    def new_cache(self, rows: int, capacity: int) -> KeyValueCache:
        model = self.config.model
        kv_heads = max(1, model.kv_heads // self.axis.size)
        shape = (rows, capacity, kv_heads, model.head_size)
        layers = map(int, self.stage.layers)
        return KeyValueCache(layers, shape, self.dtype, self.device)

    def hidden(self, ids: Tensor, cache: KeyValueCache | None = None) -> Tensor | None:
        """ids [s, b] -> activations [s, b, h] for the head on the last stage; None on others.

        With a cache the ids stand at its positions and see what it keeps; else each column is a
        sequence from its beginning.
        """
        stage, pipeline = self.stage, self.axes["pipeline"]
        rotary = None
        if stage.rotary is not None and cache is not None:
            # [s, 1, 1, head size] -> [s, b, 1, head size]
            cos, sin = stage.rotary
            rotary = cos[cache.positions, 0], sin[cache.positions, 0]
        elif stage.rotary is not None:
            cos, sin = stage.rotary
            rotary = cos[: ids.shape[0]], sin[: ids.shape[0]]
        with torch.no_grad():
            x = None
            if not stage.first:
                shape = (*ids.shape, self.config.model.hidden)
                x = torch.empty(shape, dtype=self.dtype, device=self.device)
                pipeline.recv(x, self.placed.rank_of(self.number - 1))
            x = stage.advance(ids, x, Context(rotary=rotary, cache=cache))
        if stage.last:
            return x
        self._send(x.contiguous())
        return None

    def _send(self, x: Tensor) -> None:
        """Send activations on without waiting: the next stage may be busy with those before."""
        while self._leaving and (len(self._leaving) > 2 or self._leaving[0][0].done()):
            self._leaving.pop(0)[0].wait()
        following = self.placed.rank_of(self.number + 1)
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
        if x is None:
            return None
        with torch.no_grad():
            chosen = x[last, torch.arange(x.shape[1], device=x.device)][None]  # [1, b, h]
            columns = self.stage.heads(chosen)[0][0].float().t().contiguous()  # [V/t, b]
            return self.axes["tensor"].all_gather(columns)[: self.vocab_size].t()

    def log_probabilities(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """ids and labels [s, b]: log probabilities [s, b] of the labels, and where no label is more
        probable, on the last stage; None on others. After the last call comes `finish`."""
        x = self.hidden(ids)
        if x is None:
            return None
        with torch.no_grad():
            return token_log_probabilities(self.stage.heads(x)[0], labels, self.axis)


def device_of(world: World) -> torch.device:
    """A GPU of this rank's node, where it has any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def open_inference(
    path: Path, world: World, layout: str | None, precision: str | None
) -> tuple[InferenceModel, StoredModel]:
    """The model at `path` with its weights, on all ranks of `world`.

    `layout` such as "t=2,p=2"; None: that of the run, where it fits these ranks, else one rank for
    each model. `precision` None: as it was trained. Raises InputError on every rank.
    """

    def prepare() -> tuple[StoredModel, Config]:
        stored = open_model(path)
        trained = stored.tree.get("precision", {}).get("compute", "fp32")
        sizes = _sizes(stored, world.size, layout)
        config = stored.config(world.size, precision or trained, **sizes)
        if config.model.masked:
            raise InputError(
                f"{stored.path} sees both sides of a token: it cannot be asked for the next one"
            )
        return stored, config

    stored, config = world.on_root(prepare)
    threads = stored.tree.get("run", {}).get("threads", 1)
    torch.set_num_threads(threads)
    axes = world.split(grid_of(config))
    model = InferenceModel(config, axes, stored.vocab_size, device_of(world))
    loaded = load_tensors(State(model.buffer), axes.world, stored.checkpoint)
    if isinstance(loaded, str):
        raise SharedInputError(loaded)
    return model, stored


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
