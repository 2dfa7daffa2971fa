"""Documents out of Parquet files: a row of the text column each. Needs pyarrow, an extra."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from data_prep.other_tokenizers import MISSING
from ptdmpi.config import InputError

_BATCH_ROWS = 256  # decoded at a time
_TEXT_TYPES = ("string", "large_string", "string_view")  # the last one: pyarrow 16 on


def _pyarrow(path: Path) -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path}: a Parquet file needs pyarrow: {MISSING}") from error
    return pyarrow, pyarrow.parquet


def read_rows(
    path: Path, text_field: str, start: int, stop: int | None
) -> Iterator[tuple[int, bytes]]:
    """Row numbers (from 0) and texts of the row groups that begin in bytes [start, stop).

    The texts are what the file has, perhaps no UTF-8. Raises InputError for a file that cannot be
    read, for one without a text column of that name, and for a row without text.
    """
    pyarrow, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(pyarrow, file, path, text_field)
            row = 0
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                first = group.column(0)
                begin = min(
                    at
                    for at in (first.dictionary_page_offset, first.data_page_offset)
                    if at is not None
                )
                if start <= begin and (stop is None or begin < stop):
                    yield from _rows_of_group(pyarrow, file, number, row, (path, text_field))
                row += group.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise InputError(f"{path}: cannot be read: {reason}") from error


def _check_column(pyarrow: ModuleType, file: Any, path: Path, text_field: str) -> None:
    schema = file.schema_arrow
    count = schema.names.count(text_field)
    if count != 1:
        found = f"{count} columns" if count else "no column"
        raise InputError(f"{path}: has {found} {text_field!r}, but {', '.join(schema.names)}")
    kind = schema.field(text_field).type
    if pyarrow.types.is_dictionary(kind):  # as categories are written
        kind = kind.value_type
    if str(kind) not in _TEXT_TYPES:
        raise InputError(f"{path}: the column {text_field!r} has type {kind}, not text")


def _rows_of_group(
    pyarrow: ModuleType,
    file: Any,
    number: int,
    row: int,
    place: tuple[Path, str],
) -> Iterator[tuple[int, bytes]]:
    path, text_field = place
    batches = file.iter_batches(_BATCH_ROWS, row_groups=[number], columns=[text_field])
    for batch in batches:
        for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
            if text is None:
                raise InputError(f"{path}: row {row}: no text in the column {text_field!r}")
            yield row, text
            row += 1
