"""Which kernels a layer's parts are computed with, on a device or on the host: by a table of
measurements, the same on all ranks, and kept with the run and its checkpoints, so that a run that
goes on repeats its bits, on another processor as well."""

import contextlib
import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ptdmpi.base.disk import write_whole
from ptdmpi.model import kernels
from ptdmpi.model.kernels import table

if TYPE_CHECKING:  # the import initialises MPI, which previews do without
    from ptdmpi.comm.world import World

FILE = "kernels.json"  # in the run directory
# as the table has them -> as torch.nn.attention.SDPBackend does; FlashAttention 3 takes 2's place
BACKENDS = {"fa3": "FLASH_ATTENTION", "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
# Of each kind, quickest first. A host has one of each, as `HostWays` has them: "products" (over 128
# queries, "products:256:kept" over as many, probabilities kept; other words are in OF_PRODUCTS),
# "library" or "library:1024" (at once from 1024 positions on); "library" or
# "onednn:output:input_gradient"; half types as they are or widened.
Ways = Mapping[str, Sequence[str]]
ON_HOSTS = {
    "attention": ("products", "library"),
    "linear": ("onednn", "library"),
    "gelu": ("sigmoid", "library"),
    "half": ("native", "widened"),
}
# a word behind the size -> of `HostWays`
OF_PRODUCTS = {"kept": "keeps", "library_forward": "library_forward", "fpmath": "fpmath"}
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
    world: "World",
    folder: Path,
    computing: tuple[torch.device, torch.dtype],
    before: Ways | None,
    say: Callable[[str], None],
    own: kernels.Entries | None = None,
) -> dict[str, list[str]]:
    """The ways of this run on all its ranks: those that the run directory `folder` has kept, else
    those of the checkpoint `before` it, as far as every rank has them; else, and where `before` is
    None, the quickest by the entries `own` and the table, which it keeps from now on. What is to be
    known of that goes to `say`. `computing`: where, and in which type."""
    device, dtype = computing
    found = world.on_root(lambda: _kept(folder))
    known = {} if before is None else found or before
    if device.type == "cpu":
        here = written(kernels.measured_ways(dtype, own or {}))
        stays = ways = _on_hosts(world, here, known, dtype, say)
    else:
        stays, ways = _on_devices(world, device, known, say)
    if any(stays.values()):
        world.on_root(lambda: write_whole(folder / FILE, json.dumps(stays)))
    return ways


def _on_hosts(
    world: "World",
    here: dict[str, list[str]],
    known: Ways,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> dict[str, list[str]]:
    """Every rank computes as the first would, or as before; but all have the library's ways, and
    can widen."""
    can = [("onednn", kernels.has_fused()), ("native", kernels.multiplies("cpu", dtype))]
    able = [dict(one) for one in world.control.allgather(can)]
    here = here | {"half": ["native" if able[0]["native"] else "widened"]}
    quickest: dict[str, list[str]] = world.control.bcast(here)
    kept = {
        kind: [way for way in known.get(kind, ()) if way.partition(":")[0] in names]
        for kind, names in ON_HOSTS.items()
    }
    ways, told, changed = {}, [], False
    for kind, fresh in quickest.items():
        # a run of before there was a choice keeps to the library, so that its bits repeat; its half
        # types were as the processor had them
        old = fresh if kind == "half" else ["library"]
        wanted = (kept[kind] or old if kept["attention"] else fresh)[0]
        lost = not all(one.get(wanted.partition(":")[0], True) for one in able)
        instead = "widened" if kind == "half" else "library"
        ways[kind] = [instead if lost else wanted]
        if kind == "half" and dtype not in kernels.HALF_TYPES:
            continue
        told.append(
            f"half types {ways[kind][0]}" if kind == "half" else f"{kind} by {ways[kind][0]}"
        )
        if lost:
            told[-1] += f", for {wanted} is not here"
            told[-1] += ": other bits than before" if kept["attention"] else ""
        elif ways[kind] != fresh:
            changed = True
            told[-1] += f" (as before; quickest here: {fresh[0]})"
    say(", ".join(told) + ('; run.kernels = "anew" takes what is quickest' if changed else ""))
    return ways


def _on_devices(
    world: "World", device: torch.device, known: Ways, say: Callable[[str], None]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(what the run keeps, what it takes now): what one rank lacks none makes use of."""
    here = world.control.allgather(offered(device))
    shared = [way for way in here[0] if all(way in other for other in here)]
    kept = [way for way in known.get("attention", ()) if way in BACKENDS]
    if not kept or kept == shared:
        if shared:
            say(f"attention by {', '.join(shared)}")
        return {"attention": shared}, {"attention": shared}
    ways = [way for way in kept if way in shared]
    gone = [way for way in kept if way not in ways]
    lost = f"; before also by {', '.join(gone)}, which is not here: other bits" if gone else ""
    anew = ", ".join(shared) or "what torch chooses"
    say(
        f"attention by {', '.join(ways) or 'what torch chooses'}, as before{lost}; "
        f'run.kernels = "anew" takes what is quickest here: {anew}'
    )
    return {"attention": kept}, {"attention": ways}


def written(ways: kernels.HostWays) -> dict[str, list[str]]:
    """As a run keeps them."""
    attention = "products" if ways.products else "library"
    if ways.products:
        words = [word for word, name in OF_PRODUCTS.items() if getattr(ways, name)]
        if words or ways.block != kernels.QUERY_BLOCK:
            attention = ":".join((attention, str(ways.block), *words))
    if not ways.products and ways.whole_from < math.inf:
        attention += f":{ways.whole_from:.0f}"
    least = ways.output, ways.input_gradient
    linear = "library" if least == (math.inf, math.inf) else f"onednn:{least[0]:.0f}:{least[1]:.0f}"
    gelu = "sigmoid" if ways.gelu_by_sigmoid else "library"
    half = "widened" if ways.widened else "native"
    return {"attention": [attention], "linear": [linear], "gelu": [gelu], "half": [half]}


def host_ways(kinds: Ways) -> kernels.HostWays:
    """What `written` wrote; linears of before sizes were kept, at all sizes."""
    (attention, *sizes), (linear, *least) = (
        kinds[kind][0].split(":") for kind in ("attention", "linear")
    )
    products, size = attention == "products", sizes[0] if sizes else ""
    if linear != "onednn":
        least = ["inf", "inf"]
    output, input_gradient = map(float, least or ("0", "0"))
    return kernels.HostWays(
        products=products,
        whole_from=math.inf if products else float(size or "inf"),
        output=output,
        input_gradient=input_gradient,
        block=int(size or kernels.QUERY_BLOCK) if products else kernels.QUERY_BLOCK,
        **{name: word in sizes for word, name in OF_PRODUCTS.items()},
        gelu_by_sigmoid=kinds["gelu"][0] == "sigmoid",
        widened=kinds["half"][0] == "widened",
    )


def _kept(folder: Path) -> Ways | None:
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@contextlib.contextmanager
def computing_by(kinds: Ways) -> Iterator[None]:
    """The host by its ways, a device by the first of attention that can do it; without any, as
    torch chooses. Process-wide for as long as it lasts, in whatever thread."""
    ways = kinds.get("attention", ())
    if not ways:
        yield
        return
    if "linear" in kinds:
        with kernels.taken(host_ways(kinds)):
            yield
        return
    attention: Any = importlib.import_module("torch.nn.attention")
    names = dict.fromkeys([*(BACKENDS[way] for way in ways), *REST])
    backends = [getattr(attention.SDPBackend, name) for name in names]
    _first_attention()
    with attention.sdpa_kernel(backends, set_priority=True):
        if "fa3" not in ways:
            yield
            return
        attention.activate_flash_attention_impl("FA3")
        try:
            yield
        finally:
            attention.restore_flash_attention_impl()


def _first_attention() -> None:
    """PyTorch sets an order of its own at a process's first attention on a GPU, in place of one
    that was asked for before."""
    if torch.cuda.is_available():
        some = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
        F.scaled_dot_product_attention(some, some, some)
