"""The questions in a run's task files, tokenized with the tokenizer of the run's data. This module
does not import MPI, so that a dry run can use it.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptdmpi.checkpoint.manifest import Manifest, Progress, StoredTensor
from ptdmpi.config import Config, InputError
from ptdmpi.evaluate.labelled import Framing, framing
from ptdmpi.evaluate.questions import Asking, Limits, Questions, read
from ptdmpi.inference.stored import StoredModel
from ptdmpi.inference.text import Text, find_text, name_of
from ptdmpi.lineage.course import Course
from ptdmpi.model.stage import TIED_NAME
from ptdmpi.model.state import WEIGHTS, key


def text_of(config: Config, course: Course, vocab_size: int) -> Text:
    """Return the tokenizer that made the run's shards. The tokenizer is searched for in the same
    places as for a saved model of the run.

    Raises InputError if no tokenizer is found.
    """
    stored = _stored(config, course.in_manifest(), vocab_size)
    return find_text(stored, mended="put it beside them")


def task_framing(config: Config) -> Framing:
    """Return the object that converts the texts of the run's task to sequences of tokens.

    The key `task.tokenizer` names the tokenizer. If this key is empty, the tokenizer of the model
    from which the run begins is used. Raises InputError if there is no tokenizer.
    """
    stored = _stored(config, {}, config.model.vocab_size or 2**31)
    if not (config.task.tokenizer or stored.began):
        raise InputError(
            'task.tokenizer is missing: legal: "bytes", or the path of a tokenizer.json; a run '
            "that begins from checkpoint.initial, or adapts adapt.base, uses the tokenizer of that "
            "model"
        )
    text = find_text(stored, mended="set task.tokenizer")
    return framing(text, name_of(stored), config.model)


def _stored(config: Config, more: Mapping[str, Any], vocab_size: int) -> StoredModel:
    """Return a description of the model that the run would save. `more` are additional entries of
    the checkpoint's manifest.
    """
    progress = Progress(step=0, samples=0, seed=config.run.seed)
    entries = {"progress": asdict(progress), "model": config.model.model_dump(), **more}
    table = StoredTensor((vocab_size, config.model.hidden), "float32", ())
    manifest = Manifest(progress, entries, {}, {key(WEIGHTS, TIED_NAME): table})
    return StoredModel(Path(config.run.dir), Path(), config.model_dump(), manifest)


def task_files(config: Config, course: Course, vocab_size: int) -> dict[str, Questions]:
    """Return the questions of each file in `log.tasks`, by the path of the file.

    Raises InputError with one line for each file that cannot be used.
    """
    if not config.log.tasks:
        return {}
    try:
        text = text_of(config, course, vocab_size)
    except InputError as error:
        raise InputError(f"log.tasks needs the tokenizer of the data: {error}") from None
    sizes = Limits(config.model.seq_length, vocab_size)
    # Use the defaults of `ptdmpi evaluate`. But limit answers to half of the sequence length, so
    # that the question fits, too.
    asking = Asking(max_new_tokens=min(Asking.max_new_tokens, sizes.seq_length // 2))
    files = {}
    mistakes = []
    for path in config.log.tasks:
        try:
            files[path] = read(Path(path), text, asking, sizes)
        except InputError as error:
            mistakes.append(f"log.tasks: {error}")
    if mistakes:
        raise InputError("\n".join(mistakes))
    return files
