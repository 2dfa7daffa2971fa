"""Peaks of devices, and the rates of a step."""

import itertools

import pytest
import torch

from ptdmpi.sinks.record import scalars
from ptdmpi.train.records.rates import (
    GEMM_RUNS,
    GEMM_SIZE,
    Rates,
    known_peak,
    peak_flops,
    why_no_peak,
)
from tests._configs import small

NAMES = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "AMD Instinct MI250X": 191.5e12,
    "AMD Instinct MI300X": 1307.4e12,
    "Tesla V100-SXM2-16GB": None,  # it has no bfloat16
    "NVIDIA H100 96GB HBM3e": None,
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA A100-SXM-64GB": None,  # made to order, with more of the chip
    "NVIDIA GB300": None,
    "NVIDIA H200-141C": None,  # a virtual part of one
    "NVIDIA GeForce RTX 4090": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_of_data_sheets_and_never_guessed(name):
    assert known_peak(name, "bf16") == NAMES[name]


def test_without_a_peak_there_is_no_mfu():
    rates = Rates(small(), 53, 1, None).of(2.0)
    assert rates["mfu"] is None and rates["tokens_per_s"] > 0
    assert "mfu" not in " ".join(scalars(rates))


@pytest.mark.parametrize("running_s, busy", [(0.95, False), (0.85, True), (0.3, True)])
def test_a_peak_is_measured_only_on_idle_cores(monkeypatch, running_s, busy):
    """Each product takes a second, during which the thread runs for `running_s` seconds."""
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) * 1.0)
    used = itertools.count(step=running_s * GEMM_RUNS)
    monkeypatch.setattr("time.thread_time", lambda: next(used))
    peak = peak_flops.__wrapped__(torch.device("cpu"), torch.float32, "fp32")
    assert peak == (None if busy else 2.0 * GEMM_SIZE**3)
    assert "used the same cores" in why_no_peak(torch.device("cpu"), "fp32")
