"""`make gpu` on the pretended device: every part runs, and the page says what was not measured."""

import json
import math

import pytest
import torch

from benchmarks.gpu import kernels, overlap, parts, peers, run, timing, training, wires
from benchmarks.gpu.page import page
from benchmarks.gpu.reasons import Skipped
from benchmarks.gpu.wires import conformance
from ptdmpi.comm.communicator import DONE
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.model import buffer
from tests._engines import whole_weights
from tests.device import _pretend
from tests.device._pretend import pretended
from tests.parallel import parallel

PROCESS = "device"  # torch takes the pretended device on before its first backward
pytestmark = pytest.mark.skipif(bool(_pretend.available()), reason=str(_pretend.available()))


@pytest.mark.long
@parallel(ranks=[1])
def test_every_part(comm, tmp_path):
    with pretended() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MODELS", {"small": parts.Shape(parts.SMALL, 97)})
        products = []
        patch.setattr(parts, "seconds_of", lambda work, device: products.append(work()) or 1.0)
        found = {"machine": parts.machine(device, 64), "parity": parts.parity(device, 1)}
        # constant operands would make a GPU faster than those of any training
        assert products[0].cpu().unique().numel() > 1000
        assert found["machine"]["peak_flops"] is None and found["machine"]["gemm_flops"] > 0
        apart = {row: values["apart"] for row, values in found["parity"].items()}
        assert all(apart[row] < (1e-5 if "fp32" in row else 1e-2) for row in apart), apart
        found["weight gradients"] = ways = kernels.weight_gradients(device, 64)
        assert ways["adds"]["apart"] < 1e-5 < ways["rounds"]["apart"]
        assert ways["as chosen"]["apart"] == ways["adds"]["apart"]
        found["attention"] = kernels.attentions(device, (1, 2, 32, 8))
        assert found["attention"]["cudnn"]["apart"] < 0.02
        assert "skipped" in found["attention"]["fa3"]
        found["small"] = step = training.training(device, *parts.MODELS["small"], steps=4)
        assert step["mfu"] is None and step["tokens_per_s"] > 0 and step["recompute"] == "none"
        found["trace"] = parts.trace(device, tmp_path)
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        with pytest.raises(Skipped, match="does not fit"):
            patch.setattr(training, "rank_memory_bytes", lambda device, ranks: 1000)
            training.fitting(parts.SMALL, 97, device)
    said = {"device": "pretended", "commit": "0", "libraries": {"torch": "2"}, "date": "today"}
    text = page({**said, "parts": {**found, "peer": {"skipped": "it is not installed"}}})
    assert "## Peer\n\nNot measured: it is not installed." in text
    assert "| llama bf16 |" in text and "tokens_per_s" in text


@parallel(ranks=[1])
def test_small_kernels_have_the_values_of_their_formulas(comm):
    with pretended() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "compiled", lambda one: one)
        patch.setattr(kernels, "seconds_of", lambda work, device: work() or 1.0)
        model = parts.configuration({**parts.SMALL, "kind": "llama"}, "bf16", 1, "none").model
        *_, found = timing.measured_rows(kernels.small_kernels(device, model, 1, 97))
    assert len(found) == 19 and all(row["s"] for row in found.values()), found
    assert all(row["apart"] < 2e-2 for row in found.values()), found


@parallel(ranks=[1])
def test_weights_of_a_measurement_are_drawn_on_the_device(comm):
    """None on the host, of the same distribution; what is one at first is one."""
    config = training.configuration(parts.SMALL, "bf16", 2, "none")
    with pretended() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer, "initial", lambda *arguments: pytest.fail("drawn on the host"))
        with training.drawn_there():
            engine = training.engine_on(config, 97, device)
        weights = whole_weights(engine)
    drawn = weights["embedding.word.weight"]
    assert drawn.std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(weights["final_norm.weight"], torch.ones(64))


@pytest.mark.long
@parallel(ranks=[1])
@pytest.mark.parametrize("peer", peers.SIDES)
def test_who_stands_beside_has_the_same_shape(comm, peer):
    """Random tokens cost each of them log V at first: what is not installed says so."""
    config = training.configuration({**parts.SMALL, "kind": "llama"}, "bf16", 2, "none")
    if peer == "torchtitan" and not (peers.PEERS / peer).is_dir():
        pytest.skip("torchtitan is not in .peers")
    if peer == "torchtitan":
        pytest.importorskip("triton")  # which its models import, and torch for CPUs is without
    if peer == "transformers":
        pytest.importorskip(peer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "compiled", lambda one: one)
        asked = peers.Workload(torch.device("cpu"), config.model, 97, 8, 2)
        *_, rows = timing.measured_rows(peers.SIDES[peer](asked))
        if peer == "transformers":
            whole = peers.transformers_way(asked, peers.WAYS["autocast"], (2, "full"))
            assert len(rows) == 4
            assert whole["first_loss"] == pytest.approx(math.log(97), rel=0.05)
    for found in rows.values():
        assert found["first_loss"] == pytest.approx(math.log(97), rel=0.05)
        assert found["tokens_per_s"] * found["step_s"] == pytest.approx(8 * 32)
        assert found["micro_size"] == 4


def test_a_peer_that_is_not_here_says_how_it_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    with pytest.raises(Skipped, match="--rows d2zero3-bf16 --peers torchtitan"):
        next(peers.torchtitan_side(peers.Workload(torch.device("cpu"), None, 97, 8, 2)))


@parallel(ranks=[1, 2])
def test_wires_carry_tensors_of_the_device(comm):
    """Staged by `mpi`; and what a wire does wrong is found."""
    with pretended() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(wires, "ELEMENTS", 101)
        found = conformance(World(comm), "mpi", device)
        assert found["checks"] == 21 and found["wrong"] == []
        if comm.size > 1:
            patch.setattr(MpiCommunicator, "_broadcast", lambda axis, flat, root: DONE)
            wrong = conformance(World(comm), "mpi", device)
            assert [one.split()[0] for one in wrong["wrong"]] == ["broadcast"] * 3
            assert wrong["failed"].startswith("wrong: broadcast float32, ")


@pytest.mark.long
@parallel(ranks=[2])
def test_replicas_are_traced(comm, tmp_path):
    """Staged by `mpi`, they say nothing by kernels of NCCL."""
    with pretended() as device:
        file = tmp_path / "trace.json"
        found = overlap.overlap(World(comm), "mpi", device, file, shape=parts.SMALL, vocab_size=97)
    assert bool(found) == (comm.rank == 0)
    if comm.rank == 0:
        assert found["skipped"] == "no kernel of NCCL among the 0 of the trace"
        assert json.loads(file.read_text())["traceEvents"]


@pytest.mark.long
@parallel(ranks=[1])
def test_a_part_by_its_name(comm, tmp_path):
    """As the process does that is started for it."""
    assert list(run.one_part("machine", tmp_path)) == [{"skipped": "there is no GPU here"}]
    with pretended() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "gpu", lambda: device)
        assert next(run.one_part("trace", tmp_path))["file"] == "trace.json"
        patch.setattr(parts, "MODELS", {"small": parts.Shape(parts.SMALL, 97)})
        patch.setattr(training, "rank_memory_bytes", lambda device, ranks: 1000)
        assert "does not fit" in next(run.one_part("small", tmp_path))["skipped"]


def test_without_a_gpu_nothing_is_invented(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = run.run(tmp_path, tmp_path / "gpu.md", 5.0, anew=False)
    assert all(part == {"skipped": "there is no GPU here"} for part in found["parts"].values())
    text = (tmp_path / "gpu.md").read_text()
    assert "Nothing on this page was measured on a device" in text
    assert text.count("Not measured") == len(found["parts"]) >= 9


def test_it_goes_on_where_it_was_cut_short(tmp_path, monkeypatch):
    own, asked = {"device": "some", "commit": "1", "libraries": {}}, []
    monkeypatch.setattr(run, "identity", lambda: own)
    monkeypatch.setattr(run, "asked", lambda: {"machine": 15, "parity": 30})

    def measured(name: str, left_s: float, record: run.Record) -> dict:
        asked.append(name)
        return {"left": "cut short"} if name == "parity" and len(asked) < 3 else {"s": 1.0}

    monkeypatch.setattr(run, "measured", measured)
    for _ in range(2):
        run.run(tmp_path, tmp_path / "gpu.md", 60.0, anew=False)
    assert asked == ["machine", "parity", "parity"]
    run.run(tmp_path, tmp_path / "gpu.md", 1.0, anew=True)
    assert len(asked) == 3  # no time was left for any
    assert "the same command continues" in (tmp_path / "gpu.md").read_text()
