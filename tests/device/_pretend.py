"""A pretended device: tensors that say they are on one, and are on the host, or nowhere.

Everything that treats a device otherwise than the host runs on it, without one: a tensor of the
device `pretend` wraps one of the host, which has values, or one of "meta", which has only a shape,
so that a model of full size costs no memory. Every operation passes here, in every thread, and is
looked at: what makes the host wait, what mixes devices, what a device would launch, which memory is
held. What it does not know: how quick a device is, and which kernel its library would take.

It stands on a private interface of torch, of which `available` asks.
"""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map

from ptdmpi.comm import queues
from ptdmpi.model import buffer
from ptdmpi.model.kernels import blocks, host
from ptdmpi.model.low_bit import codes
from ptdmpi.model.parameters import Parameter
from tests.device._fused import OWN, fused
from tests.device._seen import SEEN, where_now
from tests.device._streams import MODULE

NAME = "pretend"

# what needs values of the device on the host, to go on: the host waits
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount"}
WAITS |= {"unique_dim", "_unique2", "unique_consecutive"}
# what launches nothing beside the views: allocations, and the choice of a kernel
NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"}
NO_LAUNCH |= {"_reshape_alias", "_unsafe_view", "alias", "lift_fresh"}
NO_LAUNCH |= {"is_same_size", "set_", "resize_"}


def available() -> str | None:
    """Why this torch has no such device; None: it has."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 10) or not hasattr(
        backend_registration, "_setup_privateuseone_for_python_backend"
    ):
        return f"torch {torch.__version__} has no devices of Python"
    return None


class MixedDevices(AssertionError):
    """An operation was given tensors of the device and of the host."""


SETTINGS = {"inner": "cpu"}


class PretendTensor(Tensor):
    """A tensor of the device; `inner` has its values, or its shape alone."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> "PretendTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    def __init__(self, inner: Tensor, requires_grad: bool = False) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatched(func, args, kwargs or {})

    def tolist(self) -> Any:
        """One wait, whatever the length."""
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"PretendTensor({tuple(self.shape)}, {self.dtype})"


class PretendParameter(Parameter):
    """A parameter of the model on the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, requires_grad: bool = True) -> "PretendParameter":
        return PretendTensor.__new__(cls, data.inner, requires_grad)

    @property
    def data(self) -> Tensor:
        """What stands for the parameter, which gathered weights change."""
        return PretendTensor(self.inner)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Return a tensor in the parameter's place; gathered weights replace it."""
        self.inner = value.inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatched(func, args, kwargs or {})


def parameter(data: Tensor, requires_grad: bool = True) -> Parameter:
    """`Parameter`, of either kind of tensor."""
    if is_pretended(data):
        return PretendParameter(data, requires_grad)
    return Parameter(data, requires_grad)


def is_pretended(value: Any) -> bool:
    """Return True for a tensor or parameter of the pretended device."""
    return isinstance(value, PretendTensor | PretendParameter)


def _inner(value: Any) -> Any:
    if is_pretended(value):
        return value.inner
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device(SETTINGS["inner"])
    return value


def dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation of which some tensor is on the device, done on what is inside."""
    name = func.overloadpacket.__name__
    flat = tree_flatten((args, kwargs))[0]
    tensors = [one for one in flat if isinstance(one, Tensor)]
    _look_at(func, name, tensors, args, kwargs)
    if name == "_local_scalar_dense" and args[0].inner.device.type == "meta":
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
    if name in ("_to_copy", "copy_"):
        return _copied(func, name, args, kwargs)
    if name in OWN:
        result = OWN[name](*tree_map(_inner, args), **tree_map(_inner, kwargs))
    else:
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type != NAME:
        return result
    places = {id(one.inner): one for one in tensors if is_pretended(one)}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or is_pretended(value):
            return value
        if id(value) in places:  # changed in place
            return places[id(value)]
        SEEN.hold(value, name)
        return PretendTensor(value)

    return tree_map(wrapped, result)


def _look_at(
    func: Any, name: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse what mixes devices; count what waits and what is launched."""
    foreign = [one for one in tensors if not is_pretended(one) and one.dim() > 0]
    if foreign and name not in ("_to_copy", "copy_"):
        shapes = [tuple(one.shape) for one in foreign]
        raise MixedDevices(f"{name}: tensors of the host {shapes} beside those of the device")
    if name in WAITS:
        SEEN.waits.append(f"{name} at {where_now()}")
    elif name in ("index", "index_put", "index_put_") and any(
        one.dtype == torch.bool for one in tensors[1:]
    ):
        SEEN.waits.append(f"{name} by a mask at {where_now()}")
    if name not in NO_LAUNCH and not func.is_view:
        SEEN.launches[name] += 1


def _copied(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies are all that may cross devices. One of pageable memory, or one that is not said to
    be asynchronous, waits."""
    if name == "copy_":
        target, source = args[0], args[1]
        asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        crosses = is_pretended(target) != is_pretended(source)
        host = source if is_pretended(target) else target
        if crosses:
            _cross(host, bool(asynchronous))
        if _inner(target).device.type == "meta" or _inner(source).device.type != "meta":
            _inner(target).copy_(_inner(source))
        return target
    source = args[0]
    device = kwargs.get("device", source.device)
    options = {key: value for key, value in kwargs.items() if key != "device"}
    onto = torch.device(device).type == NAME
    if is_pretended(source) != onto:
        _cross(source if onto else None, bool(kwargs.get("non_blocking")))
    options.pop("pin_memory", None)
    inner = _inner(source)
    wanted = SETTINGS["inner"] if onto else "cpu"
    if inner.device.type == "meta" and wanted == "cpu":
        dtype = options.get("dtype") or inner.dtype
        return torch.ones(inner.shape, dtype=dtype)
    made = func(inner, **options, device=torch.device(wanted))
    if not onto:
        return made
    SEEN.hold(made, name)
    return PretendTensor(made)


def _cross(host: Tensor | None, asynchronous: bool) -> None:
    pinned = host is not None and is_pinned(host)
    if not asynchronous:
        SEEN.waits.append(f"copy at {where_now()}")
    if not pinned:
        SEEN.pageable.append(f"copy at {where_now()}")


PINNED: set[int] = set()


def is_pinned(host: Tensor) -> bool:
    """Return True if the memory of a host tensor counts as pinned."""
    return host.untyped_storage()._cdata in PINNED


def pin(host: Tensor) -> Tensor:
    """Call the memory of a host tensor pinned, for as long as it is there."""
    storage = host.untyped_storage()
    key = storage._cdata
    PINNED.add(key)
    weakref.finalize(storage, PINNED.discard, key)
    return host


# -- the device ---------------------------------------------------------------------------------

_LOCK = threading.Lock()
_KEPT: list[torch.library.Library] = []


def install() -> torch.device:
    """Have this process know the device; once."""
    with _LOCK:
        if not _KEPT:
            backend_registration._setup_privateuseone_for_python_backend(
                NAME, backend_module=MODULE
            )
            library = torch.library.Library("aten", "IMPL")
            library.impl("empty.memory_format", _empty, "PrivateUse1")
            library.impl("empty_strided", _empty_strided, "PrivateUse1")
            library.impl("_copy_from", _copy_from, "PrivateUse1")  # what `torch.tensor` does
            library.impl("scaled_dot_product_attention", fused, "AutogradPrivateUse1")
            # the library's own would change the shape of a tensor that is there
            for name in ("arange", "arange.start", "arange.start_step"):
                library.impl(name, _arange, "PrivateUse1")
            _KEPT.append(library)
    return torch.device(NAME, 0)


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    found = {k: kwargs[k] for k in ("dtype", "layout", "memory_format") if kwargs.get(k)}
    return {**found, "device": SETTINGS["inner"]}


def _empty(size: Any, **kwargs: Any) -> Tensor:
    inner = torch.empty(size, **_options(kwargs))
    SEEN.hold(inner, "empty")
    return PretendTensor(inner)


def _empty_strided(size: Any, stride: Any, **kwargs: Any) -> Tensor:
    inner = torch.empty_strided(size, stride, **_options(kwargs))
    SEEN.hold(inner, "empty_strided")
    return PretendTensor(inner)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _copied(None, "copy_", (target, source, non_blocking), {})


def _arange(*args: Any, **kwargs: Any) -> Tensor:
    inner = torch.arange(*args, **_options(kwargs))
    SEEN.hold(inner, "arange")
    SEEN.launches["arange"] += 1
    return PretendTensor(inner)


@contextlib.contextmanager
def pretended(inner: str = "cpu") -> Iterator[torch.device]:
    """The device, with what is on it on the host, or on "meta"; counted from zero."""
    device = install()
    with (
        mock.patch.dict(SETTINGS, inner=inner),
        mock.patch.multiple(
            queues,
            locked=lambda size: pin(torch.empty(size, dtype=torch.uint8)),
            pinned_like=lambda values: pin(torch.ones(values.shape, dtype=values.dtype)),
        ),
        mock.patch.object(buffer, "Parameter", parameter),
        mock.patch.object(host, "adds_wide", lambda device_type: device_type == NAME),
    ):
        for kept in (blocks._band, codes._level, codes._levels, codes._middles):
            kept.cache_clear()  # of what was on another inside
        SEEN.begin()
        yield device
        # autograd's thread of the device lets go of the last graph after the host has gone on
        gc.collect()
        time.sleep(0.05)
