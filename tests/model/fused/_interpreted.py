"""Kernels in Triton on the host, by Triton's interpreter, and the bytes that they load and
store."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

PROCESS = "triton"
ENVIRONMENT = {"TRITON_INTERPRET": "1"}  # Triton reads it when it is imported
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (`make setup-all` installs it)",
)


class Moves:
    """The launches of kernels, and the bytes that their programs load and store."""

    def __init__(self) -> None:
        self.launches = 0
        self.bytes = 0


@contextmanager
def counted() -> Iterator[Moves]:
    """Count launches, loads and stores of kernels inside; masked elements are not moved."""
    from triton.runtime import interpreter

    moves, builder = Moves(), interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    call = interpreter.GridExecutor.__call__

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        moves.bytes += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(self, ptrs, mask, *rest, **named)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        moves.bytes += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest, **named)

    def counted_call(self: Any, *args: Any, **named: Any) -> Any:
        moves.launches += 1
        return call(self, *args, **named)

    with (
        mock.patch.object(builder, "create_masked_load", counted_load),
        mock.patch.object(builder, "create_masked_store", counted_store),
        mock.patch.object(interpreter.GridExecutor, "__call__", counted_call),
    ):
        yield moves
