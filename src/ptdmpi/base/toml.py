"""Reading of TOML that anyone may have written, or a disk may have damaged."""

import tomllib
from typing import Any


def tables_of(content: bytes) -> dict[str, Any]:
    """Return the content of a TOML file as nested dicts and lists. Raise ValueError, whose text is
    the reason, if the content is not TOML, nests too deeply, or has a number of too many digits.
    """
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError("its lists or tables nest too deeply") from None
