"""Reading of TOML files that may contain mistakes or may be damaged."""

import tomllib
from typing import Any


def tables_of(content: bytes) -> dict[str, Any]:
    """Return the content of a TOML file as nested dicts and lists. Raise ValueError, with the
    reason as its text, if the content is not TOML, if it is nested too deeply, or if a number has
    too many digits.
    """
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError("its lists or tables nest too deeply") from None
