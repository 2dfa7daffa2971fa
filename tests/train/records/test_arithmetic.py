"""A run says so if its processors compute other bits than before."""

import json
import re
import subprocess
import sys
from unittest import mock

import torch

from ptdmpi.comm.world import World
from ptdmpi.train.records import arithmetic
from ptdmpi.train.records.arithmetic import agree
from tests.parallel import parallel
from tests.train.test_loop import loop

CPU = torch.device("cpu")
NAME = """import torch
from ptdmpi.train.records.arithmetic import arithmetic
print(arithmetic(torch.device("cpu")))
"""


def test_the_name_depends_on_the_instructions(monkeypatch):
    """Other processors are stood for by a variable that PyTorch reads at its start."""

    def named() -> str:
        done = subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True)
        return done.stdout.strip()

    here = named()
    assert re.fullmatch(r"[A-Z0-9]+ [0-9a-f]{8}", here) and named() == here
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    plain = named()
    assert plain.startswith("DEFAULT ")
    if not here.startswith("DEFAULT "):
        assert plain.split()[1] != here.split()[1]


@parallel(ranks=[2])
def test_ranks_that_differ_are_named(comm):
    world = World(comm)
    mine = ["AVX512 00000000", "AVX2 11111111"][comm.rank]
    with mock.patch.object(arithmetic, "arithmetic", lambda device: mine):
        names, lines = agree(world, CPU, [])
        assert names == ["AVX2 11111111", "AVX512 00000000"]
        (line,) = lines
        assert "rank 0 has AVX512 00000000, rank 1 on " in line and "has AVX2 11111111" in line
        assert agree(world, CPU, names) == (names, lines)
        assert (
            "before: AVX2 11111111, AVX512 00000000, other"
            in agree(world, CPU, [*names, "other"])[1][1]
        )
        assert "before: AVX512 00000000" in agree(world, CPU, ["AVX512 00000000"])[1][1]


@parallel(ranks=[1])
def test_a_resumed_run_says_that_its_bits_change(comm, tmp_path):
    changes = {"run.steps": 1, "checkpoint.every_steps": 1, "optimizer.decay": "constant"}
    more = changes | {"run.steps": 2}

    def log(changes, name) -> str:
        with (
            mock.patch.object(arithmetic, "arithmetic", lambda device: name),
            loop(comm, tmp_path, changes) as made,
        ):
            made.run()
        return (tmp_path / "run/log.txt").read_text()

    assert "last bits" not in log(changes, "AVX2 0")
    (manifest,) = (tmp_path / "run/checkpoints").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["arithmetic"] == ["AVX2 0"]
    assert "last bits" not in log(more, "AVX2 0")
    text = log(more | {"run.steps": 3}, "AVX512 1")
    assert "compute other last bits than before (AVX512 1; before: AVX2 0)" in text
    assert log(more | {"run.steps": 4}, "AVX512 1").count("last bits") == 1
