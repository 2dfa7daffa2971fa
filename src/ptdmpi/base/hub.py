"""Download of models and data sets from the Hugging Face hub by their names, and upload of
models."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ptdmpi.base.disk import user_cache
from ptdmpi.base.errors import InputError

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Suffixes of file names. A name that ends with one of these suffixes is treated as the name of a
# file. It is not looked up on the hub, even if the file does not exist.
_FILES = (".json", ".jsonl", ".txt", ".md", ".parquet", ".model", ".gz", ".bz2", ".xz", ".zst")


def is_hub_name(name: str) -> bool:
    """Return True if `name` can be the name of a repository of the hub, such as "org/name". Return
    False for a path: a name whose first folder exists, or which ends with one of the suffixes
    `_FILES`.
    """
    folder, _, rest = name.partition("/")
    if not _NAME.fullmatch(name) or rest.endswith(_FILES):
        return False
    return not Path(folder).exists()


def downloaded(name: str, kind: Kind, patterns: Sequence[str]) -> Path:
    """Return the local folder of a repository, with the files that match one of the `patterns`. For
    a model, files in subfolders are not included.

    Missing files are downloaded into the hub's own cache (`HF_HOME`). Raise InputError if the
    download fails. The message then contains a command that the user can run on a machine with
    network access.
    """
    from huggingface_hub import snapshot_download

    left_out: list[str] = []
    if kind == "model":
        # do not download subfolders, because they contain the same weights in other formats
        left_out = ["*/*"]
    try:
        return Path(
            snapshot_download(
                name, repo_type=kind, allow_patterns=list(patterns), ignore_patterns=left_out
            )
        )
    # catch every exception, because the libraries that download raise exceptions of many classes
    except Exception as error:
        raise _unreachable(name, kind, error) from None


def converted_at(name: str) -> Path:
    """Return the folder in the user's cache where the converted checkpoint of the model `name` of
    the hub is stored. The folder need not exist."""
    return user_cache() / "models" / name.replace("/", "--")


def local_model(path: Path) -> Path:
    """If `path` is the name of a model on the hub, and the user's cache contains its converted
    checkpoint, return the folder of this checkpoint. Return any other path unchanged."""
    if is_hub_name(str(path)) and converted_at(str(path)).is_dir():
        return converted_at(str(path))
    return path


def require_repository(name: str) -> None:
    """Raise InputError unless `name` is the complete name of a repository, such as "org/name"."""
    if not _NAME.fullmatch(name):
        raise InputError(
            f"--push {name}: is not the name of a repository on the hub, such as org/name"
        )


def upload(folder: Path, name: str) -> str:
    """Upload the files in `folder` to the model repository `name` on the hub, and return its
    address. If the repository does not exist, create a private one. Raise InputError if the upload
    fails. The message then contains a command that the user can run on a machine with network
    access."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = str(api.create_repo(name, repo_type="model", private=True, exist_ok=True))
        api.upload_folder(repo_id=name, repo_type="model", folder_path=folder)
    # catch every exception, because the libraries that upload raise exceptions of many classes
    except Exception as error:
        raise InputError(
            f"{name}: cannot be uploaded to the Hugging Face hub: {first_line(error)}; {folder} is "
            f"complete: where there is network, run hf upload {name} {folder}"
        ) from None
    return address


def newest_revision(name: str) -> str:
    """Return the commit of the newest version of the data set `name`. Raise InputError if the hub
    cannot be reached, or has no data set of this name."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name).sha)
    # catch every exception, because the libraries that download raise exceptions of many classes
    except Exception as error:
        raise _unreachable(name, "dataset", error) from None


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, without a full stop or colon at its end. If the
    exception has no text, return the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


def _unreachable(name: str, kind: Kind, error: Exception) -> InputError:
    """Return the exception to raise if a repository cannot be read from the hub."""
    option = " --repo-type dataset" if kind == "dataset" else ""
    return InputError(
        f"{name}: is not a file or directory, and cannot be downloaded from the Hugging Face hub: "
        f"{first_line(error)}; where there is network, run hf download {name}{option} "
        "--local-dir DIR, and give DIR instead"
    )
