"""Reading of conversation records as tasks (see `sources.Task`). A record is a line of a .jsonl
file, or an element of a .json array."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data_prep.sources import (
    JSONL,
    MAX_LINE_BYTES,
    TEXT,
    Chunk,
    CorpusFile,
    Task,
    find_sources,
    read_blocks,
    read_tasks,
)
from ptdmpi.config import InputError

JSON = ".json"


def find_records(inputs: Sequence[str]) -> list[CorpusFile]:
    """Return the .jsonl and .json files among the inputs, including compressed files. Raise
    InputError for any other kind of file. The errors of `find_sources` are also raised."""
    sources = find_sources(inputs, (JSON,), more="")
    for source in sources:
        if source.kind != JSONL and JSON not in Path(source.name).suffixes[-2:]:
            raise InputError(
                f"{source.path}: is not a .jsonl or .json file; conversations are lines of .jsonl "
                "files, or the elements of a .json array"
            )
    return sources


def record_tasks(sources: Sequence[CorpusFile], advance: Callable[[int], object]) -> Iterator[Task]:
    """Yield tasks with the records of all files. The chunks of a task consist of complete lines,
    with one record per line.

    Line n of a .json array is its element n, counted from 1. `advance` is called with the number of
    bytes that have been read. Raise InputError for a file that cannot be read.
    """
    for source in sources:
        if source.kind == JSONL:
            yield from read_tasks(0, [source], advance, "")
        else:
            data = _as_lines(source, b"".join(_limited(source, advance)))
            yield Task(
                0,
                0,
                (
                    Chunk(
                        path=str(source.path),
                        kind=JSONL,
                        data=data,
                        start=0,
                        line=1,
                        first=True,
                        last=True,
                    ),
                ),
            )


def _limited(source: CorpusFile, advance: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, in blocks. Raise InputError if the file has more than
    MAX_LINE_BYTES bytes."""
    size_bytes = 0
    for block in read_blocks(replace(source, kind=TEXT), advance):
        size_bytes += len(block)
        if size_bytes > MAX_LINE_BYTES:
            raise InputError(
                f"{source.path}: a .json array of more than {MAX_LINE_BYTES} bytes; write its "
                "elements as lines of a .jsonl file"
            )
        yield block


def _as_lines(source: CorpusFile, data: bytes) -> bytes:
    """Return the elements of the JSON array in `data`, one per line. If `data` does not begin with
    a bracket, the file already consists of JSON lines, and `data` is returned unchanged."""
    if not data.lstrip().startswith(b"["):
        return data
    try:
        records = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source.path}: not JSON: {error}") from None
    return b"\n".join(json.dumps(record).encode() for record in records)
