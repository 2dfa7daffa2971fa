"""Tables of a measured machine: what was measured comes out, and what lies between is between."""

import pytest

from ptdmpi.config import InputError
from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import Cluster, load_model
from ptdmpi.plan.machine.kernels import Group
from ptdmpi.plan.machine.measured import interpolate, machine_of
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space

SHEETS = {
    "device": {
        "name": "test",
        "peak_flops": {"fp32": 1e9},
        "memory_bytes": 1e9,
        "memory_bytes_per_s": 1e9,
        "multiprocessors": 1,
        "clock_hz": 1.0,
        "shared_bytes_per_clock": 1e15,
        "exponentials_per_clock": 1e15,
        "kernel_s": 1e-6,
    },
    "node": {
        "devices": 4,
        "link_bytes_per_s": 1e15,
        "adapters": 4,
        "adapter_bytes_per_s": 1e15,
        "adapter_latency_s": 0.0,
        "switch_latency_s": 0.0,
        "switches": 0,
    },
    "software": {
        "attention": "flash",
        "dropout": False,
        "gradient_bytes": 4,
        "overlap_pipeline": True,
        "overlap_tensor": False,
        "balanced_stages": True,
        "zero_unit": "layer",
    },
    "efficiency": {
        "gemm_fraction": 1.0,
        "memory_fraction": 1.0,
        "link_fraction": 1.0,
        "link_step_s": 0.0,
        "collective_s": 0.0,
    },
}


def cluster(**measured):
    """A machine of 1e9 FLOP/s and bytes/s, whose all-reduce takes 1 ms and 1 us per kB."""
    sizes = [1e3, 1e6]
    messages = [
        {
            "collective": name,
            "ranks": 2,
            "nodes": 1,
            "sizes_bytes": sizes,
            "seconds": [1e-3, 1e-3 + 1e-3],
        }
        for name in ("all_reduce", "all_gather", "reduce_scatter", "send")
    ]
    tree = {
        "name": "measured",
        **SHEETS,
        "measured": {
            "asynchronous": False,
            "gemm": {
                "m": [10.0, 1000.0],
                "n": [10.0],
                "k": [10.0, 1000.0],
                "flops_per_s": [[[1e8, 2e8]], [[4e8, 8e8]]],
            },
            "stream": {"moved_bytes": [1e3, 1e6], "bytes_per_s": [1e9, 1e8]},
            "attention": {
                "head_sizes": [32.0, 128.0],
                "forward_s_per_score": [1e-9, 4e-9],
                "backward_s_per_score": [2e-9, 8e-9],
            },
            "seconds_per_element": {"gelu": 5e-9},
            "messages": messages,
            "step_s": 0.5,
            "update_s_per_element": 1e-8,
            **measured,
        },
    }
    return Cluster.model_validate(tree)


def test_measured_sizes_are_as_measured_and_others_between():
    machine = machine_of(cluster(), "fp32", 4)
    assert machine.gemm_s(1000, 10, 1000) == pytest.approx(1e-6 + 2e7 / 8e8)
    # halfway in logarithms of both sides: the geometric mean of the four corners
    assert machine.gemm_s(100, 10, 100) == pytest.approx(
        1e-6 + 2e5 / (1e8 * 2e8 * 4e8 * 8e8) ** 0.25
    )
    assert machine.gemm_s(5, 1, 1) == pytest.approx(1e-6 + 10 / 1e8)
    assert machine.stream_s(1e9) == pytest.approx(1e-6 + 10)
    assert machine.elementwise_s("gelu", 1e6, 1e9) == pytest.approx(1e-6 + 5e-3)
    assert machine.elementwise_s("swiglu", 1e6, 1e3) == pytest.approx(1e-6 + 1e-6)
    assert machine.update_s(1e6, [1.0]) == pytest.approx(0.5 + 0.01)
    scores = machine.causal_scores(100, 256)
    assert scores == 100 * 192
    assert machine.flash_s(100, 256, 80, 2) == pytest.approx(1e-6 + scores * 2.5e-9)
    assert machine.flash_s(100, 256, 80, 5) == pytest.approx(1e-6 + scores * 5e-9)
    assert interpolate(3, [1, 9], [2.0, 8.0]) == pytest.approx(4.0)


def test_launches_are_hidden_where_the_host_is_ahead():
    machine = machine_of(cluster(asynchronous=True), "fp32", 4)
    assert machine.gemm_s(1, 1, 1) == 1e-6
    assert machine.gemm_s(1000, 10, 1000) == pytest.approx(2e7 / 8e8)


def test_groups_of_other_sizes_take_more_steps_and_ring_bytes():
    machine = machine_of(cluster(), "fp32", 4)
    assert machine.all_reduce_s(1e6, Group(2, 2)) == pytest.approx(2e-3)
    # three times the steps of 1 ms, and 3/4 over 1/2 of the bytes' 1 ms
    assert machine.all_reduce_s(1e6, Group(4, 4)) == pytest.approx(3e-3 + 1.5e-3)
    # past the largest the rate stays
    assert machine.all_reduce_s(1e8, Group(2, 2)) == pytest.approx(1e-3 + 0.2 - 1e-3)
    assert machine.send_s(1e3, crosses_nodes=False) == pytest.approx(1e-3)
    # an exchange is three messages of a quarter of the bytes
    message_s = machine.send_s(2.5e5, crosses_nodes=False)
    assert machine.all_to_all_s(1e6, Group(4, 4)) == pytest.approx(3 * message_s)
    assert machine.all_gather_s(1e6, Group(1, 1)) == machine.all_to_all_s(1e6, Group(1, 1)) == 0.0
    for collective_s in (machine.all_reduce_s, machine.all_to_all_s):
        with pytest.raises(InputError, match="on one node of 4 ranks"):
            collective_s(1e6, Group(8, 4))


def test_more_ranks_than_were_measured_are_refused():
    pricer = Pricer.of(cluster(), load_model("l=4,h=64,a=8,s=32,V=100"), 8, "fp32")
    with pytest.raises(InputError, match="on one node of 4 ranks; run ptdmpi probe with as many"):
        search(pricer, Space(8))
    pricer = Pricer.of(cluster(messages=[]), pricer.model, 8, "fp32")
    with pytest.raises(InputError, match="measured without messages; run ptdmpi probe"):
        search(pricer, Space(2))


def test_the_search_works_on_measured_machines():
    pricer = Pricer.of(cluster(), load_model("l=4,h=64,a=4,s=32,V=100"), 8, "fp32")
    found = search(pricer, Space(4))
    assert found[0].step_time_s == min(price.step_time_s for price in found)
    assert pricer.price(Layout(1, 1, 4)).step_time_s >= found[0].step_time_s


def test_tables_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="must have 2 x 1 x 2 numbers"):
        gemm = cluster().measured.gemm.model_dump()
        cluster(gemm={**gemm, "flops_per_s": [[[1e8, 2e8]]]})
    with pytest.raises(ValueError, match=r"gemm\.m\n.*must ascend"):
        cluster(gemm={**gemm, "m": [1000.0, 10.0]})
    with pytest.raises(ValueError, match=r"moved_bytes\n.*must ascend"):
        cluster(stream={"moved_bytes": [1e3, 1e3], "bytes_per_s": [1e9, 1e8]})
    with pytest.raises(ValueError, match="moved_bytes and bytes_per_s must have the same length"):
        cluster(stream={"moved_bytes": [1e3], "bytes_per_s": [1e9, 1e8]})
    times = {"forward_s_per_score": [1e-9, 4e-9], "backward_s_per_score": [2e-9, 8e-9]}
    with pytest.raises(ValueError, match=r"head_sizes\n.*must ascend"):
        cluster(attention={"head_sizes": [64.0, 64.0], **times})
