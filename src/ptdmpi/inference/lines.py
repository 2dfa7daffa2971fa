"""Lines of a file that somebody wrote to ask a model: prompts, or items of a task."""

from pathlib import Path

from ptdmpi.config import InputError


def numbered_lines(path: Path, what: str) -> list[tuple[str, str]]:
    """("FILE:number", line) of each line that is not blank, in UTF-8; `what` a line holds.

    Raises InputError for a file that cannot be read, is not UTF-8, or has no such line.
    """
    try:
        # only \n ends a line: others (U+2028) may stand in texts as they are
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    found = [(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{path} holds no {what}")
    return found
