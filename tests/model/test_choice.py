"""Which kernels attention is computed with: by a table, agreed, kept, and for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu.table import filled
from ptdmpi.comm.world import World
from ptdmpi.model import kernels
from ptdmpi.model.kernels import choice
from tests.parallel import parallel

TABLE = Path(kernels.__file__).parents[2] / "presets/kernels.toml"
CUDA = torch.device("cuda")


@contextmanager
def on(capability: tuple[int, int], fa3: bool) -> Iterator[None]:
    """As on a GPU."""
    module = SimpleNamespace(get_device_capability=lambda device: capability)
    with (
        mock.patch.object(torch, "get_device_module", lambda device: module),
        mock.patch.object(choice, "_has_fa3", lambda: fa3),
    ):
        yield


def test_by_the_table():
    assert choice.offered(torch.device("cpu")) == []
    with on((9, 0), True):
        assert choice.offered(CUDA) == ["fa3", "cudnn", "flash"]
    with on((9, 0), False):
        assert choice.offered(CUDA) == ["cudnn", "flash"]
    with on((8, 0), True):
        assert choice.offered(CUDA) == ["flash"]


def test_for_a_while_and_no_longer():
    before = torch._C._get_sdp_priority_order()
    flash, cudnn, math = (
        int(SDPBackend.__members__[name]) for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "MATH")
    )
    q = torch.randn(1, 2, 8, 4)
    with choice.attention_by(["cudnn", "flash"]):
        assert torch._C._get_sdp_priority_order()[:2] == [cudnn, flash]
        assert math in torch._C._get_sdp_priority_order()
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch._C._get_sdp_priority_order() == before
    with choice.attention_by([]):
        assert torch._C._get_sdp_priority_order() == before


@parallel(ranks=[2])
def test_all_ranks_agree_and_a_run_that_goes_on_keeps_to_it(comm, tmp_path):
    """What one of them lacks none makes use of; what the run had is not given up for a new one."""
    world, said = World(comm), []
    with on((9, 0), comm.rank == 0):
        assert choice.agreed(world, tmp_path, CUDA, said.append) == ["cudnn", "flash"]
    assert said.pop() == "attention by cudnn, flash"
    with on((9, 0), True):
        assert choice.agreed(world, tmp_path, CUDA, said.append) == ["cudnn", "flash"]
    with on((8, 0), True):
        assert choice.agreed(world, tmp_path, CUDA, said.append) == ["flash"]
    assert said.pop().endswith("before also by cudnn, which is not here: other bits")
    said.clear()
    assert choice.agreed(world, tmp_path / "none", torch.device("cpu"), said.append) == said == []


def test_the_table_is_filled_with_what_was_measured():
    text = TABLE.read_text()
    rows = {
        "flash": {"s": 3e-3, "apart": 0.001},
        "cudnn": {"s": 2e-3, "apart": 0.001},
        "fa3": {"s": 1e-3, "apart": 0.5},  # wrong
        "efficient": {"skipped": "none"},
    }
    made = filled(text, "cuda 9.0", rows, "some GPU")
    entries = kernels.tomllib.loads(made)["device_attention"]
    assert entries[0]["ways"] == ["cudnn", "flash"] and "2 ms" in entries[0]["measured"]
    assert [one["capability"] for one in entries] == ["9.0", "10.0", ""]
    assert made.startswith(text[: text.index("[[device_attention]]")])
    assert filled(text, "cuda 9.0", {"flash": {"skipped": "none"}}, "") == text
    table = kernels.tomllib.loads(made)
    with mock.patch.object(choice, "table", lambda: table), on((9, 0), True):
        assert choice.offered(CUDA) == ["cudnn", "flash"]
