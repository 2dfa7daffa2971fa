"""Times of kernels and messages: the published formulas, and what must hold for any size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.calibrate import product_rows
from ptdmpi.plan.machine.cluster import load_cluster
from ptdmpi.plan.machine.kernels import Group, Machine

SELENE = load_cluster("selene")
REACHED = SELENE.efficiency
NODE = SELENE.node


@pytest.fixture(scope="module")
def machine():
    return Machine(SELENE, "fp16", 2)


def test_a_large_product_runs_at_the_calibrated_fraction(machine):
    m = n = 128 * 108  # whole waves of every tile
    seconds = machine.gemm_s(m, n, 8192)
    written_s = 2 * m * n / machine.memory_rate  # behind the last step of each tile
    reached = 2 * m * n * 8192 / (seconds - written_s) / 312e12
    assert reached == pytest.approx(REACHED.gemm_fraction, rel=0.02)


def test_small_and_thin_products_are_less_efficient(machine):
    def efficiency(m, n, k):
        return 2 * m * n * k / machine.gemm_s(m, n, k) / 312e12

    assert efficiency(8192, 8192, 8192) > efficiency(2048, 480, 3840) > efficiency(128, 128, 128)
    # 12 x 9 tiles are one wave on 108 multiprocessors, 13 x 9 are not
    assert efficiency(12 * 128, 9 * 128, 8192) > 1.05 * efficiency(13 * 128, 9 * 128, 8192)
    # a product with a vector reads its matrix once
    rate = SELENE.device.memory_bytes_per_s * REACHED.memory_fraction
    assert machine.gemm_s(8192, 1, 8192) == pytest.approx(2 * 8192**2 / rate, rel=0.01)


def test_ring_all_reduce_closed_form(machine):
    """Thakur et al. 2005: 2 (n - 1) steps, 2 (n - 1) / n of the bytes."""
    size, rate = 1 << 28, NODE.link_bytes_per_s * REACHED.link_fraction
    expected = REACHED.collective_s + 14 * REACHED.link_step_s + 14 / 8 * size / rate
    assert machine.all_reduce_s(size, Group(8, 8)) == pytest.approx(expected)
    assert machine.all_reduce_s(size, Group(1, 1)) == 0.0


def test_reduce_scatter_and_all_gather_make_an_all_reduce(machine):
    both = 2 * machine.all_gather_s(1 << 28, Group(8, 8))
    assert both - REACHED.collective_s == pytest.approx(machine.all_reduce_s(1 << 28, Group(8, 8)))


def test_all_to_all_closed_form(machine):
    """A pairwise exchange: n - 1 parts of 1/n, inside a node over its links, out of it over each
    rank's share of the adapters, both at once."""
    size, rate = 1 << 28, NODE.link_bytes_per_s * REACHED.link_fraction
    inside_s = 7 * (REACHED.link_step_s + size / 8 / rate)
    assert machine.all_to_all_s(size, Group(8, 8)) == pytest.approx(REACHED.collective_s + inside_s)
    assert machine.all_to_all_s(size, Group(1, 1)) == 0.0
    adapter = min(1.0, NODE.adapters / NODE.devices) * NODE.adapter_bytes_per_s
    outside_s = 24 * (machine.network_step_s + size / 32 / adapter)
    expected = REACHED.collective_s + outside_s
    assert machine.all_to_all_s(size, Group(32, 8)) == pytest.approx(expected)
    # one rank of each of four nodes: other groups choose the same adapters
    shared = adapter / SELENE.software.groups_per_adapter
    alone_s = 3 * (machine.network_step_s + size / 4 / shared)
    expected = REACHED.collective_s + alone_s
    assert machine.all_to_all_s(size, Group(4, 1)) == pytest.approx(expected)
    # of fast adapters the links inside the node are what it waits for
    node = NODE.model_copy(update={"adapter_bytes_per_s": 1e15, "link_bytes_per_s": 1e9})
    slow = Machine(SELENE.model_copy(update={"node": node}), "fp16", 2)
    inside_s = 7 * (REACHED.link_step_s + size / 16 / slow.link_rate)
    expected = REACHED.collective_s + inside_s
    assert slow.all_to_all_s(size, Group(16, 8)) == pytest.approx(expected)


def test_groups_share_the_adapters_of_a_node(machine):
    """All eight adapters for a group that fills its nodes, one for each of eight groups; under the
    NCCL of 2021 pairs of groups take the same four."""
    newer = Machine(load_cluster("dgx-h100"), "fp16", 2)
    for each, groups in ((newer, 1), (machine, 2)):
        adapter = each.cluster.node.adapter_bytes_per_s
        assert each.ring_rate(Group(32, 8)) == min(each.link_rate, 8 * adapter)
        assert each.ring_rate(Group(32, 2)) == pytest.approx(2 * adapter / groups)
        assert each.ring_rate(Group(32, 1)) == pytest.approx(adapter / groups)
        sent_s = each.send_s(1 << 30, crosses_nodes=True) - each.send_s(0, crosses_nodes=True)
        assert sent_s == pytest.approx((1 << 30) / adapter * groups)
    older = Machine(load_cluster("v100-dgx2"), "fp16", 2)  # 16 devices, 8 adapters
    adapter = older.cluster.node.adapter_bytes_per_s
    assert older.ring_rate(Group(4, 1)) == pytest.approx(adapter / 2)


def test_many_nodes_take_the_tree(machine):
    small = 1 << 16
    ring = 2 * 1023 * REACHED.link_step_s
    assert machine.all_reduce_s(small, Group(1024, 8)) < ring


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096))
def test_no_product_beats_the_roofline(m, n, k):
    machine = Machine(SELENE, "fp16", 2)
    moved = (m * k + k * n + m * n) * 2
    seconds = machine.gemm_s(m, n, k)
    assert seconds >= 2 * m * n * k / (312e12 * REACHED.gemm_fraction) * (1 - 1e-9)
    assert seconds >= moved / (SELENE.device.memory_bytes_per_s * REACHED.memory_fraction)


def test_more_bytes_take_longer_everywhere(machine):
    for group in (Group(8, 8), Group(64, 8), Group(64, 1)):
        times = [machine.all_reduce_s(1 << power, group) for power in range(10, 34)]
        assert times == sorted(times)
    assert machine.send_s(1 << 26, crosses_nodes=True) > machine.send_s(
        1 << 26, crosses_nodes=False
    )


def test_rows_of_whole_16_bytes_are_what_tensor_cores_want():
    """A head of 108 is slower than one of 112, in numbers of 2 bytes, and that no slower than one
    of 128; scores are mostly written. And a linear of 10922 than one of 10944, by half."""
    machine = Machine(load_cluster("selene"), "fp16", 2)
    odd, even, whole = (machine.gemm_s(2048, 2048, d, 32) for d in (108, 112, 128))
    assert odd > 1.15 * even and even <= whole
    ratio = machine.gemm_s(8192, 10922, 4096) / machine.gemm_s(8192, 10944, 4096)
    assert ratio == pytest.approx(398.38 / 272.73, rel=0.03)
    wide = Machine(load_cluster("selene"), "fp32", 4)
    assert wide.gemm_s(2048, 2048, 108) <= wide.gemm_s(2048, 2048, 112)


def test_published_products_are_within_a_few_percent():
    """Large ones and thin ones: those write as much as they compute."""
    rows = list(product_rows(load_cluster("selene")))
    errors = [predicted / measured - 1 for _, predicted, measured in rows]
    assert len(errors) == 9 and max(map(abs, errors)) < 0.12
    assert sum(map(abs, errors)) / 9 < 0.06


def test_products_of_codes_run_at_the_peak_of_codes():
    """H100: twice the rate of bf16, of which the passes that make codes take a part. Without a peak
    for fp8, and in all other products, the values are multiplied as bf16."""
    h100 = load_cluster("dgx-h100")
    assert h100.device.peak("fp8") == 1979e12 and SELENE.device.peak("fp8") == 312e12
    fp8, bf16 = Machine(h100, "fp8", 2), Machine(h100, "bf16", 2)
    size = 16384
    whole_s = bf16.gemm_s(size, size, size)
    assert fp8.gemm_s(size, size, size) == whole_s
    made_s = fp8.stream_s(2 * 9 * size * size)
    computed_s = fp8.codes_gemm_s(size, size, size) - made_s
    assert computed_s == pytest.approx(whole_s / 2, rel=0.02)
    older = Machine(SELENE, "fp8", 2)
    assert older.codes_gemm_s(size, size, size) == older.gemm_s(size, size, size)
