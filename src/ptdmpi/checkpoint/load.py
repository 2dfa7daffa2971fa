"""Loading a checkpoint into a rank of any layout, with a check of its checksums at the same
time."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ptdmpi.base.words import counted
from ptdmpi.checkpoint.boxes import Damaged, Reader
from ptdmpi.checkpoint.manifest import Manifest, read_manifest, sound_manifest
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.lineage.adapted import require_kind
from ptdmpi.model.state import WEIGHTS, Counters, Piece, State, key

POSITIONS = "embedding.position.weight"
T = TypeVar("T")
# raises InputError if this run may not use the tensors of the checkpoint
Judge = Callable[[Path, Manifest], None]


def on_root(world: Communicator, work: Callable[[], T]) -> T:
    """Call `work` on rank 0 and return its result on every rank. If `work` fails, every rank raises
    SharedInputError."""
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


def load(
    state: State,
    world: Communicator,
    directory: Path,
    *,
    judge: Judge,
    mean: bool = False,
    whole: bool = True,
) -> Manifest | str:
    """Load a checkpoint and return its manifest, or the reason why it cannot be read. The result is
    the same on every rank.

    If replicas differ, each continues from its own values. All replicas continue from the mean if
    the checkpoint contains only the mean, or if `mean` allows it and the number of replicas has
    changed. If `whole` is False, a node may have only the files that its ranks read. If the
    checkpoint is damaged, the state is undefined afterwards, and another checkpoint must be loaded.
    Raise SharedInputError if the checkpoint is undamaged but not of this model, or if `judge`
    refuses it.
    """

    def fitting(path: Path, manifest: Manifest) -> None:
        """Raise InputError if the replicas of this run, or the run itself, cannot continue from the
        checkpoint."""
        _require_replicas(state, path, manifest, mean)
        judge(path, manifest)

    kinds = tuple(state.kinds)
    read = sound_manifest if whole else read_manifest
    manifest = load_tensors(state, world, directory, kinds=kinds, judge=fitting, read=read)
    if isinstance(manifest, str):
        return manifest
    progress = manifest.progress
    state.restore(Counters(progress.updates, progress.loss_scale, progress.good_steps))
    return manifest


def _require_replicas(state: State, directory: Path, manifest: Manifest, mean: bool) -> None:
    stored = manifest.replicas
    peers = state.peers.size
    differ = any(kind.kept.differs for kind in state.kinds.values())
    if differ and stored not in (0, peers) and not mean:
        raise InputError(
            f"checkpoint {directory} holds {counted(stored, 'replica')} that differ, and this run "
            f"has d = {peers}; legal: d = {stored}, or data_parallel.checkpoint = "
            '"average": then all begin from their mean'
        )


def took_mean(state: State, manifest: Manifest) -> bool:
    """Return True if the loaded state is the mean of replicas that the checkpoint stores
    separately."""
    stored = manifest.replicas
    differ = any(kind.kept.differs for kind in state.kinds.values())
    return stored > 0 and not (differ and stored == state.peers.size)


def load_tensors(
    state: State,
    world: Communicator,
    directory: Path,
    *,
    kinds: Sequence[str] = (WEIGHTS,),
    judge: Judge = lambda path, manifest: None,
    read: Callable[[Path], Manifest] = sound_manifest,
    head: Collection[str] = (),
) -> Manifest | str:
    """Load the tensors of some kinds. Return the manifest, or the reason why it cannot be read.
    `judge` may refuse the checkpoint before a tensor is read, by an InputError on every rank.
    `read` reads the manifest. A kind of the data-parallel method that the checkpoint lacks begins
    as at the first step. `head`: names of the parameters of a task's head, which keep their values
    if the checkpoint lacks them (`drawn`). With a head, sequences may be shorter than the
    checkpoint's, and only the first of the learned positions are loaded.

    Each rank reads its slices. If it reads a piece completely, it compares the piece with its
    checksum. If another layout wrote the checkpoint, some pieces may not have been read completely
    by any rank. The ranks share the pieces that no rank has read completely, and read them once
    more for the comparison. Raise the same errors as `load`.
    """
    try:
        manifest = on_root(world, lambda: read(directory))
    except InputError as error:
        return str(error)
    there = {name.partition("/")[0] for name in manifest.names}
    fresh = [
        kind
        for kind, own in state.kinds.items()
        if kind != WEIGHTS and not own.kept.needed and (kind not in kinds or kind not in there)
    ]
    kinds = [kind for kind in kinds if kind not in fresh]
    new = drawn(manifest, {p.name: p.shape for p in state.pieces() if p.name in head})
    pieces = [p for p in state.pieces() if p.kind in kinds and p.name not in new]
    whole = not state.buffer.frozen
    with Reader(directory, manifest) as reader:
        # `sound_manifest` checks all files, so all nodes see them; otherwise a node may have only
        # the files that its ranks read
        shared = read is not read_manifest
        wanted = Wanted(pieces, kinds, judge, whole=whole, shorter=bool(head), shared=shared)
        damage = _filled(reader, state, world, wanted)
    if damage:
        return damage
    state.begin(fresh)
    state.changed()
    return manifest


def load_frozen(
    state: State,
    world: Communicator,
    directory: Path,
    *,
    judge: Judge = lambda path, manifest: None,
    head: Collection[str] = (),
) -> Manifest | str:
    """Load the frozen weights, and the weights of a `head` for a task, as `load_tensors` does."""
    try:
        manifest = on_root(world, lambda: sound_manifest(directory))
    except InputError as error:
        return str(error)
    own = [p for p in state.pieces() if p.kind == WEIGHTS and p.name in head]
    new = drawn(manifest, {p.name: p.shape for p in own})
    pieces = [*state.frozen(), *(p for p in own if p.name not in new)]
    with Reader(directory, manifest) as reader:
        wanted = Wanted(pieces, (WEIGHTS,), judge, shorter=bool(head))
        damage = _filled(reader, state, world, wanted)
    if damage:
        return damage
    state.changed()
    return manifest


@dataclass(frozen=True)
class Wanted:
    """A request for tensors of a checkpoint: which pieces and kinds, and whether of a `whole` model
    or of adapters. `shorter`: sequences may be shorter than the stored positions. `judge` may
    refuse the checkpoint. If not all nodes share the checkpoint (`shared`), a rank checks only
    pieces that its node has.
    """

    pieces: Sequence[Piece]
    kinds: Sequence[str]
    judge: Judge
    whole: bool = True
    shorter: bool = False
    shared: bool = True


def _filled(reader: Reader, state: State, world: Communicator, wanted: Wanted) -> str | None:
    """Read the wanted pieces. Return None, or the reason why they cannot be read. Raise the same
    errors as `load`."""
    directory = reader.directory
    manifest = reader.manifest
    fit = partial(_require_fit, reader, wanted, state.peers.size)
    kind = partial(require_kind, directory, manifest.said, wanted.whole)
    unfit = _first(world, InputError, kind)
    unfit = unfit or _first(world, InputError, fit)
    unfit = unfit or _first(world, InputError, lambda: wanted.judge(directory, manifest))
    if unfit:
        raise SharedInputError(unfit)
    damage = _first(world, Damaged, lambda: _read(reader, state, wanted.pieces))
    if damage:
        return damage
    # a piece that one rank has read completely need not be read again
    checked = world.all_reduce(torch.from_numpy(reader.checked), "max")
    left = torch.nonzero(checked == 0).flatten().tolist()
    if wanted.shared:
        left = left[world.rank :: world.size]
    else:
        left = [number for number in left if (directory / reader.pieces[number][1].file).is_file()]
    return _first(world, Damaged, lambda: _check(reader, left))


def drawn(manifest: Manifest, head: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of a head's parameters (name -> shape) that a checkpoint lacks, or stores
    with another shape, for example for another number of classes."""
    stored = {name: manifest.find(key(WEIGHTS, name)) for name in head}
    return [name for name, tensor in stored.items() if tensor is None or tensor.shape != head[name]]


def _require_fit(reader: Reader, wanted: Wanted, peers: int) -> None:
    """Raise InputError if the checkpoint lacks a wanted kind, or stores a wanted tensor with
    another shape."""
    there = {name.partition("/")[0] for name in (*reader.tensors, *reader.means)}
    missing = sorted(set(wanted.kinds) - {WEIGHTS} - there)
    if missing:
        others = sorted({name.partition("@")[0] for name in there} - {WEIGHTS})
        instead = ", no optimizer state"
        if others:
            instead = f" but {' and '.join(others)}"
        raise InputError(
            f"checkpoint {reader.directory} has no {' and '.join(missing)}{instead}: a run can "
            "begin from it (checkpoint.initial), not resume"
        )
    for piece in wanted.pieces:
        shape = piece.shape
        name = _stored(reader, piece, peers)
        stored = reader.manifest.find(name)
        if wanted.shorter and piece.name == POSITIONS and stored is not None:
            shape = (max(shape[0], stored.shape[0]), *shape[1:])
        reader.require(name, shape)


def _stored(reader: Reader, piece: Piece, peers: int) -> str:
    """Return the name in the checkpoint of the tensor that a piece belongs to: this replica's own
    tensor, or the one that all replicas share. If the number of stored replicas is not `peers`, no
    replica has its own."""
    if reader.manifest.replicas == peers and piece.key in reader.tensors:
        return piece.key
    return key(piece.kind, piece.name)


def _read(reader: Reader, state: State, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        host = piece.values.cpu()  # on a CPU the array shares the tensor's memory
        if host.dtype == torch.bfloat16:  # numpy has no bfloat16
            host = host.float()
        reader.read(_stored(reader, piece, state.peers.size), piece.box, host.numpy())
        if host.data_ptr() != piece.values.data_ptr():
            piece.values.copy_(host)
        state.let_go()


def _check(reader: Reader, numbers: Sequence[int]) -> None:
    for number in numbers:
        reader.check(number)


def _first(world: Communicator, kind: type[Exception], work: Callable[[], Any]) -> str | None:
    """Call `work` on every rank. Return the message of the first rank on which it raised this kind
    of exception; None if it raised on no rank."""
    text = None
    try:
        work()
    except kind as error:
        text = str(error)
    return next(filter(None, world.all_gather_object(text)), None)
