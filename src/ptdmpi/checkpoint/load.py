"""Loading a checkpoint into a rank of any layout, finding out on the way whether it is sound."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Damaged, Reader
from ptdmpi.checkpoint.directory import Progress
from ptdmpi.checkpoint.share import KINDS, tensor_of
from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.world import Axes, SharedInputError
from ptdmpi.config import InputError
from ptdmpi.model.parameters import ParameterBuffer

if TYPE_CHECKING:
    from ptdmpi.train.engine import Engine

T = TypeVar("T")
# of what a manifest says: raises InputError if this run may not take up its tensors
Judge = Callable[[Path, dict[str, Any]], None]


class HoldsWeights(Protocol):
    """An engine, or a model that does not train: this rank's part of the weights."""

    axes: Axes
    buffer: ParameterBuffer


def on_root(world: Communicator, work: Callable[[], T]) -> T:
    """`work()` done by rank 0 for everyone; its failure is raised on every rank, as bad input."""
    result: tuple[T | None, str | None] = (None, None)
    if world.rank == 0:
        try:
            result = (work(), None)
        except (OSError, InputError) as error:
            result = (None, str(error))
    value, failure = world.broadcast_object(result)
    if failure is not None:
        raise SharedInputError(failure)
    return value


def load(engine: "Engine", directory: Path, judge: Judge) -> Progress | str:
    """Load a checkpoint, or say why it cannot be read; the same on every rank.

    After damage the state is undefined: another must be loaded. Raises SharedInputError if the
    checkpoint is sound but not of this model, or `judge` refuses it.
    """
    manifest = load_tensors(engine, directory, KINDS, judge)
    if isinstance(manifest, str):
        return manifest
    progress = Progress(**manifest["progress"])
    engine.optimizer.updates = progress.updates
    if engine.loss_scale.dynamic:
        engine.loss_scale.value = progress.loss_scale
        engine.loss_scale.good_steps = progress.good_steps
    return progress


def load_tensors(
    engine: HoldsWeights,
    directory: Path,
    kinds: Sequence[str] = ("weights",),
    judge: Judge = lambda path, manifest: None,
) -> dict[str, Any] | str:
    """Load the tensors of these kinds; returns the manifest, or why it cannot be read. `judge` may
    refuse it, by an InputError on every rank, before a tensor is read.

    Each rank reads its boxes and checks on the way those that were written in one piece. Pieces
    that nobody has read whole, because they were written in another layout, are read once more and
    checked by all ranks in turn. Raises as `load` does.
    """
    world = engine.axes.world
    try:
        manifest = on_root(world, lambda: files.sound_manifest(directory))
    except InputError as error:
        return str(error)
    with Reader(directory, manifest) as reader:
        unfit = _first(engine, InputError, lambda: _require_fit(engine, reader, kinds))
        unfit = unfit or _first(engine, InputError, lambda: judge(directory, manifest))
        if unfit:
            raise SharedInputError(unfit)
        damage = _first(engine, Damaged, lambda: _read_state(engine, reader, kinds))
        if not damage:
            checked = world.all_reduce(torch.from_numpy(reader.checked), "max")
            left = torch.nonzero(checked == 0).flatten().tolist()[world.rank :: world.size]
            damage = _first(engine, Damaged, lambda: [reader.check(number) for number in left])
        if damage:
            return damage
    engine.buffer.refresh_weights()
    return manifest


def _require_fit(engine: HoldsWeights, reader: Reader, kinds: Sequence[str]) -> None:
    if not any(name.startswith(f"{kinds[-1]}/") for name in reader.tensors):
        raise InputError(
            f"checkpoint {reader.directory} has no optimizer state: a run can begin from it "
            "(checkpoint.initial), not resume"
        )
    for entry in engine.buffer.entries.values():
        for kind in kinds:
            reader.require(f"{kind}/{entry.name}", entry.declaration.shape)


def _read_state(engine: HoldsWeights, reader: Reader, kinds: Sequence[str]) -> None:
    tensor = engine.axes["tensor"]
    for entry in engine.buffer.entries.values():
        for kind in kinds:
            local = tensor_of(engine, kind, entry)
            for box in entry.declaration.boxes(tensor.rank, tensor.size):
                target = local[box.local]
                host = target.detach().cpu()  # the same memory on a CPU
                if host.dtype == torch.bfloat16:  # of which numpy knows nothing
                    host = host.float()
                reader.read(f"{kind}/{entry.name}", box.logical, host.numpy())
                if host.data_ptr() != target.data_ptr():
                    target.copy_(host)


def _first(engine: HoldsWeights, kind: type[Exception], work: Callable[[], Any]) -> str | None:
    """Do it on every rank; the message of the first one where it failed in this way."""
    text = None
    try:
        work()
    except kind as error:
        text = str(error)
    return next((found for found in engine.axes.world.all_gather_object(text) if found), None)
