"""Rounding a matrix so that its products with what it was calibrated on change least (GPTQ: Frantar
et al. 2022, arXiv 2210.17323)."""

import torch
from torch import Tensor

from ptdmpi.model.low_bit.codes import Packed, codes_of, packed, scales_of, values_of
from ptdmpi.plan.shape.low_bit import LowBit

# Of the mean of the Hessian's diagonal, added to it (section 3, step 3: "dampening" of 1 %).
DAMPING = 0.01
COLUMNS = 128  # made up for within, before all behind them are (section 3, step 2: B)


def gptq(weight: Tensor, hessian: Tensor, form: LowBit) -> Packed:
    """The matrix [o, i] in few bits, given H = X^T X [i, i] of its inputs X (algorithm 1).

    Column by column: each is rounded, and what that does to the products is made up for, as far as
    it can be, by the columns behind it. Those of the greatest inputs are first, as long as most is
    left to make up for them (`act-order` of the authors' program, github.com/IST-DASLab/gptq):
    that reaches into all blocks of a row, so scales are those of the matrix as it was. Columns
    whose inputs were always zero are rounded for themselves.
    """
    order = hessian.diagonal().argsort(descending=True, stable=True)
    left, inverse = weight.double()[:, order], _inverse_factor(hessian.double()[order][:, order])
    scales, one = scales_of(weight.double(), form), LowBit(form.codes, 1)
    of_column = scales.unflatten(-1, (-1, form.numbers))[:, order // form.block]
    values = torch.empty_like(left)
    for start in range(0, left.shape[1], COLUMNS):
        stop = start + COLUMNS
        # some columns are made up for within, all behind them at once at their end (section 3,
        # step 2: "lazy batch-updates")
        columns, factor = left[:, start:stop], inverse[start:stop, start:stop]
        errors = torch.empty_like(columns)
        for j in range(columns.shape[1]):
            column, scale = columns[:, j : j + 1], of_column[:, start + j]
            value = values_of(codes_of(column, scale, one), scale, one)
            errors[:, j : j + 1] = (column - value) / factor[j, j]
            columns[:, j + 1 :] -= errors[:, j : j + 1] * factor[j, j + 1 :]
            values[:, start + j : start + j + 1] = value
        left[:, stop:] -= errors @ inverse[start:stop, stop:]
    return packed(values[:, order.argsort()], form, scales)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of H^-1 (section 3, step 3): its row j is, from column j on, row j
    of the inverse without the columns before, over the root of its first element."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    idle = diagonal == 0
    diagonal[idle] = 1.0
    diagonal += DAMPING * diagonal.mean()
    lower = torch.linalg.cholesky(hessian)
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
