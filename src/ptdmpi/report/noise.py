"""Whether a larger batch would be of use, by the noise of gradients that a run has recorded."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

MOST = 100  # records: the noise grows while a model learns, so old ones say little
LARGER, SMALLER = 2.0, 0.5  # of the noise scale in batches: beyond these the answer is plain


def judged(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """From the last records that have a `gradient_noise` of finite numbers: `noise_scale_tokens`,
    B_simple = tr(Sigma) / |G|^2 of the means of both, None where the gradient is lost in the noise;
    `batch_tokens`, the valid ones of a step; `steps`, how many records; `answer`. None where there
    is no such record.

    A batch of B needs 1 + B_simple / B times the steps of an endless one, and B / B_simple + 1
    times the least number of samples (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11).
    """
    every = (one["gradient_noise"] for one in records if "gradient_noise" in one)
    # older runs have recorded that of steps that were skipped, too
    found = [one for one in every if all(map(math.isfinite, one.values()))][-MOST:]
    if not found:
        return None
    square, variance, tokens = (
        statistics.fmean(one[key] for one in found) for key in ("square", "variance", "tokens")
    )
    scale = max(0.0, variance) / square if square > 0 else None
    told = {"noise_scale_tokens": scale, "batch_tokens": tokens, "steps": len(found)}
    return {**told, "answer": _answer(scale, tokens)}


def _answer(scale: float | None, batch: float) -> str:
    if scale is None:
        return "a larger batch is beneficial: the gradient is lost in the noise"
    if scale > LARGER * batch:
        return "a larger batch is beneficial"
    if scale < SMALLER * batch:
        return "a larger batch is of little use: a smaller one learns as much from fewer tokens"
    return "the batch is about right"


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What `judged` found, for the table."""
    scale, batch = found["noise_scale_tokens"], found["batch_tokens"]
    told = "unknown" if scale is None else f"{scale:,.0f} tokens"
    text = f"{told}, batch {batch:,.0f} valid tokens, over {found['steps']} steps"
    return [("gradient noise scale", text), ("is a larger batch beneficial", found["answer"])]
