"""The contents of a rank's memory in a layout, and, if the layout does not fit, the changes of
settings with which it would fit."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ptdmpi.base.near import divisors
from ptdmpi.base.words import counted
from ptdmpi.config import Config, Layout
from ptdmpi.config.methods import may_share, replicas_differ, toml_text
from ptdmpi.config.zero import covers_gradients
from ptdmpi.plan.cost.footprint import Footprint
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layer.legality import is_legal
from ptdmpi.plan.shape.parameters import parameter_count, trained_count

MOST_CHANGES = 3  # The largest number of settings that are changed together.
# The largest number of sizes that are tried for a microbatch, or for an axis of ranks.
MOST_SIZES = 8
GROWTHS = (1, 2, 4, 8, 16, 32, 64)  # Factors by which the number of ranks may grow.
# configuration key -> field of `Layout`, if their names differ
FIELDS = {"recompute.mode": "recompute", "recompute.layers": "recompute_layers"}
Keys = dict[str, int | str | bool]


@dataclass(frozen=True)
class Step:
    """A training run whose memory is computed: its layout, its global batch, and its memory model.

    `most_zero` is the highest stage of ZeRO that the run may use. `may_offload` is True if the
    run's state may be stored outside the device. `host_capacity_bytes` is the host memory of one
    rank.
    """

    memory: MemoryModel
    layout: Layout
    batch: int
    most_zero: int = 3
    may_offload: bool = True
    host_capacity_bytes: float = math.inf

    @classmethod
    def of(
        cls,
        config: Config,
        vocab_size: int,
        *,
        kernels: Mapping[str, int] | None = None,
        on_host: bool = True,
        nodes: int = 1,
    ) -> "Step":
        """Return the `Step` of a complete configuration (a result of `resolve`) on `nodes` nodes.
        `kernels` has the fields of `Software` that depend on the kernels of the run, such as
        `wide_products`. `on_host` is True if the model is trained on CPUs."""
        memory = MemoryModel.of(config, vocab_size, kernels=kernels, on_host=on_host, nodes=nodes)
        section, whole = config.data_parallel, config.optimizer.has_matrices
        most_zero = max(may_share(section, config.run.reproducible))
        offloads = not (replicas_differ(section) or whole)
        return cls(
            memory=memory,
            layout=config.layout,
            batch=config.batch.global_size,
            most_zero=most_zero,
            may_offload=offloads,
        )

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches that each data rank has in a step."""
        return self.layout.microbatches(self.batch)

    @property
    def model_ranks(self) -> int:
        """Return the number of ranks that compute one sample together: the product of the tensor,
        context and pipeline axes."""
        return self.layout.model_ranks

    def largest(self) -> tuple[int, Footprint]:
        """Return (pipeline rank, its peak memory) for the rank that needs the most memory."""
        return self.memory.largest(self.layout, self.microbatches)

    def peak(self, rank: int) -> Footprint:
        """Return the memory of pipeline rank `rank` at its peak."""
        return self.memory.peak(self.layout, rank, self.microbatches)

    def fits(self, capacity_bytes: float) -> bool:
        """Return True if every pipeline rank has enough memory on its device, which has
        `capacity_bytes` bytes, and on its host."""
        if self.on_hosts() > self.host_capacity_bytes:
            return False
        return self.memory.fits(self.layout, self.microbatches, capacity_bytes)

    def on_hosts(self) -> int:
        """Return the host memory, in bytes, that state and its copies take on the rank that needs
        the most host memory. Only host memory that is separate from the device's memory is
        counted."""
        if not self.memory.uses_host(self.layout):
            return 0
        ranks = self.memory.distinct_ranks(self.layout)
        return max(self.memory.host_bytes(self.layout, rank) for rank in ranks)

    def changed(self, keys: Keys, grown: int) -> "Step | None":
        """Return a copy of this `Step` with `grown` times as many ranks and with new settings:
        `keys` maps configuration keys to values. Return None if its layout is not legal."""
        fields: dict[str, Any] = {
            FIELDS.get(key, key.partition(".")[2]): value for key, value in keys.items()
        }
        for key in ("recompute_layers", "shard_group"):
            if fields.get(key) == "all":
                fields[key] = None
        layout, ranks = replace(self.layout, **fields), self.layout.ranks * grown
        if ranks % layout.model_ranks:
            return None
        layout = replace(layout, data=ranks // layout.model_ranks)
        if not is_legal(layout, self.memory.model, self.batch):
            return None
        return replace(self, layout=layout)


def changes(step: Step, capacity_bytes: float) -> Iterator[tuple[str, Footprint]]:
    """Yield, for each set of changes that makes the run fit on devices with `capacity_bytes` bytes
    of memory, the new settings and the memory that the run then needs.

    Sets that need no additional ranks come first. Among sets for the same number of ranks, those
    with fewer changes come first. Among sets with equally many changes, those that add less time to
    a step come first. A set is left out if it contains an earlier set, or changes the same keys as
    an earlier set.
    """
    fitting: list[Keys] = []
    for grown in GROWTHS:
        for count in range(1, MOST_CHANGES + 1):
            for chosen in itertools.combinations(_steps(step, grown), count):
                keys = {key: value for change in chosen for key, value in change.items()}
                known = (
                    other.keys() == keys.keys() or other.items() <= keys.items()
                    for other in fitting
                )
                if len(keys) < count or any(known):
                    continue
                tried = step.changed(keys, grown)
                if tried is None or _least_state_bytes(tried) > capacity_bytes:
                    continue
                if not tried.fits(capacity_bytes):
                    continue
                fitting.append(keys)
                words = [f"{key} = {toml_text(value)}" for key, value in keys.items()]
                if grown > 1:
                    words.append(counted(tried.layout.ranks, "rank"))
                yield ", ".join(words), tried.largest()[1]


def _least_state_bytes(step: Step) -> float:
    """Return the mean bytes of state per rank, over the ranks that divide the model among
    themselves. However the model is divided, at least one rank has at least as many bytes as the
    mean."""
    memory, model = step.memory, step.memory.model
    count, frozen = parameter_count(model, memory.vocab_size), 0.0
    if model.adapt.adapts:
        train = trained_count(model, memory.vocab_size)
        rest = count - train
        count, frozen = train, memory.least_frozen_bytes(step.layout, rest, model.layers, 1)
    return (count * memory.parameter_bytes(step.layout) + frozen) / step.model_ranks


def _some(numbers: list[int]) -> list[int]:
    """Return at most `MOST_SIZES` of the numbers: all of them, or an evenly spaced selection that
    includes the first and the last number."""
    last = len(numbers) - 1
    if last < MOST_SIZES:
        return numbers
    return [numbers[round(last * i / (MOST_SIZES - 1))] for i in range(MOST_SIZES)]


def _steps(step: Step, grown: int) -> list[Keys]:
    """Return the single changes of settings that may reduce the memory of a rank if the run has
    `grown` times as many ranks. Changes that add less time to a step come first."""
    layout = step.layout
    steps: list[Keys] = []
    if layout.recompute == "none":
        steps.append({"recompute.mode": "selective"})
    partitions = layout.partition_activations
    if layout.tensor > 1 and not layout.sequence_parallel:
        # Sequence parallelism divides all activations that `partition_activations` divides, and
        # more, so `partition_activations` is not needed in addition.
        divides: Keys = {"parallel.sequence_parallel": True}
        if partitions:
            divides["recompute.partition_activations"] = False
        steps.append(divides)
    # ZeRO 1 comes early, because it costs no time: it sends no more bytes than ZeRO 0, and also
    # divides the optimizer's work among the ranks.
    sharded = range(layout.zero + 1, step.most_zero + 1)
    if layout.copies * grown == 1:
        sharded = range(0)
    steps += [{"parallel.zero": zero} for zero in sharded if not covers_gradients(zero)]
    smaller = _some(list(reversed(divisors(layout.micro_size)[:-1])))
    steps += [{"batch.micro_size": size} for size in smaller]
    if layout.schedule == "gpipe":
        steps.append({"parallel.schedule": "1f1b"})
    if layout.recompute_layers is not None:
        steps.append({"recompute.layers": "all"})
    if layout.recompute != "full":
        steps.append({"recompute.mode": "full"})
    elif layout.tensor > 1 and not layout.sequence_parallel and not partitions:
        steps.append({"recompute.partition_activations": True})
    # ZeRO 2 and 3 come late, because they send gradients or weights for each microbatch, where ZeRO
    # 0 and 1 send them once in a step.
    steps += [{"parallel.zero": zero} for zero in sharded if covers_gradients(zero)]
    if layout.shard_group is not None:
        steps.append({"parallel.shard_group": "all"})
    if step.may_offload:
        steps += [{"parallel.offload": place} for place in _places(step)]
    for factor in _some(divisors(layout.data * grown)[1:]):
        steps.append({"parallel.tensor": layout.tensor * factor})
        steps.append({"parallel.pipeline": layout.pipeline * factor})
    return steps


def _places(step: Step) -> tuple[str, ...]:
    """Return the values of parallel.offload to try instead of the present value. The new value may
    move the state to a slower memory, which frees memory of the device, or back to the device,
    which frees the host's memory."""
    places: tuple[str, ...] = ("none", "optimizer", "disk")
    if step.memory.on_host:
        places = ("disk",)
    return tuple(place for place in places if place != step.layout.offload)


def explain(step: Step, capacity_bytes: float) -> str:
    """Return a text that explains the memory of the rank that needs the most memory: its parts, and
    up to three sets of changes with which the run would fit. A device has `capacity_bytes` bytes.
    """
    rank, peak = step.largest()
    lines = [
        f"memory of pipeline rank {rank}, which needs the most: "
        f"{size(peak.total)}, and a rank has at most {size(capacity_bytes)}"
    ]
    parts = [(name, n) for name, n in peak.parts.items() if n or name != "runtime"]
    lines += [f"  {name:<12}{size(amount):>12}" for name, amount in parts]
    if (on_hosts := step.on_hosts()) > step.host_capacity_bytes:
        settings = [f'parallel.offload = "{step.layout.offload}"']
        if step.memory.method.copies:
            settings.append("checkpoint.memory_every_steps")
        lines.append(
            f"memory of the host: with {' and '.join(settings)} a rank keeps "
            f"{size(on_hosts)} there, and may use at most {size(step.host_capacity_bytes)}"
        )
    fitting = list(itertools.islice(changes(step, capacity_bytes), 3))
    if fitting:
        lines.append("each of these changes would be enough:")
        lines += [f"  {text}: {size(after.total)}" for text, after in fitting]
    else:
        lines.append("no layout on up to 64 times the ranks would fit")
    return "\n".join(lines)


def size(amount: float) -> str:
    """Return a number of bytes as text with a unit: 1234567 -> 1.2 MiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:,.1f} {unit}"
    return f"{amount:,.0f} bytes"
