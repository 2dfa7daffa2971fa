"""Too little memory: said before anything is allocated, or explained when an allocation fails."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ptdmpi.base.launched import COPIES
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels.choice import AttentionByProducts, HostChoice
from ptdmpi.plan.cost import relief
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.preview import forecast
from ptdmpi.train import capacity
from ptdmpi.train.capacity import Memory
from ptdmpi.train.records.rates import peak_memory_bytes
from tests._configs import small
from tests.parallel import mpirun

CPU = torch.device("cpu")


def test_a_model_that_cannot_fit_is_refused_with_what_would(monkeypatch):
    config = small({"batch.micro_size": 8})
    model = MemoryModel.of(config, 53)
    needed = model.largest(config.layout, config.microbatches)[1].total
    monkeypatch.setattr(capacity, "rank_memory_bytes", lambda device, ranks: needed)
    memory = Memory(config, 53, World(), CPU)
    monkeypatch.setattr(capacity, "rank_memory_bytes", lambda device, ranks: needed - 1)
    with pytest.raises(InputError, match="does not fit into memory") as caught:
        Memory(config, 53, World(), CPU)
    text = str(caught.value)
    assert "activations" in text and "batch.micro_size = 4" in text
    assert text.count("\n  ") == 5 + 3

    allocator = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA"), allocator):
        with pytest.raises(type(error)) as caught, memory.explained():
            raise error
        assert "would be enough:" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError) as caught, memory.explained():
        raise RuntimeError("something else")
    assert not hasattr(caught.value, "__notes__")


def test_copies_in_memory_need_room_under_a_supervisor(monkeypatch):
    config = small({"checkpoint.memory_every_steps": 3})
    model = MemoryModel.of(config, 53)
    needed = model.largest(config.layout, config.microbatches)[1].total
    monkeypatch.setattr(capacity, "rank_memory_bytes", lambda device, ranks: needed - 1)
    monkeypatch.delenv(COPIES, raising=False)
    assert Memory(config, 53, World(), CPU).step.largest()[1].copies == 0
    monkeypatch.setenv(COPIES, "/dev/shm/copies")
    with pytest.raises(InputError, match="does not fit into memory") as caught:
        Memory(config, 53, World(), CPU)
    assert "\n  copies" in str(caught.value)


def test_copies_next_to_a_device_need_room_on_its_host():
    step = relief.Step.of(small({"checkpoint.memory_every_steps": 3}), 53, on_host=False)
    assert step.fits(step.largest()[1].total)
    full = replace(step, host_capacity_bytes=step.on_hosts() - 1)
    assert not full.fits(1e12) and "checkpoint.memory_every_steps" in relief.explain(full, 1e12)


def test_what_kernels_need_counts_once_they_are_chosen(monkeypatch):
    """Kept probabilities are given up where there is no room for them; widening, which the bits of
    a run hang on, is refused instead."""
    config, said = small({"precision.compute": "bf16", "model.seq_length": 300}), []
    monkeypatch.setattr(Kernels, "widens", lambda *asked: False)

    def needed(wide: bool = False, blocks: dict[str, int] | None = None) -> int:
        model = MemoryModel.of(config, 53, kernels={"wide_products": wide, **(blocks or {})})
        return model.largest(config.layout, config.microbatches)[1].total

    def settled(has: int, choice: HostChoice) -> HostChoice:
        monkeypatch.setattr(capacity, "rank_memory_bytes", lambda device, ranks: has)
        memory = Memory(config, 53, World(), CPU)
        settled_choice = memory.settle(choice, said.append)
        assert memory.step.largest()[1].total <= has
        return settled_choice

    keeps, least = HostChoice(AttentionByProducts(keeps=True)), needed(False)
    again = needed(blocks=AttentionByProducts().blocks)
    # 2 sequences of 4 heads in 3 layers: blocks end at 128, 256 and 300 keys
    most = needed(blocks=keeps.attention.blocks)
    assert most - again == 3 * 2 * 4 * (128 * 128 + 128 * 256 + 44 * 300) * 2
    assert settled(most, keeps) == keeps and not said
    assert settled(most - 1, keeps) == HostChoice(AttentionByProducts())
    assert said == ["no memory for the attention probabilities: the backward computes them again"]
    assert settled(least, HostChoice()) == HostChoice()
    with pytest.raises(InputError, match="does not fit into memory"):
        settled(least, HostChoice(half="widened"))
    assert settled(needed(True), HostChoice(half="widened")).half == "widened"


@pytest.mark.long
def test_an_address_limit_counts(tmp_path):
    code = (
        "import resource, torch; from ptdmpi.train.capacity import rank_memory_bytes as left;"
        "cpu = torch.device('cpu'); before = left(cpu, 1); halves = left(cpu, 2);"
        "resource.setrlimit(resource.RLIMIT_AS, (16 << 30, -1));"
        "print(before, halves, left(cpu, 1))"
    )
    before, halves, limited = map(int, mpirun(1, ["-c", code], timeout_s=60).stdout.split())
    assert 0.4 * before < halves < 0.5 * before
    assert limited <= min(before, 16 << 30)


def test_control_groups_count(tmp_path, monkeypatch):
    """The lowest limit of a group and its parents counts; "max" is no limit."""
    process, groups = tmp_path / "self", tmp_path / "cgroup"
    job = groups / "system" / "job"
    job.mkdir(parents=True)
    process.mkdir()
    (process / "cgroup").write_text("0::/system/job\n")
    (job / "memory.max").write_text("max\n")
    (groups / "system" / "memory.max").write_text("123456\n")
    monkeypatch.setattr(capacity, "PROCESS", process)
    monkeypatch.setattr(capacity, "CGROUPS", groups)
    assert capacity.host_memory_bytes() == 123456
    (groups / "system" / "memory.max").write_text("max\n")
    physical = capacity.host_memory_bytes()
    (process / "cgroup").write_text("5:cpu,memory:/job\n")
    old = groups / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("777\n")
    assert capacity.host_memory_bytes() == 777 < physical
    assert Path("/proc/meminfo").is_file()


def test_a_peak_can_be_forgotten():
    """A run that measures its machine first reports what the run takes."""
    capacity.forget_peak()
    before = peak_memory_bytes(CPU)
    taken = torch.ones(16 << 20)  # 64 MiB
    most = peak_memory_bytes(CPU)
    assert most > before + (50 << 20)
    del taken
    capacity.forget_peak()
    assert peak_memory_bytes(CPU) < most - (50 << 20)


def test_gpus_that_a_site_shows_one_by_one(monkeypatch):
    """Four tasks of which each is shown one GPU do not share it; nor does a preview say so."""
    module = SimpleNamespace(
        device_count=lambda: 1,
        get_device_properties=lambda device: SimpleNamespace(total_memory=80 << 30),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for of_slurm, sharing, gpus in (("4", 1, "4 GPUs"), ("", 4, "1 GPU"), ("many", 4, "1 GPU")):
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", of_slurm)
        assert capacity.expected_sharing(torch.device("cuda"), 4) == sharing
        words = f"of a GPU of this host, 4 ranks sharing the {gpus} that it shows"
        assert forecast._here(4) == ((80 << 30) // sharing, words)
