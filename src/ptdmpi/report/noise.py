"""The gradient noise scale of a run, computed from its records, and the answer to the question
whether a larger batch would be beneficial."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

# only this many of the newest records are used, because the noise scale grows during training
NEWEST = 100
# A batch is too small if the noise scale is above LARGER times the batch size in tokens. It is too
# large if the noise scale is below SMALLER times the batch size.
LARGER = 2.0
SMALLER = 0.5


def judged(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Judge the batch size from the newest records that have a finite `gradient_noise`.

    Return None if there is no such record. Otherwise return a table with the following entries.
    `noise_scale_tokens` is B_simple = tr(Sigma) / |G|^2, where G is the gradient and Sigma is the
    covariance matrix of the gradients of single tokens. The noise scale is computed from the means
    of tr(Sigma) and |G|^2 over the records. If the mean of |G|^2 is not positive, the noise hides
    the gradient, and the noise scale is None. `batch_tokens` is the mean number of valid tokens in
    a step. `steps` is the number of records. `answer` is a sentence that says whether a larger
    batch would help.

    Compared with a training with an infinite batch, a training with B tokens in a step needs 1 +
    B_simple / B times as many steps. This training needs 1 + B / B_simple times the smallest
    possible number of samples (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11).
    """
    recorded = [record["gradient_noise"] for record in records if "gradient_noise" in record]
    # older versions also recorded the noise of skipped steps, which is not finite
    noises = [noise for noise in recorded if all(map(math.isfinite, noise.values()))][-NEWEST:]
    if not noises:
        return None
    square = statistics.fmean(noise["square"] for noise in noises)
    variance = statistics.fmean(noise["variance"] for noise in noises)
    tokens = statistics.fmean(noise["tokens"] for noise in noises)
    scale = None
    if square > 0:
        scale = max(0.0, variance) / square
    return {
        "noise_scale_tokens": scale,
        "batch_tokens": tokens,
        "steps": len(noises),
        "answer": _answer(scale, tokens),
    }


def _answer(scale: float | None, batch: float) -> str:
    """Return a sentence that says whether a larger batch is beneficial. `scale` is the noise scale
    and `batch` is the batch size, both in tokens."""
    if scale is None:
        return "a larger batch is beneficial: the gradient is lost in the noise"
    if scale > LARGER * batch:
        return "a larger batch is beneficial"
    if scale < SMALLER * batch:
        return "a larger batch is of little use: a smaller one learns as much from fewer tokens"
    return "the batch is about right"


def rows(judgement: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the report's table for `judgement`, a result of `judged`."""
    scale = judgement["noise_scale_tokens"]
    shown = "unknown" if scale is None else f"{scale:,.0f} tokens"
    batch = judgement["batch_tokens"]
    text = f"{shown}, batch {batch:,.0f} valid tokens, over {judgement['steps']} steps"
    return [("gradient noise scale", text), ("is a larger batch beneficial", judgement["answer"])]
