"""Which kernels attention and linears are computed with: by a table, agreed, kept, for a while."""

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tomlkit
import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu import run
from benchmarks.gpu.table import filled, with_triton, with_weight_gradients
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.model import kernels
from ptdmpi.model.kernels import Kernels, agreement, compiler, host
from ptdmpi.model.kernels import choice as choices
from ptdmpi.model.kernels.agreement import DeviceChoice, RunPlace, agreed, stored
from ptdmpi.model.kernels.choice import (
    BY_LIBRARY,
    AttentionByLibrary,
    AttentionByProducts,
    HostChoice,
    OneDnnLinears,
)
from ptdmpi.model.kernels.stored import read, sound, written
from tests._runs import loop
from tests.parallel import parallel

PRESETS = Path(kernels.__file__).parents[2] / "presets"
TABLE = PRESETS / "kernels.toml"
LONG = HostChoice(AttentionByLibrary(whole_from=2048))
CUDA = torch.device("cuda")
GPU = RunPlace(CUDA, torch.bfloat16, {})


@contextmanager
def on(capability: tuple[int, int], fa3: bool) -> Iterator[None]:
    """As on a GPU."""
    module = SimpleNamespace(get_device_capability=lambda device: capability)
    with (
        mock.patch.object(torch, "get_device_module", lambda device: module),
        mock.patch.object(agreement, "_has_fa3", lambda: fa3),
    ):
        yield


def test_by_the_table():
    assert agreement.offered(torch.device("cpu")) == ()
    with on((9, 0), True):
        assert agreement.offered(CUDA) == ("fa3", "cudnn", "flash")
    with on((9, 0), False):
        assert agreement.offered(CUDA) == ("cudnn", "flash")
    with on((8, 0), True):
        assert agreement.offered(CUDA) == ("flash",)


@contextmanager
def in_triton(kinds: list[str], here: bool = True) -> Iterator[None]:
    """As on a GPU on which these kinds of kernels were faster in Triton, which is `here` or not."""
    entry = {"device": "cuda", "capability": "", "kinds": kinds}
    table = agreement.table() | {"device_triton": [entry]}
    with (
        on((9, 0), True),
        mock.patch.object(agreement, "table", lambda: table),
        mock.patch.object(compiler, "missing_for_triton", lambda: "" if here else "triton"),
    ):
        yield


def test_kernels_in_triton_by_the_table():
    """The package's own table has none, for want of a measurement; the host never has any."""
    with on((9, 0), True), mock.patch.object(compiler, "missing_for_triton", lambda: ""):
        assert agreement.offered_in_triton(CUDA) == ()
    with in_triton(["loss", "norm"]):
        assert agreement.offered_in_triton(CUDA) == ("loss", "norm")
        assert agreement.offered_in_triton(torch.device("cpu")) == ()
    with in_triton(["loss"], here=False):
        assert agreement.offered_in_triton(CUDA) == ()


@parallel(ranks=[2])
def test_a_run_keeps_its_kernels_in_triton(comm, tmp_path):
    """All ranks have them; a run that began with others, or with none, keeps to these."""
    world, said = World(comm), []

    def kinds(before: dict[str, list[str]] | None, folder: str = "a") -> tuple[str, ...]:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        choice = agreed(world, place, GPU, before, say=said.append)
        assert isinstance(choice, DeviceChoice)
        return choice.triton

    with in_triton(["loss", "norm"] if comm.rank else ["gated", "norm"]):
        assert kinds({}) == ("norm",)
        assert said[-1] == "by Triton: norm"
    kept = {"attention": ["fa3", "cudnn", "flash"], "triton": ["norm"]}
    if comm.rank == 0:
        assert json.loads((tmp_path / "a" / agreement.FILE).read_text()) == kept
    assert stored(DeviceChoice(("flash",), ("loss",))) == {
        "attention": ["flash"],
        "triton": ["loss"],
    }
    with in_triton(["loss", "norm", "gated"]):
        assert kinds({}) == ("norm",)
        assert said[-1].startswith('by Triton: norm, as before; run.kernels = "anew" ')
        assert kinds({"attention": ["flash"]}, "b") == ()  # it began without
        assert said[-1].startswith("by Triton: nothing, as before; ")
        assert kinds(None, "b") == ("loss", "norm", "gated")
    with in_triton(["norm"], here=comm.rank == 0):
        assert kinds({}) == ()
        assert said[-1] == (
            "Triton is not available here, so PyTorch computes norm; the bits of results change"
        )
    with in_triton(["norm"]):
        assert kinds({}) == ("norm",)  # back where it was


def test_for_a_while_and_no_longer():
    before = torch._C._get_sdp_priority_order()
    flash, cudnn, math = (
        int(SDPBackend.__members__[name]) for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "MATH")
    )
    q = torch.randn(1, 2, 8, 4)
    with agreement.trying(("cudnn", "flash")):
        assert torch._C._get_sdp_priority_order()[:2] == [cudnn, flash]
        assert math in torch._C._get_sdp_priority_order()
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch._C._get_sdp_priority_order() == before
    with agreement.trying(()):
        assert torch._C._get_sdp_priority_order() == before


@parallel(ranks=[2])
def test_all_ranks_agree_and_a_run_that_goes_on_keeps_to_it(comm, tmp_path):
    """What one of them lacks none makes use of; what the run had is not given up for a new one."""
    world, said = World(comm), []

    def order(before: dict[str, list[str]] | None) -> tuple[str, ...]:
        choice = agreed(world, tmp_path, GPU, before, say=said.append)
        assert isinstance(choice, DeviceChoice)
        assert stored(choice) == {"attention": list(choice.attention)}
        return choice.attention

    with on((9, 0), comm.rank == 0):
        assert order({}) == ("cudnn", "flash")
    assert said.pop() == "attention by cudnn, flash"
    with on((9, 0), True):
        assert order({"attention": ["cudnn", "flash"]}) == order({}) == ("cudnn", "flash")
    with on((8, 0), True):
        assert order({}) == ("flash",)
    assert "not available here: cudnn (the bits of results change); " in said.pop()
    with on((9, 0), True):  # back where it was
        assert order({}) == ("cudnn", "flash")
        assert said.pop().endswith(
            'run.kernels = "anew" chooses the fastest here: fa3, cudnn, flash'
        )
        assert order(None) == ("fa3", "cudnn", "flash")


@parallel(ranks=[2])
def test_on_hosts_all_ranks_compute_as_the_first(comm, tmp_path):
    """Whatever their processors would take; as before on another processor, unless asked anew."""
    world, said = World(comm), []
    place = RunPlace(torch.device("cpu"), torch.bfloat16, {})
    ours = HostChoice(AttentionByProducts(256), OneDnnLinears(64), "sigmoid", 2**17, 2**16)

    def ways(here: HostChoice, folder: str, before: dict[str, list[str]] | None) -> str:
        with (
            mock.patch.object(choices, "measured_choice", lambda *asked: here),
            mock.patch.object(host, "has_fused", lambda dtype: True),
            mock.patch.object(host, "multiplies", lambda *asked: True),
        ):
            choice = agreed(world, tmp_path / folder, place, before, say=said.append)
        assert choice in (ours, LONG)
        assert Kernels(choice).chosen("cpu", torch.bfloat16) == choice
        return stored(choice)["attention"][0]

    if comm.rank == 0:
        for name in "ab":
            (tmp_path / name).mkdir()
    assert ways(LONG if comm.rank else ours, "a", {}) == "products:256"
    assert said.pop() == (
        "attention by products:256, linear by onednn:64:inf, gelu by sigmoid, "
        "loss by chunks:131072, norm by chunks:65536, half types native"
    )
    assert ways(LONG, "a", {}) == "products:256"
    assert said.pop() == (
        "attention by products:256 (as before; fastest here: library:2048), "
        "linear by onednn:64:inf (as before; fastest here: library), "
        "gelu by sigmoid (as before; fastest here: library), "
        "loss by chunks:131072 (as before; fastest here: chunks:262144), "
        "norm by chunks:65536 (as before; fastest here: whole), half types native; "
        'run.kernels = "anew" chooses the fastest'
    )
    assert ways(LONG, "b", written(ours)) == "products:256"  # of a checkpoint elsewhere
    assert ways(LONG, "b", {}) == "products:256"
    assert ways(LONG, "b", None) == ways(ours, "b", {}) == "library:2048"
    # what a device took says nothing of a host
    (tmp_path / "b" / agreement.FILE).write_text('{"attention": ["flash"]}')
    comm.barrier()
    assert ways(ours, "b", {}) == "products:256"


def test_what_is_written_is_read():
    """And what was written before: the texts of every version so far."""
    for text, attention in {
        "library": AttentionByLibrary(),
        "library:1024": AttentionByLibrary(1024),
        "products": AttentionByProducts(),
        "products:512": AttentionByProducts(512),
        "products:128:kept": AttentionByProducts(keeps=True),
        "products:128:library_forward:fpmath": AttentionByProducts(
            library_forward=True, fpmath=True
        ),
        "products:256:fpmath": AttentionByProducts(256, fpmath=True),
        "products:128:kept:whole_from=1024": AttentionByProducts(keeps=True, whole_from=1024),
    }.items():
        assert written(HostChoice(attention))["attention"] == [text]
        assert read({"attention": [text]}) == {"attention": attention}
    for text, linear in {
        "library": OneDnnLinears(),
        "onednn:64:inf": OneDnnLinears(64),
        "onednn:3:7": OneDnnLinears(3, 7),
    }.items():
        assert written(HostChoice(linear=linear))["linear"] == [text]
        assert read({"linear": [text]}) == {"linear": linear}
    assert read({"linear": ["onednn"]}) == {"linear": OneDnnLinears(0, 0)}
    other = HostChoice(gelu="sigmoid", loss=2**17, norm=2**16, half="widened")
    assert HostChoice(**read(written(other))) == other
    # of devices, and of before linears were chosen
    assert read({"attention": ["cudnn", "flash"]}) == {}
    assert read({"attention": ["library", "products"]}) == {"attention": AttentionByLibrary()}


@parallel(ranks=[2])
def test_half_types_stay_as_the_run_has_multiplied_them(comm, tmp_path):
    """Widened, as before, by any processor; as they are by those that can, else with other bits."""
    world, said = World(comm), []
    bf16, native = torch.bfloat16, {"attention": ["library"], "half": ["native"]}

    def half(able: bool, name: str, before: dict[str, list[str]], dtype=bf16) -> str:
        if comm.rank == 0:
            (tmp_path / name).mkdir(exist_ok=True)
        comm.barrier()
        with mock.patch.object(host, "multiplies", lambda _, kind: able or kind != bf16):
            place = RunPlace(torch.device("cpu"), dtype, {})
            choice = agreed(world, tmp_path / name, place, before, say=said.append)
            by = Kernels(choice)
            assert by.widens("cpu", bf16) == (choice.half == "widened" or not able)
            assert not by.widens("cpu", torch.float32)
        return choice.half

    def told() -> str:
        return said.pop().partition("half types ")[2].partition("; run.kernels")[0]

    assert (half(False, "a", {}), told()) == ("widened", "widened")
    as_before = "widened (as before; fastest here: native)"
    assert (half(True, "a", {}), told()) == ("widened", as_before)
    lost = "widened, because native is not available here"
    assert (half(True, "b", {}), told()) == ("native", "native")
    assert (half(False, "b", {}), told()) == ("widened", f"{lost}: the bits of results change")
    assert (half(True, "c", native), told()) == ("native", "native")
    # a run of before this was kept goes by the processor, as it did
    assert (half(False, "d", {"attention": ["library"]}), told()) == ("widened", "widened")
    # what one rank lacks none makes use of
    assert (half(comm.rank == 0, "e", {}), told()) == ("widened", lost)
    assert (half(comm.rank == 1, "f", {}), told()) == ("widened", "widened")
    half(True, "g", {}, torch.float32)
    assert told() == ""


def test_widened_products_are_in_float32():
    x = torch.randn(4, 8).bfloat16()
    w = torch.randn(8, 8).bfloat16()
    by = Kernels(HostChoice(linear=OneDnnLinears(0, 0), half="widened"))
    assert by.widened(x).dtype == torch.float32
    y = torch.nn.functional.linear(x.float(), w.float(), w[0].float()).bfloat16()
    assert torch.equal(by.linear(x, w, w[0]), y)
    assert torch.equal(by.input_gradient(x, w), (x.float() @ w.float()).bfloat16())


DAMAGED = [
    {"attention": "products:abc"},
    {"attention": ["products:abc"]},
    {"attention": ["products:0:kept"]},
    {"attention": ["library:nan"]},
    {"attention": [5]},
    {"attention": None},
    {"linear": ["onednn:x:y"], "attention": ["library"]},
    {"linear": ["onednn:1:2:3"], "attention": ["library"]},
    {"loss": ["chunks:0"], "attention": ["library"]},
    {"norm": ["chunks:1:2"], "attention": ["library"]},
    [],
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=json.dumps)
def test_damage_is_no_choice(damaged):
    assert sound(damaged) is None
    assert sound({"attention": ["products:64", "flash"]}) == {"attention": ["products:64", "flash"]}


@parallel(ranks=[1])
def test_the_checkpoint_s_kernels_replace_a_damaged_record(comm, tmp_path):
    place = RunPlace(torch.device("cpu"), torch.float32, {})
    (tmp_path / agreement.FILE).write_text(json.dumps(DAMAGED[0]))
    chosen = agreed(World(comm), tmp_path, place, {"attention": ["products:64"]}, say=[].append)
    assert chosen.attention == AttentionByProducts(64)
    assert sound(json.loads((tmp_path / agreement.FILE).read_text())) == stored(chosen)


@parallel(ranks=[1])
def test_who_never_chose_a_way_of_linears_keeps_the_library_s(comm, tmp_path):
    """A checkpoint, or a run directory, of before there was a choice: its bits repeat."""
    world, said = World(comm), []
    place = RunPlace(torch.device("cpu"), torch.float32, {})
    before = {"attention": ["library", "products"]}
    here = HostChoice(linear=OneDnnLinears(8))
    with (
        mock.patch.object(choices, "measured_choice", lambda *asked: here),
        mock.patch.object(host, "has_fused", lambda dtype: True),
    ):
        found = agreed(world, tmp_path, place, before, say=said.append)
        assert found == BY_LIBRARY
        assert "linear by library (as before; fastest here: onednn:8:inf)" in said.pop()
        assert agreed(world, tmp_path, place, {}, say=said.append) == found
        (tmp_path / agreement.FILE).write_text(json.dumps(before))
        assert agreed(world, tmp_path, place, {}, say=said.append) == found
        anew = agreed(world, tmp_path, place, None, say=said.append)
        assert stored(anew)["linear"] == ["onednn:8:inf"]
    with mock.patch.object(host, "has_fused", lambda dtype: False):
        assert agreed(world, tmp_path, place, {}, say=said.append) == found
    assert "because onednn:8:inf is not available here: the bits of results change" in said.pop()


@parallel(ranks=[1])
def test_a_checkpoint_takes_it_along(comm, tmp_path):
    """To a run of another directory, on a processor that would choose otherwise."""
    changes = {"run.steps": 1, "checkpoint.every_steps": 1, "optimizer.decay": "constant"}

    def here(choice: HostChoice) -> Any:
        return mock.patch.object(choices, "measured_choice", lambda *asked: choice)

    with here(HostChoice(AttentionByProducts())), loop(comm, tmp_path, changes) as made:
        made.run()
    (manifest,) = (tmp_path / "run/checkpoints").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["kernels"]["attention"] == ["products"]
    again = {"run.dir": str(tmp_path / "other"), "checkpoint.resume": str(tmp_path / "run")}
    with here(LONG):
        with loop(comm, tmp_path, changes | again | {"run.steps": 2}) as made:
            made.run()
        with loop(comm, tmp_path, changes | {"run.steps": 2, "run.kernels": "anew"}) as made:
            made.run()
    assert "attention by products (as before; " in (tmp_path / "other/log.txt").read_text()
    kept = [(tmp_path / name / agreement.FILE).read_text() for name in ("other", "run")]
    assert [json.loads(one)["attention"] for one in kept] == [["products"], ["library:2048"]]


@parallel(ranks=[2])
def test_a_probed_machine_comes_before_the_table(comm, tmp_path):
    """`run.cluster` is a file of `ptdmpi probe`; one that is not there ends the run at once."""
    path = tmp_path / "here.toml"
    entry = {"capability": "", "type": "float32", "measured": "by hand"}
    own = {"attention": [entry | {"way": "products"}], "linear": [entry | {"output": 9}]}
    own["gelu"] = [entry | {"way": "sigmoid"}]
    cluster = tomllib.loads((PRESETS / "clusters/cpu-avx2.toml").read_text())
    if comm.rank == 0:
        path.write_text(tomlkit.dumps(cluster | {"kernels": own}))
    comm.barrier()
    changes = {"run.steps": 1, "run.cluster": str(path)}
    with loop(comm, tmp_path, changes) as made:
        made.run()
    linear = "onednn:9:inf" if host.has_fused(torch.float32) else "library"
    kept = json.loads((tmp_path / "run" / agreement.FILE).read_text())
    assert (kept["attention"], kept["linear"]) == (["products"], [linear])
    assert (kept["gelu"], kept["half"]) == (["sigmoid"], ["native"])
    changes = {"run.cluster": str(tmp_path / "none.toml"), "run.dir": str(tmp_path / "other")}
    with (
        pytest.raises(InputError, match=r"none\.toml: No such file"),
        loop(comm, tmp_path, changes),
    ):
        pass
    assert not (tmp_path / "other").exists()


def test_each_entry_of_a_cpu_changes_a_choice(monkeypatch):
    """On some kind of processor; each kind has the instructions of those before it."""
    names = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
    kinds = [
        dict.fromkeys(names[: count + 1], True) | {"cpu_name": name}
        for count in range(len(names))
        for name in ("AMD EPYC", "Intel Xeon")
    ]
    table = tomllib.loads(TABLE.read_text())
    types = (torch.float32, torch.bfloat16, torch.float16)

    def every_choice(entries: dict) -> list[HostChoice]:
        monkeypatch.setattr(choices, "table", lambda: entries)
        made = []
        for has in kinds:
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: has)
            made += [choices.measured_choice(dtype, {}) for dtype in types]
        return made

    monkeypatch.setattr(host, "has_fused", lambda dtype: True)
    whole = every_choice(table)
    for kind in ("attention", "gelu", "linear"):
        for entry in table[kind]:
            less = [other for other in table[kind] if other is not entry]
            assert every_choice(table | {kind: less}) != whole, entry


def test_the_table_is_filled_with_what_was_measured():
    text = TABLE.read_text()
    rows = {
        "flash": {"s": 3e-3, "apart": 0.001},
        "cudnn": {"s": 2e-3, "apart": 0.001},
        "fa3": {"s": 1e-3, "apart": 0.5},  # wrong
        "efficient": {"skipped": "none"},
    }
    made = filled(text, "cuda 9.0", rows, "some GPU")
    entries = tomllib.loads(made)["device_attention"]
    assert entries[0]["ways"] == ["cudnn", "flash"] and "2 ms" in entries[0]["measured"]
    assert [one["capability"] for one in entries] == ["9.0", "10.0", ""]
    assert made.startswith(text[: text.index("[[device_attention]]")])
    assert filled(text, "cuda 9.0", {"flash": {"skipped": "none"}}, "") == text
    table = tomllib.loads(made)
    with mock.patch.object(agreement, "table", lambda: table), on((9, 0), True):
        assert agreement.offered(CUDA) == ("cudnn", "flash")


def test_the_table_is_filled_with_kernels_in_triton(tmp_path):
    """A kind is listed if its kernel is faster than torch's operations, and accurate."""
    times = {"RMSNorm": (2.0, 1.0), "SwiGLU": (1.0, 2.0), "loss": (2.0, 1.0)}
    rows = {}
    for name, (ours, triton) in times.items():
        rows[f"{name}, ours"] = {"s": 1e-3 * ours, "apart": 1e-3}
        rows[f"{name}, Triton"] = {"s": 1e-3 * triton, "apart": 0.5 if name == "loss" else 1e-3}
    path = tmp_path / "kernels.toml"
    path.write_text(TABLE.read_text())
    parts = {"machine": {"capability": "cuda 9.0"}, "small kernels": rows}
    run.fill({"device": "G", "libraries": {"torch": "2"}, "date": "D", "parts": parts}, path)
    entry, usual = tomllib.loads(path.read_text())["device_triton"]
    assert (entry["capability"], entry["kinds"]) == ("9.0", ["norm"]) and usual["kinds"] == []
    assert "RMSNorm 1 ms, torch's 2 ms" in entry["measured"]
    left = {key: row for key, row in rows.items() if "Triton" not in key}
    assert with_triton(TABLE.read_text(), "cuda 9.0", left, "") == TABLE.read_text()


def test_the_table_is_filled_with_gradients_of_weights(tmp_path):
    rows = {"adds": {"s": 1e-3, "apart": 1e-6}, "rounds": {"s": 2e-3, "apart": 1e-3}}
    slow, wrong = {**rows["adds"], "s": 3e-3}, {**rows["adds"], "apart": 0.5}
    ways = {
        "adds": rows,
        "rounds": rows | {"adds": slow},
        "rounds ": rows | {"adds": wrong},
        "rounds  ": rows | {"adds": {"skipped": "no out_dtype"}},
    }
    path = tmp_path / "kernels.toml"
    for way, measured in ways.items():
        path.write_text(TABLE.read_text())
        parts = {"machine": {"capability": "cuda 9.0"}, "weight gradients": measured}
        run.fill({"device": "G", "libraries": {"torch": "2"}, "date": "D", "parts": parts}, path)
        (entry,) = tomllib.loads(path.read_text())["weight_gradient"]
        assert entry["way"] == way.strip() and entry["torch"] == [2, 10], way
        assert entry["measured"].endswith("rounds 2 ms (G, torch 2, D)")
    assert "adds: not there" in entry["measured"]
    text = TABLE.read_text()
    assert with_weight_gradients(text, "cuda 9.0", {"rounds": {"skipped": "none"}}, "") == text
    assert with_weight_gradients(text, "rocm 9.4", rows, "") == text


@parallel(ranks=[2])
def test_a_file_of_kernels_that_cannot_be_written_is_a_warning(comm, tmp_path):
    """Checkpoints store the kernels, too."""
    said: list[str] = []
    if comm.rank == 0:
        (tmp_path / agreement.FILE).mkdir()
    comm.barrier()
    place = RunPlace(torch.device("cpu"), torch.float32, {})
    agreed(World(comm), tmp_path, place, {"attention": ["library"]}, say=said.append)
    assert sum("kernels.json cannot be written: Is a directory; the run goes on" in x for x in said)
