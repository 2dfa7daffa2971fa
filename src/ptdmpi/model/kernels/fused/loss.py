"""Cross-entropy in two passes over the logits; the second pass overwrites the logits with their
gradient. For 16-bit logits the kernels move 6 bytes per logit: they read each logit twice, and
write its gradient once.

For the logits x of a token over V columns, its label y, and the factor f of the token's loss in the
total loss, the equations are

    loss = log sum_j exp(x_j - m) + m - x_y,    m = max_j x_j
    d loss / d x_j = f (exp(x_j - m) / sum_k exp(x_k - m) - [j = y])

where [j = y] is 1 for the column of the label, and 0 for all other columns.

The forward reads the logits once, in chunks of the vocabulary. It keeps the maximum m of the chunks
so far, and multiplies the sum of exponentials by exp(m - m') whenever the maximum grows to m'
(Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3). Each tensor rank does this for its own
columns, and the caller combines the maxima and sums of the ranks.

The reference implementation is `softmax_losses` and `logit_gradient` in
`ptdmpi.model.output.cross_entropy`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ptdmpi.model.kernels.fused.launch import block_of, on_device_of, warps_of, wide

CHUNK = 4096  # the largest number of logits of a row that a program computes at once


class RowSums(NamedTuple):
    """Three numbers for each row of logits over this rank's columns, in float32 or wider. `top`
    [rows] is the greatest logit. `sums` [2, rows] has the sum of exp(logit - top), and the logit of
    the label, which is 0 if the label's column is on another rank."""

    top: Tensor
    sums: Tensor


@triton.jit
def _forward(
    logits, labels, tops, totals, targets, columns, first, CHUNK: tl.constexpr, WIDE: tl.constexpr
):
    """Compute the three numbers of `RowSums`: each program of this Triton kernel computes them for
    one row of logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    inside_chunk = tl.arange(0, CHUNK)
    top = tl.full([], float("-inf"), WIDE)
    total = tl.full([], 0.0, WIDE)
    for begin in range(0, columns, CHUNK):
        at = begin + inside_chunk
        x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(WIDE)
        greater = tl.maximum(top, tl.max(x, 0))
        # if all logits so far are -inf, subtract 0: exp(-inf - (-inf)) would be NaN
        subtracted = tl.where(greater == float("-inf"), 0.0, greater)
        total = total * tl.exp(top - subtracted) + tl.sum(tl.exp(x - subtracted), 0)
        top = greater
    label = tl.load(labels + row) - first
    here = (label >= 0) & (label < columns)
    target = tl.load(logits + tl.where(here, label, 0)).to(WIDE)
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(targets + row, tl.where(here, target, 0.0))


@triton.jit
def _backward(
    logits, labels, tops, totals, factors, columns, first, CHUNK: tl.constexpr, WIDE: tl.constexpr
):
    """Overwrite the logits with their gradient: each program of this Triton kernel overwrites one
    row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    inside_chunk = tl.arange(0, CHUNK)
    label = tl.load(labels + row) - first
    top = tl.load(tops + row)
    factor = tl.load(factors + row)
    scale = factor / tl.load(totals + row)
    for begin in range(0, columns, CHUNK):
        at = begin + inside_chunk
        x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(WIDE)
        gradient = tl.exp(x - top) * scale - tl.where(at == label, factor, 0.0)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < columns)


def row_sums(flat: Tensor, labels: Tensor, first: int) -> RowSums:
    """Return the three numbers of `RowSums` for each row of the contiguous logits `flat` [rows,
    columns]. `labels` [rows] are columns of the whole vocabulary, in which this rank's columns
    begin at `first`."""
    rows, columns = flat.shape
    dtype = torch.promote_types(flat.dtype, torch.float32)
    top = torch.empty(rows, dtype=dtype, device=flat.device)
    sums = torch.empty(2, rows, dtype=dtype, device=flat.device)
    chunk = block_of(columns, CHUNK)
    with on_device_of(flat):
        _forward[(rows,)](
            flat,
            labels,
            top,
            *sums,
            columns=columns,
            first=first,
            CHUNK=chunk,
            WIDE=wide(flat),
            num_warps=warps_of(chunk),
        )
    return RowSums(top, sums)


def write_gradient(flat: Tensor, labels: Tensor, first: int, *, row: tuple[Tensor, ...]) -> None:
    """Overwrite the logits `flat` [rows, columns] with their gradient. `row` has three tensors
    [rows]: the greatest logit over the columns of all ranks, the sum of exponentials over these
    columns, and the gradient of the row's loss. `labels` and `first` are as in `row_sums`."""
    rows, columns = flat.shape
    chunk = block_of(columns, CHUNK)
    with on_device_of(flat):
        _backward[(rows,)](
            flat,
            labels,
            *(numbers.contiguous() for numbers in row),
            columns=columns,
            first=first,
            CHUNK=chunk,
            WIDE=wide(flat),
            num_warps=warps_of(chunk),
        )
