"""The frozen quantized weights in a rank's memory, as in the base model of QLoRA (Dettmers et al.
2023, arXiv 2305.14314, section 3)."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.model.low_bit.codes import Packed, packed
from ptdmpi.model.parameters import Entry
from ptdmpi.plan.layer.low_bit import KIND_OF_CODES, KIND_OF_SCALES

Narrow = Callable[[int, int], tuple[int, int]]  # index in a matrix -> index in its codes or scales


class PackedPart(NamedTuple):
    """A slice of the codes or of the scales (`kind`) of a quantized matrix. `shape` is the shape of
    the tensor of all codes, or all scales, of the undivided matrix. `box` is the position of the
    slice in this tensor, and `values` are the values of the slice."""

    kind: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


class InFewBits:
    """The codes (uint8) and the scales (float32) of all quantized frozen matrices of a rank, each
    in one flat tensor, one matrix after the other. Both tensors are initially zero.

    `of` maps the name of a matrix to its codes and scales, which are views of the flat tensors. A
    tensor rank has some rows of a matrix, or some columns that form complete blocks.
    """

    def __init__(self, entries: Sequence[Entry], device: torch.device) -> None:
        forms = [entry.declaration.low_bit for entry in entries]
        known = [
            (entry, form) for entry, form in zip(entries, forms, strict=True) if form is not None
        ]
        codes = [entry.elements * form.bits // 8 for entry, form in known]
        scales = [entry.elements // form.block * form.numbers for entry, form in known]
        self.codes = torch.zeros(sum(codes), dtype=torch.uint8, device=device)
        self.scales = torch.zeros(sum(scales), device=device)
        self.of: dict[str, Packed] = {}
        parts = zip(known, self.codes.split(codes), self.scales.split(scales), strict=True)
        for (entry, form), code, scale in parts:
            rows, columns = entry.shape
            self.of[entry.name] = Packed(
                code.view(form.code_shape(rows, columns)),
                scale.view(form.scale_shape(rows, columns)),
                form,
            )

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def put(self, entry: Entry, values: Tensor) -> None:
        """Quantize the flat `values` of the complete local matrix `entry`, and store its codes and
        scales."""
        held = self.of[entry.name]
        made = packed(values.view(entry.shape), held.form)
        held.codes.copy_(made.codes)
        held.scales.copy_(made.scales)

    def boxes(self, entry: Entry, tensor_rank: int, tensor_size: int) -> Iterator[PackedPart]:
        """Yield the slices of the codes and of the scales of the matrix `entry` on tensor rank
        `tensor_rank` of `tensor_size` tensor ranks."""
        held = self.of[entry.name]
        rows, columns = entry.declaration.shape
        for share in entry.declaration.held(tensor_rank, tensor_size):
            for kind, values, narrow in (
                (KIND_OF_CODES, held.codes, held.form.code_shape),
                (KIND_OF_SCALES, held.scales, held.form.scale_shape),
            ):
                here = _narrowed(share.local, narrow)
                there = _narrowed(share.logical, narrow)
                yield PackedPart(kind, narrow(rows, columns), there, values[here.index])


def _narrowed(box: Box, narrow: Narrow) -> Box:
    """Return the slice of the codes, or of the scales, that belongs to the slice `box` of the
    matrix. `box` consists of complete blocks. `narrow` converts an index in the matrix to an index
    in its codes or scales."""
    return Box(narrow(*box.start), narrow(*box.stop))
