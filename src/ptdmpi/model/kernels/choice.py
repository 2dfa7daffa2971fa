"""Which kernel attention is computed with, on a device or on the host: by a table of measurements,
the same on all ranks, and kept with the run and its checkpoints, so that a run that goes on repeats
its bits, on another processor as well."""

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ptdmpi.base.disk import write_whole
from ptdmpi.comm.world import World
from ptdmpi.model import kernels
from ptdmpi.model.kernels import table

FILE = "kernels.json"  # in the run directory
# as the table has them -> as torch.nn.attention.SDPBackend does; FlashAttention 3 takes 2's place
BACKENDS = {"fa3": "FLASH_ATTENTION", "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
HOST = ("products", "library")  # every processor can do both
# what no other takes, such as float32
REST = ("EFFICIENT_ATTENTION", "MATH")


def offered(device: torch.device) -> list[str]:
    """The ways of the table's first entry for a device, quickest first, as far as they are here;
    none for a device that it does not know, such as the host."""
    vendor = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    for entry in table()["device_attention"]:
        if entry["device"] == vendor and entry["capability"] in ("", _capability(device)):
            return [way for way in entry["ways"] if way != "fa3" or _has_fa3()]
    return []


def _quickest(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The ways that this rank has, quickest first by the table."""
    if device.type != "cpu":
        return offered(device)
    return list(HOST if kernels.attention_by_products("cpu", dtype) else reversed(HOST))


def _capability(device: torch.device) -> str:
    """Such as "9.0" of an H100."""
    numbers = torch.get_device_module(device).get_device_capability(device)
    return ".".join(map(str, numbers))


def _has_fa3() -> bool:
    """Whether torch can hand attention to FlashAttention 3, whose package is one of its own."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return False
    attention: Any = importlib.import_module("torch.nn.attention")
    known = getattr(attention, "list_flash_attention_impls", list)
    return "FA3" in list(known())


def agreed(
    world: World,
    folder: Path,
    computing: tuple[torch.device, torch.dtype],
    before: Sequence[str] | None,
    say: Callable[[str], None],
) -> list[str]:
    """The ways of this run on all its ranks: those that the run directory `folder` has kept, else
    those of the checkpoint `before` it, as far as every rank has them; else, and where `before` is
    None, those of the table, which it keeps from now on. What is to be known of that goes to
    `say`. `computing`: where, and in which type."""
    device, dtype = computing
    here = world.control.allgather(_quickest(device, dtype))
    shared = [way for way in here[0] if all(way in ways for ways in here)]
    found = world.on_root(lambda: _kept(folder))
    kept = [] if before is None else found or list(before)
    stays = kept or shared
    if stays:
        world.on_root(lambda: write_whole(folder / FILE, json.dumps({"attention": stays})))
    if stays == shared:
        if shared and device.type != "cpu":  # of the host only what it would not do by itself
            say(f"attention by {', '.join(shared)}")
        return shared
    ways = [way for way in kept if way in shared]
    gone = [way for way in kept if way not in ways]
    lost = f"; before also by {', '.join(gone)}, which is not here: other bits" if gone else ""
    told = ways[:1] if device.type == "cpu" else ways
    own = ", ".join(shared[: len(told) or None]) or "what torch chooses"
    say(
        f"attention by {', '.join(told) or 'what torch chooses'}, as before{lost}; "
        f'run.kernels = "anew" takes what is quickest here: {own}'
    )
    return ways


def _kept(folder: Path) -> list[str] | None:
    try:
        return list(json.loads((folder / FILE).read_text(encoding="utf-8"))["attention"])
    except (OSError, ValueError, KeyError):
        return None


@contextlib.contextmanager
def attention_by(ways: Sequence[str]) -> Iterator[None]:
    """Attention by the first of `ways` that can do it; without any, as torch chooses.
    Process-wide for as long as it lasts, in whatever thread."""
    if not ways:
        yield
        return
    if ways[0] in HOST:
        with kernels.taken(ways[0] == "products"):
            yield
        return
    attention: Any = importlib.import_module("torch.nn.attention")
    names = dict.fromkeys([*(BACKENDS[way] for way in ways), *REST])
    backends = [getattr(attention.SDPBackend, name) for name in names]
    with attention.sdpa_kernel(backends, set_priority=True):
        if "fa3" not in ways:
            yield
            return
        attention.activate_flash_attention_impl("FA3")
        try:
            yield
        finally:
            attention.restore_flash_attention_impl()
