"""The time of one kernel or one message on a cluster, predicted by roofline models from the rates
of data sheets.

A matrix product is cut into tiles, which the multiprocessors compute in waves (NVIDIA, "Matrix
multiplication background": tile and wave quantization). The time of a kernel that mainly moves data
is the number of moved bytes divided by the memory's rate. A collective within a node is a ring
(Thakur et al. 2005, section 4.4). The time of a collective over several nodes follows NCCL's cost
model (`nccl.py`). Several rings that pass through one node share the network adapters of the node.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ptdmpi.config.precision import PRECISIONS
from ptdmpi.plan.machine import nccl
from ptdmpi.plan.machine.cluster import Cluster

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8)  # Numbers of parts into which the summed dimension may be cut.
TILE_DEPTH = 32  # Elements of the summed dimension per step of a tile (NVIDIA: 32 or 64).
# Tensor cores need rows whose lengths are multiples of 16 bytes (NVIDIA, "Matrix multiplication
# background", tensor core requirements). With other rows, a product is slower: on an H100, a
# product of size 4096 x 10922 reaches only 273 TFLOP/s, but with 10944 columns, a multiple of 64,
# it reaches 398 TFLOP/s (stas00/ml-engineering, training/performance, final recommendations).
# The rates with multiples of 32 and with multiples of 64 differ by only 2 %, which is ignored here.
ROW_BYTES, UNALIGNED = 16, 272.73 / 398.38
# Bytes that are moved to prepare one element of an operand in 8-bit floating point: the bfloat16
# values are multiplied by the scale and converted to codes (4 + 3 bytes), and the codes are
# transposed (2 bytes).
CODES_BYTES = 9
FLASH_BLOCK = 128  # Queries per block (Dao 2023, arXiv 2307.08691, section 3.3).
# Number of matrix products of FlashAttention (2 in the forward, 5 in the backward) -> number of
# tensors that this pass reads or writes: query, key, value and output, and in the backward also
# their gradients
FLASH_TENSORS = {2: 4, 5: 8}


@dataclass(frozen=True)
class Group:
    """A group of `ranks` ranks that communicate with each other. Each node of the group has
    `per_node` of these ranks."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the group."""
        return -(-self.ranks // self.per_node)


class Machine:
    """The times of kernels and messages on one cluster, in seconds, for one data type.

    The times of matrix products are cached, because the same shapes recur.
    """

    def __init__(self, cluster: Cluster, dtype: str, element_bytes: int) -> None:
        self.cluster, self.dtype, self.element_bytes = cluster, dtype, element_bytes
        device, reached = cluster.device, cluster.efficiency
        self.peak = device.peak(dtype)
        rate = self.peak
        if element_bytes > 1 and PRECISIONS[dtype].product.scaled and "bf16" in device.peak_flops:
            rate = device.peak("bf16")  # except for products of 8-bit codes
        self.tile_rate = rate * reached.gemm_fraction / device.multiprocessors
        self.memory_rate = device.memory_bytes_per_s * reached.memory_fraction
        self._gemms: dict[tuple[int, int, int, int], float] = {}

    def host_s(self, launches: int) -> float:
        """Return the seconds that the host takes to launch `launches` kernels and messages of a
        layer."""
        return launches * self.cluster.software.launch_s

    def stream_s(self, moved_bytes: float) -> float:
        """Return the seconds of a kernel that reads and writes `moved_bytes` in total.

        The time for the kernel's computation is ignored.
        """
        return max(self.cluster.device.kernel_s, moved_bytes / self.memory_rate)

    def update_s(self, elements: float, kernel_bytes: Sequence[float]) -> float:
        """Return the seconds of the optimizer's kernels for `elements` parameters. `kernel_bytes`
        has, for each kernel, the bytes that it moves per parameter."""
        return sum(self.stream_s(elements * size) for size in kernel_bytes)

    def gemm_s(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Return the seconds of `batch` matrix products of (m, k) and (k, n).

        The result is the time of the fastest tiling, or the time of the memory traffic if this is
        longer. Tiles are computed in whole waves over the multiprocessors, and the rate of shared
        memory limits small tiles, so the efficiency depends on the shape.
        """
        key = (m, n, k, batch)
        if key not in self._gemms:
            self._gemms[key] = self._gemm_s(*key)
        return self._gemms[key]

    def codes_gemm_s(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Return the seconds of `batch` matrix products of 8-bit codes, including the passes that
        convert both operands to codes and transpose them. On a device without a peak for fp8, and
        on a cluster with measured times, return the seconds of the products of the unconverted
        values."""
        if self.cluster.measured is not None or "fp8" not in self.cluster.device.peak_flops:
            return self.gemm_s(m, n, k, batch)
        made_s = self.stream_s(batch * (m * k + k * n) * CODES_BYTES)
        return made_s + self._of_codes.gemm_s(m, n, k, batch)

    @cached_property
    def _of_codes(self) -> "Machine":
        """Return a `Machine` with the times on the same cluster if all operands are 8-bit codes, of
        one byte each."""
        return Machine(self.cluster, "fp8", 1)

    def _gemm_s(self, m: int, n: int, k: int, batch: int) -> float:
        processors = self.cluster.device.multiprocessors
        result_bytes = max(2, self.element_bytes)
        moved_bytes = batch * ((m * k + k * n) * self.element_bytes + m * n * result_bytes)
        best, step = math.inf, 1
        if self.element_bytes <= 2:  # 16-bit and 8-bit types are multiplied by tensor cores
            step = TILE_DEPTH
        for rows, columns in TILES:
            tiles = -(-m // rows) * -(-n // columns) * batch
            for split in SPLITS:
                # the last wave takes as long as every other wave, even if it has few tiles
                waves = -(-tiles * split // processors)
                depth = -(-k // (split * step)) * step
                compute_s = waves * depth * self._step_s[rows, columns]
                # If the summed dimension is cut, the partial sums are written in float32, read and
                # added up.
                summed_s = (split > 1) * split * batch * m * n * 8 / self.memory_rate
                best = min(best, compute_s + summed_s)
                # With enough tiles for all multiprocessors, cutting the summed dimension into more
                # parts would only cost time.
                if tiles >= processors:
                    break
        if self.element_bytes <= 2 and any(
            side * self.element_bytes % ROW_BYTES for side in (m, n, k)
        ):
            best /= UNALIGNED
        # a tile is written to memory only after its last products are summed, so the time to write
        # the result is added
        best += batch * m * n * result_bytes / self.memory_rate
        return max(self.cluster.device.kernel_s, best, moved_bytes / self.memory_rate)

    @cached_property
    def _step_s(self) -> dict[tuple[int, int], float]:
        """Return, for each tile size (rows, columns), the seconds of one step along the summed
        dimension of a matrix product.

        The peak rate of the device limits this step, or, for small tiles, the rate of shared
        memory. In each step, one column of the left operand and one row of the right operand are
        written to shared memory. Every warp that computes the tile then reads its part of this
        column and this row. A tile is computed by four warps, and the largest tiles by eight.
        """
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
        """Return the seconds of an elementwise operation on `elements` elements. `moved_bytes` has
        the bytes that each kernel of the operation moves.

        `kind` names the operation, for example "gelu", "layernorm" or "loss", or such a name with
        the suffix "_backward". For some operations, the subclass `MeasuredMachine` has measured
        times instead.
        """
        return sum(self.stream_s(amount) for amount in moved_bytes)

    @staticmethod
    def causal_scores(rows: int, columns: int) -> float:
        """Return the number of scores that are computed for `rows` queries and `columns` keys with
        a causal mask.

        Each block of queries uses the keys up to the position of its last query. The result is
        therefore half of all scores, plus half a block of scores for each query.
        """
        return rows * (columns + min(FLASH_BLOCK, columns)) / 2

    def flash_s(self, rows: int, columns: int, head_size: float, products: int) -> float:
        """Return the seconds of FlashAttention, whose scores stay on chip, for `rows` queries with
        `columns` keys each.

        `products` is the number of matrix products: 2 in a forward, 5 in a backward. Inputs are
        read once, and outputs are written once. Exponentials do not overlap with the matrix
        products of the same tile (Shah et al. 2024, arXiv 2407.08608, section 3.1), so the times of
        both are added.
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
        """Return the rate that a link within a node reaches, in bytes per second."""
        return self.cluster.node.link_bytes_per_s * self.cluster.efficiency.link_fraction

    @cached_property
    def network_step_s(self) -> float:
        """Return the seconds of a ring's step over the network: the time of a step within a node,
        plus the latencies of adapters and switches."""
        node = self.cluster.node
        fabric_s = 2 * node.adapter_latency_s + node.switches * node.switch_latency_s
        return self.cluster.efficiency.link_step_s + fabric_s

    @property
    def adapter_share(self) -> float:
        """Return the number of adapters per device."""
        return self.cluster.node.adapters / self.cluster.node.devices

    def ring_rate(self, group: Group) -> float:
        """Return the bytes per second through each rank of a ring.

        All groups with ranks on a node communicate at the same time, and each group uses the
        network adapters of its own ranks.
        """
        if group.nodes == 1:
            return self.link_rate
        network = group.per_node * self.adapter_share * self.cluster.node.adapter_bytes_per_s
        # If a group has only some of a node's ranks, other groups may send through the same adapter
        # (see `groups_per_adapter` of `Software`).
        if group.per_node < self.cluster.node.devices:
            network /= self.cluster.software.groups_per_adapter
        return network if group.per_node == 1 else min(network, self.link_rate)

    def _fabric(self, group: Group) -> nccl.Fabric:
        rings = max(1.0, group.per_node * self.adapter_share)  # one ring for each adapter
        node = self.cluster.node
        gather, scatter, both = node.ll128_bytes_per_s
        return nccl.Fabric(
            ranks=group.ranks,
            nodes=group.nodes,
            rate=self.ring_rate(group),
            link_step_s=self.cluster.efficiency.link_step_s,
            network_step_s=self.network_step_s,
            tree_rate=node.tree_bytes_per_s,
            ll128_rates=(rings * gather, rings * scatter, rings * both),
        )

    def all_gather_s(self, gathered_bytes: float, group: Group) -> float:
        """Return the seconds of an all-gather on the n ranks of `group`. After n - 1 steps, each
        rank has the whole tensor of `gathered_bytes` bytes."""
        return self._half_s(gathered_bytes, group, nccl.all_gather_s)

    def reduce_scatter_s(self, summed_bytes: float, group: Group) -> float:
        """Return the seconds of a reduce-scatter on the n ranks of `group`, each with a tensor of
        `summed_bytes` bytes. The reduce-scatter has n - 1 steps."""
        return self._half_s(summed_bytes, group, nccl.reduce_scatter_s)

    def _half_s(
        self, size: float, group: Group, between_nodes: Callable[[float, nccl.Fabric], float]
    ) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of `size` bytes. Each of these
        two collectives has half of the steps of an all-reduce. The function `between_nodes` returns
        the time for a group over several nodes."""
        if group.ranks == 1:
            return 0.0
        steps, reached = group.ranks - 1, self.cluster.efficiency
        if group.nodes > 1:
            return reached.collective_s + between_nodes(size, self._fabric(group))
        moved_s = steps / group.ranks * size / self.ring_rate(group)
        return reached.collective_s + steps * reached.link_step_s + moved_s

    def all_reduce_s(self, summed_bytes: float, group: Group) -> float:
        """Return the seconds of an all-reduce of `summed_bytes` bytes.

        Within a node the all-reduce is a ring of 2 (n - 1) steps on n ranks. Over several nodes,
        the time is that of NCCL's fastest algorithm.
        """
        if group.ranks == 1:
            return 0.0
        reached, steps = self.cluster.efficiency, 2 * (group.ranks - 1)
        if group.nodes > 1:
            return reached.collective_s + nccl.all_reduce_s(summed_bytes, self._fabric(group))
        moved_s = steps / group.ranks * summed_bytes / self.ring_rate(group)
        return reached.collective_s + steps * reached.link_step_s + moved_s

    def all_to_all_s(self, brought_bytes: float, group: Group) -> float:
        """Return the seconds of an all-to-all, in which each of n ranks sends 1/n of its
        `brought_bytes` bytes to every rank.

        The all-to-all is a pairwise exchange (Thakur et al. 2005) of n - 1 steps. Messages within
        the node and messages between nodes travel at the same time.
        """
        if group.ranks == 1:
            return 0.0
        reached = self.cluster.efficiency
        part_bytes = brought_bytes / group.ranks
        inside = min(group.ranks, group.per_node) - 1
        inside_s = inside * (reached.link_step_s + part_bytes / self.link_rate)
        outside = group.ranks - 1 - inside
        if not outside:
            return reached.collective_s + inside_s
        # all ranks of a node send at the same time, and get equal shares of the adapters' rate
        rate = min(1.0, self.adapter_share) * self.cluster.node.adapter_bytes_per_s
        if group.per_node < self.cluster.node.devices:
            rate /= self.cluster.software.groups_per_adapter
        outside_s = outside * (self.network_step_s + part_bytes / rate)
        return reached.collective_s + max(inside_s, outside_s)

    def send_s(self, message_bytes: float, *, crosses_nodes: bool) -> float:
        """Return the seconds of a message of `message_bytes` bytes from one rank to another, while
        every other rank of the node also sends a message. If `crosses_nodes` is True, the ranks are
        on different nodes."""
        reached = self.cluster.efficiency
        if not crosses_nodes:
            return reached.collective_s + reached.link_step_s + message_bytes / self.link_rate
        rate = min(1.0, self.adapter_share) * self.cluster.node.adapter_bytes_per_s
        rate /= self.cluster.software.groups_per_adapter
        return reached.collective_s + self.network_step_s + message_bytes / rate
