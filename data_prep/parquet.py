"""Reading of documents from Parquet files, which have one document in each row of a text column.
This module needs the optional package pyarrow."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from data_prep.other_tokenizers import MISSING
from ptdmpi.config import InputError

_BATCH_ROWS = 256  # number of rows that are decoded at a time
_TEXT_TYPES = ("string", "large_string", "string_view")  # "string_view" exists since pyarrow 16.


def _pyarrow(path: Path) -> tuple[ModuleType, ModuleType]:
    """Import pyarrow and pyarrow.parquet. Raise InputError if pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path}: a Parquet file needs pyarrow: {MISSING}") from error
    return pyarrow, pyarrow.parquet


def read_rows(
    path: Path, text_field: str, start: int, stop: int | None
) -> Iterator[tuple[int, bytes]]:
    """Yield a pair (row number, text) for each row in the row groups that begin in the bytes
    [start, stop) of the file. Rows are counted from 0.

    A text is yielded as the bytes in the file, which may not be valid UTF-8. Raise InputError for a
    file that cannot be read, for a file without a text column `text_field`, and for a row without
    text.
    """
    pyarrow, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(pyarrow, file, path, text_field)
            row = 0
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                first = group.column(0)
                offsets = (first.dictionary_page_offset, first.data_page_offset)
                begin = min(offset for offset in offsets if offset is not None)
                if start <= begin and (stop is None or begin < stop):
                    texts = _texts_of_group(file, number, text_field, pyarrow.large_binary())
                    for at, text in enumerate(texts, row):
                        if text is None:
                            raise InputError(
                                f"{path}: row {at}: no text in the column {text_field!r}"
                            )
                        yield at, text
                row += group.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise InputError(f"{path}: cannot be read: {reason}") from error


def _check_column(pyarrow: ModuleType, file: Any, path: Path, text_field: str) -> None:
    """Raise InputError if the file does not have exactly one text column of this name."""
    schema = file.schema_arrow
    count = schema.names.count(text_field)
    if count != 1:
        columns = f"{count} columns" if count else "no column"
        raise InputError(f"{path}: has {columns} {text_field!r}, but {', '.join(schema.names)}")
    kind = schema.field(text_field).type
    if pyarrow.types.is_dictionary(kind):  # a dictionary-encoded column
        kind = kind.value_type
    if str(kind) not in _TEXT_TYPES:
        raise InputError(f"{path}: the column {text_field!r} has type {kind}, not text")


def _texts_of_group(file: Any, group: int, text_field: str, binary: Any) -> Iterator[bytes | None]:
    """Yield the texts in a row group, cast to the type `binary` of pyarrow. A missing text is
    yielded as None."""
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[text_field]):
        yield from batch.column(0).cast(binary).to_pylist()
