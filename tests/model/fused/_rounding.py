"""Triton's interpreter with the rounding of devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def rounded_as_on_devices() -> Iterator[None]:
    """Round float32 to the nearest bfloat16 inside, as devices do and torch does; the interpreter
    itself truncates."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def rounded(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        narrow = torch.from_numpy(src.data.copy()).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(narrow, tl.bfloat16)

    with mock.patch.object(builder, "cast_impl", rounded):
        yield
