"""The state of a tokenization on the disk: inputs, options and progress. A restart continues from
this state.

While shards are made, each output directory contains a folder `.unfinished`. A training run refuses
a directory with this folder, so that no incomplete corpus is used by mistake. The file
`identity.json` in this folder contains the inputs and options. In the main output directory,
`.unfinished` also contains a small file for each group, with the group's progress. At the end,
`.unfinished` is removed, and `tokenize.json` contains the inputs and options of the finished
shards."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ptdmpi.base.disk import read_file, write_whole
from ptdmpi.base.lock import FileLock
from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.data.header import (
    SUMMARY,
    ShardHeader,
    confirmed,
    listed_headers,
    listing,
    read_header,
)
from ptdmpi.data.shards import UNFINISHED

# name of the copy of the tokenizer's file, without its suffix (.json or .model)
TOKENIZER_COPY = "tokenizer"
SHARDS = "shard-*.h5"
IDENTITY = "identity.json"
LOCK = "lock"
OF_CONVERSATIONS = ("answers", "answer_tokens", "truncated", "too_long", "padding_tokens")


@dataclass(frozen=True)
class CorpusCounters:
    """Sums over documents. Bytes are counted in the decompressed UTF-8 text."""

    documents: int = 0
    empty_documents: int = 0
    text_bytes: int = 0
    duplicates: int = 0  # number of documents that are left out as duplicates
    train_tokens: int = 0
    valid_tokens: int = 0
    bad_lines: int = 0  # number of bad lines that are left out
    eods_added: int = 0  # number of end-of-document tokens that were added to imported documents
    answers: int = 0  # this field and the fields below are used only for conversations
    answer_tokens: int = 0
    truncated: int = 0
    too_long: int = 0
    padding_tokens: int = 0

    def __add__(self, other: "CorpusCounters") -> "CorpusCounters":
        mine = asdict(self)
        others = asdict(other)
        return CorpusCounters(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True)
class GroupProgress:
    """The progress of a group: the position at which the next shard begins. All tokens of the group
    before this position are in finished shards."""

    shards: int = 0  # number of finished shards
    task: int = 0  # index of the task in which the next shard begins
    token: int = 0  # index of the next shard's first token within that task
    held_out: bool = False  # True if the document that continues at this position is held out
    # `train_tokens` and `valid_tokens` are sums over the finished shards. All other counters are
    # sums over the tasks before `task`.
    counters: CorpusCounters = CorpusCounters()
    complete: bool = False


Record = TypeVar("Record", CorpusCounters, GroupProgress)


def _restored(kind: type[Record], known: Any, path: Path) -> Record:
    """Return an object of the class `kind` with the field values from the JSON object `known`.
    Raise InputError if the keys or types of `known` are wrong; the message names the file
    `path`."""
    if kind is CorpusCounters and isinstance(known, dict):
        # files of older versions do not have these counters
        known = {**dict.fromkeys(OF_CONVERSATIONS, 0), **known}
    types = {name: type(value) for name, value in asdict(kind()).items()}
    if not isinstance(known, dict) or {n: type(value) for n, value in known.items()} != types:
        raise _foreign(path)
    if "counters" in known:
        known = {**known, "counters": _restored(CorpusCounters, known["counters"], path)}
    return kind(**known)


def _foreign(path: Path) -> InputError:
    return InputError(
        f"{path}: is not a file of this version of ptdmpi-data; use --force to start again"
    )


def require_writable(path: Path) -> None:
    """Raise InputError if the file `path` cannot be created, because of its directory or
    permissions."""
    if path.is_dir():
        raise InputError(f"{path}: is a directory; the name of a file is needed")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot be written: {folder} does not allow it")


def _unknown(output: Path) -> InputError:
    return InputError(f"{output}: holds shards of unknown origin: give an empty directory")


def write_file(path: Path, content: bytes) -> None:
    """Write or replace a small file in one step. Raise InputError if the file cannot be written."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write or replace a small JSON file in one step. Raise InputError if the file cannot be
    written."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no such file. Raise InputError if the file
    is damaged."""
    try:
        value = json.loads(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}; use --force to start again") from error
    if not isinstance(value, dict):
        raise _foreign(path)
    return value


def files_identity(files: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """Return the number of input files, and a SHA-256 hash of their names, sizes and modification
    times (in ns). After a restart, these values are compared with the stored ones."""
    digest = hashlib.sha256()
    count = 0
    for file in files:
        digest.update(json.dumps(file).encode())
        count += 1
    return {"input_files": count, "inputs_sha256": digest.hexdigest()}


def _compare(output: Path, identity: dict[str, Any], known: dict[str, Any]) -> None:
    """Raise InputError if the inputs and options in `identity` differ from `known`, the inputs and
    options of the shards that are already in the directory `output`."""
    for name, value in identity.items():
        if known.get(name) != value:
            other = f"{name} {known.get(name)}"
            if name == "inputs_sha256":
                other = "other input files"
            raise InputError(
                f"{output}: holds shards made with {other}: give an empty directory, or use "
                "--force to start again"
            )


def _require_shards(output: Path, summary: dict[str, Any] | None) -> None:
    """Open all shards of a finished output directory, without reading their tokens. Raise
    InputError if the directory has no summary, or if a shard that the summary lists is missing,
    has a damaged header, or was replaced."""
    if summary is None:
        raise InputError(f"{output}: {SUMMARY} is missing; use --force to start again")
    shards = summary.get("shards")
    if not isinstance(shards, dict | list):
        raise _foreign(output / SUMMARY)
    gone = [name for name in shards if not (output / str(name)).is_file()]
    if gone:
        raise InputError(
            f"{output}: {gone[0]}, made by an earlier run, is missing; use --force to start again"
        )
    try:
        for name, header in listed_headers(output).items():
            if header is None:
                read_header(output / name)
            else:
                confirmed(header)
    except InputError as error:
        raise InputError(f"{error} (use --force to start again)") from None


def _nothing_held_out(documents: int) -> str:
    """Return the error message for a corpus without any held-out document. The message names a
    fraction that is large enough."""
    # with a fraction of 5 / documents, the probability that no document is held out is about
    # exp(-5), which is below 1 %
    enough = min(0.5, math.ceil(500 / max(1, documents)) / 100)
    return (
        f"none of {counted(documents, 'document')} was held out, which is decided by the hash of "
        f"each; give more documents, or --valid-fraction {enough:g}"
    )


class _OutputLocks:
    """The locks that this process holds on its output directories."""

    def __init__(self) -> None:
        self._held: dict[Path, FileLock] = {}

    def take(self, output: Path) -> None:
        """Lock an output directory. Raise InputError if another process writes to this
        directory."""
        if output in self._held:
            if self._held[output].still_there():
                return
            # --force has removed the folder with its lock, and another process may have created the
            # folder again, with a new lock
            self._held.pop(output).close()
        try:
            lock = FileLock(output / UNFINISHED / LOCK)
        except OSError as error:
            raise InputError(f"{output}: cannot be written: {error}") from error
        if not lock.take():
            holder = lock.holder()
            lock.close()
            raise InputError(
                f"{output}: {holder} is writing to it; wait for its end, or give another directory"
            )
        self._held[output] = lock

    def release(self) -> None:
        """Unlock all output directories. `release` may be called more than once."""
        while self._held:
            self._held.popitem()[1].close()


class RunState:
    """The state of one tokenization, in its output directories.

    The first output directory is the main one, for training documents. The second one, if there is
    one, is for held-out documents. `identity` describes the inputs and options that determine the
    shards."""

    def __init__(self, outputs: Sequence[Path], identity: dict[str, Any]):
        self.outputs = tuple(outputs)
        main, *others = outputs
        # store relative paths, so that a user can move both directories together
        valid_outputs = [os.path.relpath(other.resolve(), main.resolve()) for other in others]
        self._identities = [
            {"holds": "training documents", **identity, "valid_outputs": valid_outputs},
            *({"holds": "held-out documents", **identity} for _ in others),
        ]
        self.folder = main / UNFINISHED
        self._failed = self.folder / "failed"
        self._locks = _OutputLocks()

    def begin(self, force: bool) -> CorpusCounters | None:
        """Create the output directories, or check the existing ones. If the shards are already
        complete, return the sums over all documents; otherwise return None.

        If `force` is True, remove the shards of earlier runs. Otherwise raise InputError if the
        directories contain shards of other inputs or options. In both cases, raise InputError if
        there are shards that ptdmpi-data has not made, or if another process writes to the
        directories.
        """
        try:
            done = self._begin(force)
        except BaseException:
            self.release()
            raise
        if done is not None:
            self.release()
        return done

    def _begin(self, force: bool) -> CorpusCounters | None:
        for output in self.outputs:
            if output.exists() and not output.is_dir():
                raise InputError(f"{output}: is not a directory; a directory for shards is needed")
            if (output / UNFINISHED).is_dir():
                self._locks.take(output)
        if force:
            self._remove_all()
        known = [self._known(output) for output in self.outputs]
        for output, identity, own in zip(self.outputs, self._identities, known, strict=True):
            if own is not None:
                _compare(output, identity, own)
            elif any(output.glob("*.h5")):
                if self._belongs(output, known[0]):
                    _require_shards(output, own)
                raise _unknown(output)
        summaries = [self._summary(output) for output in self.outputs]
        if summaries[0] is not None:
            for output, summary in zip(self.outputs, summaries, strict=True):
                _require_shards(output, summary)
            return _restored(
                CorpusCounters, summaries[0].get("counters"), self.outputs[0] / SUMMARY
            )
        self._make_outputs()
        return None

    def _make_outputs(self) -> None:
        """Create the output directories, and lock them. Raise InputError if an output directory
        cannot be written to."""
        try:
            for output in self.outputs:
                (output / UNFINISHED).mkdir(parents=True, exist_ok=True)
                self._locks.take(output)
                for leftover in output.glob(f"{SHARDS}.tmp"):
                    leftover.unlink()
            self._failed.unlink(missing_ok=True)
        except OSError as error:
            for output in self.outputs:
                # ignore errors: the directory may not exist, or may not be empty
                with suppress(OSError):
                    output.rmdir()
            raise InputError(f"{self.outputs[0]}: cannot be written: {error}") from error
        try:
            for output, identity in reversed([*zip(self.outputs, self._identities, strict=True)]):
                write_json(output / UNFINISHED / IDENTITY, identity)
        except InputError:
            self.clean()
            raise

    def release(self) -> None:
        """Unlock the output directories for other processes."""
        self._locks.release()

    def _summary(self, output: Path) -> dict[str, Any] | None:
        """Return the summary in an output directory. Return None if the shards are not finished, or
        if there is no summary."""
        if (output / UNFINISHED).exists():
            return None
        return read_json(output / SUMMARY)

    def _known(self, output: Path) -> dict[str, Any] | None:
        """Return the identity (inputs and options) of the shards in an output directory. Return
        None if ptdmpi-data has written nothing into this directory. Raise InputError if the file
        with the identity is damaged."""
        for path in (output / UNFINISHED / IDENTITY, output / SUMMARY):
            known = read_json(path)
            if known is not None and "holds" not in known:
                raise _foreign(path)
            if known is not None:
                return known
        return None

    def _belongs(self, output: Path, main: dict[str, Any] | None) -> bool:
        """Return True if `output` is the directory of held-out shards that is named in `main`, the
        identity of the main output directory. In this case, ptdmpi-data has made the shards in
        `output`, even if `output` itself has no file with an identity."""
        valid_outputs = self._identities[0]["valid_outputs"]
        return (
            output != self.outputs[0]
            and main is not None
            and main.get("valid_outputs") == valid_outputs
        )

    def _remove_all(self) -> None:
        """Remove the results of earlier runs from the output directories. If an output directory
        has shards that ptdmpi-data has not made for this output, raise InputError before anything
        is removed."""
        ours = []
        main = None
        for output, identity in zip(self.outputs, self._identities, strict=True):
            try:
                known = self._known(output)
            except InputError:
                # the summary is damaged: ignore the error, and remove the shards
                known = identity
            main = main or known
            if known is not None and known.get("holds") != identity["holds"]:
                raise InputError(
                    f"{output}: holds {known.get('holds')}, but is given for {identity['holds']}: "
                    "give another directory"
                )
            foreign = set(output.glob("*.h5"))
            unfinished = (output / UNFINISHED).exists()
            if known is not None or unfinished or self._belongs(output, main):
                ours.append(output)
                foreign -= set(output.glob(SHARDS))
            if foreign:
                raise _unknown(output)
        for output in ours:
            for path in [*output.glob(SHARDS), *output.glob(f"{SHARDS}.tmp"), output / SUMMARY]:
                path.unlink(missing_ok=True)
            shutil.rmtree(output / UNFINISHED, ignore_errors=True)

    def _group_path(self, group: int) -> Path:
        return self.folder / f"group-{group:05d}.json"

    def load(self, group: int) -> GroupProgress:
        """Return the stored progress of a group. Raise InputError if the group's file is
        damaged."""
        known = read_json(self._group_path(group))
        if known is None:
            return GroupProgress()
        return _restored(GroupProgress, known, self._group_path(group))

    def save(self, group: int, progress: GroupProgress) -> None:
        """Write the progress of a group to its file. Raise InputError if the file cannot be
        written."""
        write_json(self._group_path(group), asdict(progress))

    def mark_failed(self) -> None:
        """Create a file which says that this rank has failed. The other ranks then stop, because
        `someone_failed` returns True."""
        if self.folder.is_dir():
            self._failed.touch()

    def someone_failed(self) -> bool:
        """Return True if a rank has called `mark_failed`."""
        return self._failed.exists()

    def finish(self, groups: int, tokenizer: Path | None) -> CorpusCounters:
        """Complete the output directories after all shards are written. Return the sums over all
        groups.

        This method copies the tokenizer's file to each output directory, writes the summaries, and
        removes the state. Raise InputError if shards are missing, or if an output would have no
        tokens.
        """
        sums = sum((self.load(group).counters for group in range(groups)), CorpusCounters())
        headers = [
            [read_header(path) for path in sorted(output.glob(SHARDS))] for output in self.outputs
        ]
        self._require_all(sums, headers)
        reason = None
        if sums.train_tokens == 0:
            reason = (
                "the corpus has no token to train on: all documents are empty, held out or too long"
            )
            if sums.too_long:
                reason += f" ({sums.too_long} too long); legal: a larger --seq-length"
        elif len(self.outputs) > 1 and sums.valid_tokens == 0:
            reason = _nothing_held_out(sums.documents)
        if reason is not None:
            self._remove_all()
            raise InputError(reason)
        for output in self.outputs:
            if tokenizer is not None:
                suffix = ".model" if tokenizer.suffix == ".model" else ".json"
                write_file(output / (TOKENIZER_COPY + suffix), tokenizer.read_bytes())
        every = zip(self.outputs, self._identities, headers, strict=True)
        for output, identity, shards in reversed([*every]):
            summary = {**identity, "counters": asdict(sums), "shards": listing(shards)}
            write_json(output / SUMMARY, summary)
        for output in reversed(self.outputs):
            shutil.rmtree(output / UNFINISHED)
        self.release()
        return sums

    def _require_all(self, sums: CorpusCounters, headers: Sequence[Sequence[ShardHeader]]) -> None:
        """Raise InputError if the shards in an output directory do not have as many tokens as
        `sums` says."""
        expected = (sums.train_tokens, sums.valid_tokens)
        for output, shards, tokens in zip(self.outputs, headers, expected, strict=False):
            present = sum(header.tokens for header in shards)
            if present != tokens:
                raise InputError(
                    f"{output}: its shards have {present} of {tokens} tokens: some shards of an "
                    "earlier start are missing; use --force to start again"
                )

    def clean(self) -> None:
        """Clean up the output directories after a failure. Finished shards remain, so that a
        restart can use them. If there are no finished shards, the folders `.unfinished` and empty
        output directories are removed."""
        if not any(any(output.glob(SHARDS)) for output in self.outputs):
            for output in self.outputs:
                shutil.rmtree(output / UNFINISHED, ignore_errors=True)
                if output.is_dir() and not any(output.iterdir()):
                    output.rmdir()
        self.release()
