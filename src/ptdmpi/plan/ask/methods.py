"""The savings and the costs of communication-efficient data-parallel methods on a cluster.

A method that does not sum the complete gradients of all replicas changes the update of the weights,
so a training may need more steps. The answer gives the time of a step with the method, and a
break-even percentage. If the method needs this many percent more steps, the training takes as long
as with complete gradients. With a large break-even percentage, the method may save time, but only a
training can show how many more steps the method really needs.
"""

from collections.abc import Iterator
from typing import Any

from ptdmpi.base.errors import InputError
from ptdmpi.base.words import counted
from ptdmpi.config import DataParallelConfig
from ptdmpi.config.layout import Layout
from ptdmpi.config.zero import covers_state
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.cost.methods import MethodAxis, MethodTimes, sent_bytes
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.machine.kernels import Group

LEAST = {"method": "compressed", "compressor": "top_k", "ratio": 0.01}
# Name of a method in the answer -> the section [data_parallel] of a configuration that selects this
# method. The picture of the time by the number of replicas shows only the first DRAWN methods.
METHODS: dict[str, dict[str, object]] = {
    "all_reduce": {},
    "parameter_server": {"method": "parameter_server"},
    "decentralized, one-peer exponential": {
        "method": "decentralized",
        "topology": "one_peer_exponential",
    },
    "compressed, top_k 1 %, mem_sgd": LEAST | {"error_feedback": "mem_sgd"},
    "ring": {"method": "ring"},
    "decentralized, ring": {"method": "decentralized", "topology": "ring"},
    "decentralized, exponential": {"method": "decentralized", "topology": "exponential"},
    "decentralized, one-peer, all every 16": {
        "method": "decentralized",
        "topology": "one_peer_exponential",
        "average_every": 16,
    },
    "local, K = 8": {"method": "local", "local_steps": 8},
    "local, K = 64": {"method": "local", "local_steps": 64},
    "compressed, top_k 1 %, double_squeeze": LEAST | {"error_feedback": "double_squeeze"},
    "compressed, top_k 1 %, neolithic R = 2": LEAST | {"error_feedback": "neolithic"},
    "compressed, int4, double_squeeze": {
        "method": "compressed",
        "compressor": "int4",
        "error_feedback": "double_squeeze",
    },
    "compressed, power_sgd rank 2, mem_sgd": {
        "method": "compressed",
        "compressor": "power_sgd",
        "error_feedback": "mem_sgd",
    },
}
DRAWN = 4  # Number of methods in the picture of the time by the number of replicas.
MOST_DRAWN = 1024  # Largest number of replicas in the picture.


def sections() -> Iterator[tuple[str, DataParallelConfig]]:
    """Yield (name, section [data_parallel]) for each method that is compared."""
    for name, keys in METHODS.items():
        yield name, DataParallelConfig.model_validate(keys)


def answer(pricer: Pricer, layout: Layout) -> Reply:
    """Return an answer that compares the methods in METHODS: their step times, sent bytes and
    memory in one layout. Raises InputError if the layout has only one replica, or if it shards the
    optimizer state."""
    if layout.data == 1:
        raise InputError(
            f"layout {layout}: with d = 1 nothing is sent over the data axis; legal: a --layout "
            "with d above 1"
        )
    if covers_state(layout.zero):
        raise InputError(f"layout {layout}: methods other than all_reduce need zero = 0")
    plain = pricer.price(layout)
    entries, lines = _priced(pricer, layout, plain)
    best = max(entries, key=lambda entry: entry["more_steps"])
    share = plain.parts.data / plain.step_time_s
    where = f"{counted(layout.ranks, 'rank')} of {pricer.cluster.name}: {layout}"
    return Reply(
        short=f"The sum of all gradients takes {1e3 * plain.parts.data:.1f} ms of a step of "
        f"{1e3 * plain.step_time_s:.1f} ms ({share:.1%}): a method without messages could do "
        f"{share / (1 - share):.1%} more steps in the same time. The shortest step has "
        f"{best['method']}.",
        rows=[
            ["method", "data axis", "sent a step", "step", "break-even", "memory"],
            *map(_row, entries),
        ],
        numbers={"layout": str(layout), "methods": entries},
        title=f"{pricer.model.name} on {where}",
        panels=[
            Panel("replicas", "ms of the data axis", lines, logarithmic="xy"),
            Panel(
                "ms of the data axis",
                "",
                bars={entry["method"]: 1e3 * entry["data_s"] for entry in entries},
                logarithmic="x",
            ),
        ],
        notes=[
            "break-even: with this many more or fewer steps, the training takes as long as with "
            "all_reduce",
            "the time of compression counts only the bytes that are read and written; selecting "
            "the greatest numbers, or hashing, takes longer, and how much longer is unknown until "
            "it is measured",
        ],
    )


def _priced(
    pricer: Pricer, layout: Layout, plain: Price
) -> tuple[list[dict[str, Any]], dict[str, list[tuple[float, float]]]]:
    """Return two values. The first is a list with one dict for each method: its times, sent bytes
    and memory. The second has, for each method in the picture, the points of its line: (number of
    replicas, milliseconds of the messages over the data axis). `plain` is the price of the method
    all_reduce."""
    busiest = max(pricer.memory.stages.elements(layout, rank) for rank in range(layout.pipeline))
    near = pricer.times.data.replicas(layout).per_node
    entries: list[dict[str, Any]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, section in sections():
        method = RunMethod(section)
        times = MethodTimes(pricer.cluster, pricer.model, pricer.machine.dtype, method)
        other = Pricer(times, pricer.batch)
        axis = MethodAxis(other.machine, other.model, method)
        price, has = other.price(layout), axis.has(busiest)
        entries.append(
            {
                "method": name,
                "section": METHODS[name],
                "data_s": price.parts.data,
                "sent_bytes": sent_bytes(section, has, layout.data),
                "step_time_s": price.step_time_s,
                "more_steps": plain.step_time_s / price.step_time_s - 1,
                "more_memory_bytes": price.memory.total - plain.memory.total,
                "fits": price.fits,
            }
        )
        if len(lines) < DRAWN:
            lines[name] = [
                (float(n), 1e3 * axis.method_s(has, Group(n, min(n, near))))
                for n in (2**k for k in range(1, MOST_DRAWN.bit_length()))
            ]
    return entries, lines


def _row(entry: dict[str, Any]) -> list[str]:
    beside = entry["more_memory_bytes"]
    return [
        entry["method"],
        f"{1e3 * entry['data_s']:.1f} ms",
        f"{entry['sent_bytes'] / 1e6:,.1f} MB",
        f"{1e3 * entry['step_time_s']:.1f} ms",
        f"{entry['more_steps']:+.1%} steps" if entry["section"] else "",
        f"{beside / 1e9:+.2f} GB{'' if entry['fits'] else ' (too much)'}" if beside else "",
    ]
