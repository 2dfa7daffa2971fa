"""Quantized weights in the format "pack-quantized" of `compressed-tensors`, which `transformers`
can read.

Instead of NAME.weight a file contains NAME.weight_packed (int32, with the same bytes as ptdmpi's
codes), NAME.weight_scale and NAME.weight_shape.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.checkpoint.boxes import Array, Damaged, Reader
from ptdmpi.checkpoint.manifest import CODES, SCALES
from ptdmpi.config import InputError
from ptdmpi.convert.family import Counterpart, Family
from ptdmpi.convert.plan import Plan
from ptdmpi.convert.tensors import Stored, WeightFiles, entries, make_header
from ptdmpi.model.low_bit.codes import decoded
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.plan.layer.ahead.modules import MODULES
from ptdmpi.plan.layer.low_bit import LowBit

PACKED = "_packed"
SCALE = "_scale"
SHAPE = "_shape"
WORD_BYTES = 4


@dataclass(frozen=True)
class PackedModel:
    """The tensors that are written in packed form, by their names in the Hugging Face files. Each
    tensor contains complete rows of one weight of ptdmpi. `form` is the format of the codes
    (quantized numbers). `plain` has the names of the linear layers, except the head, that are not
    packed: routers, the linear layers of modules for multi-token prediction, and copies of the
    head."""

    form: LowBit
    tensors: Mapping[str, Counterpart]
    plain: tuple[str, ...] = ()

    @classmethod
    def of(cls, family: Family, plan: Plan, reader: Reader) -> "PackedModel":
        """Find the quantized weights of a checkpoint. Raise InputError if no weight is quantized,
        or if the format "pack-quantized" cannot represent the quantized weights."""
        form = reader.manifest.form
        where = reader.directory
        if form is None:
            raise InputError(
                f"{where} is not quantized; --packed needs a checkpoint of `ptdmpi quantize`"
            )
        quantized = {
            name: tensor
            for name, tensor in plan.by_name.items()
            if key(WEIGHTS, tensor.ours) in reader.manifest.in_few_bits
        }
        transposed = any(tensor.transposed for tensor in quantized.values())
        reason = ""
        if form.codes == "nf4":
            reason = "the levels of nf4 are not integers"
        elif form.codes == "uint4":
            reason = "the minimum of a uint4 block is not a multiple of its step"
        elif transposed or family.model_type.endswith("bert"):
            reason = f"it does not pack the modules of Hugging Face's {family.model_type}"
        elif any(tensor.whole[1] * form.bits % (8 * WORD_BYTES) for tensor in quantized.values()):
            reason = "its rows are not a whole number of 32-bit words"
        if reason:
            raise InputError(
                f"{where}: the format pack-quantized cannot represent it: {reason}; legal: leave "
                "out --packed, and write float32 or the type of --dtype"
            )
        plain = tuple(
            name.removesuffix(".weight")
            for name, tensor in plan.by_name.items()
            if name not in quantized and _is_plain(family, tensor, name in plan.again)
        )
        return cls(form, quantized, plain)

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the `headers` of the weight files with the entries of quantized weights replaced
        by the entries of packed tensors."""
        packed = {}
        for file, text in headers.items():
            written: list[tuple[str, Stored]] = []
            for name, stored in entries(text):
                written += self._entries(name, stored)
            packed[file] = make_header(written)
        return packed

    def _entries(self, name: str, stored: Stored) -> Iterator[tuple[str, Stored]]:
        """Yield the tensors that are written for the tensor `name`: three tensors if it is packed,
        and otherwise the tensor itself."""
        if name not in self.tensors:
            yield name, stored
            return
        rows, columns = stored.shape
        words = columns * self.form.bits // 8 // WORD_BYTES
        blocks = columns // self.form.block
        yield name + PACKED, Stored("I32", (rows, words), 4 * rows * words)
        yield name + SCALE, Stored("F32", (rows, blocks), 4 * rows * blocks)
        yield name + SHAPE, Stored("I64", (2,), 16)

    def config(self, family: Family) -> dict[str, Any]:
        """Return the value of `quantization_config` in config.json."""
        weights = {
            "num_bits": self.form.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.form.block,
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [family.output, *self.plain],
        }

    def values(self, reader: Reader, name: str) -> Tensor | None:
        """Return the packed tensor that has the name `name` in the Hugging Face files, or None if
        this tensor is not packed. Raise InputError if the checkpoint is damaged."""
        for suffix in (PACKED, SCALE, SHAPE):
            counterpart = self.tensors.get(name.removesuffix(suffix))
            if name.endswith(suffix) and counterpart is not None:
                return self._values(reader, counterpart, suffix)
        return None

    def _values(self, reader: Reader, counterpart: Counterpart, suffix: str) -> Tensor:
        rows, columns = counterpart.shape
        if suffix == SHAPE:
            return torch.tensor([rows, columns])
        first = counterpart.box.start[0]
        values: Array
        if suffix == SCALE:
            kind = SCALES
            values = np.empty(self.form.scale_shape(rows, columns), "float32")
        else:
            kind = CODES
            values = np.empty(self.form.code_shape(rows, columns), "uint8")
        box = Box((first, 0), (first + rows, values.shape[1]))
        try:
            reader.read(kind + counterpart.ours, box, values)
        except Damaged as error:
            raise InputError(str(error)) from None
        if suffix == PACKED:
            values = values.view(np.int32)
        return torch.from_numpy(values)


def _is_plain(family: Family, tensor: Counterpart, again: bool) -> bool:
    """Return True if a tensor that is not quantized is the matrix of a router, of a linear layer in
    a module for multi-token prediction, or of a copy of the head. `again` is True for a tensor that
    repeats another tensor."""
    if again:
        return family.of_head(tensor.theirs)
    in_module = tensor.ours.startswith(f"{MODULES}.") and len(tensor.shape) == 2
    return in_module or tensor.ours.endswith(".mlp.router.weight")


class UnpackedFiles:
    """Weight files whose packed tensors are read as float32 weights."""

    def __init__(self, files: WeightFiles, packed: PackedModel) -> None:
        self.files = files
        self.packed = packed
        plain = {name: Stored("F32", tensor.shape, 0) for name, tensor in packed.tensors.items()}
        self.tensors: Mapping[str, Stored] = {**files.tensors, **plain}

    def read(self, name: str) -> Tensor:
        """Return a full tensor; a packed tensor is dequantized."""
        if name not in self.packed.tensors:
            return self.files.read(name)
        codes = self.files.read(name + PACKED).view(torch.uint8)
        return decoded(codes, self.files.read(name + SCALE), self.packed.form)
