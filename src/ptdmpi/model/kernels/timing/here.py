"""The measurement of kernels before the first training of a model on a machine (`run.kernels =
"auto"`).

The kernels are timed at the sizes of the model's own layers, on all ranks at the same time. The
result is stored in the user's cache, so the next run of the same model on the same machine measures
nothing. A run that has recorded its kernels (`agreement.FILE`) never measures.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ptdmpi.base.disk import read_file, user_cache, write_whole
from ptdmpi.base.toml import tables_of
from ptdmpi.config import Config, ModelConfig
from ptdmpi.model.kernels.choice import Entries
from ptdmpi.model.kernels.timing.bench import Bench, ProbeError
from ptdmpi.model.kernels.timing.quickest import MEASURES, TimedSizes, entries
from ptdmpi.plan.layer import describe
from ptdmpi.plan.machine.probed import KernelWays

if TYPE_CHECKING:  # this import would initialise MPI, which previews do not use
    from ptdmpi.comm.world import Axes, World

# The largest number of multiplications in one timed call of a kernel. At 50 GFLOP/s they take about
# 20 ms. If the layer's sizes need more multiplications, kernels are timed with fewer positions or
# heads, because this does not change which kernel is the fastest.
MOST = 5e8
LEAST_POSITIONS = 16
# The largest number of elements at which the loss and RMSNorm are timed, about 10 ms of work.
MOST_ELEMENTS = 2**21
# After this number of seconds no further kind of kernel is timed. On a machine without other
# programs, the whole measurement takes less time than this.
LIMIT_S = 8.0


def sizes_of(config: Config, vocab_size: int) -> TimedSizes:
    """Return the sizes of the layers' kernels on one rank, reduced to at most `MOST`
    multiplications for each kernel. The model's vocabulary has `vocab_size` entries."""
    model, tensor = config.model, config.parallel.tensor
    positions = config.batch.micro_size * model.seq_length // config.parallel.context
    width = (model.expert_hidden if model.experts else model.ffn_hidden) // tensor
    hidden = model.hidden
    shapes = (*_of_attention(model, tensor), (hidden, width), (width, hidden))
    linears = sorted({(_fewer(positions, i * o), i, o) for i, o in shapes}, key=math.prod)
    columns = -(-vocab_size // tensor)
    few = min(positions, max(1, MOST_ELEMENTS // hidden))
    length = min(model.seq_length, math.isqrt(int(MOST) // model.head_size))
    heads = int(MOST // (length**2 * model.head_size))
    return TimedSizes(
        lengths=(length,),
        heads=max(1, min(model.heads // tensor, heads)),
        head_size=model.head_size,
        linears=tuple(linears),
        gelu=(_fewer(positions, width), width),
        loss=(min(positions, max(1, MOST_ELEMENTS // columns)), columns),
        norm=() if describe.norm_part(model).shift else (few, hidden),
    )


def _of_attention(model: ModelConfig, tensor: int) -> Iterator[tuple[int, int]]:
    """Yield (inputs, outputs) of each linear of attention on one of `tensor` tensor ranks."""
    hidden, queries = model.hidden, model.attention_width // tensor
    yield model.values_width // tensor, hidden
    if not model.latent:
        keys = max(1, model.kv_heads // tensor) * model.head_size
        yield hidden, queries + 2 * keys
        return
    rank, rope = model.kv_lora_rank, model.rope_head_size
    yield hidden, model.q_lora_rank + rank + rope
    yield model.q_lora_rank or hidden, queries
    yield rank, (model.heads * (model.head_size - rope) + model.values_width) // tensor


def _fewer(positions: int, each: int) -> int:
    """Return the number of positions at which a kernel is timed, at most `positions`. The kernel
    needs `each` multiplications per position. The number is chosen so that there are at most `MOST`
    multiplications, but is not reduced below LEAST_POSITIONS."""
    return max(min(positions, LEAST_POSITIONS), min(positions, int(MOST // each)))


@dataclass(frozen=True)
class Cached:
    """A file with measurements of kernels in the user's cache. `key` identifies the kind of
    machine, the division of its cores among ranks, and the sizes at which the kernels were
    timed."""

    key: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """Return the path of the file with these measurements, in the user's cache."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return user_cache() / "kernels" / f"{digest[:16]}.toml"

    def read(self) -> dict[str, list[dict[str, Any]]] | None:
        """Return the measurements; None if there are no measurements for this key, or the file is
        damaged."""
        try:
            tree = tables_of(read_file(self.path))
            if tree.get("key") != self.key:
                return None
            return KernelWays.model_validate(tree.get("kernels")).entries()
        except (OSError, ValueError):
            return None

    def write(self, measured: Entries) -> str:
        """Store the measurements `measured`. Return the reason if the file cannot be written, else
        ""."""
        # imported only here, because a run with earlier measurements does not need this module
        import tomlkit

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, tomlkit.dumps({"key": self.key, "kernels": measured}))
        except OSError as error:
            return f"not kept in {self.path}: {error.strerror}"
        return ""


def measured_here(
    world: "World",
    axes: "Axes",
    sizes: TimedSizes,
    dtype: torch.dtype,
    *,
    say: Callable[[str], None],
) -> Entries:
    """Return the measurements of this machine for kernels of the given sizes: those in the cache of
    rank 0, if there are any, otherwise new ones. All ranks call this function, and get the same
    result. `say` prints one line.

    The time of a kernel is the time on the slowest rank. If the measurement takes longer than
    LIMIT_S seconds, for example because other programs are running, the remaining kinds of kernels
    are not measured. An incomplete result is not stored in the cache. If a kernel gives a wrong
    result, return an empty dict; kernels are then chosen from the table of the package.
    """
    cached = Cached(_key(world, dtype, sizes))
    known = world.on_root(cached.read)
    if known is not None:
        say(f"kernels as measured before ({cached.path})")
        return known
    bench = Bench(axes.world, torch.device("cpu"), world.local_size)
    bench.over = max
    start = time.monotonic()
    try:
        with bench.phase("kernels of this model", sizes.measurements(dtype)):
            measured = entries(bench, dtype, sizes, LIMIT_S)
    except ProbeError as error:
        say(f"kernels not measured: {error}")
        return {}
    seconds = time.monotonic() - start
    left_out = [kind for kind in MEASURES if kind not in measured]
    if left_out:
        say(f"kernels measured in {seconds:.1f} s; no time was left for {', '.join(left_out)}")
        return measured
    failure = world.on_root(lambda: cached.write(measured))
    say(f"kernels measured in {seconds:.1f} s ({failure or cached.path})")
    return measured


def _key(world: "World", dtype: torch.dtype, sizes: TimedSizes) -> dict[str, Any]:
    """Return everything that the measured times depend on: the processor, the cores and threads of
    a rank, the versions of torch and ptdmpi, the data type and the sizes."""
    has = torch.cpu.get_capabilities()
    return {
        "cpu": str(has.get("cpu_name", "")),
        "capabilities": sorted(name for name, value in has.items() if value is True),
        "cores": len(os.sched_getaffinity(0)),
        "ranks_per_node": world.local_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ptdmpi": importlib.metadata.version("ptdmpi"),
        "type": str(dtype).removeprefix("torch."),
        "sizes": json.loads(json.dumps(asdict(sizes))),
    }
