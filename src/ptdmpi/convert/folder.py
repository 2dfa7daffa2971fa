"""The directory that a conversion writes. If the conversion fails, the directory is removed.

`from_hf` writes a directory with the layout of a run directory, so that `train`, `evaluate` and
`generate` can use it. The directory has a config.toml with [model], and a checkpoint with weights
only. The folder `hugging_face/` in the directory contains the files that only the conversion back
needs. These files are the headers of the weight files, the tensors that are not parameters
(buffers), and all other files of the model's directory (such as config.json and the tokenizer).
From these files and the checkpoint, `to_hf` writes the original files again. If the weights are
unchanged, the files that `to_hf` writes are byte for byte equal to the original files.
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
HUB_NAME = "hub_name.txt"  # the name of the model on the hub, if the model was downloaded


@dataclass(frozen=True)
class Converted:
    """The result of a conversion, for the user.

    `difference` is the greatest difference between the logits of both models, relative to the
    greatest magnitude of a logit. `files` and `bytes` are the number and the total size of the
    weight files. `note` is a remark for the user.
    """

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
    """Yield a directory to write into. At the end of the `with` block the directory is renamed to
    `target`. If the block raises an exception, the directory is removed. Raise InputError if
    `target` exists (unless it is an empty directory), or cannot be written."""
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
    # if the disk is full, safetensors raises SafetensorError instead of OSError
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{target} was not written: {reason}") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
