"""How long a cluster takes for one kernel or one message: rooflines of data sheets.

A product of matrices is cut into tiles that the multiprocessors take in waves (NVIDIA, "Matrix
multiplication background": tile and wave quantization). A kernel that moves data takes as long as
its bytes. A collective within a node is a ring (Thakur et al. 2005, section 4.4), over several
nodes what NCCL makes of it (`nccl`); several rings of one node share its adapters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ptdmpi.plan.machine import nccl
from ptdmpi.plan.machine.cluster import Cluster

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8)  # parts that the summed dimension may be cut into
TILE_DEPTH = 32  # of the summed dimension that a tile takes at once (of NVIDIA's kernels: or 64)
# Tensor cores want rows of 16 bytes (NVIDIA, "Matrix multiplication background", tensor core
# requirements); without them 273 of 398 TFLOP/s are reached (stas00/ml-engineering,
# training/performance, final recommendations: 4096 x 10922 on H100, and 10944, 2 % apart as the
# multiples of 32 among its neighbours are from those of 64).
ROW_BYTES, UNALIGNED = 16, 272.73 / 398.38
FLASH_BLOCK = 128  # of queries (Dao 2023, arXiv 2307.08691, section 3.3)
# Products of FlashAttention -> tensors of a head's size that it reads or writes: query, key, value
# and output; backwards also their gradients
FLASH_TENSORS = {2: 4, 5: 8}


@dataclass(frozen=True)
class Group:
    """`ranks` that communicate, `per_node` of them on each node they touch."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)


class Machine:
    """Times on one cluster, for one type of numbers; results are kept, for shapes recur."""

    def __init__(self, cluster: Cluster, dtype: str, element_bytes: int) -> None:
        self.cluster, self.dtype, self.element_bytes = cluster, dtype, element_bytes
        device, reached = cluster.device, cluster.efficiency
        self.peak = device.peak(dtype)
        self.tile_rate = self.peak * reached.gemm_fraction / device.multiprocessors
        self.memory_rate = device.memory_bytes_per_s * reached.memory_fraction
        self._gemms: dict[tuple[int, int, int, int], float] = {}

    def host_s(self, launches: int) -> float:
        """What the host needs to launch so many kernels and messages of a layer."""
        return launches * self.cluster.software.launch_s

    def stream_s(self, moved_bytes: float) -> float:
        """One kernel that reads and writes so many bytes and computes next to nothing."""
        return max(self.cluster.device.kernel_s, moved_bytes / self.memory_rate)

    def update_s(self, elements: float, kernel_bytes: Sequence[float]) -> float:
        """Kernels that each move so many bytes of every element: the optimizer."""
        return sum(self.stream_s(elements * size) for size in kernel_bytes)

    def gemm_s(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """`batch` products of (m, k) and (k, n): the fastest tiling, or the memory if that is
        slower.

        Waves of tiles over the multiprocessors are whole, and small tiles are bound by shared
        memory: together they make the efficiency a function of the shape.
        """
        key = (m, n, k, batch)
        if key not in self._gemms:
            self._gemms[key] = self._gemm_s(*key)
        return self._gemms[key]

    def _gemm_s(self, m: int, n: int, k: int, batch: int) -> float:
        processors = self.cluster.device.multiprocessors
        moved_bytes = batch * (m * k + k * n + m * n) * self.element_bytes
        best, step = math.inf, 1
        if self.element_bytes == 2:  # tensor cores
            step = TILE_DEPTH
        for rows, columns in TILES:
            tiles = -(-m // rows) * -(-n // columns) * batch
            for split in SPLITS:
                # the last wave is as long as the others, however few tiles it has
                waves = -(-tiles * split // processors)
                depth = -(-k // (split * step)) * step
                compute_s = waves * depth * self._step_s[rows, columns]
                # float32 parts are written, read and summed
                summed_s = (split > 1) * split * batch * m * n * 8 / self.memory_rate
                best = min(best, compute_s + summed_s)
                # enough for all: to cut the summed dimension would only add sums
                if tiles >= processors:
                    break
        if self.element_bytes == 2 and any(side * 2 % ROW_BYTES for side in (m, n, k)):
            best /= UNALIGNED
        # tiles are written when their last step is done
        best += batch * m * n * self.element_bytes / self.memory_rate
        return max(self.cluster.device.kernel_s, best, moved_bytes / self.memory_rate)

    @cached_property
    def _step_s(self) -> dict[tuple[int, int], float]:
        """Tile -> time of one step along the summed dimension: its FLOPs, or, for small tiles,
        shared memory. A column and a row are written there and read by each of the warps that share
        the tile, four or, for the largest, eight."""
        device, steps = self.cluster.device, {}
        shared_rate = device.shared_bytes_per_clock * device.clock_hz
        for rows, columns in TILES:
            across, down = (
                (2, 2) if rows * columns <= 128 * 128 else (max(2, columns // 64), rows // 64)
            )
            read = across * down * (rows // down + columns // across)
            shared_s = (read + rows + columns) * self.element_bytes / shared_rate
            steps[rows, columns] = max(2 * rows * columns / self.tile_rate, shared_s)
        return steps

    def elementwise_s(self, kind: str, elements: float, *moved_bytes: float) -> float:
        """What is done to each element, by kernels that move so many bytes: "gelu", "layernorm",
        "loss" and the like, each also with "_backward"."""
        return sum(self.stream_s(amount) for amount in moved_bytes)

    @staticmethod
    def causal_scores(rows: int, columns: int) -> float:
        """What is computed of rows x columns scores: blocks of queries, each on the keys up to its
        end, so half of them and half a block more."""
        return rows * (columns + min(FLASH_BLOCK, columns)) / 2

    def flash_s(self, rows: int, columns: int, head_size: int, products: int) -> float:
        """`products` matrix products between scores that stay on chip, 2 forwards or 5 backwards,
        and what is read and written beside, once.

        Exponentials do not overlap with the products of the same tile (Shah et al. 2024, arXiv
        2407.08608, section 3.1).
        """
        device = self.cluster.device
        scores = self.causal_scores(rows, columns)
        flops = 2 * scores * head_size * products
        exponentials_per_s = device.exponentials_per_clock * device.clock_hz
        exponentials_per_s *= device.multiprocessors
        rate = self.tile_rate * device.multiprocessors
        computed_s = flops / (rate * self.cluster.efficiency.attention_fraction)
        moved_bytes = FLASH_TENSORS[products] * rows * head_size * self.element_bytes
        computed_s += scores / exponentials_per_s + moved_bytes / self.memory_rate
        return max(device.kernel_s, computed_s)

    @cached_property
    def link_rate(self) -> float:
        return self.cluster.node.link_bytes_per_s * self.cluster.efficiency.link_fraction

    @cached_property
    def network_step_s(self) -> float:
        """One step of a ring over the network: as within a node, and the way through the fabric."""
        node = self.cluster.node
        fabric_s = 2 * node.adapter_latency_s + node.switches * node.switch_latency_s
        return self.cluster.efficiency.link_step_s + fabric_s

    @property
    def adapter_share(self) -> float:
        """Adapters per device."""
        return self.cluster.node.adapters / self.cluster.node.devices

    def ring_rate(self, group: Group) -> float:
        """Bytes per second through each rank of a ring. The groups of one node run at once, each
        with the adapters of its ranks."""
        if group.nodes == 1:
            return self.link_rate
        network = group.per_node * self.adapter_share * self.cluster.node.adapter_bytes_per_s
        # groups that each have a part of a node's ranks may choose the same adapter (`Software`)
        if group.per_node < self.cluster.node.devices:
            network /= self.cluster.software.groups_per_adapter
        return network if group.per_node == 1 else min(network, self.link_rate)

    def _fabric(self, group: Group) -> nccl.Fabric:
        rings = max(1.0, group.per_node * self.adapter_share)  # one for each adapter
        node = self.cluster.node
        gather, scatter, both = node.ll128_bytes_per_s
        return nccl.Fabric(
            group.ranks,
            group.nodes,
            self.ring_rate(group),
            self.cluster.efficiency.link_step_s,
            self.network_step_s,
            node.tree_bytes_per_s,
            (rings * gather, rings * scatter, rings * both),
        )

    def all_gather_s(self, gathered_bytes: float, group: Group) -> float:
        """Each rank gives 1/n of the bytes and gets all of them: n - 1 steps."""
        return self._half_s(gathered_bytes, group, nccl.all_gather_s)

    def reduce_scatter_s(self, summed_bytes: float, group: Group) -> float:
        """The mirror image of all-gather."""
        return self._half_s(summed_bytes, group, nccl.reduce_scatter_s)

    def _half_s(
        self, size: float, group: Group, between_nodes: Callable[[float, nccl.Fabric], float]
    ) -> float:
        """Half of an all-reduce."""
        if group.ranks == 1:
            return 0.0
        steps, reached = group.ranks - 1, self.cluster.efficiency
        if group.nodes > 1:
            return reached.collective_s + between_nodes(size, self._fabric(group))
        moved_s = steps / group.ranks * size / self.ring_rate(group)
        return reached.collective_s + steps * reached.link_step_s + moved_s

    def all_reduce_s(self, summed_bytes: float, group: Group) -> float:
        """A ring, 2 (n - 1) steps; over several nodes the fastest of what NCCL has."""
        if group.ranks == 1:
            return 0.0
        reached, steps = self.cluster.efficiency, 2 * (group.ranks - 1)
        if group.nodes > 1:
            return reached.collective_s + nccl.all_reduce_s(summed_bytes, self._fabric(group))
        moved_s = steps / group.ranks * summed_bytes / self.ring_rate(group)
        return reached.collective_s + steps * reached.link_step_s + moved_s

    def all_to_all_s(self, brought_bytes: float, group: Group) -> float:
        """Seconds in which each rank gives every rank 1/n of the bytes that it brings, and gets as
        much: a pairwise exchange (Thakur et al. 2005), n - 1 steps. What stays in the node and what
        leaves it travel at once."""
        if group.ranks == 1:
            return 0.0
        reached = self.cluster.efficiency
        part_bytes = brought_bytes / group.ranks
        inside = min(group.ranks, group.per_node) - 1
        inside_s = inside * (reached.link_step_s + part_bytes / self.link_rate)
        outside = group.ranks - 1 - inside
        if not outside:
            return reached.collective_s + inside_s
        # every rank of a node sends at once: each has its share of the adapters
        rate = min(1.0, self.adapter_share) * self.cluster.node.adapter_bytes_per_s
        if group.per_node < self.cluster.node.devices:
            rate /= self.cluster.software.groups_per_adapter
        outside_s = outside * (self.network_step_s + part_bytes / rate)
        return reached.collective_s + max(inside_s, outside_s)

    def send_s(self, message_bytes: float, *, crosses_nodes: bool) -> float:
        """One message to one rank, while all ranks of a node send at once."""
        reached = self.cluster.efficiency
        if not crosses_nodes:
            return reached.collective_s + reached.link_step_s + message_bytes / self.link_rate
        rate = min(1.0, self.adapter_share) * self.cluster.node.adapter_bytes_per_s
        rate /= self.cluster.software.groups_per_adapter
        return reached.collective_s + self.network_step_s + message_bytes / rate
