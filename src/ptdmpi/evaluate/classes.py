"""Accuracy of models with a classification or multiple-choice head, in any parallel layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.base.progress import progress
from ptdmpi.config import Config
from ptdmpi.data.labelled import LabelledFile, LabelledForm, in_order
from ptdmpi.evaluate.choice import standard_error
from ptdmpi.evaluate.labelled import framing, read
from ptdmpi.evaluate.scoring import BATCH_TOKENS
from ptdmpi.inference.model import InferenceModel
from ptdmpi.inference.stored import StoredModel
from ptdmpi.inference.tensors import as_tensors
from ptdmpi.inference.text import find_text, name_of


def files_of(
    stored: StoredModel, config: Config, tokenizer: str | None, paths: Sequence[Path]
) -> tuple[LabelledForm, list[LabelledFile]]:
    """Return the form of the model's inputs, and the task files `paths` converted to sequences of
    tokens.

    The texts are encoded by `tokenizer`, or by the tokenizer of the model `stored` if `tokenizer`
    is None. A sequence has at most `model.seq_length` tokens, as `config` says, and longer texts
    are cut. Raise InputError if a tokenizer or a file cannot be used.
    """
    text = find_text(stored, tokenizer)
    frame = framing(text, tokenizer or name_of(stored), config.model)
    return frame.form, [read(path, config.task, frame) for path in paths]


def predictions(model: InferenceModel, file: LabelledFile, form: LabelledForm) -> np.ndarray:
    """Return for each sample the class or candidate with the highest score, on every rank.

    The result is an array of integers [samples]. Every rank calls this function.
    """
    data = model.axes["data"]
    micro = max(1, BATCH_TOKENS // (form.seq_length * file.sequences))
    microbatches = list(in_order(file, form, micro, data_rank=data.rank, data_size=data.size))
    chosen: dict[int, int] = {}
    with progress("classifying", len(microbatches), "batch") as advance:
        for microbatch in microbatches:
            batch = as_tensors(microbatch).each(lambda tensor: tensor.to(model.device))
            scores = model.scores(batch)
            advance(1)
            if scores is not None:
                numbers = microbatch.samples[:: file.sequences] // file.sequences
                best = scores.argmax(-1).tolist()
                chosen |= dict(zip(numbers.tolist(), best, strict=True))
    model.finish()
    parts = data.all_gather_object(model.share(chosen))
    every = {number: best for part in parts for number, best in part.items()}
    return np.array([every[number] for number in range(len(file.labels))])


def accuracy(file: LabelledFile, predicted: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return the fraction of samples that were classified correctly, and further scores.

    `by_class` has the number of samples and the accuracy of each class in `names`. The accuracy of
    a class without samples is None. `most_frequent` is the accuracy of always choosing the most
    frequent class.
    """
    right = predicted == file.labels
    count = len(file.labels)
    share = float(right.mean())
    by_class: dict[str, Any] = {}
    for number, name in enumerate(names):
        own = right[file.labels == number]
        own_share = float(own.mean()) if len(own) else None
        by_class[name] = {"items": len(own), "accuracy": own_share}
    return {
        "items": count,
        "accuracy": share,
        "standard_error": standard_error(share, count),
        "most_frequent": float(np.bincount(file.labels).max()) / count,
        "truncated": file.cut,
        "by_class": by_class,
    }
