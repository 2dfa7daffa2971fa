"""The agreement of all ranks of a run on the kernels that they use. The table of measurements in
presets/kernels.toml says which kernels are the fastest.

The agreed kernels are stored in the run directory and in the checkpoints. A resumed run uses them
again, so that its results are bitwise equal, even on another processor.
"""

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from ptdmpi.base.disk import read_file, write_whole
from ptdmpi.model.kernels import choice as choices
from ptdmpi.model.kernels import compiler, host
from ptdmpi.model.kernels.choice import BY_LIBRARY, Entries, HostChoice, OneDnnLinears
from ptdmpi.model.kernels.fused import KINDS as TRITON_KINDS
from ptdmpi.model.kernels.host import table
from ptdmpi.model.kernels.stored import KINDS, Stored, read, sound, text_of, written

if TYPE_CHECKING:  # this import would initialise MPI, which previews do not use
    from ptdmpi.comm.world import World

FILE = "kernels.json"  # The file in the run directory that stores the agreed kernels.
# Attention backends: name in the table -> name in torch.nn.attention.SDPBackend. FlashAttention 3
# has the same SDPBackend name as FlashAttention 2, which it replaces in torch.
BACKENDS = {"fa3": "FLASH_ATTENTION", "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
# the attention backends for inputs, such as float32, that no backend in `BACKENDS` supports
REST = ("EFFICIENT_ATTENTION", "MATH")
# the kind of record that says whether the layers are compiled, and its two texts
LAYERS, COMPILED, UNCOMPILED = "layers", "compiled", "uncompiled"
# the kernels that every host can compute
ANYWHERE = replace(BY_LIBRARY, half="widened")


@dataclass(frozen=True)
class DeviceChoice:
    """The attention backends that a device tries, in this order, and the kinds of kernels that it
    computes in Triton. If `attention` is empty, torch chooses the backend. `compiled` says whether
    a measurement has chosen compiled layers; it is None if nothing was measured."""

    attention: tuple[str, ...] = ()
    triton: tuple[str, ...] = ()
    compiled: bool | None = None


Choice = HostChoice | DeviceChoice


class Abilities(NamedTuple):
    """The abilities of one rank's host. `fuses` is True if the host has oneDNN's fused call for
    linears of the run's data type. `multiplies` is True if the host multiplies numbers of this type
    without converting them to a wider type."""

    fuses: bool
    multiplies: bool


class Settled(NamedTuple):
    """The choice of kernels for all hosts, and the lines that report the choice. `keeps_slower` is
    True if the run keeps a kernel that it has used before, although another kernel is faster."""

    choice: HostChoice
    lines: list[str]
    keeps_slower: bool


class Agreed(NamedTuple):
    """The kernels of a run. `kept` has the kernels that are stored for the run, in the form that
    the function `stored` returns. `taken` has the kernels that the run uses now."""

    kept: dict[str, list[str]]
    taken: Choice


def stored(choice: Choice) -> dict[str, list[str]]:
    """Return the dict that is stored in run directories and checkpoints for a choice of kernels:
    kind of kernel -> texts (see the file `stored.py`)."""
    if isinstance(choice, DeviceChoice):
        return _on_device(choice)
    return written(choice)


def _on_device(choice: DeviceChoice) -> dict[str, list[str]]:
    """Return the record of a device's kernels, which is stored for the run. Without kernels in
    Triton and without a measurement of compiled layers, the record is the same as in older
    versions."""
    kept = {"attention": list(choice.attention)}
    if choice.triton:
        kept["triton"] = list(choice.triton)
    if choice.compiled is not None:
        kept[LAYERS] = [COMPILED if choice.compiled else UNCOMPILED]
    return kept


def keep_layers(folder: Path, choice: DeviceChoice) -> str:
    """Add to the record of the run directory `folder` whether the layers are compiled. Return a
    warning if the record cannot be written, else "". Only rank 0 calls this function."""
    kept = {**(_kept(folder) or {}), LAYERS: _on_device(choice)[LAYERS]}
    return _not_written(folder / FILE, kept)


def offered(device: torch.device) -> tuple[str, ...]:
    """Return the attention backends that are available on a device, the fastest first. They are the
    backends of the first entry for this device in the table of measurements. For a device that is
    not in the table, such as the host, the result is empty."""
    ways = _entry("device_attention", device).get("ways", ())
    return tuple(way for way in ways if way != "fa3" or _has_fa3())


def offered_in_triton(device: torch.device) -> tuple[str, ...]:
    """Return the kinds of kernels that are faster in Triton than in PyTorch on a device, according
    to the first entry for this device in the table of measurements. The result is empty on the
    host, and if Triton is not available."""
    if not _has_triton(device):
        return ()
    return tuple(_entry("device_triton", device).get("kinds", ()))


def _has_triton(device: torch.device) -> bool:
    """Return True if this rank can compute kernels in Triton on a device."""
    return device.type == "cuda" and not compiler.missing_for_triton()


def _entry(kind: str, device: torch.device) -> Mapping[str, Any]:
    """Return the first entry for a kind of kernel on a device in the table of measurements; {} if
    there is none."""
    vendor = host.vendor(device.type)
    for entry in table()[kind]:
        if entry["device"] == vendor and entry["capability"] in ("", _capability(device)):
            return entry
    return {}


def _capability(device: torch.device) -> str:
    """Return the capability of a CUDA device, such as "9.0" for an H100."""
    numbers = torch.get_device_module(device).get_device_capability(device)
    return ".".join(map(str, numbers))


def _has_fa3() -> bool:
    """Return True if torch can use FlashAttention 3, which is in a separate package."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return False
    attention: Any = importlib.import_module("torch.nn.attention")
    known = getattr(attention, "list_flash_attention_impls", list)
    return "FA3" in list(known())


@dataclass(frozen=True)
class RunPlace:
    """The device of a run, the data type in which the run computes, and the measurements `own` of
    kernels on this machine. If `own` has measurements of a kind of kernel, they are used instead of
    those in presets/kernels.toml."""

    device: torch.device
    dtype: torch.dtype
    own: Entries


def agreed(
    world: "World",
    folder: Path,
    place: RunPlace,
    before: Stored | None,
    *,
    say: Callable[[str], None],
) -> Choice:
    """Return the kernels that all ranks of this run use on its device (`place`). All ranks must
    call `agreed`.

    The kernels are read from the run directory `folder`, or else from `before`, the kernels that
    the checkpoint of the run stores. A stored kernel is used again only if every rank has it;
    otherwise the kernel that was fastest in the measurements is chosen. If `before` is None, stored
    kernels are ignored. The chosen kernels are stored in the run directory, and `say` prints one
    line with the kernels and the reasons.
    """
    kept_here = world.on_root(lambda: _kept(folder))
    known: Stored = {}
    if before is not None:
        known = kept_here or sound(before) or {}
    if place.device.type == "cpu":
        settled = _on_hosts(world, place, known, say)
    else:
        settled = _on_devices(world, place.device, known, say)
    if any(settled.kept.values()):
        problem = world.on_root(lambda: _not_written(folder / FILE, settled.kept))
        if problem:
            say(problem)
    return settled.taken


def _not_written(path: Path, kept: Stored) -> str:
    """Store the kernels `kept` in the file `path`. If the file cannot be written, return a warning;
    otherwise return "". The run can continue, because its checkpoints store the kernels, too."""
    try:
        write_whole(path, json.dumps(kept))
    except OSError as error:
        return (
            f"warning: {path} cannot be written: {error.strerror}; the run goes on, and a start "
            "before its first checkpoint may choose other kernels"
        )
    return ""


def _on_hosts(world: "World", place: RunPlace, known: Stored, say: Callable[[str], None]) -> Agreed:
    """Return the host kernels that all ranks use: those that the run has used before (`known`), or
    else the fastest kernels of rank 0. A kernel that some rank lacks is replaced by one that every
    rank has: by PyTorch's kernel or, for products of 16-bit types, by products in float32."""
    dtype = place.dtype
    mine = Abilities(host.has_fused(dtype), host.multiplies("cpu", dtype))
    able = [Abilities(*each) for each in world.control.allgather(tuple(mine))]
    fastest = choices.measured_choice(dtype, place.own)
    if not able[0].multiplies:
        fastest = replace(fastest, half="widened")
    fastest = world.control.bcast(fastest)
    settled = _as_before(fastest, read(known), able, dtype)
    report = ", ".join(settled.lines)
    if settled.keeps_slower:
        report += '; run.kernels = "anew" chooses the fastest'
    say(report)
    return Agreed(written(settled.choice), settled.choice)


def _as_before(
    fastest: HostChoice, kept: Mapping[str, Any], able: list[Abilities], dtype: torch.dtype
) -> Settled:
    """Return the kernels that the run has used so far (`kept`), or the `fastest` kernels if `kept`
    has none. `able` has the abilities of all hosts. A kernel that some host cannot compute is
    replaced by one that every host can compute."""
    taken: dict[str, Any] = {}
    lines: list[str] = []
    changed = False
    for kind in KINDS:
        fresh = getattr(fastest, kind)
        wanted = _wanted(kind, fresh, kept)
        is_lost = not _can(kind, wanted, able)
        taken[kind] = wanted
        if is_lost:
            taken[kind] = getattr(ANYWHERE, kind)
        if kind == "half" and dtype not in host.HALF_TYPES:
            continue
        text = text_of(kind, taken[kind])
        line = f"{kind} by {text}"
        if kind == "half":
            line = f"half types {text}"
        if is_lost:
            line += f", because {text_of(kind, wanted)} is not available here"
            if "attention" in kept:
                line += ": the bits of results change"
        elif taken[kind] != fresh:
            changed = True
            line += f" (as before; fastest here: {text_of(kind, fresh)})"
        lines.append(line)
    return Settled(HostChoice(**taken), lines, changed)


def _wanted(kind: str, fresh: Any, kept: Mapping[str, Any]) -> Any:
    """Return the kernel of the kind `kind` that the run has used so far (`kept`). If no kernel is
    stored for the run, return the fastest kernel (`fresh`)."""
    if "attention" not in kept:
        return fresh
    if kind in kept:
        return kept[kind]
    # A run may have begun with an older version of ptdmpi, in which the kernel of this kind could
    # not be chosen. Such a run keeps PyTorch's kernel, so that its results stay bitwise equal. The
    # kind "half" is an exception: the older version multiplied numbers of 16-bit types either in
    # their own type or in float32, whichever was faster on the processor. `fresh` names the faster
    # one.
    if kind == "half":
        return fresh
    return getattr(BY_LIBRARY, kind)


def _can(kind: str, wanted: Any, able: list[Abilities]) -> bool:
    """Return True if the hosts of all ranks can compute the kernel `wanted` of the kind `kind`.
    `able` has the abilities of these hosts."""
    if kind == "linear" and wanted != OneDnnLinears():
        return all(each.fuses for each in able)
    if kind == "half" and wanted == "native":
        return all(each.multiplies for each in able)
    return True


def _on_devices(
    world: "World", device: torch.device, known: Stored, say: Callable[[str], None]
) -> Agreed:
    """Return the attention backends and the kinds of kernels in Triton that all ranks use in a run
    on devices, and whether the run has compiled layers. Only kernels that every rank has are used.
    `known` has the kernels that the run has used before."""
    kept, taken = _attention_on_devices(world, device, known, say)
    recorded = any(name in BACKENDS for name in known.get("attention", ()))
    before = known.get("triton", () if recorded else None)
    kept_kinds, kinds = _triton_on_devices(world, device, before, say)
    layers = known.get(LAYERS, ())
    compiled = COMPILED in layers if layers else None
    kept_choice = DeviceChoice(tuple(kept), kept_kinds, compiled)
    return Agreed(_on_device(kept_choice), DeviceChoice(taken, kinds, compiled))


def _triton_on_devices(
    world: "World",
    device: torch.device,
    before: Sequence[str] | None,
    say: Callable[[str], None],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two values: the kinds of kernels to store for the run as computed in Triton, and the
    kinds that all ranks compute in Triton now. `before` has the kinds that the run stored earlier;
    it is empty if the run stored no kinds, and None for a new run. A new run uses the kinds that
    are faster in Triton on every rank. If a rank lacks Triton, no rank computes in Triton."""
    here = world.control.allgather((offered_in_triton(device), _has_triton(device)))
    shared = tuple(kind for kind in here[0][0] if all(kind in kinds for kinds, _ in here))
    kept = shared
    if before is not None:
        kept = tuple(kind for kind in before if kind in TRITON_KINDS)
    if kept and not all(able for _, able in here):
        say(
            f"Triton is not available here, so PyTorch computes {', '.join(kept)}; the bits of "
            "results change"
        )
        return kept, ()
    if kept or shared:
        text = f"by Triton: {', '.join(kept) or 'nothing'}"
        if kept != shared:
            anew = ", ".join(shared) or "nothing"
            text += f', as before; run.kernels = "anew" chooses the fastest here: {anew}'
        say(text)
    return kept, kept


def _attention_on_devices(
    world: "World", device: torch.device, known: Stored, say: Callable[[str], None]
) -> tuple[list[str], tuple[str, ...]]:
    """Return two values: the attention backends that are stored for the run, and the backends that
    the run uses now. `known` has the backends that were stored earlier, if there are any. The
    backends used now are the stored backends that every rank has, in the stored order."""
    here = world.control.allgather(offered(device))
    shared = [name for name in here[0] if all(name in other for other in here)]
    kept = [name for name in known.get("attention", ()) if name in BACKENDS]
    if not kept or kept == shared:
        if shared:
            say(f"attention by {', '.join(shared)}")
        return shared, tuple(shared)
    taken = [name for name in kept if name in shared]
    gone = [name for name in kept if name not in taken]
    lost = ""
    if gone:
        lost = f"; not available here: {', '.join(gone)} (the bits of results change)"
    anew = ", ".join(shared) or "what torch chooses"
    say(
        f"attention by {', '.join(taken) or 'what torch chooses'}, as before{lost}; "
        f'run.kernels = "anew" chooses the fastest here: {anew}'
    )
    return kept, tuple(taken)


def is_recorded(folder: Path) -> bool:
    """Return True if the run directory `folder` has a record of the run's kernels."""
    return bool(_kept(folder))


def _kept(folder: Path) -> Stored | None:
    """Return the kernels that the run directory `folder` records. Return None if it has no record,
    or only a damaged one."""
    try:
        return sound(json.loads(read_file(folder / FILE)))
    except (OSError, ValueError, RecursionError):
        return None


@contextlib.contextmanager
def trying(backends: tuple[str, ...]) -> Iterator[None]:
    """Return a context in which torch tries the attention backends `backends` in this order. If
    `backends` is empty, torch chooses the backend. The order is a setting of torch for the whole
    process."""
    if not backends:
        yield
        return
    attention: Any = importlib.import_module("torch.nn.attention")
    names = dict.fromkeys([*(BACKENDS[name] for name in backends), *REST])
    order = [getattr(attention.SDPBackend, name) for name in names]
    _first_attention()
    with attention.sdpa_kernel(order, set_priority=True):
        if "fa3" not in backends:
            yield
            return
        attention.activate_flash_attention_impl("FA3")
        try:
            yield
        finally:
            attention.restore_flash_attention_impl()


def _first_attention() -> None:
    """Compute attention once on a GPU, if there is one. At the first attention of a process on a
    GPU, PyTorch sets its own order of backends, which would overwrite an order that the caller has
    set. So the caller calls this function first, and then sets its order."""
    if torch.cuda.is_available():
        some = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
        F.scaled_dot_product_attention(some, some, some)
