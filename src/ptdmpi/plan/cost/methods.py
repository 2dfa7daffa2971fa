"""Communication-efficient data-parallel methods: the times and the bytes of their messages over the
data axis.

In the following table, n is the number of data-parallel ranks. Each rank has B bytes of gradients
and W bytes of master weights, and its codes (compressed gradients or weights) have C bytes:

    method            in a step                                             each rank sends
    all_reduce        one sum                                               2 B (n - 1) / n
    ring              2 (2 n - 3) messages of B / (n - 1) in a row          2 B (n - 1) / n
    parameter_server  n - 1 messages to one rank, n - 1 back                B; the server (n - 1) B
    decentralized     k neighbours' messages at once                        k W
      every H-th step   one sum instead (Gossip-PGA)                        2 W (n - 1) / n
    local             one sum every K steps                                 2 W (n - 1) / (n K)
    compressed        one gather of codes                                   C (n - 1)
      squeezed twice  codes to their servers, codes of means back           2 C (n - 1) / n

If a decentralized step sends codes instead of weights, each rank sends k C. If a local step sends
codes, the codes are gathered.

"Squeezed twice" stands for the kinds of error feedback in `SQUEEZED`. With these, each rank is the
server of one slice of the gradient: it averages this slice, and compresses the mean again.

The numbers of bytes in the table are means over the ranks. In this trainer's ring, every slice of
the gradients starts at rank 0, so that the ring computes the same sums as all_reduce
(`ptdmpi.engine.data_parallel.pairwise`). In the textbook's ring, each rank starts one slice, and
there are 2 (n - 1) messages of B / n in a row. The number of messages in a row, each with its own
latency, is O(n) for both rings and for a parameter server, and O(1) for decentralized steps. The
number of sent bytes is O(n) for a parameter server and for gathered codes. Gathering codes sends
less than an all_reduce if C n < 2 B.

The predicted time of encoding and decoding is a lower bound: the time to read and write the values
in memory. Compressors that select the largest values, or that compute hashes, take longer.
"""

import math
from dataclasses import dataclass
from functools import cache

from ptdmpi.base.traffic import PASSES
from ptdmpi.config import DataParallelConfig, ModelConfig
from ptdmpi.config.layout import Layout
from ptdmpi.config.methods import encodes, rounds_of
from ptdmpi.config.precision import FLOAT32
from ptdmpi.plan.cost.data_axis import Behind, DataAxis
from ptdmpi.plan.cost.step import StepTimes
from ptdmpi.plan.layout.run_method import MESSAGE_ELEMENTS, RunMethod
from ptdmpi.plan.layout.topology import topology
from ptdmpi.plan.machine.cluster import Cluster, Model
from ptdmpi.plan.machine.kernels import Group, Machine
from ptdmpi.plan.shape.codes import bits_per_element
from ptdmpi.plan.shape.parameters import first_linear

# Kinds of error feedback in which each rank is the server of one slice of the gradient.
SQUEEZED = ("double_squeeze", "neolithic")
# For each element, at least this many values are read or written. Encoding (CODING_PASSES) reads
# the gradient, reads the stored error of the error feedback, and writes the new error. Decoding a
# received code (DECODING_PASSES) reads and writes the sum. A decentralized step (PUBLIC_PASSES)
# also reads and writes the approximate copies of weights that a rank keeps from earlier messages.
CODING_PASSES, DECODING_PASSES, PUBLIC_PASSES = 3, 2, 3


@cache
def messages(name: str, ranks: int, per_node: int) -> tuple[tuple[float, float], ...]:
    """Return, for each step of a topology's period, the numbers of messages that a rank sends: (to
    other nodes, within its node), as means over the ranks.

    If a topology has no period, the result is for its first four steps. The ranks fill the nodes
    one after the other, `per_node` ranks on each. Raises InputError for a file of edges that does
    not fit `ranks`.
    """
    graph = topology(name, ranks)
    messages = []
    for step in range(graph.period or 4):
        all_sent = far = 0
        for rank in range(ranks):
            peers = graph.destinations(step, rank)
            all_sent += len(peers)
            far += sum(peer // per_node != rank // per_node for peer in peers)
        messages.append((far / ranks, (all_sent - far) / ranks))
    return tuple(messages)


def neighbours(name: str, ranks: int) -> float:
    """Return the number of messages that a rank sends in a step of the topology `name`, as the mean
    over the ranks and over the steps of a period."""
    every = messages(name, ranks, ranks)
    return sum(map(sum, every)) / len(every)


@dataclass(frozen=True)
class Told:
    """The numbers that determine the sizes of a rank's messages. The rank has `elements` gradients
    of `gradient_bytes` bytes each, and as many master weights of `master_bytes` bytes each. `tile`
    is the shape (lines, length of a line) of the tiles that PowerSGD factorizes."""

    elements: float
    gradient_bytes: int
    master_bytes: int = FLOAT32.bytes
    tile: tuple[float, float] = (64.0, 1024.0)

    @property
    def gradients(self) -> float:
        """Return the bytes of all gradients of a rank."""
        return self.elements * self.gradient_bytes

    @property
    def masters(self) -> float:
        """Return the bytes of all master weights of a rank."""
        return self.elements * self.master_bytes

    def code(self, section: DataParallelConfig) -> float:
        """Return the bytes of a rank's codes in a step, summed over all rounds of encoding. The
        numbers in a code that are not quantized, such as scales, have the type of the master
        weights."""
        bits = bits_per_element(section, 8 * self.master_bytes, self.tile)
        return rounds_of(section) * self.elements * bits / 8


def told_of(
    model: ModelConfig,
    vocab_size: int,
    elements: float,
    *,
    gradient_bytes: int,
    master_bytes: int,
) -> Told:
    """Return the message sizes of a rank with `elements` parameters. `gradient_bytes` and
    `master_bytes` are the sizes of one element.

    PowerSGD factorizes tiles, which consist of neighbouring lines (rows of a weight). In attention,
    a tile has the lines of one head. In the MLP and in the vocabulary's table, a tile has 1/n of
    the lines, with n = gcd(heads, ffn_hidden). If n does not divide the size of the vocabulary,
    each row of the table is sent uncompressed. For simplicity, the result has a single shape for
    all tiles. The number of lines in this shape is a harmonic mean of the numbers of lines of all
    tiles, each weighted with the tile's number of elements.
    """
    cut = math.gcd(model.heads, model.ffn_hidden)
    head, hidden = model.hidden / model.heads, float(model.hidden)
    attention = 2 * hidden * (hidden + head * model.kv_heads)
    mlp = hidden * (sum(first_linear(model).outputs) + model.ffn_hidden)
    rows = vocab_size / cut if vocab_size % cut == 0 else 1.0
    parts = [
        (model.layers * attention, head),
        (model.layers * mlp, model.ffn_hidden / cut),
        (vocab_size * hidden, rows),
    ]
    each = sum(size / lines for size, lines in parts) / sum(size for size, _ in parts)
    return Told(elements, gradient_bytes, master_bytes, (1 / each, hidden))


def share_of_averages(section: DataParallelConfig) -> float:
    """Return the fraction of steps that end with an average over all replicas; 0 if replicas are
    never averaged."""
    if section.method == "local":
        return 1 / section.local_steps
    if section.average_every:
        return 1 / section.average_every
    return 0.0


def code_messages(section: DataParallelConfig, sizes: Told, n: int) -> dict[str, float]:
    """Return the approximate bytes of the codes that one of `n` ranks exchanges in a step, as a
    dict from the kind of message to bytes. For an all-gather and an all-reduce, these are the bytes
    of the whole tensor (as in `ptdmpi.base.traffic`)."""
    code = sizes.code(section)
    if section.method == "decentralized":
        return {"neighbours": code}  # a rank sends its code to each neighbour
    if section.compressor == "power_sgd":
        return {"all_reduce": code}  # the ranks sum the factors of PowerSGD
    if section.error_feedback in SQUEEZED:
        return {"send": code * (n - 1) / n, "all_gather": code}
    return {"all_gather": n * code}


def sent_bytes(section: DataParallelConfig, sizes: Told, n: int) -> float:
    """Return the bytes that a data rank sends in a step, as the mean over steps and ranks. For
    example, an all-reduce of x bytes over n ranks counts 2 x (n - 1) / n bytes
    (`ptdmpi.base.traffic`). Messages that average the optimizer's moments are not counted."""
    whole = 2 * sizes.gradients * (n - 1) / n
    match section.method:
        case "parameter_server":
            # gradients are sent to the server, and means are sent back
            return 2 * sizes.gradients * (n - 1) / n
        case "decentralized" if encodes(section):
            return neighbours(section.topology, n) * sizes.code(section)
        case "decentralized" | "local" if not encodes(section):
            averaging = share_of_averages(section)
            mixed = averaging * 2 * (n - 1) / n
            if section.method == "decentralized":
                mixed += (1 - averaging) * neighbours(section.topology, n)
            return mixed * sizes.masters
        case "compressed":
            return _codes_bytes(section, sizes, n)
        case "local":
            return _codes_bytes(section, sizes, n) / section.local_steps
        case _:
            return whole


def _codes_bytes(section: DataParallelConfig, sizes: Told, n: int) -> float:
    """Return the bytes that one of `n` data ranks sends in one exchange of codes (compressed
    gradients or weights)."""
    codes = code_messages(section, sizes, n)
    return sum(_sent_of(kind, size, n) for kind, size in codes.items())


def _sent_of(kind: str, size: float, n: int) -> float:
    """Return the bytes that one of `n` ranks sends in a message or collective of the kind `kind`
    with a tensor of `size` bytes."""
    if kind in PASSES:
        return PASSES[kind] * size * (n - 1) / n
    return size


class MethodAxis(DataAxis):
    """The times of the messages over the data axis with a communication-efficient method. With such
    a method, gradients are not sharded."""

    def __init__(self, machine: Machine, model: Model, method: RunMethod) -> None:
        super().__init__(machine, model)
        self.section, self.kinds = method.section, method.averaged_kinds

    def has(self, elements: float) -> Told:
        """Return the message sizes of a rank with `elements` parameters."""
        return told_of(
            self.model,
            self.vocab_size,
            elements,
            gradient_bytes=self.gradient_bytes,
            master_bytes=FLOAT32.bytes,
        )

    def behind(self, layout: Layout, elements: float) -> Behind:
        """Return the predicted seconds of the messages that a step sends over the data axis after
        its last backward, for a rank with `elements` trained parameters. Some methods send these
        messages before the update, and others after it. In both cases, `gradients_s` has their
        time, and `weights_s` is 0."""
        if layout.data == 1 or self.section.method == "all_reduce":
            return super().behind(layout, elements)
        group = self.replicas(layout)
        told_s = self.method_s(self.has(elements), group)
        return Behind(self._ends_s(layout) + told_s, 0.0)

    def method_s(self, sizes: Told, group: Group) -> float:
        """Return the seconds that the method's messages, encoding and decoding take in a step, as
        the mean over steps."""
        machine, section, n = self.machine, self.section, group.ranks
        match section.method:
            case "ring":
                return self._ring_s(sizes, group)
            case "parameter_server":
                # all messages pass through the link of the server's node, first towards the server
                # and then away from it. No other rank of this node sends anything
                size = (n - 1) * sizes.gradients
                if group.nodes > 1:
                    size *= min(1.0, machine.adapter_share)
                return 2 * self._send_s(size, group)
            case "decentralized" | "local" if not encodes(section):
                averaging, mixed = share_of_averages(section), self.kinds * sizes.masters
                told_s = averaging * machine.all_reduce_s(mixed, group)
                if section.method == "decentralized" and averaging < 1:
                    arrived = neighbours(section.topology, n) * mixed
                    sums_s = machine.stream_s(2 * arrived + mixed)
                    told_s += (1 - averaging) * (self._neighbours_s(mixed, group) + sums_s)
                return told_s
            case "decentralized":
                # codes that a rank reads: its own code and the received codes
                every = 1 + neighbours(section.topology, n)
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
        """Return the seconds of the messages of the method "ring" in a step.

        The gradients of n ranks are sent in n - 1 slices. After 2 n - 3 messages, the last slice
        has been summed over all ranks. The sums are then sent to all ranks, which takes another 2 n
        - 3 messages. If a slice is larger than the largest message, the gradients are sent in
        several rounds.
        """
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
        """Return the seconds that a rank needs to send `size` bytes to each neighbour. Messages
        over the network and messages within nodes travel at the same time."""
        every = messages(self.section.topology, group.ranks, group.per_node)
        return sum(self._ways_s(size, far, near, group) for far, near in every) / len(every)

    def _compressed_s(self, sizes: Told, group: Group) -> float:
        """Return the seconds of one exchange of codes (compressed gradients or weights) over the
        data axis, including encoding and decoding."""
        machine, section, n = self.machine, self.section, group.ranks
        code, passes = sizes.code(section), CODING_PASSES * rounds_of(section)
        if section.compressor == "power_sgd":
            told_s = 2 * machine.all_reduce_s(code / 2, group)
            passes += DECODING_PASSES
        elif section.error_feedback in SQUEEZED:
            start_s = self._send_s(0.0, group)
            # Each server receives n - 1 messages at the same time. The times of their bytes add up,
            # but only one latency counts.
            told_s = start_s + (n - 1) * (self._send_s(code / n, group) - start_s)
            told_s += machine.all_gather_s(code, group)
            # As a server, each of n ranks decodes 1/n of the elements from each of n ranks. Later
            # the rank decodes the averages of all elements. Together, it decodes each element
            # twice.
            passes += 2 * DECODING_PASSES * rounds_of(section)
        else:
            told_s = machine.all_gather_s(n * code, group)
            passes += n * DECODING_PASSES
        return told_s + machine.stream_s(passes * sizes.masters)

    def _ways_s(self, size: float, far: float, near: float, group: Group) -> float:
        """Return the seconds that a rank needs to send several messages of `size` bytes at the same
        time. `far` is the mean number of messages to other nodes, and `near` is the mean number of
        messages within the rank's own node."""
        if group.nodes == 1:
            near += far
            far = 0.0
        sent = [
            self.machine.send_s(count * size, crosses_nodes=crosses)
            for count, crosses in ((far, True), (near, False))
            if count
        ]
        return max(sent, default=0.0)

    def _send_s(self, size: float, group: Group) -> float:
        return self.machine.send_s(size, crosses_nodes=group.nodes > 1)


class MethodTimes(StepTimes):
    """The times, in seconds, of steps with a given data-parallel method, which determines the
    messages between replicas and the state that each replica keeps.

    `ptdmpi` uses this class only to price layouts that a user gives. A search does not choose the
    method, because another method would change the training.
    """

    def __init__(self, cluster: Cluster, model: Model, precision: str, method: RunMethod) -> None:
        """Make a `StepTimes` object, and replace its times of the data axis with those of the
        method. The arguments are those of `StepTimes`."""
        super().__init__(cluster, model, precision, method)
        self.data = MethodAxis(self.machine, model, method)
