"""What `make calibrate` looks at, and what it does not."""

import pytest

from benchmarks.planning import calibrate, rows
from benchmarks.planning.elsewhere import FLASH2_H100
from ptdmpi.plan.machine.cluster import load_cluster


def fitted_to():
    """Every number that calibration fits to, and the numbers of other devices."""
    cluster = load_cluster("selene")
    node = cluster.node.link_bytes_per_s
    readings = ("counted", "not counted")
    return (
        [calibrate.observations(cluster, reading) for reading in readings],
        [calibrate.links(gpu, node, {}) for gpu in ("a100", "v100")],
        calibrate.others({"gemm_fraction": 1.0}),
        [[*calibrate.attention_rows(cluster, device)] for device in ("a100", "h100")],
    )


def test_calibration_reads_nothing_else(monkeypatch):
    """Whatever stands in other rows: no number that is fitted to changes, and no other file is
    opened."""
    read, opened = rows.read, set()

    def changed(name):
        opened.add(name)
        for row in read(name):
            if name == calibrate.SMALL and not row["table_ref"].startswith("Fig 7"):
                row["iter_time_s"] = "1e9"
            yield row

    expected = fitted_to()
    monkeypatch.setattr(rows, "read", changed)
    monkeypatch.setattr(calibrate, "read", changed)
    assert fitted_to() == expected
    assert opened == set(calibrate.FILES)


def test_other_devices_are_set_beside_an_a100():
    """Best products of 803 and 869 thousandths of the peak."""
    shares = calibrate.others({"gemm_fraction": 1.0, "memory_fraction": 0.5})
    assert shares["h100"]["gemm_fraction"] == pytest.approx(794.5 / 989 / (271.2 / 312))
    assert all(share["memory_fraction"] == 0.5 for share in shares.values())


def test_flash_attention_2_reaches_less_of_an_h100_than_of_an_a100():
    """Its own rates, refitted: what stands in the presets and in the mapping of torchtitan."""
    cluster = load_cluster("dgx-h100")
    assert cluster.efficiency.attention_fraction == 1.0  # cuDNN's
    found = calibrate.attention(cluster, "h100", cluster.efficiency.model_dump())
    assert found["attention_fraction"] == pytest.approx(FLASH2_H100["attention_fraction"], rel=5e-3)
    selene = load_cluster("selene")
    found = calibrate.attention(selene, "a100", selene.efficiency.model_dump())
    assert found["attention_fraction"] == pytest.approx(selene.efficiency.attention_fraction, 5e-3)
