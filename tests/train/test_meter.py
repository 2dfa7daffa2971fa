"""The run directory where the disk fails."""

import errno
import os

import pytest

from ptdmpi.config import InputError
from ptdmpi.sinks.record import scalars
from ptdmpi.train import meter
from ptdmpi.train.meter import Rates, RunDirectory, known_peak
from tests._configs import small


def test_lines_wait_for_a_disk_that_fails(tmp_path, monkeypatch, capsys):
    directory = RunDirectory(tmp_path / "run", "", 0)
    directory.record(step=1)
    with monkeypatch.context() as patch:
        patch.setattr(meter, "append_lines", _no_space)
        directory.record(step=2)
        directory.record(step=3)
    directory.record(step=4)
    steps = [1, 2, 3, 4]
    expected = "".join(f'{{"step": {step}}}\n' for step in steps)
    assert (tmp_path / "run/metrics.jsonl").read_text() == expected
    assert capsys.readouterr().err.count("No space left on device; its lines wait") == 1


def _no_space(path, lines):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_line_that_fits_in_part_is_not_written(tmp_path, monkeypatch):
    """A disk that has room for some bytes more takes these and no others."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("whole\n")
    real_open = open

    def small_disk(*words, **options):
        file = real_open(*words, **options)
        return _Small(file)

    monkeypatch.setattr(meter, "open", small_disk, raising=False)
    with pytest.raises(OSError, match="No space"):
        meter.append_lines(path, "a line of some length\n")
    assert path.read_text() == "whole\n"


class _Small:
    """A file on a disk with three bytes left."""

    def __init__(self, file):
        self.file = file
        self.tell, self.truncate = file.tell, file.truncate

    def write(self, data: bytes) -> int:
        return self.file.write(data[:3])

    def __enter__(self):
        return self

    def __exit__(self, *words):
        self.file.close()


def test_a_run_directory_that_cannot_be_written_at_the_start(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(InputError, match=r"run.dir = "):
        RunDirectory(tmp_path / "run", "", 0)


def test_timelines_of_later_steps_are_dropped(tmp_path):
    folder = tmp_path / "timeline"
    folder.mkdir()
    for step in (3, 4):
        (folder / f"step-{step:08d}.json").touch()
    RunDirectory(tmp_path, "", 3)
    assert [path.name for path in folder.iterdir()] == ["step-00000003.json"]


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
