"""Conversations to shards: packed in rows of one length, none of them cut by the end of a row."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.chat.conversations import ChatFields, Conversation, Conversations, pieces
from data_prep.corpus import OutputOptions
from data_prep.sources import (
    JSONL,
    CorpusFile,
    Task,
    document_share,
    find_sources,
    read_tasks,
    size_on_disk,
)
from data_prep.state import CorpusCounters, GroupProgress, RunState, files_identity, write_file
from data_prep.vocabulary import (
    END_OF_DOCUMENT,
    GIGATOKEN,
    TIKTOKEN,
    MarkedTokenizer,
    Vocabulary,
    load_tokenizer,
    tokenizer_file,
)
from ptdmpi.config import InputError
from ptdmpi.data.chat_template import PLAIN, TEMPLATE, ChatTemplate, find_template
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.terminal.progress import progress

OPEN_ROWS = 64  # a conversation goes into the first of so many that has room for it
COUNTED = (
    "documents",
    "answers",
    "truncated",
    "too_long",
    "empty_documents",
    "bad_lines",
    "text_bytes",
    "train_tokens",
    "valid_tokens",
    "answer_tokens",
    "padding_tokens",
)


@dataclass(frozen=True)
class ChatOptions:
    """What is read by `ptdmpi-data chat`, and how. `too_long`: a conversation of more than
    `seq_length` tokens loses its end ("truncate"), or is left out ("drop")."""

    inputs: tuple[str, ...]
    tokenizer: str
    seq_length: int
    template: Path | None = None
    fields: ChatFields = field(default_factory=ChatFields)
    too_long: str = "truncate"
    skip_bad_lines: bool = False


@dataclass
class _Row:
    """Conversations that stand together; `size`: their tokens."""

    held: list[Conversation] = field(default_factory=list)
    size: int = 0


class RowWriter:
    """Packs conversations into rows, first fit, and writes them to the shards of one directory.

    A row is `seq_length` tokens: conversations, each a document, and ends of document as one more,
    which do not count. Sample j of a shard is row j, with the first token of the next one as its
    last label, which never counts; so one token more ends each shard.
    """

    def __init__(
        self, output: Path, vocabulary: Vocabulary, seq_length: int, shard_tokens: int
    ) -> None:
        self._output, self._vocabulary, self._length = output, vocabulary, seq_length
        self._shard_rows = max(1, shard_tokens // seq_length)
        self._rows: list[_Row] = []
        self._writer: ShardWriter | None = None
        self._shards = self._written = 0
        self.tokens = self.padding = 0

    def add(self, one: Conversation) -> None:
        """One of at most `seq_length` tokens."""
        for row in self._rows:
            if row.size + one.ids.size <= self._length:
                break
        else:
            row = _Row()
            self._rows.append(row)
            if len(self._rows) > OPEN_ROWS:
                self._write(self._rows.pop(0))
        row.held.append(one)
        row.size += one.ids.size

    def finish(self) -> None:
        """Write all that is left."""
        while self._rows:
            self._write(self._rows.pop(0))
        self._close()

    def discard(self) -> None:
        """Leave no half-written shard."""
        if self._writer is not None:
            self._writer.discard()

    def _write(self, row: _Row) -> None:
        self._writer = self._writer or self._open()
        padding = self._length - row.size
        end = self._vocabulary.eod_id
        ids = [*(one.ids for one in row.held), np.full(padding, end, row.held[0].ids.dtype)]
        weights = [*(one.weights for one in row.held), np.zeros(padding, dtype=bool)]
        for one in weights[: len(row.held)]:
            one[0] = False  # nothing stands before it in its conversation
        sizes = [one.size for one in ids if one.size]
        self._writer.write_row(np.concatenate(ids), np.cumsum(sizes), np.concatenate(weights))
        self.padding += padding
        self._written += 1
        if self._written == self._shard_rows:
            self._close()

    def _open(self) -> ShardWriter:
        return ShardWriter(
            self._output / f"shard-00000-{self._shards:05d}.h5",
            self._vocabulary.name,
            self._vocabulary.sha256,
            vocab_size=self._vocabulary.vocab_size,
            eod_id=self._vocabulary.eod_id,
            row_length=self._length,
        )

    def _close(self) -> None:
        if self._writer is not None:
            one = np.ones(1, dtype=np.int64)
            self._writer.write_row(one * self._vocabulary.eod_id, one, np.zeros(1, dtype=bool))
            self.padding += 1
            self._writer.close()
            self.tokens += self._writer.tokens
            self._writer, self._written, self._shards = None, 0, self._shards + 1


def make_chat_shards(options: ChatOptions, output: OutputOptions) -> dict[str, Any]:
    """Make shards of conversations; the final table. The same files and options give the same
    bytes; stopped, it begins anew. Raises InputError for what is bad, and then leaves nothing."""
    started = time.perf_counter()
    output.check()
    if options.seq_length < 2:
        raise InputError(f"--seq-length {options.seq_length}: at least 2")
    tokenizer = _tokenizer(options.tokenizer)
    file = tokenizer_file(options.tokenizer)
    eod = tokenizer.decode(np.array([tokenizer.eod_id]))
    eod = eod if eod in tokenizer.special else ""
    template = find_template(file, options.template, eod)
    if template.source == PLAIN and not eod:
        raise InputError(
            f"--tokenizer {options.tokenizer} has neither a chat template nor an end of document "
            f"({', '.join(END_OF_DOCUMENT)}), so nothing would end an answer; give --template FILE"
        )
    sources = find_sources(options.inputs)
    other = [source.path for source in sources if source.kind != JSONL]
    if other:
        raise InputError(f"{other[0]}: conversations are lines of .jsonl files")
    state = RunState(output.outputs, _identity(options, output, tokenizer, template, sources))
    done = state.begin(output.force)
    if done is None:
        try:
            state.save(0, _written(options, output, tokenizer, template, sources))
            for directory in output.outputs:  # for whoever asks what was trained on them
                write_file(directory / TEMPLATE, template.source.encode())
            done = state.finish(1, file)
        except BaseException:
            for directory in output.outputs:
                for path in (*directory.glob("shard-00000-*.h5"), directory / TEMPLATE):
                    with suppress(OSError):
                        path.unlink()
            state.clean()
            raise
    sums = asdict(done)
    table = {name: sums[name] for name in COUNTED}
    return {**table, "template": template.said_of, "seconds": time.perf_counter() - started}


def _tokenizer(name: str) -> MarkedTokenizer:
    if name.startswith((GIGATOKEN, TIKTOKEN)) or name.endswith(".model"):
        raise InputError(
            f"--tokenizer {name}: a chat template writes special tokens, which only 'bytes' and a "
            "Hugging Face tokenizer.json are read with here"
        )
    tokenizer: Any = load_tokenizer(name)
    return tokenizer


def _identity(
    options: ChatOptions,
    output: OutputOptions,
    tokenizer: Vocabulary,
    template: ChatTemplate,
    sources: list[CorpusFile],
) -> dict[str, Any]:
    """What the bytes of the shards depend on."""
    files = ((one.name, one.size_bytes, one.modified_ns) for one in sources)
    return {
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "chat_template": template.source,
        "special": dict(template.special),
        "seq_length": options.seq_length,
        "too_long": options.too_long,
        "fields": asdict(options.fields),
        "skip_bad_lines": options.skip_bad_lines,
        **output.identity(),
        **files_identity(files),
    }


def _tasks(sources: list[CorpusFile], advance: Any) -> Iterator[Task]:
    for source in sources:
        yield from read_tasks(0, [source], advance, "")


def _written(
    options: ChatOptions,
    output: OutputOptions,
    tokenizer: MarkedTokenizer,
    template: ChatTemplate,
    sources: list[CorpusFile],
) -> GroupProgress:
    """Read, pack and write everything."""
    read = Conversations(tokenizer, template, options.fields, options.skip_bad_lines)
    length, counts = options.seq_length, CorpusCounters()
    writers = [
        RowWriter(directory, tokenizer, length, output.shard_tokens) for directory in output.outputs
    ]
    try:
        with progress("packing", sum(map(size_on_disk, sources)), "B") as advance:
            for one in pieces(_tasks(sources, advance), read):
                cut = one.ids.size > length
                kept = one._replace(ids=one.ids[:length], weights=one.weights[:length].copy())
                nothing = not kept.weights[1:].any()  # of an answer that could count
                left_out = nothing or (cut and options.too_long == "drop")
                counts += CorpusCounters(
                    documents=not left_out,
                    empty_documents=left_out and not cut,
                    answers=0 if left_out else int((one.answers < length).sum()),
                    text_bytes=len(one.text.encode()),
                    truncated=cut and not left_out,
                    too_long=left_out and cut,
                    answer_tokens=0 if left_out else int(kept.weights[1:].sum()),
                )
                if not left_out:
                    share = document_share(one.text.encode())
                    writers[share < output.valid_fraction].add(kept)
        for writer in writers:
            writer.finish()
    except BaseException:
        for writer in writers:
            writer.discard()
        raise
    tokens = [writer.tokens for writer in writers] + [0]
    counts += CorpusCounters(
        train_tokens=tokens[0],
        valid_tokens=tokens[1],
        bad_lines=read.bad_lines,
        padding_tokens=sum(writer.padding for writer in writers),
    )
    return GroupProgress(counters=counts, complete=True)
