"""torch.distributed over our transports: each call beside gloo's, DTensor, FSDP2 and DCP."""

import os
import subprocess
import sys

import pytest
import tomlkit

from tests._mpirun import mpirun
from tests._runs import configuration, corpus

PREAMBLE = """
import sys
import torch, torch.distributed as dist
import ptdmpi.comm.c10d
dist.init_process_group("ptdmpi")
rank, size = dist.get_rank(), dist.get_world_size()
gloo = dist.new_group(backend="gloo")
ours = dist.group.WORLD

def alike(name, work):
    results = []
    for group in (ours, gloo):
        torch.manual_seed(rank)
        results.append(work(group))
    a, b = results
    assert type(a) is type(b) and len(a) == len(b), name
    for x, y in zip(a, b):
        assert x.dtype == y.dtype and x.shape == y.shape, (name, x, y)
        torch.testing.assert_close(x, y, msg=lambda text: f"{name}: {text}")
"""
CALLS = """
Op = dist.ReduceOp
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
    def some(*shape):
        return torch.randint(1, 5, shape).to(dtype)
    bitwise = [Op.BAND, Op.BOR, Op.BXOR] if dtype is torch.int64 else []
    for op in (Op.SUM, Op.MAX, Op.MIN, Op.PRODUCT, *bitwise):
        def all_reduce(group):
            x = some(6, 5)
            dist.all_reduce(x, op, group=group)
            y = some(5, 6).t()  # not contiguous
            work = dist.all_reduce(y, op, group=group, async_op=True)
            work.wait()
            return [x, y]
        alike(f"all_reduce {op} {dtype}", all_reduce)
        def reduce(group):
            x = some(7)
            dist.reduce(x, size - 1, op, group=group)
            return [x] if rank == size - 1 else []
        alike(f"reduce {op} {dtype}", reduce)
        def reduce_scatter(group):
            x = torch.empty(3, dtype=dtype)
            dist.reduce_scatter(x, [some(3) for _ in range(size)], op, group=group)
            return [x]
        alike(f"reduce_scatter {op} {dtype}", reduce_scatter)
        def reduce_scatter_tensor(group):
            x = torch.empty(3, dtype=dtype)
            dist.reduce_scatter_tensor(x, some(3 * size), op, group=group)
            return [x]
        alike(f"reduce_scatter_tensor {op} {dtype}", reduce_scatter_tensor)
        # gloo has no parts of unequal sizes, but it can reduce all parts on each rank
        parts = [some(number + 1, 2) for number in range(size)]
        every = torch.cat(parts)
        dist.all_reduce(every, op, group=gloo)
        x = torch.empty(rank + 1, 2, dtype=dtype)
        dist.reduce_scatter(x, parts, op)
        assert torch.equal(x, every.split([len(part) for part in parts])[rank]), (op, dtype)
    parts = [torch.empty(number, 2, dtype=dtype) for number in range(1, size + 1)]
    dist.all_gather(parts, torch.full((rank + 1, 2), rank + 3).to(dtype))
    for number, part in enumerate(parts):
        assert torch.equal(part, torch.full_like(part, number + 3)), (number, dtype)
    def coalesced(group):
        # several tensors in one call, and several calls in a context that makes them one
        sums, whole = [some(3), some(2, 2)], [torch.empty(3 * size, dtype=dtype) for _ in range(2)]
        dealt = [torch.empty(2, dtype=dtype) for _ in range(2)]
        dist.all_reduce_coalesced(sums, group=group)
        lists = [[torch.empty(3, dtype=dtype), torch.empty(2, 2, dtype=dtype)] for _ in range(size)]
        dist.all_gather_coalesced(lists, [some(3), some(2, 2)], group=group)
        with dist._coalescing_manager(group):
            for output in whole:
                dist.all_gather_into_tensor(output, some(3), group=group)
        with dist._coalescing_manager(group):
            for output in dealt:
                dist.reduce_scatter_tensor(output, some(2 * size), group=group)
        return [*sums, *(part for parts in lists for part in parts), *whole, *dealt]
    alike(f"coalesced {dtype}", coalesced)
    def broadcast(group):
        x = some(4, 3)
        dist.broadcast(x, 1 % size, group=group)
        return [x]
    alike(f"broadcast {dtype}", broadcast)
    def all_gather(group):
        parts = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, some(2, 3), group=group)
        whole = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(whole, some(2, 3), group=group)
        return [*parts, whole]
    alike(f"all_gather {dtype}", all_gather)
    def gather_scatter(group):
        parts = [torch.empty(3, dtype=dtype) for _ in range(size)] if rank == 0 else None
        dist.gather(some(3), parts, 0, group=group)
        back = torch.empty(3, dtype=dtype)
        dist.scatter(back, parts, 0, group=group)
        return [back, *(parts or [])]
    alike(f"gather, scatter {dtype}", gather_scatter)
    def all_to_all(group):
        x = some(2 * size, 3)
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        sent = [(rank + k) % 3 for k in range(size)]
        received = [(k + rank) % 3 for k in range(size)]
        z = torch.empty(sum(received), 2, dtype=dtype)
        dist.all_to_all_single(z, some(sum(sent), 2), received, sent, group=group)
        parts = [torch.empty(2, dtype=dtype) for k in range(size)]  # gloo has equal sizes only
        dist.all_to_all(parts, [some(2) for k in range(size)], group=group)
        return [y, z, *parts]
    alike(f"all_to_all {dtype}", all_to_all)
    def ring(group):
        x, y = some(5), torch.empty(5, dtype=dtype)
        ops = [
            dist.P2POp(dist.isend, x, (rank + 1) % size, group),
            dist.P2POp(dist.irecv, y, (rank - 1) % size, group),
        ]
        if size > 1:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        return [y] if size > 1 else []
    alike(f"ring {dtype}", ring)
for op, factor in ((Op.AVG, 1 / size), (dist._make_nccl_premul_sum(0.25), 0.25)):
    x, y = torch.full((4,), rank + 1.0), torch.empty(2)
    total = factor * size * (size + 1) / 2
    dist.all_reduce(x, op)
    dist.reduce_scatter_tensor(y, torch.full((2 * size,), rank + 1.0), op)
    assert x.tolist() == [total] * 4 and y.tolist() == [total] * 2, (op, x, y, total)
flags = torch.tensor([rank == 0, True])
dist.all_reduce(flags, Op.MIN)
assert flags.tolist() == [size == 1, True]
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert [value["rank"] for value in objects] == list(range(size))
values = ["of rank", rank] if rank == 0 else [None, None]
dist.broadcast_object_list(values, 0)
assert values == ["of rank", 0]
for first in range(size - 1):  # groups of neighbours; others are not in them
    group = dist.new_group([first, first + 1])
    x = torch.ones(1)
    if rank in (first, first + 1):
        dist.all_reduce(x, group=group)
        assert x.item() == 2
dist.barrier()
dist.destroy_process_group()
"""
TRAINING = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

folder = sys.argv[1]
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rows", "columns"))
whole = torch.arange(24.0).view(6, 4)
dealt = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
weights = distribute_tensor(torch.ones(4, 2), mesh, [Replicate(), Shard(0)])
assert torch.equal((dealt @ weights).full_tensor(), whole @ torch.ones(4, 2))

def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

def losses(groups, steps, restore=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    for layer in (*model, model):
        if layer is model or isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=groups)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if restore:
        states = state_of(model, optimizer)
        dcp.load(states, checkpoint_id=restore)
        both = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
        set_state_dict(model, optimizer, **both)
    found = []
    for step in steps:
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item())
        if step == 1 and not restore:
            dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return found

from torch.distributed.device_mesh import DeviceMesh
by_ours = losses(DeviceMesh("cpu", list(range(size))), range(4))
by_gloo = losses(DeviceMesh.from_group(gloo, "cpu"), range(4))
assert max(abs(a - b) for a, b in zip(by_ours, by_gloo)) < 1e-6, (by_ours, by_gloo)
assert losses(DeviceMesh("cpu", list(range(size))), range(2, 4), restore=folder) == by_ours[2:]

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def divided_losses(groups):
    # one batch on all ranks; a linear divided by columns, and a linear divided by rows
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    parallelize_module(model, groups, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert model[0].weight.to_local().shape == (16 // size, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for step in range(4):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found

by_ours = divided_losses(DeviceMesh("cpu", list(range(size))))
# DTensor caches by mesh, and meshes of the same name are equal, even if their groups differ
by_gloo = divided_losses(DeviceMesh.from_group(gloo, "cpu", mesh_dim_names=("gloo",)))
assert max(abs(a - b) for a, b in zip(by_ours, by_gloo)) < 1e-6, (by_ours, by_gloo)
assert by_ours[-1] < by_ours[0]
if rank == 0:
    print("losses", by_ours)
dist.destroy_process_group()
"""

MESH = """
import sys
import torch, torch.distributed as dist
import ptdmpi
from ptdmpi.comm.c10d import mesh_of

run = ptdmpi.Run(sys.argv[1])
grid, rank = run.axes.grid, run.axes.world.rank
mesh = mesh_of(run.axes)
for step in run:
    for axis in mesh.mesh_dim_names:
        group = mesh.get_group(axis)
        assert mesh.get_local_rank(axis) == run.axes[axis].rank, axis
        assert dist.get_process_group_ranks(group) == list(grid.members(rank, axis)), axis
        ours, theirs = (torch.tensor([1.5 * rank + step.number]) for _ in range(2))
        dist.all_reduce(ours, group=group)
        assert torch.equal(ours, run.axes[axis].all_reduce(theirs)), axis
sizes = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names}
assert sizes == {axis: run.axes[axis].size for axis in sizes} and mesh.size() == 4
print("alike", rank)
dist.destroy_process_group()
"""


def run(tmp_path, ranks, program, *arguments):
    file = tmp_path / "program.py"
    file.write_text(PREAMBLE + program)
    return mpirun(ranks, [str(file), *arguments])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_call_does_what_gloo_does(tmp_path, ranks):
    run(tmp_path, ranks, CALLS)


@pytest.mark.long
def test_other_libraries_train_and_save_over_it(tmp_path):
    """DTensor's products and divided linears, FSDP2, gloo's losses for both, and DCP."""
    done = run(tmp_path, 4, TRAINING, str(tmp_path / "checkpoint"))
    assert "losses" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("sizes", [("tensor", "pipeline"), ("context", "data")])
def test_the_grid_of_a_run_is_a_mesh(tmp_path, sizes):
    corpus(tmp_path)
    changes = {f"parallel.{axis}": 2 for axis in sizes} | {"run.steps": 2}
    (tmp_path / "config.toml").write_text(tomlkit.dumps(configuration(tmp_path, changes)))
    file = tmp_path / "program.py"
    file.write_text(MESH)
    done = mpirun(4, [str(file), str(tmp_path / "config.toml")])
    assert done.stdout.count("alike") == 4


@pytest.mark.long
def test_with_torchrun_s_environment_torch_meets_as_ever(tmp_path):
    """The way to meet without an address is only used where the environment names no rank."""
    program = (
        "import ptdmpi.comm.c10d, torch.distributed as dist; dist.init_process_group('gloo'); "
        "print(dist.get_backend(), dist.get_world_size())"
    )
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["gloo", "1"]
