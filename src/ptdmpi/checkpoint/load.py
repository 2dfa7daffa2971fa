"""Loading of a checkpoint into the ranks of a run with any layout. The checksums are verified
during loading."""

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
# A function that raises InputError if this run may not use the tensors of the checkpoint.
Judge = Callable[[Path, Manifest], None]


def on_root(world: Communicator, work: Callable[[], T]) -> T:
    """Call `work` on rank 0 and return its result on every rank. If `work` raises OSError or
    InputError, every rank raises SharedInputError with this message."""
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

    If replicas differ, each replica continues from its own values. In two cases, all replicas
    instead continue from the mean of the stored replicas: the checkpoint contains only the mean, or
    the number of replicas has changed and `mean` is True. If `whole` is True, every node must see
    all files of the checkpoint. If `whole` is False, a node may have only the files that its own
    ranks read. If the checkpoint is damaged, the state is undefined afterwards, and another
    checkpoint must be loaded. Raise SharedInputError if the checkpoint is undamaged but belongs to
    another model, or if the function `judge` refuses the checkpoint.
    """

    def fitting(path: Path, manifest: Manifest) -> None:
        """Raise InputError if the number of replicas does not fit the checkpoint, or if `judge`
        refuses the checkpoint."""
        _require_replicas(state, path, manifest, mean)
        judge(path, manifest)

    kinds = tuple(state.kinds)
    read = sound_manifest if whole else read_manifest
    manifest = load_tensors(state, world, directory, kinds=kinds, judge=fitting, read=read)
    if isinstance(manifest, str):
        return manifest
    progress = manifest.progress
    counters = (progress.updates, progress.loss_scale, progress.good_steps)
    state.restore(Counters(*counters, manifest.exponents))
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
    """Return True if the loaded state is a mean of replicas: the checkpoint stores the replicas
    separately, and this run has loaded their mean."""
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
    """Load the tensors of the given `kinds`, such as the weights or a kind of optimizer state.
    Return the manifest, or the reason why the checkpoint cannot be read. Before a tensor is read,
    `judge` may refuse the checkpoint by raising InputError. Every rank then raises this error. The
    function `read` returns the manifest of a directory. If the checkpoint lacks tensors that the
    data-parallel method stores, these tensors get the values that they have at the beginning of a
    new run. `head` has the names of the parameters of a task head. A parameter of the head that the
    checkpoint lacks keeps its initial value (see `drawn`). If `head` is not empty, the model may
    have fewer learned positions than the checkpoint, and only the first positions are loaded.

    Each rank reads the slices of tensors that its part of the model needs. A rank that reads a
    whole piece compares the piece with its checksum. If a run with another layout has written the
    checkpoint, there may be pieces that no rank reads completely. The ranks divide these pieces
    among them, and read them once more to compare the checksums. Raise the same errors as `load`.
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
        # `read_manifest` does not check that all files exist, so a node may have only the files
        # that its own ranks read. Any other `read` calls `sound_manifest`. It checks that all files
        # exist, so every node must see all files.
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
    """Load the frozen weights of a model with adapters, and the weights of its task head. `head`
    has the names of the task head's parameters. The result and the errors are the same as those of
    `load_tensors`.
    """
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
    """The tensors that a rank requests from a checkpoint: their slices (`pieces`) and their kinds.
    `whole` is True for a checkpoint of a full model, and False for a checkpoint of adapters. If
    `shorter` is True, the model may have fewer learned positions than the checkpoint. `judge` may
    refuse the checkpoint. If `shared` is False, the nodes have different files, so a rank verifies
    only the checksums of files on its own node."""

    pieces: Sequence[Piece]
    kinds: Sequence[str]
    judge: Judge
    whole: bool = True
    shorter: bool = False
    shared: bool = True


def _filled(reader: Reader, state: State, world: Communicator, wanted: Wanted) -> str | None:
    """Fill the training state with the slices that `wanted` lists. Return None, or the reason why
    the checkpoint is damaged. Raise the same errors as `load`."""
    directory = reader.directory
    manifest = reader.manifest
    fit = partial(_require_fit, reader, wanted, state.peers.size)
    kind = partial(require_kind, directory, manifest.said, wanted.whole)
    unfit = _first(world, InputError, kind)
    kinds = partial(require_kinds, directory, manifest, wanted.kinds)
    unfit = unfit or _first(world, InputError, kinds)
    # call `judge` before `fit`: the message of `judge` names the key that has changed, and the
    # message of `fit` names only a tensor
    unfit = unfit or _first(world, InputError, lambda: wanted.judge(directory, manifest))
    unfit = unfit or _first(world, InputError, fit)
    if unfit:
        raise SharedInputError(unfit)
    damage = _first(world, Damaged, lambda: _read(reader, state, wanted.pieces))
    if damage:
        return damage
    # if some rank has already compared a piece with its checksum, the piece is not read again
    checked = world.all_reduce(torch.from_numpy(reader.checked), "max")
    left = torch.nonzero(checked == 0).flatten().tolist()
    if wanted.shared:
        left = left[world.rank :: world.size]
    else:
        left = [number for number in left if (directory / reader.pieces[number][1].file).is_file()]
    return _first(world, Damaged, lambda: _check(reader, left))


def drawn(manifest: Manifest, head: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of the parameters of a task head that must keep their initial values. A
    parameter keeps its initial value if the checkpoint lacks it, or stores it with another shape,
    for example for another number of classes. `head` maps the name of each parameter to its
    shape."""
    stored = {name: manifest.find(key(WEIGHTS, name)) for name in head}
    return [name for name, tensor in stored.items() if tensor is None or tensor.shape != head[name]]


def _require_fit(reader: Reader, wanted: Wanted, peers: int) -> None:
    """Raise InputError if the checkpoint lacks a wanted tensor, or stores it with another shape.
    `peers` is the number of replicas of this run."""
    for piece in wanted.pieces:
        shape = piece.shape
        name = _stored(reader, piece, peers)
        stored = reader.manifest.find(name)
        if wanted.shorter and piece.name == POSITIONS and stored is not None:
            shape = (max(shape[0], stored.shape[0]), *shape[1:])
        reader.require(name, shape)


def require_kinds(directory: Path, manifest: Manifest, kinds: Collection[str]) -> None:
    """Raise InputError if the checkpoint in `directory` lacks a kind of state in `kinds`, such as a
    moment of the optimizer."""
    there = {name.partition("/")[0] for name in (*manifest.tensors, *manifest.means)}
    missing = sorted(set(kinds) - {WEIGHTS} - there)
    if missing:
        others = sorted({name.partition("@")[0] for name in there} - {WEIGHTS})
        instead = ", no optimizer state"
        if others:
            instead = (
                f" but {' and '.join(others)} (optimizer.kind, optimizer.ema_decay and "
                "data_parallel.method decide)"
            )
        raise InputError(
            f"checkpoint {directory} has no {' and '.join(missing)}{instead}: a run can begin from "
            "it (checkpoint.initial), not resume"
        )


def _stored(reader: Reader, piece: Piece, peers: int) -> str:
    """Return the name of the stored tensor from which the slice `piece` is read. If the checkpoint
    stores `peers` replicas, return the name of the tensor of this rank's replica. Otherwise all
    replicas read the same tensor, or the mean of the stored replicas."""
    if reader.manifest.replicas == peers and piece.key in reader.tensors:
        return piece.key
    return key(piece.kind, piece.name)


def _read(reader: Reader, state: State, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        host = piece.values.cpu()  # `cpu` copies nothing if the tensor is already on the host.
        if host.dtype == torch.bfloat16:  # numpy has no bfloat16, so read float32 numbers
            host = host.float()
        reader.read(_stored(reader, piece, state.peers.size), piece.box, host.numpy())
        if host.data_ptr() != piece.values.data_ptr():
            piece.values.copy_(host)
        state.let_go()


def _check(reader: Reader, numbers: Sequence[int]) -> None:
    for number in numbers:
        reader.check(number)


def _first(world: Communicator, kind: type[Exception], work: Callable[[], Any]) -> str | None:
    """Call `work` on every rank. If `work` raises an exception of the class `kind` on some ranks,
    return the message of the first of these ranks; otherwise return None."""
    text = None
    try:
        work()
    except kind as error:
        text = str(error)
    return next(filter(None, world.all_gather_object(text)), None)
