"""Data-parallel methods that tell each other less: seconds and bytes of each over the data axis.

With n data ranks, B bytes of gradients on each, W bytes of masters, and a code of C bytes:

    method            in a step                                             each rank sends
    all_reduce        one sum                                               2 B (n - 1) / n
    ring              2 (2 n - 3) messages of B / (n - 1) in a row          2 B (n - 1) / n
    parameter_server  n - 1 messages to one rank, n - 1 back                B; the server (n - 1) B
    decentralized     k neighbours' messages at once                        k W
      every H-th step   one sum instead (Gossip-PGA)                        2 W (n - 1) / n
    local             one sum every K steps                                 2 W (n - 1) / (n K)
    compressed        one gather of codes                                   C (n - 1)
      squeezed twice  codes to their servers, codes of means back           2 C (n - 1) / n

Codes of decentralized and local steps travel as there, and as gathers, C for W.

What a rank sends is the mean over ranks. A ring's parts all begin at rank 0, so that sums are those
of all_reduce; the textbook's, of which each rank begins one, has 2 (n - 1) messages of B / n in a
row (`ptdmpi.engine.data_parallel.messages`). So latency is O(n) for a ring and a server, O(1) for
neighbours; volume is O(n) at a server and for gathered codes, which pay while C n < 2 B.

What a code takes to make is counted by what it reads and writes of memory, which is the least: what
choosing the greatest, or hashing, takes beside that is not known before it is measured.
"""

import math
from dataclasses import dataclass
from functools import cache

from ptdmpi.base.traffic import PASSES
from ptdmpi.config import DataParallelConfig, ModelConfig
from ptdmpi.config.layout import Layout
from ptdmpi.config.methods import encodes
from ptdmpi.config.precision import FLOAT32
from ptdmpi.plan.cost.data_axis import Behind, DataAxis
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.layout.messages import MESSAGE_ELEMENTS, RunMethod
from ptdmpi.plan.layout.topology import topology
from ptdmpi.plan.machine.cluster import Cluster, Model
from ptdmpi.plan.machine.kernels import Group, Machine
from ptdmpi.plan.shape.codes import bits_per_element
from ptdmpi.plan.shape.parameters import layer

# Kinds of feedback that compress the mean again, at servers that each have a part of it.
SQUEEZED = ("double_squeeze", "neolithic")
# What coding reads and writes of each number, at least: the gradient and the memory, the memory
# back; of each code that arrives the sum it is added to. Neighbours also keep what was told before,
# which is read and written.
CODING_PASSES, DECODING_PASSES, PUBLIC_PASSES = 3, 2, 3


@cache
def messages(name: str, ranks: int, per_node: int) -> tuple[tuple[float, float], ...]:
    """How many messages a rank sends to other nodes, and within its own, in each step of a
    topology's period, on average over ranks; of one that never repeats in its first steps. `ranks`
    fill the nodes one after the other. Raises InputError for a file that does not fit."""
    graph = topology(name, ranks)
    found = []
    for step in range(graph.period or 4):
        all_sent = far = 0
        for rank in range(ranks):
            peers = graph.destinations(step, rank)
            all_sent += len(peers)
            far += sum(peer // per_node != rank // per_node for peer in peers)
        found.append((far / ranks, (all_sent - far) / ranks))
    return tuple(found)


def neighbours(name: str, ranks: int) -> float:
    """How many messages a rank sends in a step, on average over ranks and a period."""
    every = messages(name, ranks, ranks)
    return sum(map(sum, every)) / len(every)


def rounds_of(section: DataParallelConfig) -> int:
    """How many codes of a gradient travel as one."""
    return section.rounds if section.error_feedback == "neolithic" else 1


@dataclass(frozen=True)
class Told:
    """What a rank has to tell: `elements`, the bytes of a number of its gradients, and of its
    masters; lines and length of the tiles that PowerSGD factors."""

    elements: float
    gradient_bytes: int
    master_bytes: int = FLOAT32.bytes
    tile: tuple[float, float] = (64.0, 1024.0)

    @property
    def gradients(self) -> float:
        return self.elements * self.gradient_bytes

    @property
    def masters(self) -> float:
        return self.elements * self.master_bytes

    def code(self, section: DataParallelConfig) -> float:
        """C: bytes of all rounds; numbers travel in the masters' type."""
        bits = bits_per_element(section, 8 * self.master_bytes, self.tile)
        return rounds_of(section) * self.elements * bits / 8


def told_of(
    model: ModelConfig, vocab_size: int, elements: float, gradient_bytes: int, master_bytes: int
) -> Told:
    """What a rank with so many parameters has to tell. The lines of PowerSGD's tiles are those of a
    head in attention, of an n-th of the MLP or of the vocabulary elsewhere, n = gcd(heads,
    ffn_hidden), as the mean over their elements of what a line costs; of a vocabulary that n does
    not divide each row travels whole."""
    cut = math.gcd(model.heads, model.ffn_hidden)
    head, hidden = model.hidden / model.heads, float(model.hidden)
    attention = 2 * hidden * (hidden + head * model.kv_heads)
    up = layer(model)["mlp.up"]
    mlp = hidden * (sum(up.outputs) + model.ffn_hidden) if isinstance(up, Linear) else 0.0
    rows = vocab_size / cut if vocab_size % cut == 0 else 1.0
    parts = [
        (model.layers * attention, head),
        (model.layers * mlp, model.ffn_hidden / cut),
        (vocab_size * hidden, rows),
    ]
    each = sum(size / lines for size, lines in parts) / sum(size for size, _ in parts)
    return Told(elements, gradient_bytes, master_bytes, (1 / each, hidden))


def share_of_averages(section: DataParallelConfig) -> float:
    """In which part of the steps all replicas take their mean, where they differ."""
    every = section.local_steps if section.method == "local" else section.average_every
    return 1 / every if every else 0.0


def code_messages(section: DataParallelConfig, sizes: Told, n: int) -> dict[str, float]:
    """Kind of message -> the bytes x that one step's codes are about on a rank, of all its messages
    together, as `ptdmpi.base.traffic` counts them."""
    code = sizes.code(section)
    if section.method == "decentralized":
        return {"neighbours": code}  # to each of them
    if section.compressor == "power_sgd":
        return {"all_reduce": code}  # its factors are summed
    if section.error_feedback in SQUEEZED:
        return {"send": code * (n - 1) / n, "all_gather": code}
    return {"all_gather": n * code}


def sent_bytes(section: DataParallelConfig, sizes: Told, n: int, moments: int = 0) -> float:
    """What a data rank sends in a step, on average over steps and ranks, by the convention of
    `ptdmpi.base.traffic`. `moments`: how many the optimizer has, where they are averaged too."""
    whole = 2 * sizes.gradients * (n - 1) / n
    match section.method:
        case "parameter_server":
            return 2 * sizes.gradients * (n - 1) / n  # n - 1 go up, n - 1 come down
        case "decentralized" if encodes(section):
            return neighbours(section.topology, n) * sizes.code(section)
        case "decentralized" | "local" if not encodes(section):
            averaging = share_of_averages(section)
            sent = neighbours(section.topology, n) if section.method == "decentralized" else 0.0
            mixed = averaging * 2 * (n - 1) / n + (1 - averaging) * sent
            return mixed * sizes.masters * (1 + (moments if section.average_moments else 0))
        case "compressed" | "local":
            every = section.local_steps if section.method == "local" else 1
            told = code_messages(section, sizes, n)
            return (
                sum(
                    PASSES[kind] * size * (n - 1) / n if kind in PASSES else size
                    for kind, size in told.items()
                )
                / every
            )
        case _:
            return whole


class MethodAxis(DataAxis):
    """Messages over the data axis by a method that tells others less. Gradients are not sharded."""

    def __init__(self, machine: Machine, model: Model, method: RunMethod) -> None:
        super().__init__(machine, model)
        self.section, self.kinds = method.section, method.averaged_kinds

    def has(self, elements: float) -> Told:
        """What a rank with so many parameters has to tell."""
        return told_of(self.model, self.vocab_size, elements, self.gradient_bytes, FLOAT32.bytes)

    def behind(self, layout: Layout, elements: float) -> Behind:
        """What the method sends behind the last backward, or behind the update."""
        if layout.data == 1 or self.section.method == "all_reduce":
            return super().behind(layout, elements)
        group = self.replicas(layout)
        told_s = self.method_s(self.has(elements), group)
        return Behind(self._ends_s(layout) + told_s, 0.0)

    def method_s(self, sizes: Told, group: Group) -> float:
        """Seconds of a step, on average over steps."""
        machine, section, n = self.machine, self.section, group.ranks
        match section.method:
            case "ring":
                return self._ring_s(sizes, group)
            case "parameter_server":
                # all through the server's link, in and then out, nobody else on its node sends
                alone = min(1.0, machine.adapter_share) if group.nodes > 1 else 1.0
                return 2 * self._send_s((n - 1) * sizes.gradients * alone, group)
            case "decentralized" | "local" if not encodes(section):
                averaging, mixed = share_of_averages(section), self.kinds * sizes.masters
                told_s = averaging * machine.all_reduce_s(mixed, group)
                if section.method == "decentralized" and averaging < 1:
                    arrived = neighbours(section.topology, n) * mixed
                    sums_s = machine.stream_s(2 * arrived + mixed)
                    told_s += (1 - averaging) * (self._neighbours_s(mixed, group) + sums_s)
                return told_s
            case "decentralized":
                every = 1 + neighbours(section.topology, n)  # its own code, and those that arrive
                passes = CODING_PASSES + every * PUBLIC_PASSES
                coding_s = machine.stream_s(passes * sizes.masters)
                return self._neighbours_s(sizes.code(section), group) + coding_s
            case "local":
                return self._compressed_s(sizes, group) / section.local_steps
            case "compressed":
                return self._compressed_s(sizes, group)
            case _:
                return machine.all_reduce_s(sizes.gradients, group)

    def _ring_s(self, sizes: Told, group: Group) -> float:
        """The last of n - 1 parts in a row has come n - 1 ranks far after 2 n - 3
        messages; and so the sums. Above the size of a message there are more such rounds."""
        n = group.ranks
        if n == 1:
            return 0.0
        whole, rest = divmod(sizes.elements, (n - 1) * MESSAGE_ELEMENTS)
        return sum(
            rounds * 2 * (2 * n - 3) * self._ways_s(size, 1 / group.per_node, 1.0, group)
            for rounds, size in (
                (whole, MESSAGE_ELEMENTS * sizes.gradient_bytes),
                (1, rest / (n - 1) * sizes.gradient_bytes),
            )
            if rounds and size
        )

    def _neighbours_s(self, size: float, group: Group) -> float:
        """So many bytes to each neighbour, over the network and within nodes at once."""
        every = messages(self.section.topology, group.ranks, group.per_node)
        return sum(self._ways_s(size, far, near, group) for far, near in every) / len(every)

    def _compressed_s(self, sizes: Told, group: Group) -> float:
        machine, section, n = self.machine, self.section, group.ranks
        code, passes = sizes.code(section), CODING_PASSES * rounds_of(section)
        if section.compressor == "power_sgd":
            told_s = 2 * machine.all_reduce_s(code / 2, group)
            passes += DECODING_PASSES
        elif section.error_feedback in SQUEEZED:
            start_s = self._send_s(0.0, group)
            # n - 1 messages at once, their bytes one after the other
            told_s = start_s + (n - 1) * (self._send_s(code / n, group) - start_s)
            told_s += machine.all_gather_s(code, group)
            passes += 2 * DECODING_PASSES * rounds_of(section)  # n codes of an n-th, and all means
        else:
            told_s = machine.all_gather_s(n * code, group)
            passes += n * DECODING_PASSES
        return told_s + machine.stream_s(passes * sizes.masters)

    def _ways_s(self, size: float, far: float, near: float, group: Group) -> float:
        """So many messages of each rank, on average, to other nodes and within its own, at once."""
        ways = ((far, True), (near, False)) if group.nodes > 1 else ((far + near, False),)
        sent = [
            self.machine.send_s(count * size, crosses_nodes=crosses)
            for count, crosses in ways
            if count
        ]
        return max(sent, default=0.0)

    def _send_s(self, size: float, group: Group) -> float:
        return self.machine.send_s(size, crosses_nodes=group.nodes > 1)


class MethodPricer(Pricer):
    """Prices layouts whose replicas tell each other what a method says, and keep what it keeps. It
    is for layouts that are given: another method is another training, no choice of a search."""

    def __init__(
        self,
        cluster: Cluster,
        model: Model,
        batch: int,
        precision: str,
        method: RunMethod,
    ) -> None:
        """`method`: as of `StepTimes`."""
        super().__init__(cluster, model, batch, precision, method)
        self.data = MethodAxis(self.machine, model, method)
