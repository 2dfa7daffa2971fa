"""`ptdmpi probe`: a cluster file that the planner reads, and results that are checked."""

import tomllib
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import tomlkit
import torch

from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.config.layout import Layout
from ptdmpi.model.kernels import Kernels, host
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.choice import BY_LIBRARY, HostChoice, measured_choice
from ptdmpi.model.kernels.timing import bench, quickest
from ptdmpi.model.kernels.timing.bench import ProbeError
from ptdmpi.model.kernels.timing.quickest import TimedSizes
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import Cluster, load_model
from ptdmpi.plan.machine.fit import descend
from ptdmpi.plan.machine.probed import KernelWays
from ptdmpi.probe import kernels, layers
from ptdmpi.probe.layers import ProbedModel
from ptdmpi.probe.machine import Effort, probe
from tests.parallel import mpirun, parallel

TINY = Effort(
    kernels.Extent((16, 32), (1 << 10, 1 << 14), 16, 2, (8, 16)),
    (1 << 8, 1 << 12, 1 << 17),
    (ProbedModel(2, 16, 8, 8, 64, 1), ProbedModel(2, 32, 8, 16, 64, 2)),
    TimedSizes((130, 140), 2, 4, ((2, 4, 8), (4, 8, 16)), (4, 8)),
)


class Told:
    """Stands in for `progress`: what was to be done, and what was."""

    def __init__(self):
        self.phases = {}

    @contextmanager
    def progress(self, what, total, unit, first_s):
        self.phases[what] = [total, 0]
        yield lambda more: self.phases[what].__setitem__(1, self.phases[what][1] + more)


def run(comm, bar=None, **changes):
    shown = patch.object(bench, "progress", (bar or Told()).progress)
    # a fit to times of microseconds is noise: a narrow one takes a tenth of the tries
    narrow = patch.object(layers, "descend", lambda loss, start, most: descend(loss, start, 1.01))
    with shown, narrow, patch.object(bench, "TRIALS", 2), patch.object(bench, "TRIAL_S", 1e-4):
        return probe(World(comm), "fp32", torch.device("cpu"), replace(TINY, **changes))


@parallel(ranks=[2])
def test_what_is_probed_prices_layouts(comm):
    bar = Told()
    tree, findings = run(comm, bar)
    assert len(bar.phases) == 6 and all(done == total for total, done in bar.phases.values())
    assert len(set(map(str, comm.allgather((tree, findings))))) == 1
    cluster = Cluster.model_validate(tomllib.loads(tomlkit.dumps(tree)))
    assert cluster.node.devices == comm.size
    kinds = {(table.collective, table.ranks) for table in cluster.measured.messages}
    names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    assert kinds == ({(name, 2) for name in names} if comm.size == 2 else set())
    pricer = Pricer.of(cluster, load_model("l=4,h=64,a=4,s=32,V=100"), 4, "fp32")
    for layout in (Layout(1, comm.size, 1), Layout(comm.size, 1, 1), Layout(1, 1, comm.size)):
        assert 0 < pricer.price(layout).step_time_s < 100
    words = dict(findings)
    own = cluster.kernels.entries()
    assert [len(own[kind]) for kind in ("attention", "linear", "gelu")] == [
        1,
        1,
        1,
    ] and "causal attention by" in words
    assert "GB/s" in words["memory"] and "layers over 1 rank" in words


def choice_in(work: partial) -> HostChoice | None:
    """The choice of the kernels that a piece of work was given, however deep they are in it."""
    for part in (work.func, *work.args):
        if isinstance(part, AttentionCore):
            part = part.kernels
        if isinstance(part, Kernels):
            return part.choice
        if isinstance(part, partial) and (found := choice_in(part)) is not None:
            return found
    return None


class Times:
    """Stands in for a Bench: some time of each way, by the sizes that a tensor of it has."""

    def __init__(self, times):
        self.times = times

    def work_s(self, work):
        work()
        return self.times(choice_in(work))

    def agreed(self, value):
        return value

    def check(self, right, what):
        assert right, what

    def note(self, name, value):
        pass


@pytest.mark.skipif(not host.has_fused(torch.float32), reason="this torch is without oneDNN")
def test_the_quickest_ways_are_what_a_run_then_takes():
    """Products where they beat the better of the library's two ways at the lengths together;
    oneDNN, and the library at once, from where they are the quicker at all sizes above."""

    def settled(times, dtype=torch.float32):
        own = quickest.entries(Times(times), dtype, TINY.ways)
        assert "130, 140 positions" in own["attention"][0]["measured"]
        return measured_choice(dtype, KernelWays(**own).entries())

    attentions = {name: HostChoice(kernel) for name, kernel in quickest.ATTENTION.items()}
    slow_products = attentions["products"]
    assert settled(lambda way: 0.9 if way == slow_products else 1.0) == slow_products
    assert settled(lambda way: 0.98 if way != BY_LIBRARY else 1.0) == BY_LIBRARY  # chance
    whole = settled(lambda way: 0.9 if way == attentions["whole"] else 1.0)
    assert whole.attention.whole_from == 130
    for name in ("products in fpmath mode", "PyTorch forward, products backward in fpmath mode"):
        way = attentions[name]
        assert settled(lambda way_, way=way: 0.9 if way_ == way else 1.0) == BY_LIBRARY
        narrow = settled(lambda way_, way=way: 0.9 if way_ == way else 1.0, torch.bfloat16)
        assert narrow == way
    larger = attentions["products of 256 queries"]
    assert settled(lambda way: 0.9 if way == larger else 1.0).attention.block == 256
    assert (
        settled(lambda way: {larger: 0.89, slow_products: 0.9}.get(way, 1.0)).attention.block == 128
    )  # chance
    assert settled(lambda way: 0.9 if way == quickest.SIGMOID else 1.0) == quickest.SIGMOID
    quick = settled(lambda way: 0.9 if way == quickest.ONEDNN else 1.0)
    assert (quick.linear.output, quick.linear.input_gradient) == (64, 64)
    assert quickest._quicker_from([1, 2, 3, 4], [1, 1, 1, 1], [0.5, 2, 0.5, 0.5]) == 3
    assert quickest._quicker_from([2, 1], [1, 1], [2, 0.5]) is None


@parallel(ranks=[2])
def test_wrong_results_end_the_probe_on_every_rank(comm):
    """A sum that one rank has wrong, a product that is half of what it should be."""
    right_sum, right_product = MpiCommunicator._all_reduce, Kernels.linear

    def wrong_sum(axis, flat, op):
        handle = right_sum(axis, flat, op)
        if axis.rank == 1:
            flat[-1] += 1
        return handle

    with (
        patch.object(MpiCommunicator, "_all_reduce", wrong_sum),
        pytest.raises(ProbeError, match="all_reduce of 256 bytes over 2 ranks of a node is wrong"),
    ):
        run(comm)
    with (
        patch.object(Kernels, "linear", lambda by, x, w, *bias: right_product(by, x, w, *bias) / 2),
        pytest.raises(ProbeError, match=r"product 16 x 16 x 16 is wrong on ranks 0, 1"),
    ):
        run(comm)


@pytest.mark.long
def test_a_bad_path_is_refused_before_anything_is_measured(tmp_path):
    code = ["-m", "ptdmpi", "probe", "--output", str(tmp_path / "none" / "here.toml")]
    result = mpirun(1, code, timeout_s=60, check=False)
    assert result.returncode == 2
    assert "must be a .toml file in a directory that exists" in result.stderr


@pytest.mark.parametrize(
    "keys",
    [
        {"way": "products", "keeps": True, "library_forward": True},
        {"way": "library", "fpmath": True},
        {"way": "products", "type": "float32", "fpmath": True},
    ],
)
def test_ways_that_do_not_go_together_are_refused(keys):
    entry = {"capability": "", "type": "bfloat16", "measured": "by hand"}
    assert KernelWays(attention=[entry | {"way": "products", "fpmath": True}]).attention
    with pytest.raises(ValueError, match=r"keeps|fpmath"):
        KernelWays(attention=[entry | keys])
