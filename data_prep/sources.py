"""Finding and reading corpus files: everything here is a pure function of the files and their
order.

A corpus is read as a sequence of tasks of about a megabyte, each made of chunks: whole lines of a
.jsonl file, or a piece of a text file. Tasks never depend on who works on them or how fast.
"""

import bz2
import hashlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import zstandard

from data_prep.parquet import read_rows
from ptdmpi.config import InputError

TEXT, JSONL, PARQUET = ".txt", ".jsonl", ".parquet"
_COMPRESSED = {
    ".gz": lambda: zlib.decompressobj(wbits=31),  # 31: a gzip header and trailer are expected
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}
PIECE_BYTES = 1 << 20  # longer documents are encoded in pieces of at most this size
TASK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 30  # a line of a .jsonl file must fit into memory
_BLOCK_BYTES = 1 << 16  # of compressed bytes
_INFLATED_BYTES = 1 << 20  # that a block is inflated to at a time, where the library can be told
_SPACE = b" \t\n\r\v\f"


@dataclass(frozen=True)
class CorpusFile:
    """One corpus file."""

    path: Path
    name: str  # as given, or relative to the directory given: names the file in the corpus identity
    kind: str  # TEXT (one document), JSONL (one document a line) or PARQUET (one a row)
    size_bytes: int  # on disk
    modified_ns: int
    start: int = (
        0  # the lines (row groups of Parquet) that begin in bytes [start, stop) of the file
    )
    stop: int | None = None  # None: to its end


@dataclass(frozen=True)
class Chunk:
    """Consecutive bytes of a source, decompressed: whole lines (JSONL), texts of rows (PARQUET) or
    a piece of a document (TEXT)."""

    path: str
    kind: str
    data: bytes
    start: int  # byte offset of `data` in the decompressed file
    line: int  # number of its first line, from 1 where its source starts (JSONL)
    first: bool  # a document begins at its start
    last: bool  # a document ends at its end
    source_start: int = 0  # byte at which its source's first line begins (JSONL)
    lengths: tuple[int, ...] = ()  # bytes of each document (PARQUET); `line` is the first's row


@dataclass(frozen=True)
class Task:
    """Chunks that are encoded together; `index` counts the tasks of a group from 0."""

    group: int
    index: int
    chunks: tuple[Chunk, ...]
    # bool: is the document left out that goes on from the task before, and each that begins here
    dropped: np.ndarray | None = None


def _kind(path: Path, suffixes: Sequence[str]) -> str | None:
    name = path.name
    if name.endswith(PARQUET):
        return PARQUET
    for compressed in _COMPRESSED:
        name = name.removesuffix(compressed)
    if name.endswith(JSONL):
        return JSONL
    return TEXT if name.endswith((TEXT, *suffixes)) else None


def _walk(directory: Path) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for folder, folders, files in os.walk(directory, onerror=unreadable):
        folders.sort()
        yield from (Path(folder) / name for name in sorted(files))


def find_sources(inputs: Sequence[str | Path], suffixes: Sequence[str] = ()) -> list[CorpusFile]:
    """The corpus files: `inputs` in the order given, directories walked in sorted order.

    Taken are .txt and .jsonl, files that end in one of `suffixes` (read as .txt), each of them also
    followed by .gz, .bz2, .xz or .zst, and .parquet. Raises InputError for a missing input, a file
    of another kind, a directory with no usable file, a file that is named twice.
    """
    legal = ", ".join((TEXT, JSONL, *suffixes)) + " (also with .gz, .bz2, .xz or .zst), .parquet"
    sources: list[CorpusFile] = []
    if "" in map(str, inputs):
        raise InputError("an input without a name; give files or directories")
    if "" in suffixes:
        raise InputError("--suffix: it is empty, and every file ends so; give one such as .py")
    for given in map(Path, inputs):
        if given.is_dir():
            paths = [path for path in _walk(given) if _kind(path, suffixes) and path.is_file()]
            if not paths:
                raise InputError(f"{given}: no usable file in this directory; taken are {legal}")
        elif not given.exists():
            raise InputError(f"{given}: no such file or directory")
        elif not given.is_file():
            raise InputError(f"{given}: is no regular file")
        elif _kind(given, suffixes):
            paths = [given]
        else:
            raise InputError(
                f"{given}: unknown kind of file; taken are {legal}; name more by --suffix"
            )
        for path in paths:
            status, name = (
                path.stat(),
                str(path.relative_to(given) if path != given else given.name),
            )
            kind = _kind(path, suffixes) or TEXT
            sources.append(CorpusFile(path, name, kind, status.st_size, status.st_mtime_ns))
    seen: set[Path] = set()
    for source in sources:
        resolved = source.path.resolve()
        if resolved in seen:
            raise InputError(f"{source.path}: this file is given twice")
        seen.add(resolved)
    return sources


def split_sources(sources: Sequence[CorpusFile], slice_bytes: int) -> list[CorpusFile]:
    """Files of rows, and those of lines that are not compressed, in slices of `slice_bytes`; other
    files whole. A line (or a group of rows) belongs to the slice in which it begins.
    """
    slices: list[CorpusFile] = []
    for source in sources:
        if source.kind == TEXT or source.path.suffix in _COMPRESSED:
            slices.append(source)
            continue
        starts = range(0, max(1, source.size_bytes), slice_bytes)
        slices += [replace(source, start=at, stop=at + slice_bytes) for at in starts]
    return slices


def size_on_disk(source: CorpusFile) -> int:
    """Bytes of a file, or of its slice."""
    stop = source.size_bytes if source.stop is None else min(source.stop, source.size_bytes)
    return stop - source.start


def group_sources(sources: Sequence[CorpusFile], group_bytes: int) -> list[list[CorpusFile]]:
    """Consecutive files (or slices) in groups of at least `group_bytes` on disk (but the last).
    Shards never hold tokens of two groups, so that groups can be dealt to ranks without knowing
    their token counts."""
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
    """Decompress one or more concatenated streams; EOFError where the last one is not complete."""
    decompressor = None
    for block in blocks:
        while block:
            decompressor = decompressor or _COMPRESSED[suffix]()
            if hasattr(decompressor, "needs_input"):  # bz2 and xz inflate up to 20,000 times
                yield decompressor.decompress(block, _INFLATED_BYTES)
                while not (decompressor.eof or decompressor.needs_input):
                    yield decompressor.decompress(b"", _INFLATED_BYTES)
            else:
                yield decompressor.decompress(block)
            block = decompressor.unused_data if decompressor.eof else b""
            if decompressor.eof:
                decompressor = None
    if decompressor is not None:
        raise EOFError("the compressed stream is truncated")


def read_blocks(source: CorpusFile, advance: Callable[[int], object]) -> Iterator[bytes]:
    """The decompressed bytes of a file (from one byte before a slice), in blocks. `advance` is told
    the bytes read from the disk.

    Raises InputError for a file that cannot be read or decompressed.
    """

    def raw() -> Iterator[bytes]:
        with open(source.path, "rb") as stream:
            stream.seek(max(0, source.start - 1))
            while block := stream.read(_BLOCK_BYTES):
                advance(len(block))
                yield block

    suffix = source.path.suffix
    if suffix in _COMPRESSED and not source.size_bytes:
        raise InputError(f"{source.path}: is empty, and so no {suffix} file")
    try:
        yield from _inflate(raw(), suffix) if suffix in _COMPRESSED else raw()
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise InputError(f"{source.path}: cannot be read: {error}") from error


def _cut(window: bytes) -> int:
    """Where to cut a document of more than PIECE_BYTES; `window` is its first PIECE_BYTES + 1
    bytes.

    Preferred, in the second half: after the last single line end between two characters that are no
    spaces, since the usual pre-tokenizers (GPT-2's and its successors') have a boundary there on
    either side whatever follows, so that the tokens stay those of the whole document. Else after
    the last line end; else before the last whole UTF-8 character.
    """
    low, end = PIECE_BYTES // 2, PIECE_BYTES
    while (at := window.rfind(b"\n", low, end)) >= 0:
        if window[at - 1] not in _SPACE and window[at + 1] not in _SPACE:
            return at + 1
        end = at
    if (at := window.rfind(b"\n", low, PIECE_BYTES)) >= 0:
        return at + 1
    cut = PIECE_BYTES
    while cut > PIECE_BYTES - 3 and window[cut] & 0xC0 == 0x80:  # a UTF-8 continuation byte
        cut -= 1
    return cut


def split_document(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """A document's pieces of at most PIECE_BYTES, and whether each is the last: a pure function of
    its bytes, not of the blocks they come in. An empty document is one empty piece."""
    buffer = bytearray()
    for block in blocks:
        buffer += block
        while len(buffer) > PIECE_BYTES:
            cut = _cut(bytes(buffer[: PIECE_BYTES + 1]))
            yield bytes(buffer[:cut]), False
            del buffer[:cut]
    yield bytes(buffer), True


def split_whole(document: bytes) -> Iterator[tuple[bytes, bool]]:
    """The pieces of `split_document`, of a document that is there as a whole: no copy of it."""
    start = 0
    while len(document) - start > PIECE_BYTES:
        cut = _cut(document[start : start + PIECE_BYTES + 1])
        yield document[start : start + cut], False
        start += cut
    yield document[start:] if start else document, True


def _text_chunks(source: CorpusFile, blocks: Iterable[bytes]) -> Iterator[Chunk]:
    start = 0
    for data, last in split_document(blocks):
        yield Chunk(str(source.path), TEXT, data, start, 1, start == 0, last)
        start += len(data)


def _first_line(source: CorpusFile, blocks: Iterator[bytes]) -> tuple[int, Iterator[bytes]]:
    """Where the first line begins that begins in the slice or behind, and the bytes from there."""
    position = source.start
    if not position:
        return 0, blocks
    position -= 1  # a line begins after each line end, the one before the slice included
    for block in blocks:
        at = block.find(b"\n") + 1
        if at:
            return position + at, chain([block[at:]], blocks)
        position += len(block)
    return position, iter(())


def _lines_of_slice(source: CorpusFile, start: int, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks from `start` to the end of the last line that begins in the slice."""
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
    """Whole lines: each chunk ends at the first line end at or after TASK_BYTES."""
    start, blocks = _first_line(source, blocks)
    source_start = start
    buffer, line, searched = bytearray(), 1, TASK_BYTES - 1

    def chunk(data: bytes) -> Chunk:
        return Chunk(str(source.path), JSONL, data, start, line, True, True, source_start)

    for block in _lines_of_slice(source, start, blocks):
        buffer += block
        while (end := buffer.find(b"\n", searched) + 1) > 0:
            with memoryview(buffer) as view:
                data = bytes(view[:end])  # one copy of what may be one long line
            del buffer[:end]
            yield chunk(data)
            start, line, searched = start + end, line + data.count(b"\n"), TASK_BYTES - 1
        searched = max(searched, len(buffer))
        if len(buffer) > MAX_LINE_BYTES:
            raise InputError(
                f"{source.path}: byte {start}: a line is longer than {MAX_LINE_BYTES} bytes"
            )
    if buffer:
        yield chunk(bytes(buffer))


def _row_chunks(
    source: CorpusFile, text_field: str, advance: Callable[[int], object]
) -> Iterator[Chunk]:
    """Whole texts: each chunk ends at the first one's end at or after TASK_BYTES."""
    texts: list[bytes] = []
    size_bytes = first = 0

    def chunk() -> Chunk:
        lengths = tuple(map(len, texts))
        return Chunk(str(source.path), PARQUET, b"".join(texts), 0, first, True, True, 0, lengths)

    for row, text in read_rows(source.path, text_field, source.start, source.stop):
        first = first if texts else row
        texts.append(text)
        size_bytes += len(text)
        if size_bytes >= TASK_BYTES:
            yield chunk()
            texts, size_bytes = [], 0
    if texts:
        yield chunk()
    advance(size_on_disk(source))


def _chunks(
    source: CorpusFile, text_field: str, advance: Callable[[int], object]
) -> Iterator[Chunk]:
    if source.kind == PARQUET:
        return _row_chunks(source, text_field, advance)
    blocks = read_blocks(source, advance)
    return _line_chunks(source, blocks) if source.kind == JSONL else _text_chunks(source, blocks)


def read_tasks(
    group: int,
    sources: Sequence[CorpusFile],
    advance: Callable[[int], object],
    text_field: str = "text",
) -> Iterator[Task]:
    """The tasks of one group, in order. Raises InputError for a file that cannot be read."""
    chunks: list[Chunk] = []
    index = size_bytes = 0
    for source in sources:
        for chunk in _chunks(source, text_field, advance):
            chunks.append(chunk)
            size_bytes += len(chunk.data)
            if size_bytes >= TASK_BYTES:
                yield Task(group, index, tuple(chunks))
                chunks, index, size_bytes = [], index + 1, 0
    if chunks:
        yield Task(group, index, tuple(chunks))


def document_share(first_piece: bytes) -> float:
    """A number in [0, 1) that depends only on the first piece of a document (BLAKE2b, 8 bytes)."""
    digest = hashlib.blake2b(first_piece, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
