"""GPTQ: quantizing a matrix so that its outputs for the calibration inputs change least.

Source: Frantar et al. 2022, arXiv 2210.17323.
"""

import torch
from torch import Tensor

from ptdmpi.model.low_bit.codes import Packed, codes_of, packed, scales_of, values_of
from ptdmpi.plan.layer.low_bit import LowBit

# This fraction of the mean of the Hessian's diagonal is added to the diagonal before GPTQ inverts
# the Hessian (section 3, step 3: "dampening" of 1 %).
DAMPING = 0.01
# The number of columns in a block. Errors are compensated within the block first, then in all later
# columns (section 3, step 2: B).
COLUMNS = 128


def gptq(weight: Tensor, hessian: Tensor, form: LowBit) -> Packed:
    """Return the quantized matrix, given the `weight` [outputs, inputs] and the `hessian` X^T X
    [inputs, inputs] of its calibration inputs X (algorithm 1).

    The columns are rounded one by one. After each column, the columns that are not yet rounded are
    changed so that they compensate the error of the outputs as far as possible. The columns with
    the greatest inputs are rounded first, while most columns can still compensate their errors
    (`act-order` of the authors' program, github.com/IST-DASLab/gptq). Columns that are rounded one
    after the other may belong to different blocks, so the scales of all blocks are computed
    beforehand from the original matrix. Columns whose inputs were always zero are rounded
    independently.
    """
    order = hessian.diagonal().argsort(descending=True, stable=True)
    left = weight.double()[:, order]
    inverse = _inverse_factor(hessian.double()[order][:, order])
    scales = scales_of(weight.double(), form)
    # each column is rounded alone, so the format for rounding a column has blocks of one element
    single = LowBit(form.codes, 1)
    of_column = scales.unflatten(-1, (-1, form.numbers))[:, order // form.block]
    values = torch.empty_like(left)
    for start in range(0, left.shape[1], COLUMNS):
        stop = start + COLUMNS
        # errors are compensated within these columns immediately, and in all later columns at the
        # end of the block (section 3, step 2: "lazy batch-updates")
        columns = left[:, start:stop]
        factor = inverse[start:stop, start:stop]
        errors = torch.empty_like(columns)
        for j in range(columns.shape[1]):
            column = columns[:, j : j + 1]
            scale = of_column[:, start + j]
            value = values_of(codes_of(column, scale, single), scale, single)
            errors[:, j : j + 1] = (column - value) / factor[j, j]
            columns[:, j + 1 :] -= errors[:, j : j + 1] * factor[j, j + 1 :]
            values[:, start + j : start + j + 1] = value
        left[:, stop:] -= errors @ inverse[start:stop, stop:]
    return packed(values[:, order.argsort()], form, scales)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the Hessian H (section 3, step 3).

    Let H_j be H without its first j rows and columns. From column j on, row j of the factor is the
    first row of the inverse of H_j, divided by the square root of that row's first element.
    """
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    idle = diagonal == 0
    diagonal[idle] = 1.0
    diagonal += DAMPING * diagonal.mean()
    lower = torch.linalg.cholesky(hessian)
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
