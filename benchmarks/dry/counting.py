"""Counts of the work that PyTorch's dispatcher gives a device: launches, bytes and FLOPs of each
operator."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Rates of an H100 SXM according to its data sheet: bytes/s of its memory, and FLOP/s of dense
# bfloat16 products.
MEMORY_RATE = 3.35e12
PRODUCT_RATE = 989e12
# In-place operators that overwrite a tensor without reading its old values.
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}
OVERWRITES |= {"_foreach_zero_", "_foreach_copy_"}


class DeviceWork(NamedTuple):
    """The work of operators on a device.

    `moved_bytes` is the size of all inputs and outputs of the operators. `other_bytes` is the same
    size, but only for operators that are neither matrix products nor attention. `roofline_s` is the
    shortest possible time on an H100, in seconds. Each operator adds the longer of two times: the
    time for its bytes at the full rate of the H100's memory, and the time for its FLOPs at the full
    rate of matrix products.
    """

    launches: int = 0
    moved_bytes: int = 0
    other_bytes: int = 0
    flops: int = 0
    roofline_s: float = 0.0

    def plus(self, other: "DeviceWork") -> "DeviceWork":
        """Return the sum of this work and `other`, field by field."""
        return DeviceWork(*(mine + more for mine, more in zip(self, other, strict=True)))


class Counting(TorchDispatchMode):
    """A context in which the work of each operator on a type of device is counted. `launched` is a
    function that returns the number of launches so far. An operator is counted only if it launches
    something, so views and allocations are not counted.
    """

    def __init__(self, device_type: str, launched: Callable[[], int]) -> None:
        super().__init__()
        self._device_type = device_type
        self._launched = launched
        self.by_operator: dict[str, DeviceWork] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = self._launched()
        result = func(*args, **kwargs)
        launches = self._launched() - before
        if launches:
            moved = moved_bytes(func, args, kwargs, result, self._device_type)
            flops = flops_of(func, args, kwargs, result)
            name = func.overloadpacket.__name__
            known = self.by_operator.get(name, DeviceWork())
            self.by_operator[name] = known.plus(_work(launches, moved, flops))
        return result

    def work(self) -> DeviceWork:
        """Return the total work of all operators that were counted."""
        total = DeviceWork()
        for work in self.by_operator.values():
            total = total.plus(work)
        return total


def _work(launches: int, moved: int, flops: int) -> DeviceWork:
    other = 0 if flops else moved
    seconds = max(moved / MEMORY_RATE, flops / PRODUCT_RATE)
    return DeviceWork(launches, moved, other, flops, roofline_s=seconds)


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the number of floating-point operations of a matrix product, a convolution or
    attention. Return 0 for other operators."""
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0
    # PyTorch's functions that count FLOPs do not accept a data type as a positional argument.
    args = [_without_values(value) for value in args if not isinstance(value, torch.dtype)]
    return int(count(*args, **kwargs, out_val=result))


def _without_values(value: Any) -> Any:
    """Return `value`. If it is a tensor of integers, return a tensor of the same shape without
    values instead. Such integers are the positions at which documents begin. If PyTorch counted
    FLOPs with these positions, it would wait for the device to read them. Without the positions,
    PyTorch assumes that all documents are as long as the longest one, so it counts too many
    FLOPs."""
    if isinstance(value, Tensor) and not value.is_floating_point():
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


def moved_bytes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, device_type: str
) -> int:
    """Return the size of the tensors that an operator reads and writes on a type of device.

    Each tensor counts once, with the elements that it has in memory: an expanded dimension counts
    as one element. A tensor that is changed in place counts as read and as written. If the operator
    overwrites the tensor without reading it, the tensor counts only as written.
    """
    overwrites = func.overloadpacket.__name__ in OVERWRITES
    read: list[Tensor] = []
    written: list[Tensor] = []
    for argument, value in _arguments(func, args, kwargs):
        tensors = list(_tensors(value, device_type))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written += tensors
        if not is_written or not (argument.is_out or overwrites):
            read += tensors
    results = result if isinstance(result, tuple) else (result,)
    for returned, value in zip(func._schema.returns, results, strict=False):
        if returned.alias_info is None:
            written += _tensors(value, device_type)
    return _distinct_bytes(read) + _distinct_bytes(written)


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield (description in the operator's schema, value) for each argument of a call of the
    operator `func`."""
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(value: Any, device_type: str) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.device.type == device_type:
            yield leaf


def _distinct_bytes(tensors: Iterable[Tensor]) -> int:
    sizes = {}
    for tensor in tensors:
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset())
        sizes[place, tensor.shape, tensor.stride()] = stored_bytes(tensor)
    return sum(sizes.values())


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of the elements that a tensor has in memory."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in dims if stride or not size) * tensor.element_size()
