"""Writing of conversations to shards. The conversations are packed into rows of equal length, and
each conversation is completely in one row."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.chat.conversations import Conversation, Conversations, Group, pieces
from data_prep.chat.forms import ChatFields, messages_of
from data_prep.chat.pairs import pair_of
from data_prep.chat.records import find_records, record_tasks
from data_prep.corpus import OutputOptions
from data_prep.encode import document_share
from data_prep.sources import CorpusFile, size_on_disk
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
from ptdmpi.base.progress import progress
from ptdmpi.config import InputError
from ptdmpi.data.chat_template import PLAIN, TEMPLATE, ChatTemplate, Message, find_template
from ptdmpi.data.shard_writer import ShardWriter

MOST_LENGTH = 1 << 28  # maximum tokens in a row, because a complete row must fit into memory
# Maximum number of unfinished rows in memory. A conversation is placed in the first unfinished row
# that has enough room.
OPEN_ROWS = 64
# names of the fields of CorpusCounters that the final table shows
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
    """The inputs and options of `ptdmpi-data chat` and `pairs`, except the options for the output.

    `too_long` says what happens to a conversation with more than `seq_length` tokens: "truncate"
    cuts off its end, and "drop" leaves it out. If `pairs` is True, the records are pairs of
    answers. For pairs, `fields` is not used, and a pair that is too long is always left out.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    seq_length: int
    template: Path | None = None
    fields: ChatFields = field(default_factory=ChatFields)
    too_long: str = "truncate"
    skip_bad_lines: bool = False
    pairs: bool = False

    def messages_of(self, record: Mapping[str, Any]) -> list[list[Message]]:
        """Return the messages of each conversation in a record. Raise BadConversation for a record
        of an unknown format."""
        if self.pairs:
            return pair_of(record)
        return [messages_of(record, self.fields)]


@dataclass
class _Row:
    """The conversations in a row. `size` is their total number of tokens."""

    conversations: list[Conversation] = field(default_factory=list)
    size: int = 0


class RowWriter:
    """A writer that packs conversations into rows (first fit), and writes the rows to shards in one
    directory.

    A row has `seq_length` tokens. A row consists of conversations and of padding. Each conversation
    is a document. The padding is another document, which consists of end-of-document tokens. Tokens
    of the padding are not labels. The conversations of one record form a group, and are next to
    each other in one row. Sample j of a shard is row j. The label of the last token of a row is the
    first token of the next row, so each shard ends with one extra token. The loss ignores the label
    of the last token of a row.
    """

    def __init__(
        self,
        output: Path,
        vocabulary: Vocabulary,
        seq_length: int,
        shard_tokens: int,
        *,
        pairs: bool = False,
    ) -> None:
        self._output = output
        self._pairs = pairs
        self._vocabulary = vocabulary
        self._length = seq_length
        self._shard_rows = max(1, shard_tokens // seq_length)
        self._rows: list[_Row] = []
        self._writer: ShardWriter | None = None
        self._shards = self._written = 0
        self.tokens = self.padding = 0

    def add(self, group: Group) -> None:
        """Add the conversations of one group. The conversations must have at most `seq_length`
        tokens in total. The errors of `ShardWriter` are raised."""
        size = _size(group)
        for row in self._rows:
            if row.size + size <= self._length:
                break
        else:
            row = _Row()
            self._rows.append(row)
            if len(self._rows) > OPEN_ROWS:
                self._write(self._rows.pop(0))
        row.conversations += group
        row.size += size

    def finish(self) -> None:
        """Write the rows that are not full yet, and complete the last shard."""
        while self._rows:
            self._write(self._rows.pop(0))
        self._close()

    def discard(self) -> None:
        """Remove the shard that is being written, if there is one."""
        if self._writer is not None:
            self._writer.discard()

    def _write(self, row: _Row) -> None:
        self._writer = self._writer or self._open()
        padding = self._length - row.size
        ids = [conversation.ids for conversation in row.conversations]
        ids.append(np.full(padding, self._vocabulary.eod_id, ids[0].dtype))
        weights = [conversation.weights for conversation in row.conversations]
        for own in weights:
            # the first token of a conversation is not a label, because it must not be predicted
            # from another conversation
            own[0] = False
        weights.append(np.zeros(padding, dtype=bool))
        sizes = [part.size for part in ids if part.size]
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
            pairs=self._pairs,
        )

    def _close(self) -> None:
        """If a shard is open, write the extra token and complete the shard."""
        if self._writer is not None:
            extra = np.array([self._vocabulary.eod_id])
            self._writer.write_row(extra, np.array([1]), np.array([False]))
            self.padding += 1
            self._writer.close()
            self.tokens += self._writer.tokens
            self._writer = None
            self._written = 0
            self._shards += 1


@dataclass(frozen=True)
class _ChatCorpus:
    """The opened inputs of `ptdmpi-data chat`."""

    options: ChatOptions
    tokenizer: MarkedTokenizer
    template: ChatTemplate
    sources: list[CorpusFile]

    def identity(self) -> dict[str, Any]:
        """Return those options, and those properties of the input files, that determine the
        tokens."""
        files = ((file.name, file.size_bytes, file.modified_ns) for file in self.sources)
        pairs = {}
        if self.options.pairs:
            pairs["pairs"] = True
        return {
            "tokenizer": self.tokenizer.name,
            "tokenizer_sha256": self.tokenizer.sha256,
            "chat_template": self.template.source,
            "special": dict(self.template.special),
            "seq_length": self.options.seq_length,
            "too_long": self.options.too_long,
            "fields": asdict(self.options.fields),
            "skip_bad_lines": self.options.skip_bad_lines,
            **pairs,
            **files_identity(files),
        }


def make_chat_shards(options: ChatOptions, output: OutputOptions) -> dict[str, Any]:
    """Make shards of conversations, and return the final table.

    The same files and options always give shards with the same bytes. If the command is stopped,
    its next start makes all shards from the beginning. Raise InputError for bad options, files or
    lines. After such an error, no output remains.
    """
    started = time.perf_counter()
    output.check()
    if not 2 <= options.seq_length <= MOST_LENGTH:
        raise InputError(f"--seq-length {options.seq_length}; legal: 2 to {MOST_LENGTH}")
    tokenizer = _tokenizer(options.tokenizer)
    file = tokenizer_file(options.tokenizer)
    eod = tokenizer.decode(np.array([tokenizer.eod_id]))
    if eod not in tokenizer.special:
        eod = ""
    template = find_template(file, options.template, eod)
    if template.source == PLAIN and not eod:
        raise InputError(
            f"--tokenizer {options.tokenizer} has neither a chat template nor an end of document "
            f"({', '.join(END_OF_DOCUMENT)}), so nothing would end an answer; give --template FILE"
        )
    sources = find_records(options.inputs)
    corpus = _ChatCorpus(options, tokenizer, template, sources)
    state = RunState(output.outputs, {**corpus.identity(), **output.identity()})
    done = state.begin(output.force)
    if done is None:
        try:
            state.save(0, _write(corpus, output))
            # store the template next to the shards, because a conversation with a model that was
            # trained on these shards needs the same template
            for directory in output.outputs:
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
    if options.pairs:
        table = {"pairs": table.pop("documents") // 2, **table}
    return {**table, "template": template.said_of, "seconds": time.perf_counter() - started}


def _tokenizer(name: str) -> MarkedTokenizer:
    """Load a tokenizer that can encode the names of special tokens as special tokens. Raise
    InputError for any other tokenizer."""
    if name.startswith((GIGATOKEN, TIKTOKEN)) or name.endswith(".model"):
        raise InputError(
            f"--tokenizer {name}: a chat template writes special tokens, which need 'bytes' or a "
            "Hugging Face tokenizer.json"
        )
    tokenizer: Any = load_tokenizer(name)
    return tokenizer


def _size(group: Group) -> int:
    """Return the total number of tokens of the conversations in a group."""
    return sum(conversation.ids.size for conversation in group)


def _kept(group: Group, options: ChatOptions) -> Group | None:
    """Return the conversations of a group, each cut to the length of a row. Return None if the
    group must be left out: if the group is longer than a row and must not be cut, or if one of its
    conversations would have no label."""
    length = options.seq_length
    if _size(group) > length and (options.pairs or options.too_long == "drop"):
        return None
    kept = [
        conversation._replace(
            ids=conversation.ids[:length],
            weights=conversation.weights[:length].copy(),
            answers=conversation.answers[conversation.answers < length],
        )
        for conversation in group
    ]
    if not all(part.weights[1:].any() for part in kept):
        return None
    return kept


def _counts(group: Group, kept: Group | None, length: int) -> CorpusCounters:
    """Return the numbers that the conversations `group` of one input record add to the counters of
    the corpus. `kept` is the result of `_kept`: the cut conversations, or None if the group is left
    out. `length` is the number of tokens in a row."""
    cut = _size(group) > length
    text_bytes = sum(len(conversation.text.encode()) for conversation in group)
    if kept is None:
        return CorpusCounters(
            text_bytes=text_bytes, too_long=int(cut), empty_documents=int(not cut)
        )
    return CorpusCounters(
        documents=len(kept),
        text_bytes=text_bytes,
        truncated=int(cut),
        answers=sum(part.answers.size for part in kept),
        answer_tokens=sum(int(part.weights[1:].sum()) for part in kept),
    )


def _write(corpus: _ChatCorpus, output: OutputOptions) -> GroupProgress:
    """Read all conversations, pack them into rows, and write the shards. Raise InputError for a bad
    line or a full disk. After such an error, no incomplete shard remains."""
    options = corpus.options
    read = Conversations(
        corpus.tokenizer, corpus.template, options.messages_of, options.skip_bad_lines
    )
    counts = CorpusCounters()
    writers = [
        RowWriter(
            directory,
            corpus.tokenizer,
            options.seq_length,
            output.shard_tokens,
            pairs=options.pairs,
        )
        for directory in output.outputs
    ]
    try:
        with progress("packing", sum(map(size_on_disk, corpus.sources)), "B") as advance:
            for group in pieces(record_tasks(corpus.sources, advance), read):
                kept = _kept(group, options)
                counts += _counts(group, kept, options.seq_length)
                if kept is not None:
                    share = document_share(group[0].text.encode())
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
