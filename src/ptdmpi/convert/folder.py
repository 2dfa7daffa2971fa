"""What a conversion leaves: a directory that is there as a whole or not at all.

`from_hf` writes it laid out like a run directory, so that `train`, `evaluate` and `generate` take
it: config.toml with [model], and a checkpoint that holds weights alone. Beside them stands
`hugging_face/` with what we do not need and the way back does: every other file of the directory
(config.json, tokenizer), the headers of the weight files, and buffers of old ones. From these
`to_hf` writes the same files again, byte for byte where the weights are the same.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from ptdmpi.base.disk import sync
from ptdmpi.config import InputError

HEADERS = "headers.json"
BUFFERS = "buffers.safetensors"


@dataclass(frozen=True)
class Converted:
    """`difference`: of the logits of both sides, over their magnitude; `files`, `bytes`: of the
    weights; `note`: what else is to be known."""

    path: Path
    family: str
    parameters: int
    vocab_size: int
    files: int
    bytes: int
    difference: float
    note: str = ""


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `target` at the end, or is removed if that is not
    reached. Raises InputError if `target` exists (an empty directory may), or cannot be made."""
    try:
        if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
            raise InputError(f"{target} exists already: name another directory, or remove it")
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        where = target.absolute().parent
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=where))
    except OSError as error:
        raise InputError(f"{target}: {error.strerror}") from None
    try:
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)
        yield folder
        sync(folder)
        folder.rename(target)
        sync(target.absolute().parent)
    except (OSError, SafetensorError) as error:  # as which that library tells of a full disk
        shutil.rmtree(folder, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{target} was not written: {reason}") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
