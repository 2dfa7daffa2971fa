"""Reading the lines of a file that contains prompts for a model, or items of a task."""

from pathlib import Path

from ptdmpi.base.disk import read_file
from ptdmpi.config import InputError


def numbered_lines(path: Path, what: str) -> list[tuple[str, str]]:
    """Return ("FILE:number", line) for each line of a UTF-8 file that is not blank.

    `what` names the content of a line in error messages. Raise InputError if the file cannot be
    read, is not UTF-8, or has only blank lines.
    """
    try:
        # only \n ends a line: other separators (U+2028) may be part of a text
        lines = read_file(path).decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    numbered = [(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InputError(f"{path} holds no {what}")
    return numbered
