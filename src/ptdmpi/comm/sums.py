"""Sums and maxima of the tensors of several ranks, in the order of the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor


def combine(pieces: Sequence[Tensor] | Tensor, op: str, result: Tensor) -> None:
    """Write the sum or the maximum of two or more tensors [n], taken in their order, to `result`.

    Tensors in fp16 or bf16 are summed in float32, and the sum is rounded once. Two tensors are
    added directly in their own type, because a single addition is also rounded only once, and gives
    the same bits. `result` may be the first tensor.
    """
    if op == "max":
        torch.maximum(pieces[0], pieces[1], out=result)
        for piece in pieces[2:]:
            torch.maximum(result, piece, out=result)
    elif op != "sum":
        raise ValueError(f"op is sum or max, not {op}")
    elif result.dtype in (torch.bfloat16, torch.float16) and len(pieces) > 2:
        # round only once: rounding every partial sum to bfloat16 (8 significant bits) would lose
        # small gradients
        total = pieces[0].float()
        for piece in pieces[1:]:
            total += piece
        result.copy_(total)
    else:
        torch.add(pieces[0], pieces[1], out=result)
        for piece in pieces[2:]:
            result += piece
