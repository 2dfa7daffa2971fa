"""Memory of models of full size on a pretended device that has none, beside the planner's account;
and whose a device is."""

import gc

import pytest
import torch

from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, resolve
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.plan.cost import relief
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train import capacity
from ptdmpi.train.capacity import Memory, expected_sharing, rank_memory_bytes, ranks_sharing
from tests._configs import small
from tests.device import _pretend
from tests.device._pretend import pretended
from tests.device._seen import SEEN
from tests.device._streams import MODULE
from tests.parallel import parallel

PROCESS = "device"  # torch takes the pretended device on before its first backward
pytestmark = pytest.mark.skipif(bool(_pretend.available()), reason=str(_pretend.available()))

GIB = 2**30
GPT = {"layers": 24, "hidden": 2048, "heads": 16, "seq_length": 2048}
LLAMA = {"kind": "llama", "layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 11008}
MODELS = {"gpt-1.3b": (GPT, 50257), "llama-6.7b": (LLAMA | {"seq_length": 2048}, 32000)}


def peak_bytes(comm, model: dict, vocab_size: int, micro_size: int, mode: str) -> tuple[int, int]:
    """The most that a step of two microbatches holds on the device, and what is foreseen, without
    what a device's runtime takes."""
    tree = {
        "run": {"steps": 4},
        "model": model,
        "batch": {"global_size": 2 * micro_size, "micro_size": micro_size},
        "precision": {"compute": "bf16"},
        "recompute": {"mode": mode},
        "data": {"train": [{"path": "unused"}]},
    }
    config = resolve(tree, 1)
    with pretended("meta") as device, pytest.MonkeyPatch.context() as patch:
        # of 6.7e9 weights that are nowhere
        patch.setattr(ParameterBuffer, "initialise", lambda self, *which, **frozen: None)
        axes = World(comm).split(grid_of(config), wire_named())
        engine = Engine(config, axes, vocab_size, device)
        ids = torch.zeros(model["seq_length"], micro_size, dtype=torch.long)
        batch = Microbatch(ids, ids, None, torch.zeros(micro_size, dtype=torch.long))
        batches = [batch.each(lambda one: one.to(device)) for _ in range(2)]
        SEEN.begin()
        engine.step(0, batches)
        found = SEEN.peak_bytes
    model_memory = MemoryModel.of(config, vocab_size, on_host=False)
    need = model_memory.peak(config.layout, 0, config.microbatches)
    del engine
    gc.collect()
    return found, need.total


def check_size(comm, name: str, micro_size: int, mode: str) -> None:
    model, vocab_size = MODELS[name]
    found, foreseen = peak_bytes(comm, model, vocab_size, micro_size, mode)
    text = f"{name}, b = {micro_size}, {mode}: {found / GIB:.1f} GiB, foreseen {foreseen / GIB:.1f}"
    print(text, SEEN.peak_at)
    assert found == pytest.approx(foreseen, rel=0.1), text


@parallel(ranks=[1])
@pytest.mark.parametrize("name", ["gpt-1.3b", pytest.param("llama-6.7b", marks=pytest.mark.long)])
def test_full_size_is_as_foreseen(comm, name):
    check_size(comm, name, 1, "none")


@pytest.mark.long
@parallel(ranks=[1], limit_s=200)
@pytest.mark.parametrize(
    ("name", "micro_size", "mode"),
    [("gpt-1.3b", 4, "none"), ("gpt-1.3b", 1, "full"), ("llama-6.7b", 4, "full")],
)
def test_full_size_in_other_ways(comm, name, micro_size, mode):
    check_size(comm, name, micro_size, mode)


@parallel(ranks=[2])
def test_a_gpu_is_shared_by_who_sees_the_same_one(comm):
    """Each rank may be shown one GPU, as number 0: whether it is the same its UUID says."""
    world, total = World(comm), MODULE.total_memory
    with pretended() as device:
        assert ranks_sharing(world, device) == 2
        assert Memory(small({}, 2), 53, world, device).capacity_bytes == total // 2
        MODULE.uuid = f"of rank {comm.rank}"
        assert ranks_sharing(world, device) == 1
        assert Memory(small({}, 2), 53, world, device).capacity_bytes == total
        assert rank_memory_bytes(device, expected_sharing(device, 3)) == total // 3
        MODULE.uuid = "pretended"


@parallel(ranks=[2])
def test_a_host_holds_what_its_gpus_offload(comm):
    """All of its ranks together; what is said names the host, and what would fit instead."""
    world, asked = World(comm), {"parallel.data": 2, "parallel.offload": "optimizer"}
    config = small(asked, 2)
    here = relief.Step.of(config, 53, on_host=False).on_hosts()
    assert here > 0
    with pretended() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "host_memory_bytes", lambda: 2 * here)
        # one rank has a byte too few and the other one to spare; then none has one to spare
        for resident in ((-1, 1), (0, 1)):
            patch.setattr(capacity, "process_bytes", lambda got=resident: (0, got[comm.rank]))
            if resident[0]:
                assert Memory(config, 53, world, device).step.host_capacity_bytes == here - 1
                continue
            with pytest.raises(InputError, match="does not fit into memory") as caught:
                Memory(config, 53, world, device)
        if comm.rank == 0:
            text = str(caught.value)
            assert 'memory of the host: with parallel.offload = "optimizer"' in text
            assert 'parallel.offload = "none"' in text
        Memory(small(asked | {"parallel.offload": "none"}, 2), 53, world, device)


@parallel(ranks=[2])
def test_what_others_have_of_a_gpu_is_not_there(comm):
    """Contexts and communicators are no tensors of this process; what its allocator has it may
    use."""
    world, total = World(comm), MODULE.total_memory
    with pretended() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "outside_bytes", GIB)
        assert Memory(small({}, 2), 53, world, device).capacity_bytes == (total - GIB) // 2
        held = torch.empty(GIB // 4, device=device)
        free = total - 2 * GIB
        assert rank_memory_bytes(device, 2) == free // 2 + held.nbytes
        del held
        patch.setattr(MODULE, "outside_bytes", total)
        with pytest.raises(InputError, match="does not fit into memory"):
            Memory(small({}, 2), 53, world, device)
