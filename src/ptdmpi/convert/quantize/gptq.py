"""Rounding a matrix so that its products with what it was calibrated on change least (GPTQ: Frantar
et al. 2022, arXiv 2210.17323)."""

import torch
from torch import Tensor

from ptdmpi.model.low_bit.codes import Packed, codes_of, packed, scales_of, values_of
from ptdmpi.plan.shape.low_bit import LowBit

# Of the mean of the Hessian's diagonal, added to it (section 3, step 3: "dampening" of 1 %).
DAMPING = 0.01


def gptq(weight: Tensor, hessian: Tensor, form: LowBit) -> Packed:
    """The matrix [o, i] in few bits, given H = X^T X [i, i] of its inputs X (algorithm 1).

    Column by column: each is rounded, and what that does to the products is made up for, as far as
    it can be, by the columns behind it. Scales are those of a block as it stands when its first
    column is rounded (section 4, "grouping"). Columns whose inputs were always zero are rounded for
    themselves.
    """
    left, inverse = weight.double().clone(), _inverse_factor(hessian.double())
    values, scales = torch.empty_like(left), []
    for start in range(0, left.shape[1], form.block):
        stop = start + form.block
        # a block at a time is made up for within, all behind it at once at its end (section 3,
        # step 2: "lazy batch-updates")
        block, factor = left[:, start:stop], inverse[start:stop, start:stop]
        scale = scales_of(block, form)
        errors = torch.empty_like(block)
        for j in range(form.block):
            column = block[:, j : j + 1]
            one = LowBit(form.codes, 1)
            value = values_of(codes_of(column, scale, one), scale, one)
            errors[:, j : j + 1] = (column - value) / factor[j, j]
            block[:, j + 1 :] -= errors[:, j : j + 1] * factor[j, j + 1 :]
            values[:, start + j : start + j + 1] = value
        left[:, stop:] -= errors @ inverse[start:stop, stop:]
        scales.append(scale)
    return packed(values, form, torch.cat(scales, dim=1))


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
