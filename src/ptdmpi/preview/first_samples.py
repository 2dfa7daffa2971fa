"""The first samples of a run as text, decoded with the tokenizer that made the run's shards."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptdmpi.config import Config, InputError
from ptdmpi.lineage.course import Course
from ptdmpi.train.feed import SampleSource
from ptdmpi.train.tasks.files import text_of

SHOWN = 2  # Maximum number of samples that are shown.
CHARACTERS = 400  # The text of a sample is decoded from at most this number of its first tokens.
IDS = 16


def first_samples(
    config: Config, source: SampleSource, course: Course, *, step: int, vocab_size: int
) -> dict[str, Any]:
    """Return the first samples in the batch of step `step` (counted from 0), as ids and as text.

    The samples are read and checked as in training. If the tokenizer is not found, the samples have
    no text, and the entry "no_text" has the reason.
    """
    count = min(SHOWN, config.samples)
    ids = course.samples(step) + np.arange(count)
    numbers, places = course.order.locate(ids)
    decode: Callable[[Sequence[int]], str] | None = None
    no_text = None
    try:
        decode = text_of(config, course, vocab_size).decode
    except InputError as error:
        no_text = str(error)
    shown = []
    for sample, number, place in zip(ids.tolist(), numbers.tolist(), places, strict=True):
        tokens = source.ids(number, int(place))
        shown.append(
            {
                "sample": sample,
                "dataset": config.data.train[number].path,
                "ids": tokens[:IDS],
                "text": decode and decode(tokens[:CHARACTERS]),
            }
        )
    return {"step": step + 1, "samples": shown, "no_text": no_text}
