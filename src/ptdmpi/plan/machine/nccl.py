"""Times of collectives over several nodes, computed with NCCL's own cost model.

NCCL chooses the algorithm and the protocol of a collective with a cost model. The authors of NCCL
measured its constants: the time of a step over a link and over a network, the fraction of the rate
that a protocol reaches, and the largest rate of trees. This file has the same constants as NCCL 2.9
(src/graph/tuning.cc). The time of a step within a node is calibrated (`link_step_s`, 2.0 us) and
agrees with NCCL's constant of 1.9 us.
"""

import math
from dataclasses import dataclass
from enum import IntEnum


class Collective(IntEnum):
    """The collectives that NCCL computes by rings. The value of a member is its index in
    `Fabric.ll128_rates`."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2


@dataclass(frozen=True)
class Protocol:
    """The properties of one of NCCL's protocols, "LL", "LL128" or "Simple", in a ring or in a
    tree."""

    link_steps: float  # Time of a step over a link, as a multiple of the time in a ring with LL128.
    hop_s: float  # Shortest time of a step over the network, in seconds.
    share: float  # Fraction of the rate that the protocol reaches.
    lone_share: float  # The same fraction in a group with only one rank per node.
    most: float = math.inf  # Upper limit of the rate, in bytes per second.


@dataclass(frozen=True)
class Fabric:
    """The links and the network between the `ranks` ranks of a group on `nodes` nodes.

    `rate` is the bytes per second through each rank, `link_step_s` is the time of a step over a
    link, and `network_step_s` is the shortest time of a step over the network. `tree_rate` and
    `ll128_rates` are the largest rates of trees and of rings with LL128, in bytes per second.
    """

    ranks: int
    nodes: int
    rate: float
    link_step_s: float
    network_step_s: float
    tree_rate: float
    # indexed by `Collective`
    ll128_rates: tuple[float, float, float] = (math.inf, math.inf, math.inf)

    @property
    def per_node(self) -> float:
        """Return the number of ranks per node."""
        return self.ranks / self.nodes

    def share(self, protocol: Protocol) -> float:
        """Return the fraction of the rate that `protocol` reaches in this group."""
        return protocol.lone_share if self.per_node < 2 else protocol.share

    def hop_s(self, protocol: Protocol) -> float:
        """Return the seconds of a step over the network with `protocol`."""
        return max(protocol.hop_s, self.network_step_s)


# LL sends a flag with every 4 bytes, so it reaches only a quarter of the rate, and at most 19 GB/s
# on more than two nodes with AMD hosts (with Intel hosts 20.4 GB/s). With LL, a step over a link
# takes 1.8 times as long in a group over several nodes as in a group on one node.
LL = Protocol(link_steps=0.47 * 1.8 / 1.9, hop_s=2.7e-6, share=0.25, lone_share=0.25, most=19.0e9)
# The protocols of rings (LL128, Simple, LL) and of trees (LL128, Simple).
RINGS = (Protocol(1.0, 4.0e-6, 0.92, 0.7), Protocol(1.8, 9.6e-6, 1.0, 1.0), LL)
TREES = (Protocol(0.6, 8.5e-6, 0.915, 0.915), Protocol(15.0, 50e-6, 1.0, 1.0))
TREE_SHARE = 0.9  # Fraction of a ring's rate that a tree reaches.
# In a ring over several nodes with the protocol Simple, a tensor with at least
# PLATEAU_BYTES_PER_RANK bytes per rank fills the buffers, and the latencies are then PLATEAU times
# as long. NCCL's model has this factor only for all-reduces, where rings compete with trees. This
# file also uses the factor for reduce-scatters and all-gathers, because a reduce-scatter and an
# all-gather together are an all-reduce.
PLATEAU_BYTES_PER_RANK, PLATEAU = 65536 / 16, 1.9
# The rate that trees reach, in tenths of their largest rate, for tensors of 64 bytes, 128 bytes,
# ..., 128 MiB. There is one row for each protocol in TREES.
TREE_TENTHS = (
    (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 5, 6, 6, 7, 7, 8, 9, 9, 10),
    (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 5, 5, 6, 6, 7, 8, 9),
)


def all_gather_s(gathered_bytes: float, fabric: Fabric) -> float:
    """Return the seconds of an all-gather of `gathered_bytes` bytes in a ring of n ranks. The ring
    has n - 1 steps. The number of steps over the network is the number of nodes minus 1."""
    kind = Collective.ALL_GATHER
    return min(_ring_s(gathered_bytes, fabric, protocol, kind) for protocol in RINGS)


def reduce_scatter_s(summed_bytes: float, fabric: Fabric) -> float:
    """Return the seconds of a reduce-scatter of `summed_bytes` bytes in a ring of n ranks, which
    has n - 1 steps."""
    kind = Collective.REDUCE_SCATTER
    return min(_ring_s(summed_bytes, fabric, protocol, kind) for protocol in RINGS)


def all_reduce_s(summed_bytes: float, fabric: Fabric) -> float:
    """Return the seconds of an all-reduce of `summed_bytes` bytes by the fastest ring or tree.

    A ring of n ranks has 2 (n - 1) steps. The depth of double binary trees (Sanders et al. 2009)
    grows with the logarithm of the number of nodes.
    """
    kind = Collective.ALL_REDUCE
    rings = [_ring_s(summed_bytes, fabric, protocol, kind) for protocol in RINGS]
    trees = [_tree_s(summed_bytes, fabric, kind) for kind in range(len(TREES))]
    return min(*rings, *trees)


def _ring_s(size: float, fabric: Fabric, protocol: Protocol, kind: Collective) -> float:
    summing = kind is Collective.ALL_REDUCE
    # an all-reduce is a reduce-scatter and an all-gather, so the data travels around the ring twice
    steps = (1 + summing) * (fabric.ranks - 1)
    network_steps = steps * (fabric.nodes - 1) / (fabric.ranks - 1)
    latency_s = network_steps * fabric.hop_s(protocol)
    latency_s += (steps - network_steps) * protocol.link_steps * fabric.link_step_s
    if protocol is RINGS[1] and size >= fabric.ranks * PLATEAU_BYTES_PER_RANK:
        latency_s *= PLATEAU
    rate = min(fabric.rate * fabric.share(protocol), protocol.most)
    if protocol is RINGS[0]:
        rate = min(rate, fabric.ll128_rates[kind])
    return latency_s + steps / fabric.ranks * size / rate


def _tree_s(size: float, fabric: Fabric, kind: int) -> float:
    protocol = TREES[kind]
    depth_s = (fabric.per_node - 1) * protocol.link_steps * fabric.link_step_s
    depth_s += math.log2(fabric.nodes) * fabric.hop_s(protocol)
    # the rate is interpolated between the sizes of the table, so that more bytes never take less
    # time
    power, tenths = math.log2(max(64.0, size) / 64), TREE_TENTHS[kind]
    below = min(int(power), len(tenths) - 1)
    above = tenths[below + 1] if below + 1 < len(tenths) else 10
    part = min(1.0, power - below)
    rate = min(fabric.rate * TREE_SHARE, fabric.tree_rate) * protocol.share
    rate *= (tenths[below] * (1 - part) + above * part) / 10
    return 2 * depth_s + 2 * size / rate  # sums go up to the root, and results down again
