"""Which kernels attention is computed with: by a table, agreed, kept, and for a while."""

import json
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
from tests._runs import loop
from tests.parallel import parallel

TABLE = Path(kernels.__file__).parents[2] / "presets/kernels.toml"
CUDA = torch.device("cuda")
GPU = (CUDA, torch.bfloat16)


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
        assert choice.agreed(world, tmp_path, GPU, (), said.append) == ["cudnn", "flash"]
    assert said.pop() == "attention by cudnn, flash"
    with on((9, 0), True):
        assert choice.agreed(world, tmp_path, GPU, ["flash"], said.append) == ["cudnn", "flash"]
    with on((8, 0), True):
        assert choice.agreed(world, tmp_path, GPU, (), said.append) == ["flash"]
    assert "before also by cudnn, which is not here: other bits; " in said.pop()
    with on((9, 0), True):  # back where it was
        assert choice.agreed(world, tmp_path, GPU, (), said.append) == ["cudnn", "flash"]
        assert said.pop().endswith('run.kernels = "anew" takes what is quickest here: fa3, cudnn')
        assert choice.agreed(world, tmp_path, GPU, None, said.append) == ["fa3", "cudnn", "flash"]


@parallel(ranks=[2])
def test_on_hosts_all_ranks_compute_as_the_first(comm, tmp_path):
    """Whatever their processors would take; as before on another processor, unless asked anew."""
    world, said = World(comm), []
    host = (torch.device("cpu"), torch.bfloat16)

    def ways(products: bool, folder: str, before: tuple[str, ...] | None) -> list[str]:
        with mock.patch.object(kernels, "attention_by_products", lambda *asked: products):
            found = choice.agreed(world, tmp_path / folder, host, before, said.append)
            with choice.attention_by(found):
                assert kernels.by_products("cpu", torch.bfloat16) == (found[0] == "products")
            assert kernels.by_products("cpu", torch.bfloat16) == products
            return found

    if comm.rank == 0:
        for name in "ab":
            (tmp_path / name).mkdir()
    assert ways(comm.rank == 0, "a", ()) == ["products", "library"] and said == []
    assert ways(False, "a", ()) == ["products", "library"]
    assert said.pop() == (
        'attention by products, as before; run.kernels = "anew" takes what is quickest here: '
        "library"
    )
    assert ways(False, "b", ("products", "library"))[0] == "products"  # of a checkpoint elsewhere
    assert ways(False, "b", ())[0] == "products"
    assert ways(False, "b", None)[0] == ways(True, "b", ())[0] == "library"
    assert len(said) == 3


@parallel(ranks=[1])
def test_a_checkpoint_takes_it_along(comm, tmp_path):
    """To a run of another directory, on a processor that would choose otherwise."""
    changes = {"run.steps": 1, "checkpoint.every_steps": 1, "optimizer.decay": "constant"}
    products = mock.patch.object(kernels, "attention_by_products", lambda *asked: True)
    with products, loop(comm, tmp_path, changes) as made:
        made.run()
    (manifest,) = (tmp_path / "run/checkpoints").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["kernels"] == ["products", "library"]
    again = {"run.dir": str(tmp_path / "other"), "checkpoint.resume": str(tmp_path / "run")}
    with mock.patch.object(kernels, "attention_by_products", lambda *asked: False):
        with loop(comm, tmp_path, changes | again | {"run.steps": 2}) as made:
            made.run()
        with loop(comm, tmp_path, changes | {"run.steps": 2, "run.kernels": "anew"}) as made:
            made.run()
    assert "attention by products, as before; " in (tmp_path / "other/log.txt").read_text()
    kept = [(tmp_path / name / choice.FILE).read_text() for name in ("other", "run")]
    assert [json.loads(one)["attention"][0] for one in kept] == ["products", "library"]


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
