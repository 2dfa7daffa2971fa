"""Saving and loading with real engines: shares, layouts, threads, and ranks that cannot write."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint import examine as check
from ptdmpi.checkpoint import save as module
from ptdmpi.checkpoint.save import Checkpoints, SaveFailed
from ptdmpi.checkpoint.share import divide
from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError
from ptdmpi.engine.engine import Engine
from tests._configs import layout
from tests._engines import build, course, microbatches
from tests.parallel import parallel

CHANGES = {"model.dropout": 0.1, "model.layers": 4, "run.steps": 6}


def _step(engine: Engine, numbers: Sequence[int]) -> None:
    for number in numbers:
        engine.step(number, microbatches(engine.config, number, engine.axes["data"].rank))


def _checkpoints(engine: Engine, path, **values) -> Checkpoints:
    config = engine.config.replace("checkpoint", **values)
    return Checkpoints(path, engine.state, engine.axes, course(config))


def _differing(world, first, second) -> list[str]:
    """What differs between two checkpoints, as rank 0 sees it."""
    return world.on_root(lambda: [str(one) for one in check.differences(first, second)])


@pytest.mark.parametrize("holders", [1, 2, 3, 7])
def test_shares_are_even_and_whole(holders):
    shapes = [(5,), (3000, 30), (100, 4000), (7, 2), (40000,), (10, 10)]
    total = sum(torch.Size(shape).numel() for shape in shapes)
    shares = [list(divide(shapes, 4, holders, place)) for place in range(holders)]
    rows = [(n, r) for share in shares for n, part in share for r in range(part.start, part.stop)]
    assert sorted(rows) == [(n, r) for n, shape in enumerate(shapes) for r in range(shape[0])]
    for share in shares:
        size = sum(
            (part.stop - part.start) * torch.Size(shapes[n][1:]).numel() for n, part in share
        )
        assert abs(size - total / holders) < 4000 + 16384  # a row, or a box that stays whole


@pytest.mark.cases(1)
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize(
    ("sizes", "then", "changes", "asynchronous"),
    [
        (
            {"t": 2, "d": 2},
            {"t": 2, "d": 2},
            {"precision.compute": "fp16", "precision.loss_scale_window": 2},
            True,
        ),
        ({"t": 2, "p": 2, "v": 2}, {"t": 2, "p": 2}, {"precision.compute": "bf16"}, True),
        (
            {"t": 2, "d": 2},
            {"t": 2, "p": 2, "v": 2},
            {"precision.compute": "bf16", "run.reproducible": True},
            False,
        ),
    ],
)
def test_resume_has_the_same_bits(comm, tmp_path, sizes, then, changes, asynchronous):
    """4 steps, or 2, saved, loaded, 2 more: with dropout, masters behind half types, and fp16's
    loss scale; in the same layout, and in others that are bitwise equal."""
    world = World(comm)
    straight = build(world, {**CHANGES, **changes, **layout(**sizes)})
    checkpoints = _checkpoints(straight, tmp_path, asynchronous=asynchronous)
    _step(straight, range(2))
    saved = checkpoints.save(2)
    _step(straight, range(2, 4))  # while the thread writes what was there before
    saved += checkpoints.finish()
    assert [one.step for one in saved] == [2] and saved[0].stall_s > 0.0
    saved = [*checkpoints.save(4), *checkpoints.finish()]
    checkpoints.close()

    resumed = build(world, {**CHANGES, **changes, **layout(**then)})
    progress, skipped = _checkpoints(resumed, tmp_path).resume(str(tmp_path / "step-00000002"))
    assert progress.step == 2 and progress.samples == 16 and skipped == []
    _step(resumed, range(2, 4))
    _checkpoints(resumed, tmp_path / "again").save(4)
    path = tmp_path / "step-00000004"
    assert _differing(world, path, tmp_path / "again/step-00000004") == []
    assert resumed.loss_scale.value == straight.loss_scale.value
    assert world.on_root(lambda: check.problems(path)) == []


@pytest.mark.cases(1)
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize("compute", ["fp32", pytest.param("fp64", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["gpt", "qwen3"])
def test_other_layouts_hold_the_same_tensors(comm, tmp_path, compute, kind):
    """What one layout writes, another reads and writes again: equal to the bit. The second kind has
    one key head for all tensor ranks, which is written once."""
    world = World(comm)
    settings = {**CHANGES, "precision.compute": compute, "model.kind": kind}
    if kind == "qwen3":
        settings |= {"model.kv_heads": 1, "model.ffn_hidden": 48}
    first = build(world, {**settings, **layout(t=2, d=2)})
    _step(first, range(1))
    _checkpoints(first, tmp_path).save(1)
    for number, sizes in enumerate(({"t": 4}, {"p": 2, "v": 2, "d": 2}, {"t": 2, "p": 2})):
        where = {**settings, **layout(**sizes)}
        where |= {"parallel.first_layers": 1} if number == 2 else {}  # an uneven split reads, too
        engine = build(world, where)
        progress, _ = _checkpoints(engine, tmp_path).resume("auto")
        assert progress.step == 1
        copies = _checkpoints(engine, tmp_path / f"copy{number}")
        copies.save(1)
        copied = tmp_path / f"copy{number}/step-00000001"
        assert _differing(world, tmp_path / "step-00000001", copied) == []
        assert world.on_root(lambda path=copied: check.problems(path)) == []
    sizes = [os.path.getsize(path) for path in sorted((tmp_path / "copy1").glob("*/rank*"))]
    assert len(sizes) == 4
    for pipeline_rank in (0, 1):  # its two data replicas
        mine = sizes[2 * pipeline_rank : 2 * pipeline_rank + 2]
        assert min(mine) / max(mine) > 0.9  # small tensors stay whole


def _fail(path, blocks):
    raise OSError(28, "No space left on device", str(path))


@parallel(ranks=[2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_rank_cannot_write(comm, tmp_path, asynchronous):
    """Every rank hears of it, nothing of the checkpoint is left, and the next one is written."""
    world = World(comm)
    engine = build(world, {**CHANGES, **layout(d=2)})
    checkpoints = _checkpoints(engine, tmp_path, asynchronous=asynchronous, keep=1)
    checkpoints.save(1)
    checkpoints.finish()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(module, "write", _fail)
        with pytest.raises(SaveFailed, match=r"step-00000002 was not written: rank 1: .*No space"):
            checkpoints.save(2)
            checkpoints.finish()
    assert world.on_root(lambda: sorted(os.listdir(tmp_path))) == ["latest", "step-00000001"]
    checkpoints.save(3)
    checkpoints.finish()
    assert world.on_root(lambda: sorted(os.listdir(tmp_path))) == ["latest", "step-00000003"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "give_name", lambda *_: _fail("manifest", ()))
        with pytest.raises(SaveFailed, match="No space"):
            checkpoints.save(4)
            checkpoints.finish()
    assert world.on_root(lambda: sorted(os.listdir(tmp_path))) == ["latest", "step-00000003"]
    checkpoints.close()


@parallel(ranks=[2])
def test_a_checkpoint_is_saved_although_latest_cannot_be_written(comm, tmp_path):
    world = World(comm)
    engine = build(world, {**CHANGES, **layout(d=2)})
    checkpoints = _checkpoints(engine, tmp_path, keep=1)
    checkpoints.save(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_whole", _fail)
        (saved,) = checkpoints.save(2)
    latest = tmp_path / "latest"
    assert saved.warning is not None and "step-00000002 is complete, but the" in saved.warning
    assert f"No space left on device: '{latest}'" in saved.warning
    assert world.on_root(lambda: sorted(os.listdir(tmp_path))) == ["latest", "step-00000002"]
    (saved,) = checkpoints.save(3)
    assert saved.warning is None
    assert files.named(latest).name == "step-00000003"
    checkpoints.close()


@parallel(ranks=[2])
def test_a_mistake_of_ours_is_no_full_disk(comm, tmp_path):
    engine = build(World(comm), {**CHANGES, **layout(d=2)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write", lambda path, blocks: blocks.nothing)
        with pytest.raises(AttributeError):
            _checkpoints(engine, tmp_path).save(1)


@parallel(ranks=[2])
def test_writing_in_the_background(comm, tmp_path):
    """`save` returns before the disk has it, `latest` moves behind it, and the next save waits."""
    world = World(comm)
    engine = build(world, {**CHANGES, **layout(d=2)})
    checkpoints = _checkpoints(engine, tmp_path, asynchronous=True)
    go_on, write = threading.Event(), module.write

    def wait_and_write(path, blocks):
        assert go_on.wait(30)
        return write(path, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write", wait_and_write)
        assert checkpoints.save(1) == []
        assert checkpoints.poll() == [] and not (tmp_path / "latest").exists()
        host = checkpoints.outgoing._host.data_ptr()
        _step(engine, range(1))
        go_on.set()
        (saved,) = checkpoints.save(2)
        assert saved.step == 1 and saved.bytes >= checkpoints.state_bytes
        assert files.named(tmp_path / "latest").name == "step-00000001"
        assert checkpoints.outgoing._host.data_ptr() == host  # one copy, used again
        (saved,) = checkpoints.finish()
    assert saved.step == 2 and checkpoints.poll() == []
    mine = sum(part.box.elements for part in checkpoints.outgoing.parts)
    assert checkpoints.outgoing._host.numel() == mine
    fresh = build(world, {**CHANGES, **layout(d=2)}).buffer.masters[0]
    other = build(world, {**CHANGES, **layout(d=2)})
    _checkpoints(other, tmp_path).resume(str(tmp_path / "step-00000001"))
    assert torch.equal(
        other.buffer.masters[0], fresh
    )  # saved before the step that went on meanwhile
    checkpoints.close()


@parallel(ranks=[2])
def test_what_resume_steps_over_and_what_it_refuses(comm, tmp_path):
    world = World(comm)
    engine = build(world, {**CHANGES, **layout(t=2)})
    checkpoints = _checkpoints(engine, tmp_path, keep=2)
    assert checkpoints.resume("auto") == (None, [])
    for step in (1, 2, 3):
        checkpoints.save(step)
    world.on_root(lambda: _flip(tmp_path / "step-00000003/rank-00001.safetensors"))
    progress, skipped = checkpoints.resume("auto")
    assert progress.step == 2 and len(skipped) == 1 and "rank-00001" in skipped[0]
    one = build(world, {**CHANGES, **layout(d=2)})  # nobody reads a whole piece: found all the same
    assert _checkpoints(one, tmp_path).resume("auto")[0].step == 2
    checkpoints.save(3)  # the damaged one makes room, and stays
    assert world.on_root(lambda: (tmp_path / "step-00000003.damaged").is_dir())
    assert checkpoints.resume(str(tmp_path / "latest"))[0].step == 3
    assert checkpoints.resume("never") == (None, [])

    for change in ({"model.hidden": 64}, {"model.heads": 2}, {"model.norm_eps": 1e-3}):
        other = build(world, {**CHANGES, **layout(t=2), **change})
        key = next(iter(change))
        for wanted in ("auto", str(tmp_path / "step-00000003")):
            with pytest.raises(SharedInputError, match=f"it was trained with {key} = "):
                _checkpoints(other, tmp_path).resume(wanted)
    for change in ({"batch.global_size": 16}, {"run.seed": 7}):
        other = build(world, {**CHANGES, **layout(t=2), **change})
        with pytest.raises(SharedInputError, match="skipped or seen twice"):
            _checkpoints(other, tmp_path).resume("auto")
        with pytest.raises(SharedInputError, match="skipped or seen twice"):
            _checkpoints(other, tmp_path).resume(str(tmp_path / "step-00000003"))
        named = build(world, {**CHANGES, **layout(t=2), **change, "data.change": "from here"})
        found = _checkpoints(named, tmp_path)
        assert found.resume(str(tmp_path / "step-00000003"))[0].step == 3
        assert found.course.samples(4) == 24 + named.config.batch.global_size
    for step in (2, 3):
        world.on_root(lambda step=step: _flip(tmp_path / files.name_of(step) / "manifest.json"))
    with pytest.raises(SharedInputError, match=r"is complete.*begins anew"):
        checkpoints.resume("auto")
    with pytest.raises(SharedInputError, match=r"checkpoint.resume = .*step-00000002"):
        checkpoints.resume(str(tmp_path / "step-00000002"))


@parallel(ranks=[2])
def test_a_run_that_is_rolled_back_goes_on_from_there(comm, tmp_path):
    """Checkpoints of later steps would else be the newest ones, and come back."""
    world = World(comm)
    engine = build(world, {**CHANGES, **layout(d=2)})

    def start(resume, **options):
        checkpoints = _checkpoints(engine, tmp_path, **options)
        progress, _ = checkpoints.resume(resume)
        return checkpoints, progress.step if progress else 0

    def left():
        return world.on_root(
            lambda: sorted(path.name.removeprefix("step-0000000") for path in tmp_path.glob("s*"))
        )

    for step in range(1, 7):
        _checkpoints(engine, tmp_path, keep=0).save(step)
    second = str(tmp_path / "step-00000002")
    checkpoints, step = start(second, keep=0)
    assert step == 2 and len(left()) == 6  # a start that saves nothing changes nothing
    checkpoints.save(4)
    gone = [f"{step}.abandoned" for step in (3, 4, 5, 6)]
    assert left() == sorted(["1", "2", "4", *gone])
    assert start("auto")[1] == 4
    again, step = start(second)  # the same command, as a batch job gives it again
    assert step == 4 and again.followed == Path(second)
    checkpoints, _ = start("never", keep=1)
    checkpoints.save(1)
    assert [name for name in left() if "." not in name] == ["1"]
    assert world.on_root(lambda: files.named(tmp_path / "latest").is_dir())
    assert start("auto")[1] == 1
    kept = tmp_path / "step-00000005.abandoned"
    assert start(str(kept))[1] == 6 - 1  # nothing is lost


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
