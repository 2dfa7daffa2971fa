"""`ptdmpi-data`: text files to token shards, tokenizers, and what is in a dataset."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ptdmpi.config import InputError

_INPUTS = click.argument("inputs", nargs=-1, required=True, type=click.Path())
_TEXT_FIELD = click.option(
    "--text-field", default="text", show_default=True, help="Field of .jsonl lines."
)
_SUFFIX = click.option(
    "--suffix", "suffixes", multiple=True, help="Read files that end so (.py) as .txt."
)
_ERRORS = click.option(
    "--errors",
    type=click.Choice(["strict", "replace"]),
    default="strict",
    show_default=True,
    help="What to do with bytes that are not UTF-8.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """Prepare training data: files of text become HDF5 token shards.

    INPUTs are .txt files (one document each), .jsonl files (one document a line), either with .gz
    or .zst, or directories of them.
    """


@commands.command()
@_INPUTS
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="Directory for the shards."
)
@click.option("--tokenizer", required=True, help="'bytes', or a Hugging Face tokenizer.json.")
@click.option(
    "--valid-output", type=click.Path(path_type=Path), help="Directory for held-out shards."
)
@click.option(
    "--valid-fraction", type=float, default=0.0, help="Share of documents to hold out, by hash."
)
@click.option(
    "--shard-tokens",
    type=click.IntRange(1),
    default=1 << 28,
    show_default=True,
    help="A shard ends at the first document end from here.",
)
@click.option(
    "--workers", type=click.IntRange(1), help="Processes [default: one per core; 1 under MPI]."
)
@click.option(
    "--force", is_flag=True, help="Remove what an earlier run made there, and begin anew."
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
@_TEXT_FIELD
@_SUFFIX
@_ERRORS
@_JSON
def tokenize(as_json: bool, **given: Any) -> None:
    """Make token shards of text files. The same command again goes on where it was stopped."""
    from data_prep.corpus import TokenizeOptions, tokenize
    from data_prep.encode import EncodeOptions
    from data_prep.launch import launcher_ranks

    names = ("tokenizer", "text_field", "errors", "valid_fraction")
    encode = EncodeOptions(**{name: given.pop(name) for name in names})
    ranks = launcher_ranks()
    try:
        table = tokenize(TokenizeOptions(encode=encode, **given), ranks)
    except InputError:
        if ranks.rank:
            sys.exit(2)  # rank 0 says it for all
        raise
    if ranks.rank == 0:
        click.echo(json.dumps(table) if as_json else _format_table(table))


def _format_table(table: dict[str, Any]) -> str:
    return "\n".join(
        f"{name.replace('_', ' '):<18}{value:>18,.2f}"
        if isinstance(value, float)
        else f"{name.replace('_', ' '):<18}{value:>18,}"
        for name, value in table.items()
    )


@commands.command("train-tokenizer")
@_INPUTS
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="The tokenizer.json to make."
)
@click.option(
    "--vocab-size", required=True, type=int, help="Entries, of which 257 are bytes and the end."
)
@click.option(
    "--sample-bytes",
    type=click.IntRange(1),
    help="Learn from about so much of the text, chosen by hash [default: all].",
)
@_TEXT_FIELD
@_SUFFIX
@_ERRORS
@_JSON
def train_tokenizer(
    inputs: tuple[str, ...], output: Path, vocab_size: int, as_json: bool, **given: Any
) -> None:
    """Train a byte-level BPE tokenizer with the special token <|endoftext|>."""
    from data_prep.state import write_file
    from data_prep.vocabulary import train_bpe

    content, size = train_bpe(_training_texts(inputs, **given), vocab_size)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{output.parent}: cannot be made: {error}") from error
    write_file(output, content.encode())
    table = {"output": str(output), "vocab_size": size}
    click.echo(json.dumps(table) if as_json else f"{output}: {size} entries")


def _training_texts(
    inputs: tuple[str, ...],
    suffixes: tuple[str, ...],
    sample_bytes: int | None,
    text_field: str,
    errors: str,
) -> Iterator[str]:
    from data_prep.encode import EncodeOptions, read_pieces
    from data_prep.sources import document_share, find_sources, read_tasks

    sources = find_sources(inputs, suffixes)
    share = (
        1.0 if sample_bytes is None else sample_bytes / max(1, sum(s.size_bytes for s in sources))
    )
    options = EncodeOptions("", text_field, errors, 0.0)
    nothing = True
    for task in read_tasks(0, sources, lambda size: None):
        for piece in read_pieces(task, options):
            if piece.text and document_share(piece.text.encode()) < share:
                nothing = False
                yield piece.text
    if nothing:
        raise InputError(
            "no text to learn from: all documents are empty, or --sample-bytes is too small"
        )


@commands.command()
@click.argument("path", type=click.Path(path_type=Path))
@_JSON
def inspect(path: Path, as_json: bool) -> None:
    """Show what a directory of shards, or one shard, holds."""
    from data_prep.examine import describe, format_description

    description = describe(path)
    click.echo(json.dumps(description) if as_json else format_description(description))


@commands.command()
@click.argument("path", type=click.Path(path_type=Path))
@_JSON
def verify(path: Path, as_json: bool) -> None:
    """Read all of a dataset, or of one shard, and check it. Exit code 2 if anything is wrong."""
    from data_prep.examine import problems, shard_paths

    found = problems(path)
    if as_json:
        click.echo(
            json.dumps({"path": str(path), "shards": len(shard_paths(path)), "problems": found})
        )
    else:
        click.echo("\n".join(found) or f"{path}: {len(shard_paths(path))} shard(s), all sound")
    if found:
        sys.exit(2)


def main() -> None:
    """Entry point. Exit codes: 0 done, 2 bad input, 130 interrupted."""
    try:
        commands.main(standalone_mode=False)
    except InputError as error:
        click.echo(f"ptdmpi-data: error: {error}", err=True)
        sys.exit(2)
    except click.UsageError as error:
        click.echo(f"ptdmpi-data: error: {error.format_message()}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("ptdmpi-data: interrupted; the same command again goes on", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
