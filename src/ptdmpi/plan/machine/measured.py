"""Times of kernels and messages on a machine that `ptdmpi probe` measured. The tables of measured
times replace the rates of data sheets.

Between measured sizes, times and rates are interpolated linearly in the logarithms of size and
value. Outside the range of measured sizes, the rate is assumed to be constant. Messages below the
smallest measured size are an exception: they are assumed to take as long as a message of this size.

For a group of n ranks that was not measured, the times of the measured group with the nearest
number of ranks are used. A measured time consists of latency and the time of the transfer. The
latency is scaled with n - 1, the number of steps of a ring. The time of the transfer is scaled with
(n - 1) / n, the fraction of the tensor that a rank of a ring sends.
"""

import bisect
import math
from collections.abc import Sequence

from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.plan.machine.cluster import Cluster
from ptdmpi.plan.machine.kernels import Group, Machine
from ptdmpi.plan.machine.probed import Measured, Messages


def between(x: float, places: Sequence[float]) -> tuple[int, float]:
    """Return the index i and the weight w with log x = (1 - w) log places[i] + w log places[i + 1].

    `places` are ascending. A value x outside the range of `places` is replaced with the nearest of
    them.
    """
    if x <= places[0] or len(places) == 1:
        return 0, 0.0
    if x >= places[-1]:
        return len(places) - 2, 1.0
    i = bisect.bisect_right(places, x) - 1
    return i, math.log(x / places[i]) / math.log(places[i + 1] / places[i])


def interpolate(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the value at x, interpolated between `values` at ascending `places`. The logarithm of
    the value is linear in the logarithm of x."""
    i, weight = between(x, places)
    if weight == 0.0:
        return values[i]
    return values[i] ** (1 - weight) * values[i + 1] ** weight


class MeasuredMachine(Machine):
    """A `Machine` whose times of kernels and messages were measured.

    During the measurement, all ranks of a node computed and communicated at the same time, as they
    do in training.
    """

    def __init__(
        self, cluster: Cluster, measured: Measured, dtype: str, element_bytes: int
    ) -> None:
        super().__init__(cluster, dtype, element_bytes)
        self.measured = measured
        self._overhead_s = cluster.device.kernel_s
        self._messages: dict[tuple[str, bool], list[Messages]] = {}
        for table in self.measured.messages:
            self._messages.setdefault((table.collective, table.nodes > 1), []).append(table)

    def _kernel_s(self, work_s: float) -> float:
        """Return the seconds of a kernel that computes for `work_s` seconds, including the time to
        launch it.

        On an asynchronous device, the launch overlaps with the previous kernel. On a synchronous
        device, the kernel runs after the launch, so their times add up.
        """
        if self.measured.asynchronous:
            return max(self._overhead_s, work_s)
        return self._overhead_s + work_s

    def host_s(self, launches: int) -> float:
        """Return 0, because the measured times of kernels include their launches."""
        return 0.0

    def stream_s(self, moved_bytes: float) -> float:
        table = self.measured.stream
        rate = interpolate(moved_bytes, table.moved_bytes, table.bytes_per_s)
        return self._kernel_s(moved_bytes / rate / self.cluster.efficiency.memory_fraction)

    def elementwise_s(self, kind: str, elements: float, *moved_bytes: float) -> float:
        per_element_s = self.measured.seconds_per_element.get(kind)
        if per_element_s is None:
            return super().elementwise_s(kind, elements, *moved_bytes)
        return self._kernel_s(elements * per_element_s / self.cluster.efficiency.memory_fraction)

    def _gemm_s(self, m: int, n: int, k: int, batch: int) -> float:
        table = self.measured.gemm
        sides = [
            between(size, places) for size, places in ((m, table.m), (n, table.n), (k, table.k))
        ]
        log_rate = 0.0
        # interpolate between the eight corners of a cell of the table: bit i of `corner` selects
        # the lower or the upper end on axis i
        for corner in range(8):
            weight, at = 1.0, []
            for axis, (i, w) in enumerate(sides):
                far = corner >> axis & 1
                weight *= w if far else 1 - w
                at.append(i + far)
            if weight:
                log_rate += weight * math.log(table.flops_per_s[at[0]][at[1]][at[2]])
        work_s = batch * 2 * m * n * k / math.exp(log_rate) / self.cluster.efficiency.gemm_fraction
        return self._kernel_s(work_s)

    def flash_s(self, rows: int, columns: int, head_size: float, products: int) -> float:
        table = self.measured.attention
        backward = products > 2
        times = table.backward_s_per_score if backward else table.forward_s_per_score
        (small, large), sizes = times, table.head_sizes
        share = (head_size - sizes[0]) / (sizes[1] - sizes[0])
        # Interpolate on a straight line through both measured head sizes. Below the smaller size
        # s0, whose time is t, the line could fall below 0. Therefore the result for a head size s
        # is at least t s / (2 s0).
        per_score_s = max(small * head_size / sizes[0] * 0.5, small + share * (large - small))
        return self._kernel_s(self.causal_scores(rows, columns) * per_score_s)

    def update_s(self, elements: float, kernel_bytes: Sequence[float]) -> float:
        return self.measured.step_s + elements * self.measured.update_s_per_element

    def _message_s(self, collective: str, size: float, group: Group) -> float:
        """Return the seconds of a collective of `size` bytes over a group.

        A group with several ranks on each of several nodes communicates in two phases: over the
        network, with `size` / `per_node` bytes per rank, and within the node.
        """
        if group.ranks == 1:
            return 0.0
        if group.nodes == 1:
            return self._table_s(collective, False, size, group.ranks)
        if group.per_node == 1:
            return self._table_s(collective, True, size, group.nodes)
        across_s = self._table_s(collective, True, size / group.per_node, group.nodes)
        return across_s + self._table_s(collective, False, size, group.per_node)

    def _table_s(self, collective: str, network: bool, size: float, ranks: int) -> float:
        """Return the seconds of a collective on `ranks` ranks, scaled from the measured group whose
        number of ranks is nearest to `ranks`.

        `size` is in bytes. `network` is True if each rank is on a different node. Raises InputError
        if no group was measured for the collective.
        """
        tables = self._messages.get((collective, network), [])
        if not tables:
            known = f"on one node of {counted(self.cluster.node.devices, 'rank')}"
            raise InputError(
                f"cluster {self.cluster.name} was measured "
                f"{known if network else 'without messages'}; run ptdmpi probe with as many "
                "ranks as the training will have"
            )
        table = min(tables, key=lambda table: (abs(math.log(table.ranks / ranks)), table.ranks))
        least_s = min(table.seconds)
        whole_s = interpolate(size, table.sizes_bytes, table.seconds)
        if size > table.sizes_bytes[-1]:
            whole_s *= size / table.sizes_bytes[-1]
        # a ring of n ranks has n - 1 latencies and moves (n - 1) / n of the tensor. The smallest
        # time in the table is assumed to be only latency
        steps = (ranks - 1) / (table.ranks - 1)
        share = (1 - 1 / ranks) / (1 - 1 / table.ranks)
        taken_s = steps * least_s + share * max(0.0, whole_s - least_s)
        return taken_s / self.cluster.efficiency.link_fraction

    def all_gather_s(self, gathered_bytes: float, group: Group) -> float:
        return self._message_s("all_gather", gathered_bytes, group)

    def reduce_scatter_s(self, summed_bytes: float, group: Group) -> float:
        return self._message_s("reduce_scatter", summed_bytes, group)

    def all_reduce_s(self, summed_bytes: float, group: Group) -> float:
        return self._message_s("all_reduce", summed_bytes, group)

    def all_to_all_s(self, brought_bytes: float, group: Group) -> float:
        """Return the seconds of an all-to-all on n ranks: n - 1 measured messages, one after the
        other, each with 1/n of the `brought_bytes` bytes."""
        part_bytes = brought_bytes / max(1, group.ranks)
        inside = min(group.ranks, group.per_node) - 1
        outside = group.ranks - 1 - inside
        taken_s = 0.0
        if inside:
            taken_s += inside * self.send_s(part_bytes, crosses_nodes=False)
        if outside:
            taken_s += outside * self.send_s(part_bytes, crosses_nodes=True)
        return taken_s

    def send_s(self, message_bytes: float, *, crosses_nodes: bool) -> float:
        return self._table_s("send", crosses_nodes, message_bytes, 2)


def machine_of(cluster: Cluster, dtype: str, element_bytes: int) -> Machine:
    """Return the `Machine` (times of kernels and messages) of a cluster. If the cluster file has
    measurements, the times are computed from them; otherwise they are computed from data sheets.

    `dtype` is the data type of the numbers, and `element_bytes` is the size of one number.
    """
    if cluster.measured is None:
        return Machine(cluster, dtype, element_bytes)
    return MeasuredMachine(cluster, cluster.measured, dtype, element_bytes)
