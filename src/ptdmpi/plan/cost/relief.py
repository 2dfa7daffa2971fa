"""What fills a rank's memory under a configuration, and which changes would make it fit."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ptdmpi.config import Config
from ptdmpi.config.rules import divisors, rules
from ptdmpi.plan.cost import memory
from ptdmpi.plan.cost.counts import parameter_count
from ptdmpi.plan.cost.state import state_bytes

PARTS = {
    "weights": ("weights", "master_weights"),
    "gradients": ("gradients",),
    "optimizer": ("first_moments", "second_moments"),
}
MOST_CHANGES = 3  # that are made at once
GROWTHS = (1, 2, 4, 8, 16, 32, 64)  # of the number of ranks


@dataclass(frozen=True)
class Need:
    """Bytes of one rank at its peak, part by part."""

    pipeline_rank: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def need(config: Config, vocab_size: int, pipeline_rank: int, wide: bool = False) -> Need:
    """Of one pipeline rank. `wide`: half types are multiplied in float32 (`Sizes`)."""
    sizes = memory.Sizes(config, wide)
    state = {item.name: item.bytes for item in state_bytes(sizes, vocab_size, pipeline_rank)}
    parts = {name: sum(state.get(item, 0) for item in items) for name, items in PARTS.items()}
    parts["activations"] = memory.peak_activation_bytes(sizes, vocab_size, pipeline_rank)
    return Need(pipeline_rank, parts)


def largest(config: Config, vocab_size: int, wide: bool = False) -> Need:
    """Of the pipeline rank that needs most."""
    ranks = range(config.parallel.pipeline)
    return max((need(config, vocab_size, rank, wide) for rank in ranks), key=lambda n: n.total)


def changes(config: Config, vocab_size: int, capacity_bytes: float) -> Iterator[tuple[str, Need]]:
    """(what to set, what is needed then) of changes that fit: as few at once as possible, those
    that cost least time first; at last with more ranks. None holds another one, and no two name the
    same keys."""
    fitting: list[dict[str, object]] = []
    whole = _least_state_bytes(config, vocab_size)
    for grown in GROWTHS:
        for count in range(1, MOST_CHANGES + 1):
            for chosen in itertools.combinations(_steps(config, grown), count):
                keys = {key: value for step in chosen for key, value in step.items()}
                known = (
                    one.keys() == keys.keys() or one.items() <= keys.items() for one in fitting
                )
                if len(keys) < count or any(known):
                    continue
                tensor = keys.get("parallel.tensor", config.parallel.tensor)
                pipeline = keys.get("parallel.pipeline", config.parallel.pipeline)
                if whole > capacity_bytes * tensor * pipeline:
                    continue
                tried = _set(config, keys, grown)
                if tried is None or not _fits(tried, vocab_size, capacity_bytes):
                    continue
                fitting.append(keys)
                words = [f"{key} = {_toml(value)}" for key, value in keys.items()]
                words += [f"{_ranks(tried)} ranks"] if grown > 1 else []
                yield ", ".join(words), largest(tried, vocab_size)


def _least_state_bytes(config: Config, vocab_size: int) -> int:
    """Of the whole model. Over t p ranks no split has less on each of them than their mean."""
    state = state_bytes(memory.Sizes(config), vocab_size, 0)
    return parameter_count(config.model, vocab_size) * sum(item.element_bytes for item in state)


def _ranks(config: Config) -> int:
    return config.parallel.tensor * config.parallel.pipeline * config.data_size


def _fits(config: Config, vocab_size: int, capacity_bytes: float) -> bool:
    """Of all pipeline ranks; the first one, which keeps most microbatches, is asked first."""
    ranks = range(config.parallel.pipeline)
    return all(need(config, vocab_size, rank).total <= capacity_bytes for rank in ranks)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _steps(config: Config, grown: int) -> list[dict[str, object]]:
    """Changes of a configuration on `grown` times its ranks, the cheapest first."""
    parallel, batch = config.parallel, config.batch
    steps: list[dict[str, object]] = []
    if config.recompute.mode == "none":
        steps.append({"recompute.mode": "selective"})
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        steps.append({"parallel.sequence_parallel": True})
    steps += [{"batch.micro_size": b} for b in reversed(divisors(batch.micro_size)[:-1])]
    if parallel.schedule == "gpipe":
        steps.append({"parallel.schedule": "1f1b"})
    if config.recompute.mode != "full":
        steps.append({"recompute.mode": "full"})
    room = config.data_size * grown
    for factor in divisors(room)[1:]:
        steps.append({"parallel.tensor": parallel.tensor * factor})
        steps.append({"parallel.pipeline": parallel.pipeline * factor})
    return steps


def _set(config: Config, keys: dict[str, object], grown: int) -> Config | None:
    """The configuration on `grown` times its ranks with the keys set, or None if not legal."""
    ranks = _ranks(config) * grown
    for key, value in keys.items():
        section, _, name = key.partition(".")
        config = config.replace(section, **{name: value})
    model_ranks = config.parallel.tensor * config.parallel.pipeline
    if ranks % model_ranks:
        return None
    config = config.replace("parallel", data=ranks // model_ranks).replace("run", spare_ranks=0)
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    return None if any(rules(sections, ranks)) else config


def explain(config: Config, vocab_size: int, capacity_bytes: float, wide: bool = False) -> str:
    """The breakdown of the rank that needs most, and three changes that would fit."""
    found = largest(config, vocab_size, wide)
    lines = [
        f"memory of pipeline rank {found.pipeline_rank}, which needs most: "
        f"{size(found.total)}, and a rank has at most {size(capacity_bytes)}"
    ]
    lines += [f"  {name:<12}{size(amount):>12}" for name, amount in found.parts.items()]
    fitting = list(itertools.islice(changes(config, vocab_size, capacity_bytes), 3))
    if fitting:
        lines.append("what would fit, by itself:")
        lines += [f"  {text}: {size(after.total)}" for text, after in fitting]
    else:
        lines.append("no layout on up to 64 times the ranks would fit")
    return "\n".join(lines)


def size(amount: float) -> str:
    """1234567 -> 1.2 MiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:,.1f} {unit}"
    return f"{amount:,.0f} bytes"
