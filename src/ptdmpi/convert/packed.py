"""Weights in few bits as the package `compressed-tensors` has them ("pack-quantized"), which
`transformers` loads: instead of NAME.weight stand NAME.weight_packed (int32, of our codes the same
bytes), NAME.weight_scale and NAME.weight_shape."""

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
from ptdmpi.convert import tensors
from ptdmpi.convert.family import Counterpart, Family
from ptdmpi.convert.plan import Plan
from ptdmpi.convert.tensors import Stored, WeightFiles
from ptdmpi.model.low_bit.codes import decoded
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.plan.shape.low_bit import LowBit

PACKED, SCALE, SHAPE = ("_packed", "_scale", "_shape")
WORD_BYTES = 4


@dataclass(frozen=True)
class PackedModel:
    """Which tensors of a plan are written packed, by their names: a box of whole rows of ours."""

    form: LowBit
    found: Mapping[str, Counterpart]

    @classmethod
    def of(cls, family: Family, plan: Plan, reader: Reader) -> "PackedModel":
        """Raises InputError for a model that the format has no form for."""
        form, where = reader.manifest.form, reader.directory
        if form is None:
            raise InputError(f"{where} is not in few bits: --packed is of what quantize makes")
        found = {
            name: one
            for name, one in plan.by_name.items()
            if key(WEIGHTS, one.ours) in reader.manifest.in_few_bits
        }
        words = all(one.whole[1] * form.bits % (8 * WORD_BYTES) == 0 for one in found.values())
        reason = ""
        if form.codes == "nf4":
            reason = "nf4 has no whole numbers"
        elif form.codes == "uint4":
            reason = "the least values of uint4's blocks are no whole numbers of steps"
        elif any(one.transposed for one in found.values()) or family.model_type.endswith("bert"):
            reason = f"a {family.model_type} of Hugging Face has other modules than it packs"
        elif not words:
            reason = "its rows are no whole words of 32 bits"
        if reason:
            raise InputError(
                f"{where}: pack-quantized cannot hold it, for {reason}; legal: "
                "without --packed, as float32 or --dtype"
            )
        return cls(form, found)

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Those of the same files with the packed tensors in their places."""
        return {
            file: tensors.make_header(
                one for name, stored in tensors.entries(text) for one in self._entries(name, stored)
            )
            for file, text in headers.items()
        }

    def _entries(self, name: str, stored: Stored) -> Iterator[tuple[str, Stored]]:
        if name not in self.found:
            yield name, stored
            return
        rows, columns = stored.shape
        words = columns * self.form.bits // 8 // WORD_BYTES
        blocks = columns // self.form.block
        yield name + PACKED, Stored("I32", (rows, words), 4 * rows * words)
        yield name + SCALE, Stored("F32", (rows, blocks), 4 * rows * blocks)
        yield name + SHAPE, Stored("I64", (2,), 16)

    def config(self, family: Family) -> dict[str, Any]:
        """What config.json says of it, under `quantization_config`."""
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
            "ignore": [family.output],
        }

    def values(self, reader: Reader, name: str) -> Tensor | None:
        """One of the packed tensors, by its name in the file; None for all others."""
        for suffix in (PACKED, SCALE, SHAPE):
            counterpart = self.found.get(name.removesuffix(suffix))
            if name.endswith(suffix) and counterpart is not None:
                return self._values(reader, counterpart, suffix)
        return None

    def _values(self, reader: Reader, found: Counterpart, suffix: str) -> Tensor:
        rows, columns = found.shape
        if suffix == SHAPE:
            return torch.tensor([rows, columns])
        if suffix == SCALE:
            shape, kind, dtype = self.form.scale_shape(rows, columns), SCALES, "float32"
        else:
            shape, kind, dtype = self.form.code_shape(rows, columns), CODES, "uint8"
        first = found.box.start[0]
        values: Array = np.empty(shape, dtype)
        try:
            reader.read(kind + found.ours, Box((first, 0), (first + rows, shape[1])), values)
        except Damaged as error:
            raise InputError(str(error)) from None
        return torch.from_numpy(values.view(np.int32) if suffix == PACKED else values)


class UnpackedFiles:
    """Weight files as whoever knows nothing of packing reads them."""

    def __init__(self, files: WeightFiles, packed: PackedModel) -> None:
        self.files, self.packed = files, packed
        plain = {name: Stored("F32", one.shape, 0) for name, one in packed.found.items()}
        self.tensors: Mapping[str, Stored] = {**files.tensors, **plain}

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        if name not in self.packed.found:
            return self.files.read(name)
        codes = self.files.read(name + PACKED).view(torch.uint8)
        return decoded(codes, self.files.read(name + SCALE), self.packed.form)
