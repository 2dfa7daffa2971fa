"""Loading a checkpoint into a rank of any layout, finding out on the way whether it is sound."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ptdmpi.checkpoint.boxes import Damaged, Reader
from ptdmpi.checkpoint.manifest import Manifest, Progress, sound_manifest
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.model.state import WEIGHTS, Counters, Piece, State

T = TypeVar("T")
# of what a manifest says: raises InputError if this run may not take up its tensors
Judge = Callable[[Path, Mapping[str, Any]], None]


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


def load(state: State, world: Communicator, directory: Path, judge: Judge) -> Progress | str:
    """Load a checkpoint, or say why it cannot be read; the same on every rank.

    After damage the state is undefined: another must be loaded. Raises SharedInputError if the
    checkpoint is sound but not of this model, or `judge` refuses it.
    """
    manifest = load_tensors(state, world, directory, tuple(state.kinds), judge)
    if isinstance(manifest, str):
        return manifest
    progress = manifest.progress
    state.restore(Counters(progress.updates, progress.loss_scale, progress.good_steps))
    return progress


def load_tensors(
    state: State,
    world: Communicator,
    directory: Path,
    kinds: Sequence[str] = (WEIGHTS,),
    judge: Judge = lambda path, said: None,
) -> Manifest | str:
    """Load the tensors of these kinds; returns the manifest, or why it cannot be read. `judge` may
    refuse it, by an InputError on every rank, before a tensor is read.

    Each rank reads its boxes and checks on the way those that were written in one piece. Pieces
    that nobody has read whole, because they were written in another layout, are read once more and
    checked by all ranks in turn. Raises as `load` does.
    """
    try:
        manifest = on_root(world, lambda: sound_manifest(directory))
    except InputError as error:
        return str(error)
    pieces = [piece for piece in state.pieces() if piece.kind in kinds]
    with Reader(directory, manifest) as reader:
        unfit = _first(world, InputError, lambda: _require_fit(reader, pieces, kinds))
        unfit = unfit or _first(world, InputError, lambda: judge(directory, manifest.said))
        if unfit:
            raise SharedInputError(unfit)
        damage = _first(world, Damaged, lambda: _read(reader, state, pieces))
        if not damage:
            # what one rank has read whole, nobody needs to read again
            checked = world.all_reduce(torch.from_numpy(reader.checked), "max")
            left = torch.nonzero(checked == 0).flatten().tolist()[world.rank :: world.size]
            damage = _first(world, Damaged, lambda: _check(reader, left))
        if damage:
            return damage
    state.changed()
    return manifest


def _require_fit(reader: Reader, pieces: Sequence[Piece], kinds: Sequence[str]) -> None:
    there = {name.partition("/")[0] for name in reader.tensors}
    if not there >= set(kinds) - {WEIGHTS}:
        raise InputError(
            f"checkpoint {reader.directory} has no optimizer state: a run can begin from it "
            "(checkpoint.initial), not resume"
        )
    for piece in pieces:
        reader.require(piece.key, piece.shape)


def _read(reader: Reader, state: State, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        host = piece.values.cpu()  # the same memory on a CPU
        if host.dtype == torch.bfloat16:  # of which numpy knows nothing
            host = host.float()
        reader.read(piece.key, piece.box, host.numpy())
        if host.data_ptr() != piece.values.data_ptr():
            piece.values.copy_(host)
        state.let_go()


def _check(reader: Reader, numbers: Sequence[int]) -> None:
    for number in numbers:
        reader.check(number)


def _first(world: Communicator, kind: type[Exception], work: Callable[[], Any]) -> str | None:
    """Do it on every rank; the message of the first one where it failed in this way."""
    text = None
    try:
        work()
    except kind as error:
        text = str(error)
    return next((found for found in world.all_gather_object(text) if found), None)
