"""Quantization of matrices to codes and scales, and dequantization, for the formats that
`plan.layer.low_bit.LowBit` describes. A format has a list of levels, and a code is the number of a
level in this list. The dequantized value of a code is level x (scale of the block) or, in some
formats, level x (scale of the block) + (least value of the block).

All arithmetic is in float32 (in float64 for a float64 matrix). Weights from a file, packed weights
in memory, and operands that are rounded before a product therefore have the same dequantized
values.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ptdmpi.model.low_bit.packing import pack
from ptdmpi.plan.layer.low_bit import LowBit, chunk_elements


@dataclass(frozen=True)
class Packed:
    """A quantized matrix [rows, columns]: the packed codes [rows, columns * bits / 8], uint8, and
    the scales [rows, columns / block * numbers], float32. A block consists of `form.block`
    consecutive elements of a row. For each block, `scales` has `form.numbers` numbers: the scale
    and, in some formats, the least value (see `LowBit`)."""

    codes: Tensor
    scales: Tensor
    form: LowBit

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized matrix [rows, columns], computed in float32 and rounded to
        `dtype`."""
        whole = torch.empty(self._shape, dtype=dtype, device=self.codes.device)
        step = _rows_at_once(self.codes, self._shape[1])
        for first in range(0, len(whole), step):
            rows = slice(first, first + step)
            whole[rows] = decoded(self.codes[rows], self.scales[rows], self.form)
        return whole

    @property
    def _shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.form.bits


def _rows_at_once(x: Tensor, columns: int) -> int:
    return max(1, chunk_elements(x.device.type == "cpu") // columns)


@cache
def _levels(form: LowBit, device: torch.device) -> Tensor:
    """Return a table [256, elements per byte] with the levels that each value of a byte encodes in
    the format `form`. The lowest bits of the byte encode the first level."""
    levels = _level(form, torch.device("cpu"))
    if form.bits == 4:
        high, low = torch.meshgrid(levels, levels, indexing="ij")
        return torch.stack((low.flatten(), high.flatten()), dim=1).to(device)
    return levels[:, None].to(device)


@cache
def _level(form: LowBit, device: torch.device) -> Tensor:
    return torch.tensor(form.levels, device=device)


@cache
def _middles(form: LowBit, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(form.middles, dtype=dtype, device=device)


def place_tables(form: LowBit, device: torch.device) -> None:
    """Copy the lookup tables of a quantized format to a device before the first step. A copy within
    a step would make the host wait for the device."""
    for table in (_levels, _level):
        table(form, device)
    for wide in (torch.float32, torch.float64):
        _middles(form, device, wide)


def scales_of(x: Tensor, form: LowBit) -> Tensor:
    """Return the scales [rows, columns / block * numbers] of a matrix [rows, columns] in the format
    `form`, float32. A scale is computed from the greatest magnitude of its block or, for uint4,
    from the least and the greatest value of the block. The scale of int4 has a sign, because int4
    has eight levels on one side of zero and seven on the other side. The sign puts the value of
    greatest magnitude on the side with eight levels."""
    # use a wide type, because x / scale would be rounded in a 16-bit type
    wide = torch.promote_types(x.dtype, torch.float32)
    least, greatest = (ends.to(wide) for ends in x.unflatten(-1, (-1, form.block)).aminmax(dim=-1))
    if form.codes == "uint4":
        least = least.float()
        return torch.stack(((greatest - least) / form.reach, least), dim=-1).flatten(-2).float()
    if form.codes == "int4":
        return (torch.where(-least > greatest, least, greatest) / form.reach).float()
    return (torch.maximum(-least, greatest) / form.reach).float()


def codes_of(x: Tensor, scales: Tensor, form: LowBit) -> Tensor:
    """Return the codes of the levels of `form` that are nearest to x [..., columns], int64 with the
    shape of x. `scales` is [..., columns / block * numbers]. In a block with scale 0, all codes
    mean level 0."""
    wide = torch.promote_types(x.dtype, torch.float32)
    blocks = x.to(wide).unflatten(-1, (-1, form.block))
    numbers = _by_block(scales.to(wide), form)
    scale = numbers[..., :1]
    if form.numbers == 2:
        blocks = blocks - numbers[..., 1:]
    share = torch.where(scale != 0, blocks / scale, 0.0).flatten(-2)
    if form.codes == "nf4":
        return torch.bucketize(share, _middles(form, x.device, wide))
    least = int(form.levels[0])
    greatest = int(form.levels[-1])
    return share.round_().clamp_(least, greatest).to(torch.int64) - least


def values_of(codes: Tensor, scales: Tensor, form: LowBit) -> Tensor:
    """Return the dequantized float32 values [..., columns] of codes [..., columns], int64, in the
    format `form`. `scales` is [..., columns / block * numbers]."""
    return _scaled(_level(form, codes.device)[codes], scales, form)


def _by_block(scales: Tensor, form: LowBit) -> Tensor:
    """Return `scales` [..., blocks * numbers] as [..., blocks, numbers], with a separate dim for
    the numbers that each block stores: its scale and, in some formats, its least value."""
    return scales.unflatten(-1, (-1, form.numbers))


def _scaled(levels: Tensor, scales: Tensor, form: LowBit) -> Tensor:
    """Multiply the float32 levels [..., columns] by the scales of their blocks, and return the
    products. If the format stores the least value of each block, add this value to the products."""
    numbers = _by_block(scales, form)
    values = levels.unflatten(-1, (-1, form.block)) * numbers[..., :1]
    if form.numbers == 2:
        values += numbers[..., 1:]
    return values.flatten(-2)


def decoded(codes: Tensor, scales: Tensor, form: LowBit) -> Tensor:
    """Return the dequantized float32 values [rows, columns] of a matrix in the format `form`, given
    its packed codes, uint8, and their scales."""
    levels = _levels(form, codes.device).index_select(0, codes.reshape(-1).int())
    return _scaled(levels.view(codes.shape[0], -1), scales, form)


def packed(x: Tensor, form: LowBit, scales: Tensor | None = None) -> Packed:
    """Return a matrix [rows, columns] quantized to the format `form`. If `scales` is None, the
    scales are computed from the matrix."""
    if scales is None:
        scales = scales_of(x, form)
    rows, columns = x.shape
    code = torch.empty(form.code_shape(rows, columns), dtype=torch.uint8, device=x.device)
    step = _rows_at_once(x, columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        numbers = codes_of(x[part], scales[part], form)
        code[part] = pack(numbers.view(-1), form.bits).view(len(numbers), -1)
    return Packed(code, scales, form)


def rounded(x: Tensor, form: LowBit) -> Tensor:
    """Return a matrix [rows, columns] after quantization to the format `form` and dequantization,
    in the type of x (fake quantization)."""
    result = torch.empty_like(x)
    step = _rows_at_once(x, x.shape[1])
    for first in range(0, len(x), step):
        rows = x[first : first + step]
        scales = scales_of(rows, form)
        result[first : first + step] = values_of(codes_of(rows, scales, form), scales, form)
    return result
