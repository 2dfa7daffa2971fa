"""What makes a tokenization restartable: who it was for, and how far each group of files has come.

While shards are made, each output directory holds a folder `.unfinished`, so that nobody trains on
a part of a corpus by mistake; the main one's has `identity.json` and one small file per group. At
the end the folder goes and `tokenize.json` tells what was made out of what.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptdmpi.config import InputError
from ptdmpi.data.shards import UNFINISHED

SUMMARY = "tokenize.json"
TOKENIZER_COPY = "tokenizer.json"
SHARDS = "shard-*.h5"


@dataclass(frozen=True)
class Counters:
    """Sums over documents. Bytes are of UTF-8 text, decompressed."""

    documents: int = 0
    empty_documents: int = 0
    text_bytes: int = 0
    train_tokens: int = 0
    valid_tokens: int = 0
    eods_added: int = 0  # to documents of ready tokens that had no end

    def __add__(self, other: "Counters") -> "Counters":
        mine, others = asdict(self), asdict(other)
        return Counters(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True)
class Progress:
    """Where the next shard of a group begins. Everything before is in shards that have their
    names."""

    shards: int = 0  # finished
    task: int = 0  # in which the next shard begins
    token: int = 0  # of that task
    held_out: bool = False  # whether the document that goes on there is held out
    counters: Counters = Counters()  # tokens: of finished shards; the others: of the tasks before
    complete: bool = False


def write_file(path: Path, content: bytes) -> None:
    """Replace a small file as a whole. Raises InputError if it cannot be written."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise InputError(f"{path}: cannot be written: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Replace a small JSON file as a whole. Raises InputError if it cannot be written."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """None if there is no such file. Raises InputError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; use --force to begin anew") from error


def files_identity(files: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """What a restart must have in common with its beginning: files by name, size and time (ns)."""
    digest, count = hashlib.sha256(), 0
    for file in files:
        digest.update(json.dumps(file).encode())
        count += 1
    return {"input_files": count, "inputs_sha256": digest.hexdigest()}


class RunState:
    """The state of one tokenization, in its output directories (the main one first)."""

    def __init__(self, outputs: Sequence[Path], identity: dict[str, Any]):
        self.outputs = tuple(outputs)
        self.identity = identity
        self._folder = outputs[0] / UNFINISHED
        self._failed = self._folder / "failed"

    def begin(self, force: bool) -> Counters | None:
        """Make or check the output directories; the sums if everything is done already.

        Raises InputError where they hold something else: shards of other inputs or options (unless
        `force`, which removes them), or files that ptdmpi-data did not make.
        """
        if force:
            self._remove_all()
        summary = read_json(self.outputs[0] / SUMMARY)
        known = read_json(self._folder / "identity.json") or summary
        if known is None:
            self._refuse_shards()
        else:
            self._compare(known)
        if summary is not None and not self._folder.exists():
            return Counters(**summary["counters"])
        try:
            for output in self.outputs:
                (output / UNFINISHED).mkdir(parents=True, exist_ok=True)
                for leftover in output.glob(f"{SHARDS}.tmp"):
                    leftover.unlink()
            self._failed.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{self.outputs[0]}: cannot be written: {error}") from error
        write_json(self._folder / "identity.json", self.identity)
        return None

    def _compare(self, known: dict[str, Any]) -> None:
        for name, value in self.identity.items():
            if known.get(name) != value:
                what = (
                    "other input files" if name == "inputs_sha256" else f"{name} {known.get(name)}"
                )
                raise InputError(
                    f"{self.outputs[0]}: holds shards made with {what}: give an empty directory, "
                    "or use --force to begin anew"
                )

    def _refuse_shards(self) -> None:
        for output in self.outputs:
            if any(output.glob("*.h5")):
                raise InputError(
                    f"{output}: holds shards of unknown origin: give an empty directory"
                )

    def _remove_all(self) -> None:
        if read_json(self.outputs[0] / SUMMARY) is None and not self._folder.exists():
            return  # nothing of ours: what is there is refused, not removed
        for output in self.outputs:
            for path in [*output.glob(SHARDS), *output.glob(f"{SHARDS}.tmp"), output / SUMMARY]:
                path.unlink(missing_ok=True)
            shutil.rmtree(output / UNFINISHED, ignore_errors=True)

    def _group_path(self, group: int) -> Path:
        return self._folder / f"group-{group:05d}.json"

    def load(self, group: int) -> Progress:
        """How far a group has come."""
        known = read_json(self._group_path(group))
        if known is None:
            return Progress()
        return Progress(**{**known, "counters": Counters(**known["counters"])})

    def save(self, group: int, progress: Progress) -> None:
        write_json(self._group_path(group), asdict(progress))

    def mark_failed(self) -> None:
        """Tell the other ranks to stop."""
        if self._folder.is_dir():
            self._failed.touch()

    def someone_failed(self) -> bool:
        return self._failed.exists()

    def finish(self, groups: int, tokenizer: Path | None) -> Counters:
        """Everything is in shards: copy the tokenizer's file beside them, write the summary, remove
        the state; the sums over all groups. Raises InputError for an output without a token."""
        sums = sum((self.load(group).counters for group in range(groups)), Counters())
        reason = None
        if sums.train_tokens == 0:
            reason = "the corpus yields no token to train on: its documents are empty or held out"
        elif len(self.outputs) > 1 and sums.valid_tokens == 0:
            reason = "no document was held out: raise --valid-fraction, or give more documents"
        if reason is not None:
            self._remove_all()
            raise InputError(reason)
        for output in self.outputs:
            if tokenizer is not None:
                write_file(output / TOKENIZER_COPY, tokenizer.read_bytes())
        write_json(self.outputs[0] / SUMMARY, {**self.identity, "counters": asdict(sums)})
        for output in reversed(self.outputs):
            shutil.rmtree(output / UNFINISHED)
        return sums

    def clean(self) -> None:
        """After a failure: leave finished shards for a restart; without any, leave nothing."""
        if any(any(output.glob(SHARDS)) for output in self.outputs):
            return
        for output in self.outputs:
            shutil.rmtree(output / UNFINISHED, ignore_errors=True)
            if output.is_dir() and not any(output.iterdir()):
                output.rmdir()
