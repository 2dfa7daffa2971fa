"""The files of a corpus, and the division of their content into tasks.

A corpus is read as a sequence of tasks, which have about a megabyte each. A task consists of
chunks. A chunk contains complete lines of a .jsonl file, the texts of some rows of a Parquet file,
or a piece of a text file. The tasks depend only on the files and their order, not on the number or
the speed of the processes.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import zstandard

from data_prep.parquet import read_rows
from ptdmpi.base.disk import regular_files
from ptdmpi.base.hub import downloaded, is_hub_name
from ptdmpi.config import InputError

TEXT = ".txt"
JSONL = ".jsonl"
PARQUET = ".parquet"
_COMPRESSED = {
    ".gz": lambda: zlib.decompressobj(wbits=31),  # 31: the stream has a gzip header and trailer
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}
PIECE_BYTES = 1 << 20  # longer documents are encoded in pieces of at most this number of bytes
TASK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 30  # limit for a line of a .jsonl file, because a line must fit into memory
_BLOCK_BYTES = 1 << 16  # number of bytes (before decompression) that are read at a time
# Number of bytes that are decompressed at a time, if the library accepts a limit.
_INFLATED_BYTES = 1 << 20
_SPACE = b" \t\n\r\v\f"


@dataclass(frozen=True)
class CorpusFile:
    """A file of the corpus, or a slice of a file: the lines or row groups that begin in the bytes
    [start, stop) of the file."""

    path: Path
    # The name of the file: the given name, or, in a given directory, the path relative to this
    # directory. A restart compares this name with the name in the stored state.
    name: str
    kind: str  # TEXT (one document), JSONL (one document per line) or PARQUET (one per row)
    size_bytes: int  # size of the file on the disk, in bytes
    modified_ns: int
    start: int = 0
    stop: int | None = None  # None: up to the end of the file


@dataclass(frozen=True)
class Chunk:
    """Consecutive decompressed bytes of a file or slice: complete lines (JSONL), the texts of rows
    (PARQUET, or a data set that is streamed), or a piece of a document (TEXT)."""

    path: str
    kind: str
    data: bytes
    start: int  # byte offset of `data` in the decompressed file
    line: int  # number of the first line in the file or slice, from 1 (JSONL)
    first: bool  # True if a document begins at the start of the chunk
    last: bool  # True if a document ends at the end of the chunk
    source_start: int = 0  # byte offset of the first line of the file or slice
    # number of bytes of each document (PARQUET); `line` is then the row number of the first
    # document
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """A task: chunks that are encoded together. `group` is the number of the group of files that
    the task belongs to (see `group_sources`). `index` is the number of the task in this group,
    counted from 0."""

    group: int
    index: int
    chunks: tuple[Chunk, ...]
    # bool [1 + documents that begin in the task]: True for documents that are left out as
    # duplicates. The first entry is for the document that continues from the previous task. None if
    # no document is left out.
    dropped: np.ndarray | None = None


def _kind(path: Path, suffixes: Sequence[str]) -> str | None:
    """Return the kind of a file (TEXT, JSONL or PARQUET), which is determined by its name. Return
    None for a file that is not read."""
    name = path.name
    if name.endswith(PARQUET):
        return PARQUET
    for compressed in _COMPRESSED:
        name = name.removesuffix(compressed)
    if name.endswith(JSONL):
        return JSONL
    return TEXT if name.endswith((TEXT, *suffixes)) else None


def _usable(suffixes: Sequence[str]) -> list[str]:
    """Return glob patterns that match the names of files that can be read."""
    plain = [f"*{ending}" for ending in (TEXT, JSONL, *suffixes)]
    compressed = [f"{pattern}{ending}" for pattern in plain for ending in _COMPRESSED]
    return [*plain, *compressed, f"*{PARQUET}"]


def find_sources(
    inputs: Sequence[str | Path], suffixes: Sequence[str] = (), more: str = "; --suffix adds others"
) -> list[CorpusFile]:
    """Return the files of the corpus, in the order of `inputs`. The files of a directory are
    returned in sorted order.

    A usable file is a .txt, .jsonl or .parquet file, or a file with one of the `suffixes`, which is
    read like a .txt file. All except .parquet files may be compressed (.gz, .bz2, .xz or .zst). An
    input may also be the name of a data set of the Hugging Face hub, which is downloaded. Raise
    InputError for a missing input, an unusable file (the message lists usable files, followed by
    `more`), and a file that is given twice. Also raise the errors of `regular_files`.
    """
    names = ", ".join((TEXT, JSONL, *suffixes))
    legal = f"{names} (also with .gz, .bz2, .xz or .zst), .parquet{more}"
    sources: list[CorpusFile] = []
    if "" in map(str, inputs):
        raise InputError("an input without a name; give files or directories")
    if "" in suffixes:
        raise InputError("--suffix: is empty; give the end of a file's name, such as .py")
    for given in map(Path, inputs):
        if is_hub_name(str(given)):
            given = downloaded(str(given), "dataset", _usable(suffixes))
        if given.is_dir():
            paths = regular_files(given, lambda path: _kind(path, suffixes) is not None)
            if not paths:
                raise InputError(f"{given}: no usable file in this directory; usable are {legal}")
            names = [str(path.relative_to(given)) for path in paths]
        elif not given.exists():
            raise InputError(f"{given}: no such file or directory")
        elif not given.is_file():
            raise InputError(f"{given}: is not a regular file")
        elif _kind(given, suffixes):
            paths = [given]
            names = [given.name]
        else:
            raise InputError(f"{given}: unknown kind of file; usable are {legal}")
        for path, name in zip(paths, names, strict=True):
            stat = path.stat()
            kind = _kind(path, suffixes) or TEXT
            sources.append(
                CorpusFile(path, name, kind, size_bytes=stat.st_size, modified_ns=stat.st_mtime_ns)
            )
    seen: set[Path] = set()
    for source in sources:
        resolved = source.path.resolve()
        if resolved in seen:
            raise InputError(f"{source.path}: this file is given twice")
        seen.add(resolved)
    return sources


def split_sources(sources: Sequence[CorpusFile], slice_bytes: int) -> list[CorpusFile]:
    """Divide Parquet files and uncompressed .jsonl files into slices of `slice_bytes` bytes. Other
    files are not divided. A line or row group belongs to the slice in which it begins."""
    slices: list[CorpusFile] = []
    for source in sources:
        if source.kind == TEXT or source.path.suffix in _COMPRESSED:
            slices.append(source)
            continue
        starts = range(0, max(1, source.size_bytes), slice_bytes)
        slices += [replace(source, start=at, stop=at + slice_bytes) for at in starts]
    return slices


def size_on_disk(source: CorpusFile) -> int:
    """Return the size in bytes of a file, or of its slice, on the disk."""
    if source.stop is None:
        return source.size_bytes - source.start
    return min(source.stop, source.size_bytes) - source.start


def group_sources(sources: Sequence[CorpusFile], group_bytes: int) -> list[list[CorpusFile]]:
    """Return groups of consecutive files or slices. Each group, except the last one, has at least
    `group_bytes` bytes on the disk.

    A shard contains tokens of only one group. Therefore groups can be divided among ranks before
    the number of their tokens is known.
    """
    groups: list[list[CorpusFile]] = []
    size_bytes = group_bytes
    for source in sources:
        if size_bytes >= group_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(source)
        size_bytes += size_on_disk(source)
    return groups


def _inflate(blocks: Iterable[bytes], suffix: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of one or more concatenated streams. Raise EOFError if the last
    stream is incomplete, and the library's own error if a stream is damaged."""
    decompressor = None
    for block in blocks:
        while block:
            decompressor = decompressor or _COMPRESSED[suffix]()
            # limit the size of the output: bz2 and xz can expand data up to 20,000 times
            if hasattr(decompressor, "needs_input"):
                yield decompressor.decompress(block, _INFLATED_BYTES)
                while not (decompressor.eof or decompressor.needs_input):
                    yield decompressor.decompress(b"", _INFLATED_BYTES)
            else:
                yield decompressor.decompress(block)
            block = b""
            if decompressor.eof:
                block = decompressor.unused_data
                decompressor = None
    if decompressor is not None:
        raise EOFError("the compressed stream is truncated")


def read_blocks(source: CorpusFile, advance: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, in blocks. If `source` is a slice that does not start
    at the first byte of the file, the first yielded byte is the last byte before the slice. The
    blocks continue to the end of the file, even if the slice ends earlier.

    `advance` is called with the number of bytes read from the disk. Raise InputError for a file
    that cannot be read or decompressed.
    """

    def raw() -> Iterator[bytes]:
        """Yield the bytes of the file as they are on the disk, without decompression."""
        with open(source.path, "rb") as stream:
            stream.seek(max(0, source.start - 1))
            while block := stream.read(_BLOCK_BYTES):
                advance(len(block))
                yield block

    suffix = source.path.suffix
    if suffix in _COMPRESSED and not source.size_bytes:
        raise InputError(f"{source.path}: is empty, so it is not a {suffix} file")
    try:
        yield from _inflate(raw(), suffix) if suffix in _COMPRESSED else raw()
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise InputError(f"{source.path}: cannot be read: {error}") from error


def _cut(window: bytes) -> int:
    """Return the position at which a document with more than PIECE_BYTES bytes must be cut.
    `window` contains its first PIECE_BYTES + 1 bytes.

    The cut is in the second half of the window. If possible, it is after the last line end that is
    between two non-space characters. The usual pre-tokenizers (of GPT-2 and later models) have a
    boundary on both sides of such a line end, so the tokens are the same as for the undivided
    document. If there is no such line end, the cut is after the last line end of this half. If this
    half has no line end, the cut is at the end of the window, between two UTF-8 characters.
    """
    low = PIECE_BYTES // 2
    end = PIECE_BYTES
    while (at := window.rfind(b"\n", low, end)) >= 0:
        if window[at - 1] not in _SPACE and window[at + 1] not in _SPACE:
            return at + 1
        end = at
    if (at := window.rfind(b"\n", low, PIECE_BYTES)) >= 0:
        return at + 1
    cut = PIECE_BYTES
    # move the cut back while the byte after it is not the first byte of a UTF-8 character
    while cut > PIECE_BYTES - 3 and window[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def split_document(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield a pair (piece, True for the last piece) for each piece of a document. A piece has at
    most PIECE_BYTES bytes.

    The pieces depend only on the bytes of the document, not on the division of these bytes into
    `blocks`. An empty document yields one empty piece.
    """
    buffer = bytearray()
    for block in blocks:
        buffer += block
        while len(buffer) > PIECE_BYTES:
            cut = _cut(bytes(buffer[: PIECE_BYTES + 1]))
            yield bytes(buffer[:cut]), False
            del buffer[:cut]
    yield bytes(buffer), True


def split_whole(document: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the same pieces as `split_document`, for a document that is in memory as a whole. A
    document with a single piece is not copied."""
    start = 0
    while len(document) - start > PIECE_BYTES:
        cut = _cut(document[start : start + PIECE_BYTES + 1])
        yield document[start : start + cut], False
        start += cut
    yield document[start:] if start else document, True


def _text_chunks(source: CorpusFile, blocks: Iterable[bytes]) -> Iterator[Chunk]:
    """Yield the pieces of a text file, whose content is one document."""
    start = 0
    for data, last in split_document(blocks):
        yield Chunk(
            path=str(source.path),
            kind=TEXT,
            data=data,
            start=start,
            line=1,
            first=start == 0,
            last=last,
        )
        start += len(data)


def _first_line(source: CorpusFile, blocks: Iterator[bytes]) -> tuple[int, Iterator[bytes]]:
    """Return the offset of the first line that begins in or after the slice, and the bytes of the
    file from this offset on. `blocks` are the bytes of the file from one byte before the slice."""
    position = source.start
    if not position:
        return 0, blocks
    # Also read the byte before the slice. If this byte is a line end, a line begins exactly at the
    # start of the slice.
    position -= 1
    for block in blocks:
        at = block.find(b"\n") + 1
        if at:
            return position + at, chain([block[at:]], blocks)
        position += len(block)
    return position, iter(())


def _lines_of_slice(source: CorpusFile, start: int, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of the file from the offset `start` to the end of the last line that begins
    in the slice. `blocks` are the bytes of the file from `start` on."""
    if source.stop is None:
        yield from blocks
        return
    position = start
    if position >= source.stop:
        return
    for block in blocks:
        end = block.find(b"\n", max(0, source.stop - 1 - position)) + 1
        if position + len(block) >= source.stop and end:
            yield block[:end]
            return
        yield block
        position += len(block)


def _line_chunks(source: CorpusFile, blocks: Iterator[bytes]) -> Iterator[Chunk]:
    """Yield chunks of complete lines. A chunk ends at the first line end that gives it a length of
    at least TASK_BYTES bytes. Raise InputError for a line longer than MAX_LINE_BYTES."""
    start, blocks = _first_line(source, blocks)
    source_start = start
    buffer = bytearray()
    line = 1
    # index in `buffer` at which the search for the line end that ends the chunk begins
    searched = TASK_BYTES - 1

    def chunk(data: bytes) -> Chunk:
        """Return a chunk of lines that begins at `start`."""
        return Chunk(
            path=str(source.path),
            kind=JSONL,
            data=data,
            start=start,
            line=line,
            first=True,
            last=True,
            source_start=source_start,
        )

    for block in _lines_of_slice(source, start, blocks):
        buffer += block
        while (end := buffer.find(b"\n", searched) + 1) > 0:
            with memoryview(buffer) as view:
                # copy the bytes only once, because a chunk may be a single very long line
                data = bytes(view[:end])
            del buffer[:end]
            yield chunk(data)
            start += end
            line += data.count(b"\n")
            searched = TASK_BYTES - 1
        searched = max(searched, len(buffer))
        if len(buffer) > MAX_LINE_BYTES:
            raise InputError(
                f"{source.path}: byte {start}: a line is longer than {MAX_LINE_BYTES} bytes"
            )
    if buffer:
        yield chunk(bytes(buffer))


def row_chunks(path: str, rows: Iterable[tuple[int, bytes]]) -> Iterator[Chunk]:
    """Yield chunks of `rows`, which are pairs (number of the row, text in UTF-8), in order. A chunk
    ends when it has at least TASK_BYTES bytes. `path` is the name of the source in error
    messages."""
    texts: list[bytes] = []
    size_bytes = first = 0

    def chunk() -> Chunk:
        """Return a chunk that consists of the collected `texts`."""
        lengths = tuple(map(len, texts))
        return Chunk(
            path=path,
            kind=PARQUET,
            data=b"".join(texts),
            start=0,
            line=first,
            first=True,
            last=True,
            source_start=0,
            lengths=lengths,
        )

    for row, text in rows:
        if not texts:
            first = row
        texts.append(text)
        size_bytes += len(text)
        if size_bytes >= TASK_BYTES:
            yield chunk()
            texts = []
            size_bytes = 0
    if texts:
        yield chunk()


def _parquet_chunks(
    source: CorpusFile, text_field: str, advance: Callable[[int], object]
) -> Iterator[Chunk]:
    """Yield chunks of a Parquet file. Each chunk consists of complete texts."""
    rows = read_rows(source.path, text_field, source.start, source.stop)
    yield from row_chunks(str(source.path), rows)
    advance(size_on_disk(source))


def _chunks(
    source: CorpusFile, text_field: str, advance: Callable[[int], object]
) -> Iterator[Chunk]:
    if source.kind == PARQUET:
        return _parquet_chunks(source, text_field, advance)
    blocks = read_blocks(source, advance)
    if source.kind == JSONL:
        return _line_chunks(source, blocks)
    return _text_chunks(source, blocks)


def tasks_of(group: int, chunks: Iterable[Chunk]) -> Iterator[Task]:
    """Yield the tasks of one group, in order. `chunks` are the chunks of the group."""
    held: list[Chunk] = []
    index = size_bytes = 0
    for chunk in chunks:
        held.append(chunk)
        size_bytes += len(chunk.data)
        if size_bytes >= TASK_BYTES:
            yield Task(group, index, tuple(held))
            held = []
            index += 1
            size_bytes = 0
    if held:
        yield Task(group, index, tuple(held))


def read_tasks(
    group: int,
    sources: Sequence[CorpusFile],
    advance: Callable[[int], object],
    text_field: str = "text",
) -> Iterator[Task]:
    """Yield the tasks of one group, in order. After each read, `advance` is called with the number
    of bytes that were read. Raise InputError for a file that cannot be read."""
    chunks = (chunk for source in sources for chunk in _chunks(source, text_field, advance))
    return tasks_of(group, chunks)
