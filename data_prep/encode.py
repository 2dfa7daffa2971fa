"""Tasks to tokens, in this process or in several; results always come in the order of the tasks."""

import json
import multiprocessing
import os
import re
import secrets
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import numpy as np

from data_prep.sources import (
    JSONL,
    PIECE_BYTES,
    TEXT,
    Chunk,
    Task,
    document_share,
    split_document,
    split_whole,
)
from data_prep.state import CorpusCounters
from data_prep.vocabulary import load_tokenizer
from ptdmpi.config import InputError
from ptdmpi.data.header import token_dtype

_SPACE = b" \t\n\r\v\f"
_BATCH_BYTES = 1 << 20  # of text that is encoded in one call
_LONG_LINE_BYTES = 4 * PIECE_BYTES  # longer lines are decoded by parts
_PART_BYTES = PIECE_BYTES // 4
_QUOTE = re.compile(b'"')
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# What can be decoded apart: whole escapes, and both halves of a character that takes two.
_WHOLE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])....|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+",
    re.DOTALL,
)
_PLACE = "place of a string " + secrets.token_hex(8)  # no line says this by chance
_TASKS_PER_WORKER = 3  # under way: one is encoded, one waits, one is written


@dataclass(frozen=True)
class EncodeOptions:
    """How documents are read and encoded."""

    tokenizer: str
    text_field: str
    errors: str  # "strict" or "replace", for bytes that are not UTF-8
    valid_fraction: float  # of the documents, by their hash
    skip_bad_lines: bool = False  # of .jsonl: leave them out and count them


@dataclass(frozen=True)
class Encoded:
    """The tokens of a task, as segments: documents, or parts of a document that goes on across
    tasks."""

    group: int
    index: int
    tokens: np.ndarray  # all segments, one after the other
    lengths: np.ndarray  # int64 [segments]
    ended: np.ndarray  # bool [segments]: the document ends here, with its eod
    held_out: np.ndarray  # bool [segments]; of a document's first segment
    begins: np.ndarray  # bool [segments]: the document begins here
    counters: CorpusCounters  # documents are counted where they end


@dataclass(frozen=True)
class TextPiece:
    """Up to PIECE_BYTES of one document's text."""

    text: str
    size_bytes: int  # in UTF-8
    held_out: bool  # decided by the first piece; False in the others
    first: bool
    last: bool

    @property
    def is_nothing(self) -> bool:
        """An empty document."""
        return not self.text and self.first and self.last


def _decode(data: bytes | memoryview, path: str, start: int, errors: str) -> str:
    try:
        return str(data, "utf-8", errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {start + error.start} is not UTF-8 ({error.reason}); "
            "mend the file, or use --errors replace"
        ) from error


class _BadLine(ValueError):
    """What is wrong with a line."""


def _field(data: memoryview, path: str, start: int, options: EncodeOptions) -> bytes:
    """The UTF-8 text of one JSON line, which lies at byte `start` of its file."""
    line = _decode(data, path, start, options.errors)
    try:
        record = json.loads(line)
        del line  # perhaps most of the memory
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not a JSON line: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(options.text_field), str):
        raise _BadLine(f"no JSON object with a text in the field {options.text_field!r}")
    # a lone surrogate, legal in JSON's \u escapes, is no character: UTF-8 has no bytes for it
    errors = "strict" if options.errors == "strict" else "replace"
    try:
        return record[options.text_field].encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise _BadLine("the text has a lone surrogate; use --errors replace") from error


def _decoded(string: memoryview) -> Iterator[bytes]:
    """The UTF-8 text of what stands between the quotes of a JSON string, by parts. Raises
    ValueError where it is not sound."""
    start = 0
    while start < len(string):
        stop = _WHOLE.match(string, start, start + _PART_BYTES).end()
        while start < stop < len(string) and string[stop] & 0xC0 == 0x80:  # inside a character
            stop -= 1
        if stop == start:
            raise ValueError("half an escape, or half a character")
        yield json.loads(f'"{str(string[start:stop], "utf-8")}"').encode()
        start = stop


def _long_string(line: memoryview, field: str) -> memoryview | None:
    """What stands between the quotes of a long text in a JSON line, or None where only reading the
    line as a whole tells (what is wrong with it, say). Long strings are taken out and the rest is
    parsed, so that the line is not copied: a character of its text takes up to four bytes in a
    `str`, and there would be two."""
    strings: list[memoryview] = []
    rest, taken, position = bytearray(), 0, 0
    while quote := _QUOTE.search(line, position):
        found = _STRING.match(line, quote.start())
        if found is None:
            return None
        start, position = found.span()
        if position - start > _PART_BYTES:
            rest += line[taken:start]
            rest += json.dumps([_PLACE, len(strings)]).encode()
            strings.append(line[start + 1 : position - 1])
            taken = position
    rest += line[taken:]
    try:
        record = json.loads(str(rest, "utf-8"))
        value = record.get(field) if isinstance(record, dict) else None
        if not isinstance(value, list) or value[:1] != [_PLACE]:
            return None
        for _ in chain.from_iterable(map(_decoded, strings)):  # all of the line must be sound
            pass
    except (ValueError, RecursionError):
        return None
    return strings[value[1]]


def _lines_before(chunk: Chunk) -> int:
    """Lines of the file before the slice that a chunk is of: counted only for an error."""
    count, left = 0, chunk.source_start
    with open(chunk.path, "rb") as stream:
        while left and (block := stream.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def lines(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """Where each line starts, and the line: not copied, for it may be most of the memory."""
    view, start = memoryview(data), 0
    while start <= len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        yield start, view[start:end]
        start = end + 1


def _documents(
    chunk: Chunk, options: EncodeOptions, bad: list[int]
) -> Iterator[Iterator[tuple[bytes, bool]]]:
    """The texts of lines, in pieces; the numbers of those that are left out are added to `bad`."""
    for number, (start, data) in enumerate(lines(chunk.data), chunk.line):
        if not data or (data[0] in _SPACE and not data.tobytes().strip()):
            continue
        if len(data) > _LONG_LINE_BYTES:
            string = _long_string(data, options.text_field)
            if string is not None:
                yield split_document(_decoded(string))
                continue
        try:
            document = split_whole(_field(data, chunk.path, chunk.start + start, options))
        except (_BadLine, InputError) as error:
            if options.skip_bad_lines:
                bad.append(number)
            elif isinstance(error, InputError):
                raise
            else:
                place = f"{chunk.path}:{_lines_before(chunk) + number}"
                raise InputError(f"{place}: {error}") from error
        else:
            yield document


def _rows(
    chunk: Chunk, options: EncodeOptions, bad: list[int]
) -> Iterator[Iterator[tuple[bytes, bool]]]:
    start = 0
    for row, length in enumerate(chunk.lengths, chunk.line):
        data = chunk.data[start : start + length]
        text = _decode(data, f"{chunk.path}: row {row}", 0, options.errors)
        yield split_whole(text.encode())
        start += length


def _held_out(first_piece: bytes, options: EncodeOptions) -> bool:
    # hashing takes as long as the fastest tokenizer
    return options.valid_fraction > 0 and document_share(first_piece) < options.valid_fraction


def read_pieces(
    task: Task, options: EncodeOptions, bad: list[int] | None = None
) -> Iterator[TextPiece]:
    """The documents of a task in pieces. Raises InputError for text that is not UTF-8 and for a
    line that is no JSON object with the text field, naming file and byte or line; but leaves such
    lines out if that is asked for, and adds their numbers to `bad`."""
    bad = [] if bad is None else bad
    for chunk in task.chunks:
        if chunk.kind != TEXT:
            read = _documents if chunk.kind == JSONL else _rows
            for document in read(chunk, options, bad):
                first = True
                for data, last in document:
                    held_out = first and _held_out(data, options)
                    yield TextPiece(data.decode(), len(data), held_out, first, last)
                    first = False
        else:
            text = _decode(chunk.data, chunk.path, chunk.start, options.errors)
            held_out = chunk.first and _held_out(chunk.data, options)
            yield TextPiece(text, len(chunk.data), held_out, chunk.first, chunk.last)


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Pieces in lists of some _BATCH_BYTES."""
    batch: list[TextPiece] = []
    size_bytes = 0
    for piece in pieces:
        batch.append(piece)
        size_bytes += piece.size_bytes
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    yield batch


class Encoder:
    """Encodes tasks with one tokenizer."""

    def __init__(self, options: EncodeOptions):
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)
        self._dtype = np.dtype(token_dtype(self._tokenizer.vocab_size))
        self._eod = np.array([self._tokenizer.eod_id], self._dtype).tobytes()

    def __call__(self, task: Task) -> Encoded:
        """Raises InputError as read_pieces does. Of a long document, text and tokens are together
        in memory for a batch of its pieces only."""
        bad: list[int] = []
        tokens, counters = bytearray(), CorpusCounters()
        segments: list[tuple[int, bool, bool, bool]] = []  # length, begins, ended, held out
        document = 0  # of the task; 0: goes on here
        for batch in _batches(read_pieces(task, self._options, bad)):
            kept: list[TextPiece] = []
            empty = duplicates = 0
            for piece in batch:
                if piece.is_nothing:
                    empty += 1
                    continue
                document += piece.first
                if task.dropped is not None and task.dropped[document]:
                    duplicates += piece.last
                else:
                    kept.append(piece)
            arrays = self._tokenizer.encode([piece.text for piece in kept])
            for piece, ids in zip(kept, arrays, strict=True):
                tokens += ids.astype(self._dtype, copy=False).tobytes()
                tokens += self._eod if piece.last else b""
                length = ids.size + piece.last
                segments.append((length, piece.first, piece.last, piece.held_out))
            counters += CorpusCounters(
                documents=sum(piece.last for piece in kept),
                empty_documents=empty,
                duplicates=duplicates,
                text_bytes=sum(piece.size_bytes for piece in kept),
            )
        columns = np.array(segments, np.int64).reshape(-1, 4).T
        return Encoded(
            group=task.group,
            index=task.index,
            tokens=np.frombuffer(tokens, self._dtype),
            lengths=columns[0],
            begins=columns[1].astype(bool),
            ended=columns[2].astype(bool),
            held_out=columns[3].astype(bool),
            counters=counters + CorpusCounters(bad_lines=len(bad)),
        )


Result = TypeVar("Result")
Worker = Callable[[EncodeOptions], Callable[[Task], Result]]  # a class whose objects take tasks


@lru_cache(1)
def _worker(make: Worker[Result], options: EncodeOptions) -> Callable[[Task], Result]:
    return make(options)


def _do(make: Worker[Result], options: EncodeOptions, task: Task) -> Result:
    return _worker(make, options)(task)


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C is met when the block ends, and not at all by a process that is started in it: half
    started, it would print a traceback of its own.

    The mask is what processes inherit; the handler is for threads of libraries (BLAS), to which
    the kernel hands a signal that this thread has masked. Python calls it in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # where it starts, it leaves the signal unmasked
    met: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: met.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if met:
            signal.raise_signal(signal.SIGINT)


def _start_worker(make: Worker[Any], options: EncodeOptions) -> None:
    """Runs first in a worker: leave Ctrl-C to the parent, and end with it even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker(make, options)


def map_in_order(
    tasks: Iterable[Task], make: Worker[Result], options: EncodeOptions, workers: int
) -> Iterator[Result]:
    """What `make(options)` returns for each task, by `workers` processes (1: in this one), a
    bounded number of them at a time.

    An error of a task is raised when its turn comes, so it does not depend on the number of
    workers.
    """
    if workers == 1:
        yield from map(make(options), tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (make, options))
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            with _interrupts_wait():  # it may start a worker
                waiting.append(pool.submit(_do, make, options, task))
            if len(waiting) >= workers * _TASKS_PER_WORKER:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker process died (killed for memory?): run the same command again to go on"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
