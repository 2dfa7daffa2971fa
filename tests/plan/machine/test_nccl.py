"""Collectives over nodes: the formulas of NCCL's cost model, and what it chooses when."""

from dataclasses import replace

import pytest

from ptdmpi.plan.machine import nccl
from ptdmpi.plan.machine.nccl import Fabric

LINK_S = 1.9e-6


def fabric(nodes, per_node=8, rate=198e9, step_s=3e-6, tree=105e9):
    return Fabric(nodes * per_node, nodes, rate, LINK_S, step_s, tree)


def test_large_sums_are_rings_at_the_rate_of_the_protocol():
    """2 (n - 1) / n of the bytes, at the whole rate with Simple."""
    four, size = fabric(4), 1 << 34
    moved_s = 62 / 32 * size / 198e9
    assert nccl.all_reduce_s(size, four) == pytest.approx(moved_s, rel=0.01)
    assert nccl.all_gather_s(size, four) == pytest.approx(moved_s / 2, rel=0.01)


def test_middle_sizes_take_ll128_and_its_steps():
    """16 MB over four nodes: 6 of 62 steps over the network."""
    size = 2048 * 3840 * 2
    latency_s = 6 * 4.0e-6 + 56 * LINK_S
    expected = latency_s + 62 / 32 * size / (0.92 * 198e9)
    assert nccl.all_reduce_s(size, fabric(4)) == pytest.approx(expected)
    gathered = 3 * 4.0e-6 + 28 * LINK_S + 31 / 32 * size / (0.92 * 198e9)
    assert nccl.all_gather_s(size, fabric(4)) == pytest.approx(gathered)


def test_ll128_reaches_so_much_with_each_ring():
    """84 MB over four nodes, eight rings of 16.9, 15.2 and 18.3 GB/s: what LL128 no longer does
    well, Simple does, with longer steps."""
    size = 2048 * 20480 * 2
    rates = (8 * 18.3e9, 8 * 15.2e9, 8 * 16.9e9)
    four = replace(fabric(4, tree=1e9), ll128_rates=rates)
    ll128_s = 6 * 4.0e-6 + 56 * LINK_S + 62 / 32 * size / rates[2]
    simple_s = 1.9 * (6 * 9.6e-6 + 56 * 1.8 * LINK_S) + 62 / 32 * size / 198e9
    assert nccl.all_reduce_s(size, four) == pytest.approx(min(ll128_s, simple_s))
    assert nccl.all_reduce_s(size, four) > 1.1 * nccl.all_reduce_s(size, fabric(4, tree=1e9))
    small = 1 << 20
    halves = [f(small, four) for f in (nccl.all_gather_s, nccl.reduce_scatter_s)]
    latency_s = 3 * 4.0e-6 + 28 * LINK_S
    for half_s, rate in zip(halves, rates, strict=False):
        assert half_s == pytest.approx(latency_s + 31 / 32 * small / rate)


def test_small_sums_over_many_nodes_take_trees():
    many = fabric(128)
    ring_s = 2 * 127 * 4.0e-6 + 2 * (1023 - 127) * LINK_S
    depth_s = 7 * 0.6 * LINK_S + 7 * 8.5e-6
    assert nccl.all_reduce_s(64, many) == pytest.approx(2 * depth_s, rel=0.01)
    assert nccl.all_reduce_s(64, many) < ring_s


def test_a_slow_fabric_and_a_lone_rank_count():
    size = 1 << 20
    assert nccl.all_reduce_s(size, fabric(4, step_s=1e-3)) > 4e-3
    # one rank of each node: LL128 reaches 0.7 of the rate, so large messages take Simple
    lone = Fabric(8, 8, 24.8e9, LINK_S, 3e-6, 105e9)
    expected = 1.9 * 7 * 9.6e-6 + 7 / 8 * (1 << 32) / 24.8e9
    assert nccl.all_gather_s(1 << 32, lone) == pytest.approx(expected)


def test_more_bytes_never_take_less():
    """The bounds of the search rest on it."""
    for group in (fabric(2), fabric(16), fabric(64, 1, 24.8e9), fabric(512)):
        times = [nccl.all_reduce_s(1.19**power, group) for power in range(20, 140)]
        assert times == sorted(times)


def test_small_parts_take_ll():
    """16 KB over 192 nodes: 191 of 1535 steps over the network, others 1.8 times a node's."""
    many = fabric(192, step_s=2e-6)
    steps_s = 191 * 2.7e-6 + 1344 * 0.47e-6 * 1.8
    assert nccl.all_gather_s(16384, many) == pytest.approx(steps_s, rel=0.01)
    # a quarter of the rate, and no more than 19 GB/s: a megabyte takes LL128 again
    size = 1 << 27
    assert nccl.all_gather_s(size, fabric(2)) < 15 / 16 * size / 19e9
