"""The optimizer's state off the device: the same bits, less memory, and nothing left behind."""

import os
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch

from ptdmpi.checkpoint import examine
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError
from ptdmpi.engine import offload
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.cost.memory import CHUNK_BYTES
from ptdmpi.train import live
from tests._configs import layout
from tests._engines import build, course, microbatches, steps_of, whole_weights
from tests.parallel import parallel

PLACES = ("optimizer", "disk")
SMALL_CHUNKS = mock.patch.object(offload, "CHUNK_BYTES", 3 * 4 * 1000)  # 768 elements each

SHAPES: dict[str, Mapping[str, object]] = {
    "fp32": {},
    "bf16": {"precision.compute": "bf16"},
    "fp16": {"precision.compute": "fp16", "precision.initial_loss_scale": 2.0**10},
    "fp64": {"precision.compute": "fp64"},
    "reproducible": {"run.reproducible": True, "precision.compute": "bf16"},
    "clipped": {"optimizer.clip_norm": 0.1, "model.tie_embeddings": False},
}


def made(comm, path: Path, place: str, changes: Mapping[str, object]) -> Engine:
    return build(World(comm), {**changes, "run.dir": str(path), "parallel.offload": place})


def trained(engine: Engine, steps: int = 4):
    """Losses and norms of the steps, and the weights after them."""
    results = [(r.loss, r.grad_norm, r.skipped) for r in steps_of(engine, steps)]
    weights = [part.clone() for part in engine.buffer.weight_parts]
    return results, whole_weights(engine), weights


def check_bits(comm, path: Path, place: str, changes: Mapping[str, object]) -> None:
    results, weights, parts = trained(made(comm, path, "none", changes))
    with SMALL_CHUNKS:
        found = trained(made(comm, path, place, changes))
    assert found[0] == results
    for name, weight in weights.items():
        assert torch.equal(found[1][name], weight), name
    # of half types these follow the masters
    assert all(torch.equal(a, b) for a, b in zip(found[2], parts, strict=True))


@pytest.mark.cases(1)
@parallel(ranks=[1, 2])
@pytest.mark.parametrize(
    ("place", "shape"),
    [
        ("optimizer", "bf16"),
        ("optimizer", "clipped"),
        ("disk", "fp32"),
        ("disk", "fp16"),
        *(pytest.param("disk", one, marks=pytest.mark.long) for one in ("fp64", "reproducible")),
    ],
)
def test_bits_are_those_of_state_on_the_device(comm, tmp_path, place, shape):
    check_bits(comm, tmp_path, place, {**SHAPES[shape], **layout(d=comm.size)})


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(
    ("place", "axes", "changes"),
    [
        ("disk", {"d": 4}, {"parallel.zero": 1}),
        pytest.param(
            "optimizer",
            {"d": 4},
            {"parallel.zero": 3, "parallel.shard_group": 2},
            marks=pytest.mark.long,
        ),
        pytest.param("optimizer", {"p": 2, "d": 2}, {"parallel.zero": 2}, marks=pytest.mark.long),
        ("disk", {"t": 2, "d": 2}, {"parallel.zero": 3, "precision.compute": "bf16"}),
        pytest.param(
            "disk", {"t": 2, "p": 2}, {"precision.compute": "bf16"}, marks=pytest.mark.long
        ),
    ],
)
def test_bits_beside_other_axes_and_zero(comm, tmp_path, place, axes, changes):
    check_bits(comm, tmp_path, place, {**changes, **layout(**axes)})


@parallel(ranks=[1])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_a_device_apart_from_the_host(comm, tmp_path, place, compute):
    """As there: what is not on the host is copied to it, and its changes back."""
    rooms = []

    def room(tensor):
        rooms.append(torch.empty_like(tensor))
        return rooms[-1]

    with mock.patch.object(offload, "room_for", room):
        check_bits(comm, tmp_path, place, {"precision.compute": compute})
    assert rooms and max(map(len, rooms)) <= 768


@parallel(ranks=[2])
def test_an_overflow_changes_nothing(comm, tmp_path):
    scale = {"precision.initial_loss_scale": 2.0**40}
    changes = {**layout(d=2), **SHAPES["fp16"], **scale}
    engine = made(comm, tmp_path, "disk", changes)
    before = [part.clone() for part in (*engine.state.flats, *engine.buffer.weight_parts)]
    (result,) = steps_of(engine, 1)
    after = (*engine.state.flats, *engine.buffer.weight_parts)
    assert result.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.long
@parallel(ranks=[4], limit_s=120)
def test_through_a_checkpoint_into_another_layout_and_back(comm, tmp_path):
    """none -> disk -> optimizer, each in another layout: what is saved again is the same."""
    world, bf16 = World(comm), {"precision.compute": "bf16"}
    ways = [
        ("none", layout(t=2, d=2)),
        ("disk", {**layout(p=2, d=2), "parallel.zero": 2}),
        ("optimizer", {**layout(d=4), "parallel.zero": 3}),
        ("disk", layout(t=2, p=2)),
    ]
    for number, (place, where) in enumerate(ways):
        engine = made(comm, tmp_path / "run", place, {**bf16, **where})
        settings = engine.config.replace("checkpoint", asynchronous=True)
        path = tmp_path / str(number)
        checkpoints = Checkpoints(path, engine.state, engine.axes, course(settings))
        if number == 0:
            steps_of(engine, 2)
        else:
            progress, _ = checkpoints.resume(str(tmp_path / f"{number - 1}/step-00000002"))
            assert progress.step == 2
        checkpoints.save(2)
        checkpoints.finish()
        checkpoints.close()
    first, last = (tmp_path / f"{number}/step-00000002" for number in (0, len(ways) - 1))
    assert world.on_root(lambda: [str(one) for one in examine.differences(first, last)]) == []


@parallel(ranks=[2])
@pytest.mark.parametrize("place", PLACES)
def test_resumed_goes_on_with_the_same_bits(comm, tmp_path, place):
    where = {**layout(d=2), "precision.compute": "bf16"}
    straight = made(comm, tmp_path, "none", where)
    expected = trained(straight, 4)
    engine = made(comm, tmp_path, place, where)
    steps_of(engine, 2)
    Checkpoints(tmp_path / "c", engine.state, engine.axes, course(engine.config)).save(2)
    again = made(comm, tmp_path, place, where)
    Checkpoints(tmp_path / "c", again.state, again.axes, course(again.config)).resume("auto")
    for step in (2, 3):
        again.step(step, microbatches(again.config, step, again.axes["data"].rank))
    for name, weight in whole_weights(again).items():
        assert torch.equal(weight, expected[1][name]), name


def mapped_bytes(path: Path) -> tuple[int, int]:
    """(mapped, resident) of this process's mappings of files in `path`."""
    mapped = resident = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            ours = str(path) in line
        elif ours and first in ("Size:", "Rss:"):
            mapped += int(rest[0]) * 1024 * (first == "Size:")
            resident += int(rest[0]) * 1024 * (first == "Rss:")
    return mapped, resident


@parallel(ranks=[2])
def test_memory_has_two_chunks_and_no_more(comm, tmp_path):
    """Masters and moments, in the beginning, after steps, while they are saved, and loaded."""
    changes = {**layout(d=2), "precision.compute": "bf16", "model.hidden": 256}
    with mock.patch.object(offload, "CHUNK_BYTES", 300_000):
        engine = made(comm, tmp_path, "disk", changes)
        state = sum(part.nbytes for part in engine.state.flats)
        assert state > 20 * 300_000
        assert mapped_bytes(tmp_path)[0] >= state
        assert mapped_bytes(tmp_path)[1] == 0
        steps_of(engine, 2)
        assert mapped_bytes(tmp_path)[1] == 0
        rooms = sum(room.nbytes for room in engine.buffer.storage._rooms)
        assert 0 < rooms <= 2 * 300_000
    checkpoints = Checkpoints(tmp_path / "c", engine.state, engine.axes, course(engine.config))
    checkpoints.save(2)
    largest = max(piece.values.nbytes for piece in engine.state.pieces())
    assert mapped_bytes(tmp_path)[1] <= 2 * largest < state
    checkpoints.resume("auto")
    assert mapped_bytes(tmp_path)[1] == 0


def test_the_planner_counts_the_same_chunks():
    assert offload.CHUNK_BYTES == CHUNK_BYTES


@parallel(ranks=[2])
def test_no_file_is_ever_seen(comm, tmp_path):
    """Nor is one of another run, or of one that was killed, of any concern."""
    engine = made(comm, tmp_path, "disk", layout(d=2))
    steps_of(engine, 1)
    comm.Barrier()
    assert list(tmp_path.rglob("*")) == []


@parallel(ranks=[2])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_full_disk_is_told_on_every_rank(comm, tmp_path, compute):
    allocate = os.posix_fallocate

    def full(descriptor, place, size):
        if comm.rank == 1:
            raise OSError(28, "No space left on device")
        allocate(descriptor, place, size)

    changes = {**layout(d=2), "precision.compute": compute}
    with mock.patch.object(os, "posix_fallocate", full), pytest.raises(SharedInputError) as told:
        made(comm, tmp_path, "disk", changes)
    assert "rank 1: No space left on device; legal: " in str(told.value)
    assert str(tmp_path) in str(told.value)


@parallel(ranks=[2])
def test_a_directory_that_cannot_be_made_is_told(comm, tmp_path):
    world = World(comm)
    world.on_root(lambda: (tmp_path / "file").write_text(""))
    with pytest.raises(SharedInputError, match=r'offload = "disk" needs a file in .*: rank 0: '):
        made(comm, tmp_path / "file/run", "disk", layout(d=2))


@parallel(ranks=[1])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_in_an_update_ends_the_run(comm, tmp_path, call):
    engine = made(comm, tmp_path, "disk", {})
    steps_of(engine, 1)
    batches = microbatches(engine.config, 1, 0)
    failing = mock.Mock(side_effect=OSError(5, "Input/output error"))
    with mock.patch.object(os, call, failing), pytest.raises(OSError, match="Input/output"):
        engine.step(1, batches)
    assert engine.steps_done is None  # half a state is nobody's


@parallel(ranks=[2])
def test_survivors_hand_it_over(comm, tmp_path):
    """What is held of an engine that is gone stands in its file until it has been taken."""
    world, where = World(comm), {**layout(d=2), "precision.compute": "bf16"}
    engine = made(comm, tmp_path, "disk", where)
    steps_of(engine, 2)
    expected = [part.clone() for part in (*engine.state.flats, *engine.buffer.weight_parts)]
    holding = live.hold(engine, live.Account())
    del engine
    fresh = made(comm, tmp_path, "disk", where)
    ways = [(0, 0), (0, 1)]
    handles = live.give(world, holding, ways)
    live.take(world, fresh, holding, 0)
    for handle in handles:
        handle.wait()
    found = (*fresh.state.flats, *fresh.buffer.weight_parts)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
