"""What makes a tokenization restartable: who it was for, and how far each group of files has come.

While shards are made, each output directory holds a folder `.unfinished`, so that nobody trains on
a part of a corpus by mistake; it says in `identity.json` whose it is, and the main one's has one
small file per group. At the end the folder goes and `tokenize.json` tells what was made of what.
"""

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

from ptdmpi.base.disk import write_whole
from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.data.header import SUMMARY, ShardHeader, listing, read_header
from ptdmpi.data.lock import FileLock
from ptdmpi.data.shards import UNFINISHED

TOKENIZER_COPY = "tokenizer"  # with the suffix of the file: .json or .model
SHARDS = "shard-*.h5"
IDENTITY = "identity.json"
LOCK = "lock"
OF_CONVERSATIONS = ("answers", "answer_tokens", "truncated", "too_long", "padding_tokens")


@dataclass(frozen=True)
class CorpusCounters:
    """Sums over documents. Bytes are of UTF-8 text, decompressed."""

    documents: int = 0
    empty_documents: int = 0
    text_bytes: int = 0
    duplicates: int = 0  # documents left out
    train_tokens: int = 0
    valid_tokens: int = 0
    bad_lines: int = 0  # left out
    eods_added: int = 0  # to documents of ready tokens that had no end
    answers: int = 0  # from here on of conversations
    answer_tokens: int = 0
    truncated: int = 0
    too_long: int = 0
    padding_tokens: int = 0

    def __add__(self, other: "CorpusCounters") -> "CorpusCounters":
        mine, others = asdict(self), asdict(other)
        return CorpusCounters(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True)
class GroupProgress:
    """Where the next shard of a group begins: all before is in shards that have their names."""

    shards: int = 0  # finished
    task: int = 0  # in which the next shard begins
    token: int = 0  # of that task
    held_out: bool = False  # whether the document that goes on there is held out
    counters: CorpusCounters = CorpusCounters()  # tokens of finished shards, else of tasks before
    complete: bool = False


Record = TypeVar("Record", CorpusCounters, GroupProgress)


def _restored(kind: type[Record], known: Any, path: Path) -> Record:
    """A record that `asdict` made JSON of. Raises InputError for anything else."""
    if kind is CorpusCounters and isinstance(known, dict):
        known = {**dict.fromkeys(OF_CONVERSATIONS, 0), **known}  # older versions have none
    types = {name: type(value) for name, value in asdict(kind()).items()}
    if not isinstance(known, dict) or {n: type(value) for n, value in known.items()} != types:
        raise _foreign(path)
    if "counters" in known:
        known = {**known, "counters": _restored(CorpusCounters, known["counters"], path)}
    return kind(**known)


def _foreign(path: Path) -> InputError:
    return InputError(
        f"{path}: is not what this version of ptdmpi-data writes there; use --force to begin anew"
    )


def require_writable(path: Path) -> None:
    """Raises InputError where a file could not be made, as far as one can tell beforehand."""
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
    """Replace a small file as a whole. Raises InputError if it cannot be written."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Replace a small JSON file as a whole. Raises InputError if it cannot be written."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file. Raises InputError if it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}; use --force to begin anew") from error
    if not isinstance(value, dict):
        raise _foreign(path)
    return value


def files_identity(files: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """What a restart must have in common with its beginning: files by name, size and time (ns)."""
    digest, count = hashlib.sha256(), 0
    for file in files:
        digest.update(json.dumps(file).encode())
        count += 1
    return {"input_files": count, "inputs_sha256": digest.hexdigest()}


def _compare(output: Path, identity: dict[str, Any], known: dict[str, Any]) -> None:
    for name, value in identity.items():
        if known.get(name) != value:
            what = "other input files" if name == "inputs_sha256" else f"{name} {known.get(name)}"
            raise InputError(
                f"{output}: holds shards made with {what}: give an empty directory, or use "
                "--force to begin anew"
            )


def _require_shards(output: Path, summary: dict[str, Any] | None) -> None:
    """Raises InputError if a finished output lacks what was made there."""
    if summary is None:
        raise InputError(f"{output}: {SUMMARY} is gone; use --force to begin anew")
    shards = summary.get("shards")
    if not isinstance(shards, dict | list):
        raise _foreign(output / SUMMARY)
    gone = [name for name in shards if not (output / str(name)).is_file()]
    if gone:
        raise InputError(
            f"{output}: {gone[0]}, made by an earlier run, is gone; use --force to begin anew"
        )


def _nothing_held_out(documents: int) -> str:
    # at five over their number, less than one corpus in a hundred has none again: exp(-5)
    enough = min(0.5, math.ceil(500 / max(1, documents)) / 100)
    return (
        f"no document was held out of {counted(documents, 'document')}, for the hash of each "
        f"decides; give more documents, or --valid-fraction {enough:g}"
    )


class _OutputLocks:
    """The locks of the output directories that this process writes to."""

    def __init__(self) -> None:
        self._held: dict[Path, FileLock] = {}

    def take(self, output: Path) -> None:
        """Keep others out of an output. Raises InputError if somebody is at work in it."""
        if output in self._held:
            if self._held[output].still_there():
                return
            # the folder went with its lock (--force): whoever made it anew may hold that one
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
        """Let others work in the outputs; more than once, if need be."""
        while self._held:
            self._held.popitem()[1].close()


class RunState:
    """The state of one tokenization, in its output directories (the main one first)."""

    def __init__(self, outputs: Sequence[Path], identity: dict[str, Any]):
        self.outputs = tuple(outputs)
        main, *others = outputs
        # The held-out shards belong to these training shards, wherever both are moved together.
        beside = [os.path.relpath(other.resolve(), main.resolve()) for other in others]
        self._identities = [
            {"holds": "training documents", **identity, "valid_outputs": beside},
            *({"holds": "held-out documents", **identity} for _ in others),
        ]
        self.folder = main / UNFINISHED
        self._failed = self.folder / "failed"
        self._locks = _OutputLocks()

    def begin(self, force: bool) -> CorpusCounters | None:
        """Make or check the output directories; the sums if everything is done already.

        Raises InputError where they hold something else: shards of other inputs or options (unless
        `force`, which removes them), or files that ptdmpi-data did not make; and where another
        process writes to them.
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
                raise InputError(f"{output}: is no directory; shards go into one")
            if (output / UNFINISHED).is_dir():
                self._locks.take(output)
        if force:
            self._remove_all()
        known = [self._known(output) for output in self.outputs]
        for output, identity, found in zip(self.outputs, self._identities, known, strict=True):
            if found is not None:
                _compare(output, identity, found)
            elif any(output.glob("*.h5")):
                if self._belongs(output, known[0]):
                    _require_shards(output, found)
                raise _unknown(output)
        summaries = [self._summary(output) for output in self.outputs]
        if summaries[0] is not None:
            for output, summary in zip(self.outputs, summaries, strict=True):
                _require_shards(output, summary)
            return _restored(
                CorpusCounters, summaries[0].get("counters"), self.outputs[0] / SUMMARY
            )
        try:
            for output in self.outputs:
                (output / UNFINISHED).mkdir(parents=True, exist_ok=True)
                self._locks.take(output)
                for leftover in output.glob(f"{SHARDS}.tmp"):
                    leftover.unlink()
            self._failed.unlink(missing_ok=True)
        except OSError as error:
            for output in self.outputs:
                with suppress(OSError):  # not empty, or not made
                    output.rmdir()
            raise InputError(f"{self.outputs[0]}: cannot be written: {error}") from error
        try:
            for output, identity in reversed([*zip(self.outputs, self._identities, strict=True)]):
                write_json(output / UNFINISHED / IDENTITY, identity)
        except InputError:
            self.clean()
            raise
        return None

    def release(self) -> None:
        """Let others work in the outputs."""
        self._locks.release()

    def _summary(self, output: Path) -> dict[str, Any] | None:
        """What a finished run left in an output; None: there is none, or it is not finished."""
        return None if (output / UNFINISHED).exists() else read_json(output / SUMMARY)

    def _known(self, output: Path) -> dict[str, Any] | None:
        """Whose shards an output holds; None where ptdmpi-data has not been."""
        for path in (output / UNFINISHED / IDENTITY, output / SUMMARY):
            known = read_json(path)
            if known is not None and "holds" not in known:
                raise _foreign(path)
            if known is not None:
                return known
        return None

    def _belongs(self, output: Path, main: dict[str, Any] | None) -> bool:
        """Whether the main output, of which so much is known, has this one for its held-out shards:
        then they are ours even where nothing beside them says so."""
        beside = self._identities[0]["valid_outputs"]
        return (
            output != self.outputs[0] and main is not None and main.get("valid_outputs") == beside
        )

    def _remove_all(self) -> None:
        """Remove what earlier runs made. Raises InputError, before anything goes, where there is
        something that is not theirs."""
        ours = []
        main = None
        for output, identity in zip(self.outputs, self._identities, strict=True):
            try:
                known = self._known(output)
            except InputError:
                known = identity  # damaged, so nobody's
            main = main or known
            if known is not None and known.get("holds") != identity["holds"]:
                raise InputError(
                    f"{output}: holds {known.get('holds')}, and {identity['holds']} would go "
                    "there: give another directory"
                )
            mine = known is not None or (output / UNFINISHED).exists()
            mine = mine or self._belongs(output, main)
            foreign = set(output.glob("*.h5")) - (set(output.glob(SHARDS)) if mine else set())
            if foreign:
                raise _unknown(output)
            ours += [output] if mine else []
        for output in ours:
            for path in [*output.glob(SHARDS), *output.glob(f"{SHARDS}.tmp"), output / SUMMARY]:
                path.unlink(missing_ok=True)
            shutil.rmtree(output / UNFINISHED, ignore_errors=True)

    def _group_path(self, group: int) -> Path:
        return self.folder / f"group-{group:05d}.json"

    def load(self, group: int) -> GroupProgress:
        """How far a group has come."""
        known = read_json(self._group_path(group))
        if known is None:
            return GroupProgress()
        return _restored(GroupProgress, known, self._group_path(group))

    def save(self, group: int, progress: GroupProgress) -> None:
        write_json(self._group_path(group), asdict(progress))

    def mark_failed(self) -> None:
        """Tell the other ranks to stop."""
        if self.folder.is_dir():
            self._failed.touch()

    def someone_failed(self) -> bool:
        return self._failed.exists()

    def finish(self, groups: int, tokenizer: Path | None) -> CorpusCounters:
        """Everything is in shards: copy the tokenizer's file beside them, write the summary, remove
        the state; the sums over all groups. Raises InputError for an output without a token."""
        sums = sum((self.load(group).counters for group in range(groups)), CorpusCounters())
        headers = [
            [read_header(path) for path in sorted(output.glob(SHARDS))] for output in self.outputs
        ]
        self._require_all(sums, headers)
        reason = None
        if sums.train_tokens == 0:
            reason = "the corpus yields no token to train on: all are empty, held out or too long"
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
        """Raises InputError if a shard that was finished has gone since; perhaps none holds out."""
        counted = (sums.train_tokens, sums.valid_tokens)
        for output, shards, tokens in zip(self.outputs, headers, counted, strict=False):
            there = sum(header.tokens for header in shards)
            if there != tokens:
                raise InputError(
                    f"{output}: its shards have {there} of {tokens} tokens: some that an earlier "
                    "start made are gone; use --force to begin anew"
                )

    def clean(self) -> None:
        """After a failure: leave finished shards for a restart; without any, leave nothing."""
        if not any(any(output.glob(SHARDS)) for output in self.outputs):
            for output in self.outputs:
                shutil.rmtree(output / UNFINISHED, ignore_errors=True)
                if output.is_dir() and not any(output.iterdir()):
                    output.rmdir()
        self.release()
