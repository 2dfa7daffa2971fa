"""The effect of a faster or slower network, and of a network with two tiers, on the time of a
step."""

from collections.abc import Sequence
from typing import NamedTuple

from ptdmpi.base.errors import InputError
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config.layout import Layout
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.cost.data_axis import Behind, DataAxis, InOps
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.cost.step import StepTimes
from ptdmpi.plan.machine.cluster import Cluster, Model
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.shape.parameters import ModelPart

LATENCY = 10  # the factor in the change "latencies 10 times as long"


def slower(cluster: Cluster, adapters: float = 1.0, links: float = 1.0) -> Cluster:
    """Return a copy of the cluster in which the rates of network adapters are divided by
    `adapters`, and the rates of links inside nodes by `links`."""
    node = cluster.node
    rates = {
        "adapter_bytes_per_s": node.adapter_bytes_per_s / adapters,
        "tree_bytes_per_s": node.tree_bytes_per_s / adapters,
        "ll128_bytes_per_s": tuple(rate / adapters for rate in node.ll128_bytes_per_s),
        "link_bytes_per_s": node.link_bytes_per_s / links,
    }
    return cluster.model_copy(update={"node": node.model_copy(update=rates)})


def distant(cluster: Cluster, times: float) -> Cluster:
    """Return a copy of the cluster in which the latencies between nodes are multiplied by
    `times`."""
    node = cluster.node
    delays = {
        "adapter_latency_s": node.adapter_latency_s * times,
        "switch_latency_s": node.switch_latency_s * times,
    }
    return cluster.model_copy(update={"node": node.model_copy(update=delays)})


class TieredTimes(StepTimes):
    """The times of steps, in seconds, on a network of two tiers: the nodes form pods, and the
    network between pods is slower. `taper` is (number of nodes in a pod, factor). Messages within a
    pod have the rates of the cluster file, and messages between pods have these rates divided by
    the factor.

    All ranks wait for the slowest message. Therefore one message between pods is enough to give all
    messages of its kind the lower rate. Messages between pipeline stages have the lower rate if the
    layout spans several pods. Messages of the data axis have the lower rate unless each
    data-parallel group is inside one pod. Let t, c and d be the sizes of the tensor, context and
    data axes. Consecutive ranks fill one node after the other, and a data-parallel group lies in a
    block of t c d consecutive ranks. So each data-parallel group is inside one pod if t c d divides
    the number of ranks in a pod, or if the whole layout fits into a pod.
    """

    def __init__(
        self, cluster: Cluster, model: Model, precision: str, taper: tuple[int, float]
    ) -> None:
        super().__init__(cluster, model, precision)
        pod_nodes, divided = taper
        self.pod_ranks = pod_nodes * cluster.node.devices
        self.outside = StepTimes(slower(cluster, divided), model, precision)
        self.data = TieredAxis(self.data, self.outside.data, self.pod_ranks)

    def _way_s(self, layout: Layout, crosses: bool) -> float:
        if crosses and layout.ranks > self.pod_ranks:
            return self.outside._way_s(layout, crosses)
        return super()._way_s(layout, crosses)


class TieredAxis(DataAxis):
    """The times of messages over the data axis on a network of two tiers. `inside` has the times
    within a pod of `pod_ranks` ranks, and `outside` has the times between pods."""

    def __init__(self, inside: DataAxis, outside: DataAxis, pod_ranks: int) -> None:
        super().__init__(inside.machine, Model("", inside.model, inside.vocab_size))
        self.outside, self.pod_ranks = outside, pod_ranks

    def _tapered(self, layout: Layout) -> bool:
        """Return True if a data-parallel group may span more than one pod."""
        block = layout.tensor * layout.context * layout.data
        return layout.ranks > self.pod_ranks and self.pod_ranks % block != 0

    def _ends_s(self, layout: Layout) -> float:
        """Return the seconds of the messages between the first and the last pipeline stage, whose
        ranks are farthest apart."""
        if layout.ranks > self.pod_ranks:
            return self.outside._ends_s(layout)
        return super()._ends_s(layout)

    def behind(self, layout: Layout, elements: float) -> Behind:
        if self._tapered(layout):
            return self.outside.behind(layout, elements)
        return super().behind(layout, elements)

    def in_ops(self, layout: Layout, stage: ModelPart) -> InOps:
        if self._tapered(layout):
            return self.outside.in_ops(layout, stage)
        return super().in_ops(layout, stage)

    def least_in_ops_s(self, layout: Layout, layers: float) -> float:
        if self._tapered(layout):
            return self.outside.least_in_ops_s(layout, layers)
        return super().least_in_ops_s(layout, layers)


class What(NamedTuple):
    """A change of the machine, and the step times of two layouts on the changed machine. `same_s`
    is the step time in the layout that was the best before the change. `best` is the price of the
    layout that is the best after the change."""

    name: str
    same_s: float
    best: Price


def machines(pricer: Pricer, pod_nodes: int | None) -> list[tuple[str, Pricer]]:
    """Return pairs (name, pricer): first the cluster itself, then the changed machines. Networks of
    two tiers, with pods of `pod_nodes` nodes, are included unless `pod_nodes` is None.

    Raises InputError for a measured machine, because it has tables of message times instead of
    rates that could be changed.
    """
    cluster = pricer.cluster
    precision = pricer.machine.dtype
    if cluster.measured is not None:
        raise InputError(
            f"{cluster.name} was measured: its messages are tables of times, in which a rate "
            "cannot be changed; name a cluster file made from data sheets"
        )
    changed: list[tuple[str, Cluster]] = [
        ("as it is", cluster),
        ("adapters twice as fast", slower(cluster, 0.5)),
        ("adapters half as fast", slower(cluster, 2)),
        ("adapters a quarter as fast", slower(cluster, 4)),
        ("links half as fast", slower(cluster, links=2)),
        (f"latencies {LATENCY} times as long", distant(cluster, LATENCY)),
    ]
    pricers = [
        (name, Pricer.of(machine, pricer.model, pricer.batch, precision))
        for name, machine in changed
    ]
    if pod_nodes is not None:
        for taper in (2, 4):
            name = f"tapered {taper}:1 between pods of {counted(pod_nodes, 'node')}"
            times = TieredTimes(cluster, pricer.model, precision, (pod_nodes, taper))
            pricers.append((name, Pricer(times, pricer.batch)))
    return pricers


def answer(pricer: Pricer, ranks: int, pod_nodes: int | None) -> Reply:
    """Return the step times after each change of the machine, for two layouts: the best layout
    before the change, and the best layout after the change. `pod_nodes` is the number of nodes in a
    pod of a network with two tiers; None leaves out such networks."""
    changes: list[What] = []
    for name, changed in machines(pricer, pod_nodes):
        note(f"ptdmpi ask: {name}")
        best = search(changed, Space(ranks), 1)[0]
        kept = changes[0].best.layout if changes else best.layout
        changes.append(What(name, changed.price(kept).step_time_s, best))
    return _told(pricer, ranks, changes)


def _told(pricer: Pricer, ranks: int, changes: Sequence[What]) -> Reply:
    base_s = changes[0].best.step_time_s
    rows = [["network", "step in the same layout", "in the best", "best layout"]]
    entries, bars = [], {}
    for change in changes:
        same, best = change.same_s / base_s - 1, change.best.step_time_s / base_s - 1
        layout = str(change.best.layout)
        if change is not changes[0] and change.best.layout == changes[0].best.layout:
            layout = "the same"
        rows.append([change.name, f"{change.same_s:.2f} s ({same:+.1%})", f"{best:+.1%}", layout])
        entries.append(
            {
                "network": change.name,
                "step_time_s": change.same_s,
                "best_step_time_s": change.best.step_time_s,
                "best_layout": str(change.best.layout),
            }
        )
        bars[change.name] = 100 * same
    worst = max(changes, key=lambda change: change.same_s)
    where = f"{counted(ranks, 'rank')} of {pricer.cluster.name}"
    half = next(change for change in changes if change.name == "adapters half as fast")
    return Reply(
        short=f"{pricer.model.name} on {where}: with adapters half as fast, the step time changes "
        f"by {half.same_s / base_s - 1:+.1%} in the same layout, and by "
        f"{half.best.step_time_s / base_s - 1:+.1%} in the layout that is then the best; "
        f"the largest effect of these changes: {worst.name}, {worst.same_s / base_s - 1:+.1%}.",
        rows=rows,
        numbers={"ranks": ranks, "changes": entries},
        title=f"{pricer.model.name} on {where}, {changes[0].best.layout}: "
        "what if the network changed",
        panels=[Panel("step time, % more", "", bars=bars)],
    )
