"""Encoding of tasks, which are parts of a corpus (see `sources.Task`), as tokens, in one process or
several. The results are returned in the order of the tasks."""

import hashlib
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
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data_prep.sources import (
    JSONL,
    PIECE_BYTES,
    TEXT,
    Chunk,
    Task,
    split_document,
    split_whole,
)
from data_prep.state import CorpusCounters
from data_prep.vocabulary import load_tokenizer
from ptdmpi.config import InputError
from ptdmpi.data.header import token_dtype

_SPACE = b" \t\n\r\v\f"
_BATCH_BYTES = 1 << 20  # bytes of text that are encoded in one call
_LONG_LINE_BYTES = 4 * PIECE_BYTES  # lines with more bytes are decoded in parts
_PART_BYTES = PIECE_BYTES // 4
_QUOTE = re.compile(b'"')
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# Pattern for a part of a JSON string that can be decoded separately: the part ends neither inside
# an escape nor between the two escapes of a surrogate pair.
_WHOLE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])....|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+",
    re.DOTALL,
)
# A placeholder for a long string that was removed from a line. It is random, so that no line
# contains the same text by chance.
_PLACE = "place of a string " + secrets.token_hex(8)
# Number of tasks in memory for each worker process: one is being encoded, one waits to be encoded,
# and one waits to be written.
_TASKS_PER_WORKER = 3


@dataclass(frozen=True)
class EncodeOptions:
    """The options for reading and encoding documents."""

    tokenizer: str
    text_field: str
    errors: str  # what to do with bytes that are not UTF-8: "strict" or "replace"
    valid_fraction: float  # fraction of documents that are held out, chosen by their hashes
    skip_bad_lines: bool = False  # leave out bad lines of .jsonl files, and count them


@dataclass(frozen=True)
class Encoded:
    """The tokens of a task, divided into segments. A segment is a complete document. If a document
    extends over several tasks, a segment is the part of the document in this task."""

    group: int
    index: int
    tokens: np.ndarray  # the tokens of all segments, one after the other: int [sum of `lengths`]
    lengths: np.ndarray  # the number of tokens of each segment: int64 [segments]
    # True if the segment ends its document, with the end-of-document token: bool [segments].
    ended: np.ndarray
    # True if the document is held out: bool [segments]. The value is valid only for the first
    # segment of a document.
    held_out: np.ndarray
    begins: np.ndarray  # True if the segment begins its document: bool [segments]
    counters: CorpusCounters  # a document is counted in the task in which it ends


@dataclass(frozen=True)
class TextPiece:
    """A piece of one document's text, of at most PIECE_BYTES bytes."""

    text: str
    size_bytes: int  # number of bytes of the text in UTF-8
    held_out: bool  # valid only in the first piece of a document; False in the others
    first: bool
    last: bool

    @property
    def is_nothing(self) -> bool:
        """Return True if this piece is a complete but empty document."""
        return not self.text and self.first and self.last


def _decode(data: bytes | memoryview, path: str, start: int, errors: str) -> str:
    """Decode `data`, which begins at offset `start` of the file `path`, and return the text. Raise
    InputError if the bytes are not UTF-8 and `errors` is "strict"."""
    try:
        return str(data, "utf-8", errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {start + error.start} is not UTF-8 ({error.reason}); "
            "repair the file, or use --errors replace"
        ) from error


class _BadLine(ValueError):
    """The error for a line of a .jsonl file that cannot be used. Its text describes the mistake."""


def _field(data: memoryview, path: str, start: int, options: EncodeOptions) -> bytes:
    """Return the text in the text field of a JSON line, as UTF-8. The line `data` begins at byte
    `start` of the file `path`. Raise _BadLine if the line has no such text. The errors of `_decode`
    are also raised."""
    line = _decode(data, path, start, options.errors)
    try:
        record = json.loads(line)
        del line  # free the line now, because it may occupy most of the memory
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not a JSON line: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(options.text_field), str):
        raise _BadLine(f"no JSON object with a text in the field {options.text_field!r}")
    # a \u escape in JSON may be a lone surrogate, which UTF-8 cannot represent
    try:
        return record[options.text_field].encode("utf-8", options.errors)
    except UnicodeEncodeError as error:
        raise _BadLine("the text has a lone surrogate; use --errors replace") from error


def _decoded(string: memoryview) -> Iterator[bytes]:
    """Yield the text of a JSON string in parts, as UTF-8. `string` is the JSON string without its
    quotes. Raise ValueError if the string is malformed."""
    start = 0
    while start < len(string):
        stop = _WHOLE.match(string, start, start + _PART_BYTES).end()
        # do not divide the string inside a character
        while start < stop < len(string) and string[stop] & 0xC0 == 0x80:
            stop -= 1
        if stop == start:
            raise ValueError("an incomplete escape or character")
        yield json.loads(f'"{str(string[start:stop], "utf-8")}"').encode()
        start = stop


def _long_string(line: memoryview, field: str) -> memoryview | None:
    """If the text in the field `field` of a JSON line is long, return it as a JSON string without
    its quotes.

    Return None if the complete line must be parsed, because the text is short or because the line
    has a mistake.

    This function saves memory: long strings are removed from the line before the rest is parsed.
    Parsing the complete line would make two copies of the line as `str`, in which a character may
    take four bytes.
    """
    strings: list[memoryview] = []
    rest = bytearray()
    taken = 0  # number of bytes of the line that are already in `rest` or `strings`
    position = 0
    while quote := _QUOTE.search(line, position):
        match = _STRING.match(line, quote.start())
        if match is None:
            return None
        start, position = match.span()
        if position - start > _PART_BYTES:
            rest += line[taken:start]
            rest += json.dumps([_PLACE, len(strings)]).encode()
            strings.append(line[start + 1 : position - 1])
            taken = position
    rest += line[taken:]
    try:
        record = json.loads(str(rest, "utf-8"))
        if not isinstance(record, dict):
            return None
        value = record.get(field)
        if not isinstance(value, list) or value[:1] != [_PLACE]:
            return None
        # check that every string is well-formed
        for _ in chain.from_iterable(map(_decoded, strings)):
            pass
    except (ValueError, RecursionError):
        return None
    return strings[value[1]]


def _lines_before(chunk: Chunk) -> int:
    """Return the number of lines in the file before the slice from which the chunk was read, for an
    error message."""
    count = 0
    left = chunk.source_start
    with open(chunk.path, "rb") as stream:
        while left and (block := stream.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def lines(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset of each line in `data`, and the line itself. The line is not copied, because
    it may occupy most of the memory."""
    view = memoryview(data)
    start = 0
    while start <= len(data):
        end = data.find(b"\n", start)
        if end < 0:
            end = len(data)
        yield start, view[start:end]
        start = end + 1


def _documents(
    chunk: Chunk, options: EncodeOptions, bad: list[int]
) -> Iterator[Iterator[tuple[bytes, bool]]]:
    """Yield, for each line of a chunk, an iterator over the pieces of its text. If bad lines are
    skipped, their numbers are added to `bad`."""
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
    """Yield, for each row of a chunk of a Parquet file, an iterator over the pieces of its text. No
    row is left out, so `bad` is not changed."""
    start = 0
    for row, length in enumerate(chunk.lengths, chunk.line):
        data = chunk.data[start : start + length]
        text = _decode(data, f"{chunk.path}: row {row}", 0, options.errors)
        yield split_whole(text.encode())
        start += length


def document_share(first_piece: bytes) -> float:
    """Return a pseudorandom number in [0, 1) that depends only on the first piece of a document.
    The number is computed from the piece's 8-byte BLAKE2b digest."""
    digest = hashlib.blake2b(first_piece, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _held_out(first_piece: bytes, options: EncodeOptions) -> bool:
    # compute the hash only if documents are held out, because hashing takes as long as encoding
    # with the fastest tokenizer
    return options.valid_fraction > 0 and document_share(first_piece) < options.valid_fraction


def read_pieces(
    task: Task, options: EncodeOptions, bad: list[int] | None = None
) -> Iterator[TextPiece]:
    """Yield the pieces of text of all documents in a task.

    Raise InputError for text that is not UTF-8, and for a line that is not a JSON object with the
    text field. The message names the file and the byte or line. If `options.skip_bad_lines` is
    True, bad lines of .jsonl files are left out instead, and their numbers are added to `bad`.
    """
    if bad is None:
        bad = []
    for chunk in task.chunks:
        if chunk.kind == TEXT:
            text = _decode(chunk.data, chunk.path, chunk.start, options.errors)
            held_out = chunk.first and _held_out(chunk.data, options)
            yield TextPiece(
                text=text,
                size_bytes=len(chunk.data),
                held_out=held_out,
                first=chunk.first,
                last=chunk.last,
            )
            continue
        read = _documents if chunk.kind == JSONL else _rows
        for document in read(chunk, options, bad):
            first = True
            for data, last in document:
                held_out = first and _held_out(data, options)
                yield TextPiece(
                    text=data.decode(),
                    size_bytes=len(data),
                    held_out=held_out,
                    first=first,
                    last=last,
                )
                first = False


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yield lists of pieces, with about _BATCH_BYTES bytes of text in each list. The last list may
    be empty."""
    batch: list[TextPiece] = []
    size_bytes = 0
    for piece in pieces:
        batch.append(piece)
        size_bytes += piece.size_bytes
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch = []
            size_bytes = 0
    yield batch


class _Segment(NamedTuple):
    """The properties of one segment (see `Encoded`)."""

    length: int
    begins: bool
    ended: bool
    held_out: bool


class Encoder:
    """An encoder that converts tasks to tokens, with the same tokenizer for all tasks."""

    def __init__(self, options: EncodeOptions):
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)
        self._dtype = np.dtype(token_dtype(self._tokenizer.vocab_size))
        self._eod = np.array([self._tokenizer.eod_id], self._dtype).tobytes()

    def __call__(self, task: Task) -> Encoded:
        """Encode a task. Raise the errors that `read_pieces` raises.

        The pieces are encoded in batches, so that at any time, only one batch is in memory in both
        forms: as decoded text and as tokens.
        """
        bad: list[int] = []
        tokens = bytearray()
        counters = CorpusCounters()
        segments: list[_Segment] = []
        # number of the present document in the task; number 0 is the document that continues from
        # the previous task
        document = 0
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
                if piece.last:
                    tokens += self._eod
                length = ids.size + piece.last
                segments.append(_Segment(length, piece.first, piece.last, piece.held_out))
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
# a class whose constructor takes EncodeOptions, and whose objects are called with a task
Worker = Callable[[EncodeOptions], Callable[[Task], Result]]


@lru_cache(1)  # each worker process creates its encoder only once, and keeps it in this cache
def _worker(make: Worker[Result], options: EncodeOptions) -> Callable[[Task], Result]:
    return make(options)


def _do(make: Worker[Result], options: EncodeOptions, task: Task) -> Result:
    return _worker(make, options)(task)


def _exit_with_parent() -> None:
    """Wait until the parent process has ended, and then end this process."""
    multiprocessing.parent_process().join()
    os._exit(1)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Return a context manager that delays the effect of Ctrl-C until the `with` block ends, and
    blocks SIGINT in processes that are started inside the block. Otherwise Ctrl-C would make a
    starting process print its own traceback.

    Child processes inherit the signal mask of this thread. A signal handler is also needed. If this
    thread has masked a signal, the kernel delivers the signal to another thread, for example of a
    BLAS library. Python then calls the handler in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # start multiprocessing's resource tracker before SIGINT is masked, because the function that
    # starts the tracker also unmasks SIGINT
    resource_tracker.ensure_running()
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


def _start_worker(make: Worker[Any], options: EncodeOptions) -> None:
    """Initialize a worker process. It ignores Ctrl-C, and ends when its parent ends, even if the
    parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker(make, options)


def map_in_order(
    tasks: Iterable[Task], make: Worker[Result], options: EncodeOptions, workers: int
) -> Iterator[Result]:
    """Create a worker object in each process by `make(options)`. Pass each task to one of these
    objects, and yield the results in the order of the tasks. The work is done by `workers`
    processes, or by this process if `workers` is 1.

    Only a limited number of tasks is read in advance. If a task fails, its error is raised when its
    result would be yielded, so the behaviour does not depend on the number of workers. Raise
    ChildProcessError if a worker dies.
    """
    if workers == 1:
        yield from map(make(options), tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (make, options))
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            with _interrupts_wait():  # this call may start a worker process
                waiting.append(pool.submit(_do, make, options, task))
            if len(waiting) >= workers * _TASKS_PER_WORKER:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker process died (killed for memory?): run the same command again to continue"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
