"""`ptdmpi-data`: make token shards from text files, train tokenizers, inspect datasets."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.terminal.options import EMA, PATH, TOKENIZER, NamedPath
from ptdmpi.terminal.program import CommandGroup, run

if TYPE_CHECKING:
    from data_prep.corpus import Corpus, OutputOptions


def _joined(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that adds all `options` to a command, in order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        """Add the options, and return the command."""
        for option in reversed(options):
            command = option(command)
        return command

    return add


_TOKENIZER = partial(click.option, "--tokenizer", type=TOKENIZER)
_INPUTS = click.argument("inputs", nargs=-1, required=True, type=click.Path())
_SKIP = click.option(
    "--skip-bad-lines",
    is_flag=True,
    help="Leave out lines of .jsonl files that cannot be read, and count them.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


# the options for making shards: the fields of OutputOptions, and --json
_SHARDS = _joined(
    click.option("--output", required=True, type=PATH, help="Directory for the shards."),
    click.option("--valid-output", type=PATH, help="Directory for held-out shards."),
    click.option(
        "--valid-fraction",
        type=float,
        default=0.0,
        help="Fraction of documents to hold out, chosen by hash.",
    ),
    click.option(
        "--shard-tokens",
        type=click.IntRange(1, 1 << 48),
        default=1 << 28,
        show_default=True,
        help="A shard ends with the first document after this many tokens.",
    ),
    click.option("--force", is_flag=True, help="Remove existing shards in the output first."),
    _JSON,
)


# the options for reading texts, from files or as a stream
_TEXTS = _joined(
    click.option(
        "--text-field",
        default="text",
        show_default=True,
        help="Text field of .jsonl lines, or text column of .parquet.",
    ),
    click.option(
        "--suffix",
        "suffixes",
        multiple=True,
        help="Also read files with this suffix, such as .py, like .txt files.",
    ),
    click.option(
        "--errors",
        type=click.Choice(["strict", "replace"]),
        default="strict",
        show_default=True,
        help="What to do with bytes that are not UTF-8.",
    ),
    _SKIP,
    click.option(
        "--stream",
        is_flag=True,
        help="Read INPUT, a data set of the Hugging Face hub, without storing its files.",
    ),
    click.option("--subset", help="With --stream: the subset [default: the default subset]."),
    click.option("--split", help="With --stream: the split [default: train]."),
    click.option(
        "--documents",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --stream: read only the first N documents (on one rank).",
    ),
)


# the options for packing conversations into rows
_ROWS = _joined(
    _TOKENIZER(required=True, help="'bytes' or a Hugging Face tokenizer.json."),
    click.option(
        "--seq-length",
        required=True,
        type=int,
        help="Tokens per row: model.seq_length of the run.",
    ),
    click.option(
        "--template",
        type=PATH,
        help="Chat template, a Jinja file [default: the one in the tokenizer's folder].",
    ),
)


def _output_options(given: dict[str, Any]) -> OutputOptions:
    """Remove the fields of OutputOptions from `given`, and return an OutputOptions object with
    their values."""
    from data_prep.corpus import OutputOptions

    names = [field.name for field in dataclasses.fields(OutputOptions)]
    return OutputOptions(**{name: given.pop(name) for name in names})


def _make_shards(
    open_corpus: Callable[[OutputOptions], Corpus], as_json: bool, **given: Any
) -> None:
    """Make the shards of a corpus, and print the table of results. `given` has the values
    of the fields of OutputOptions, by name."""
    from data_prep.corpus import OutputOptions, make_shards
    from data_prep.launch import launcher_ranks

    output = OutputOptions(**given)
    ranks = launcher_ranks()
    table = make_shards(lambda: open_corpus(output), output, ranks)
    if ranks.rank == 0:
        _print_table(table, as_json)


class _Program(CommandGroup):
    """The group of all commands of `ptdmpi-data`. `in_parallel` contains the names of the commands
    that several ranks may run together."""

    in_parallel = frozenset({"tokenize", "import-megatron", "score"})


@click.group(cls=_Program)
def commands() -> None:
    """Prepare training data: convert text files to HDF5 token shards.

    INPUTs are .txt files (each is one document), .jsonl files (one document per line), .parquet
    files (one document per row), or directories with such files. Files of text and of JSON lines
    may be compressed (.gz, .bz2, .xz or .zst).

    The following line makes the Tab key complete commands and options in bash (for zsh or fish,
    write zsh_source or fish_source instead of bash_source):

    eval "$(_PTDMPI_DATA_COMPLETE=bash_source ptdmpi-data)"
    """


@commands.command()
@_INPUTS
@_TOKENIZER(
    required=True,
    help="'bytes', a Hugging Face tokenizer.json (gigatoken:FILE reads it with the faster library "
    "gigatoken), a SentencePiece .model, or tiktoken:NAME.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 4096),
    help="Number of processes [default: one per core; 1 under MPI].",
)
@click.option(
    "--deduplicate",
    type=click.Choice(["exact", "near"]),
    help="Keep only the first of several equal (or nearly equal: MinHash) documents.",
)
@_TEXTS
@_SHARDS
def tokenize(
    inputs: tuple[str, ...],
    *,
    suffixes: tuple[str, ...],
    workers: int | None,
    deduplicate: str | None,
    tokenizer: str,
    text_field: str,
    **given: Any,
) -> None:
    """Make token shards from text files. If the command was stopped, run it again to continue.

    With --stream, INPUT is a data set of the Hugging Face hub (org/name or org/name@REVISION), or a
    folder with its files, for example

    ptdmpi-data tokenize org/name --stream --documents 100000 --tokenizer tok.json --output data
    """
    from data_prep.encode import EncodeOptions
    from data_prep.stream import StreamOptions
    from data_prep.text_corpus import TextCorpus, TextOptions

    encode = EncodeOptions(
        tokenizer,
        text_field,
        errors=given.pop("errors"),
        valid_fraction=given["valid_fraction"],
        skip_bad_lines=given.pop("skip_bad_lines"),
    )
    options = TextOptions(
        inputs=inputs,
        encode=encode,
        suffixes=suffixes,
        workers=workers,
        deduplicate=deduplicate,
        stream=StreamOptions.taken_from(given),
    )
    _make_shards(lambda output: TextCorpus(options, output), **given)


@commands.command()
@_INPUTS
@_ROWS
@click.option(
    "--messages-field",
    default="messages",
    show_default=True,
    help="Field with a list of messages; tried first.",
)
@click.option(
    "--prompt-field",
    default="prompt",
    show_default=True,
    help="Field with a prompt; tried next.",
)
@click.option(
    "--answer-field", default="answer", show_default=True, help="Field with the prompt's answer."
)
@click.option(
    "--too-long",
    type=click.Choice(["truncate", "drop"]),
    default="truncate",
    show_default=True,
    help="What to do with conversations longer than a row.",
)
@_SKIP
@_SHARDS
def chat(
    inputs: tuple[str, ...],
    *,
    messages_field: str,
    prompt_field: str,
    answer_field: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Make shards of conversations. Only the assistant's turns are labels of the loss.

    INPUTs are .jsonl files, one conversation per line, or .json arrays. The format is detected for
    each line: OpenAI ({"messages": [...]}), ShareGPT ({"conversations": [...]}), alpaca
    ({"instruction", "input", "output"}), or a prompt with its answer. Several conversations are
    packed into a row. Train with data.document_boundaries = true, so that they do not attend to
    each other.
    """
    from data_prep.chat.forms import ChatFields
    from data_prep.chat.pack import ChatOptions, make_chat_shards

    output = _output_options(given)
    fields = ChatFields(messages_field, prompt_field, answer_field)
    _print_table(make_chat_shards(ChatOptions(inputs, fields=fields, **given), output), as_json)


@commands.command()
@_INPUTS
@_ROWS
@_SKIP
@_SHARDS
def pairs(inputs: tuple[str, ...], *, as_json: bool, **given: Any) -> None:
    """Make shards of preference pairs. They are for training with [preference].

    INPUTs are .jsonl files, one pair per line, or .json arrays. Each record has the fields "chosen"
    and "rejected": two complete conversations, or two answers to the record's "prompt" (or
    "question", "instruction", "conversations"). Both conversations of a pair are packed into the
    same row. After this command, run `ptdmpi-data score`, which stores the log-probabilities of the
    reference model.
    """
    from data_prep.chat.pack import ChatOptions, make_chat_shards

    output = _output_options(given)
    _print_table(make_chat_shards(ChatOptions(inputs, pairs=True, **given), output), as_json)


@commands.command()
@click.argument("model", type=PATH)
@click.argument("datasets", nargs=-1, required=True, type=PATH)
@click.option("--adapter", type=PATH, help="Run or checkpoint of adapters for MODEL.")
@click.option("--layout", metavar="t=2,p=2", help="Ranks of one model copy [default: the run's].")
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    help="Precision of the computation [default: the run's].",
)
@EMA
@click.option(
    "--top",
    type=click.IntRange(1, 1 << 16),
    metavar="K",
    help="Store the K most probable tokens for each label, to distill MODEL.",
)
@click.option(
    "--seq-length",
    type=click.IntRange(min=1),
    help="With --top: model.seq_length of the run [default: that of MODEL].",
)
@click.option(
    "--document-boundaries/--no-document-boundaries",
    "documents",
    default=None,
    help="With --top: data.document_boundaries of the run [default: that of MODEL].",
)
@_JSON
def score(
    model: Path, datasets: tuple[Path, ...], as_json: bool, top: int | None, **options: Any
) -> None:
    """Store the outputs of a reference model or a teacher.

    By default, MODEL is the reference model for preference pairs. The log-probabilities that it
    gives to the pairs in DATASETS are written to the folder `reference` of each dataset. MODEL is a
    run directory, a checkpoint, or a directory that `ptdmpi convert from-hf` has written. An
    example:

    mpirun -n 2 ptdmpi-data score base pairs/train pairs/valid --layout t=2

    With --top, MODEL is the teacher of a distillation, DATASETS are shards without pairs, and the
    folder is `teacher`.
    """
    from data_prep.launch import store_scores

    if top is None and (options["seq_length"], options["documents"]) != (None, None):
        raise InputError("--seq-length and --document-boundaries belong to --top K")

    tables = store_scores(model, datasets, top=top or 0, **options)
    for table in tables:
        _print_table(table, as_json)


@commands.command("import-megatron")
@click.argument("prefixes", nargs=-1, required=True, type=NamedPath())
@_TOKENIZER(help="Tokenizer of the tokens: 'bytes', or the tokenizer's file.")
@click.option("--vocab-size", type=int, help="Vocabulary size, if there is no tokenizer file.")
@click.option("--eod-id", type=int, help="Token id that ends a document.")
@_SHARDS
def import_megatron(
    prefixes: tuple[str, ...],
    tokenizer: str | None,
    vocab_size: int | None,
    eod_id: int | None,
    **given: Any,
) -> None:
    """Make token shards from Megatron's .bin and .idx files."""
    from data_prep.megatron_corpus import MegatronCorpus, given_vocabulary

    if (vocab_size is None) != (eod_id is None):
        raise InputError("--vocab-size and --eod-id belong together")
    vocabulary = None
    if vocab_size is not None:
        vocabulary = given_vocabulary(vocab_size, eod_id)
    _make_shards(
        lambda output: MegatronCorpus(prefixes, tokenizer, vocabulary, output.valid_fraction),
        **given,
    )


@commands.command("export-megatron")
@click.argument("directory", type=PATH)
@click.option("--output", required=True, type=PATH, help="PREFIX of the two files.")
@_JSON
def export_megatron(directory: Path, output: Path, as_json: bool) -> None:
    """Write shards as Megatron's PREFIX.bin and PREFIX.idx."""
    from data_prep.megatron import export

    _print_table(export(directory, output), as_json)


def _print_table(table: dict[str, Any], as_json: bool) -> None:
    """Print a table as JSON, or as lines with a name and a value."""
    if as_json:
        click.echo(json.dumps(table))
        return
    for name, value in table.items():
        click.echo(f"{name.replace('_', ' '):<18}{_cell(value):>18}")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


@commands.command("train-tokenizer")
@_INPUTS
@click.option("--output", required=True, type=PATH, help="The tokenizer.json to write.")
@click.option(
    "--vocab-size",
    required=True,
    type=int,
    help="Number of tokens, including the 256 bytes and the end-of-document token.",
)
@click.option(
    "--sample-bytes",
    type=click.IntRange(1),
    help="Train on about this many bytes of the text, chosen by hash [default: all].",
)
@_TEXTS
@_JSON
def train_tokenizer(
    inputs: tuple[str, ...], output: Path, vocab_size: int, as_json: bool, **given: Any
) -> None:
    """Train a byte-level BPE tokenizer. It has the special token <|endoftext|>."""
    from data_prep.encode import EncodeOptions
    from data_prep.state import require_writable, write_file
    from data_prep.stream import StreamOptions
    from data_prep.text_corpus import TextOptions, training_texts
    from data_prep.vocabulary import train_bpe

    sample_bytes = given.pop("sample_bytes")
    stream = StreamOptions.taken_from(given)
    suffixes = given.pop("suffixes")
    encode = EncodeOptions(tokenizer="", valid_fraction=0.0, **given)
    options = TextOptions(inputs, encode, suffixes, stream=stream)
    require_writable(output)  # check the output before the long training begins
    content, size = train_bpe(training_texts(options, sample_bytes), vocab_size)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{output.parent}: cannot be made: {error}") from error
    write_file(output, content.encode())
    if size < vocab_size:
        note(
            f"note: the text has too few different pairs for --vocab-size {vocab_size}: the "
            f"tokenizer has {size} entries; give more text, or a larger --sample-bytes"
        )
    if as_json:
        click.echo(json.dumps({"output": str(output), "vocab_size": size}))
    else:
        click.echo(f"{output}: {counted(size, 'entry')}")


@commands.command()
@click.argument("path", type=PATH)
@_JSON
def inspect(path: Path, as_json: bool) -> None:
    """Show the contents of a dataset, or of one shard."""
    from data_prep.examine import describe, format_description

    description = describe(path)
    if as_json:
        click.echo(json.dumps(description))
    else:
        click.echo(format_description(description))


@commands.command()
@click.argument("path", type=PATH)
@_JSON
def verify(path: Path, as_json: bool) -> None:
    """Check a dataset and its tokenizer, or one shard. The exit code is 2 if anything is wrong."""
    from data_prep.examine import examined, format_examined

    result = examined(path)
    click.echo(json.dumps(result) if as_json else format_examined(result))
    if result["problems"]:
        sys.exit(2)


def main() -> None:
    """Execute the command line. Exit codes: 0 done, 2 bad input, 130 Ctrl-C, 1 other errors."""
    again = "interrupted; run the same command again to continue"
    run(commands, "ptdmpi-data", interrupted=again)


if __name__ == "__main__":
    main()
