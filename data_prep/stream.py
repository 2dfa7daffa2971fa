"""Reading of data sets from the Hugging Face hub as a stream, without storing their files.

This module needs the optional package datasets. Each file of a data set is a group of the corpus,
so the files can be divided among ranks, and an interrupted command can continue.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from data_prep.other_tokenizers import MISSING
from data_prep.sources import Task, row_chunks, tasks_of
from data_prep.state import files_identity
from ptdmpi.base.disk import regular_files
from ptdmpi.base.hub import first_line, is_hub_name, newest_revision
from ptdmpi.config import InputError


@dataclass(frozen=True)
class StreamOptions:
    """The part of a data set that is read. `subset` is the name of a subset (`datasets` calls it a
    configuration), or None for the default subset. If `documents` is not None, only this number of
    documents is read, from the beginning."""

    subset: str | None = None
    split: str = "train"
    documents: int | None = None

    @staticmethod
    def taken_from(given: dict[str, Any]) -> "StreamOptions | None":
        """Remove the options about streams from `given`, the options of a command. Return a
        `StreamOptions` object with their values, or None without --stream. Raise InputError if one
        of these options is given without --stream."""
        names = [field.name for field in fields(StreamOptions)]
        values = {name: value for name in names if (value := given.pop(name)) is not None}
        if given.pop("stream"):
            return StreamOptions(**values)
        if values:
            raise InputError(f"--{next(iter(values))} belongs to --stream")
        return None


class StreamedTexts:
    """The texts of a data set of the Hugging Face hub, or of a folder with the files of such a data
    set."""

    def __init__(self, given: str, text_field: str, options: StreamOptions):
        """Open the data set `given`: "org/name", "org/name@revision" or a folder. Without a
        revision, the newest revision is read. Raise InputError if the data set, its subset or its
        split cannot be read."""
        self._options = options
        self._field = text_field
        self._name, _, revision = given.partition("@")
        self._version: dict[str, Any] = {}
        library = _library(given)
        pinned = None  # a folder has no revision
        if Path(given).is_dir():
            self._name = given
            self._version = _files(Path(given))
        elif is_hub_name(self._name):
            pinned = revision or newest_revision(self._name)
            self._version = {"revision": pinned}
        else:
            raise InputError(
                f"{given}: is neither a directory nor the name of a data set on the Hugging Face "
                "hub, such as org/name"
            )
        try:
            self._rows = library.load_dataset(
                self._name,
                options.subset,
                split=options.split,
                streaming=True,
                revision=pinned,
            )
            self._files = 1
            if options.documents is None:
                self._files = self._rows.num_shards
        # catch every exception, because `datasets` raises exceptions of many classes
        except Exception as error:
            raise InputError(f"{self}: {first_line(error)}") from None
        self.group_bytes = [0] * self._files  # the sizes of the files are not known

    def __str__(self) -> str:
        subset = "" if self._options.subset is None else f"{self._options.subset}, "
        return f"{self._name} ({subset}{self._options.split})"

    def identity(self) -> dict[str, Any]:
        """Return the name and the version of the data set, and the options that determine the
        texts."""
        return {
            "stream": self._name,
            "subset": self._options.subset,
            "split": self._options.split,
            "documents": self._options.documents,
            **self._version,
        }

    def tasks(self, group: int, advance: Callable[[int], object]) -> Iterator[Task]:
        """Yield the tasks of one group. Usually, a group is one file of the data set. If
        `documents` is set, the only group has the first documents of the data set. `advance` is
        called with the number of bytes of each text. Raise InputError if the stream breaks off, or
        if a row has no text."""
        where = str(self)
        rows = self._rows
        if self._options.documents is not None:
            rows = rows.take(self._options.documents)
        elif self._files > 1:
            where = f"{self}, file {group}"
            rows = rows.shard(num_shards=self._files, index=group)
        return tasks_of(group, row_chunks(where, self._texts(rows, where, advance)))

    def _texts(
        self, rows: Any, where: str, advance: Callable[[int], object]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield a pair (number of the row, text in UTF-8) for each of the `rows`. If a text
        contains a lone surrogate, its bytes are not valid UTF-8; the option --errors decides what
        happens to such bytes. `where` names the rows in error messages."""
        numbered = enumerate(rows)
        while True:
            try:
                number, row = next(numbered)
            except StopIteration:
                return
            # catch every exception, because the libraries that download raise exceptions of many
            # classes
            except Exception as error:
                raise InputError(
                    f"{where}: cannot be read to its end: {first_line(error)}; run the same "
                    "command again to continue"
                ) from None
            text = row.get(self._field)
            if self._field not in row:
                columns = ", ".join(map(str, row))
                raise InputError(f"{where}: has no column {self._field!r}, but {columns}")
            if not isinstance(text, str):
                raise InputError(f"{where}: row {number}: no text in the column {self._field!r}")
            encoded = text.encode(errors="surrogatepass")
            advance(len(encoded))
            yield number, encoded


def _files(folder: Path) -> dict[str, Any]:
    """Return the number of files in a folder, and a hash of their names, sizes and modification
    times. Raise the errors of `regular_files`."""
    paths = regular_files(folder)
    states = ((str(path.relative_to(folder)), path.stat()) for path in paths)
    return files_identity((name, state.st_size, state.st_mtime_ns) for name, state in states)


def _library(given: str) -> ModuleType:
    """Import the package `datasets`, and disable its progress bars. Raise InputError if the package
    is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"{given}: --stream needs the package datasets: {MISSING}") from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets
