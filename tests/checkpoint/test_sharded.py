"""Checkpoints of runs whose state is sharded: read by every other layout, and the other way round;
each element is written once, and what goes on has the same losses."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ptdmpi.checkpoint import examine as check
from ptdmpi.checkpoint.manifest import read_manifest
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config.files import to_toml
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.engine.engine import Engine
from ptdmpi.evaluate.scoring import Request, score
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.sampling import GREEDY
from ptdmpi.inference.model import open_inference
from tests._configs import layout
from tests._engines import build, course, microbatches
from tests._runs import tensors
from tests.parallel import parallel

CHANGES = {"model.dropout": 0.1, "model.layers": 4, "run.steps": 6, "batch.micro_size": 1}
ONE_KEY_HEAD = {"model.kind": "qwen3", "model.kv_heads": 1, "model.ffn_hidden": 48}
long = partial(pytest.param, marks=pytest.mark.long)


def sharded(zero: int, group: int | str = "all", c: int = 1, **sizes: int) -> dict[str, Any]:
    where = {"parallel.zero": zero, "parallel.shard_group": group, "parallel.context": c}
    return {**layout(**sizes), **where}


def stepped(engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    """Loss and norm of these steps."""
    rank = engine.axes["data"].rank
    here = engine.context.positions
    found = [
        engine.step(k, [batch.at(here) for batch in microbatches(engine.config, k, rank)])
        for k in range(first, last)
    ]
    return [(one.loss, one.grad_norm) for one in found]


def checkpoints(engine: Engine, path: Path) -> Checkpoints:
    return Checkpoints(path, engine.state, engine.axes, course(engine.config))


def saved(engine: Engine, path: Path, step: int) -> Path:
    checkpoints(engine, path).save(step)
    return path / f"step-{step:08d}"


def assert_whole(world: World, path: Path) -> None:
    """Each element is written once, and `checkpoint verify` has nothing to say."""
    world.on_root(lambda: tensors(path))
    assert world.on_root(lambda: check.problems(path)) == []


def assert_equal(world: World, first: Path, second: Path) -> None:
    found = world.on_root(lambda: [str(one) for one in check.differences(first, second)])
    assert found == []


@pytest.mark.cases(1)
@parallel(ranks=[4], limit_s=200)
@pytest.mark.parametrize(
    ("zero", "sizes", "group", "changes"),
    [
        (1, {"p": 2, "v": 2, "d": 2}, "all", {"precision.compute": "bf16"}),
        (3, {"t": 2, "d": 2}, "all", ONE_KEY_HEAD),
        long(3, {"c": 2, "d": 2}, "all", {}),
        long(1, {"t": 2, "c": 2}, "all", {"precision.compute": "bf16"}),
        long(2, {"c": 4}, 2, {}),
        long(3, {"d": 4}, 2, {}),
        long(2, {"t": 2, "d": 2}, "all", {"model.tie_embeddings": False}),
        long(3, {"p": 2, "d": 2}, "all", {"precision.compute": "fp16"}),
        long(2, {"d": 4}, 2, ONE_KEY_HEAD),
    ],
)
def test_every_layout_reads_what_every_layout_wrote(comm, tmp_path, zero, sizes, group, changes):
    """Sharded, written, read by an unsharded run of another layout, written again, and so on."""
    world, settings = World(comm), {**CHANGES, **changes}
    first = build(world, {**settings, **sharded(zero, group, **sizes)})
    stepped(first, 0, 2)
    path = saved(first, tmp_path / "first", 2)
    assert_whole(world, path)
    for number, wanted in enumerate(
        [
            layout(t=2, p=2),
            sharded(zero, group, **sizes),
            sharded(zero % 3 + 1, t=2, d=2),
            sharded(1, 2, d=4),
            sharded(2, c=2, d=2),
        ]
    ):
        engine = build(world, {**settings, **wanted})
        source = tmp_path / (f"copy{number - 1}" if number else "first")
        progress, skipped = checkpoints(engine, source).resume("auto")
        assert progress is not None and progress.step == 2 and not skipped
        copied = saved(engine, tmp_path / f"copy{number}", 2)
        assert_whole(world, copied)
        assert_equal(world, path, copied)


@pytest.mark.cases(1)
@parallel(ranks=[2, long(4)], limit_s=200)
@pytest.mark.parametrize(
    ("zero", "compute"), [(1, "bf16"), (3, "fp32"), long(1, "fp32"), long(2, "bf16")]
)
def test_a_resumed_run_has_the_same_losses(comm, tmp_path, zero, compute):
    """In the same layout the same bits; with `zero` = 1 also those of the unsharded run, which
    takes turns with it."""
    world, d = World(comm), comm.size
    settings = {**CHANGES, "precision.compute": compute}
    straight = build(world, {**settings, **sharded(zero, d=d)})
    saved_at = 2
    expected = stepped(straight, 0, saved_at)
    saved(straight, tmp_path, saved_at)
    expected += stepped(straight, saved_at, 5)

    resumed = build(world, {**settings, **sharded(zero, d=d)})
    checkpoints(resumed, tmp_path).resume("auto")
    assert stepped(resumed, saved_at, 5) == expected[saved_at:]
    if zero == 1:
        plain = build(world, {**settings, **layout(d=d)})
        assert stepped(plain, 0, saved_at) == expected[:saved_at]
        path = saved(plain, tmp_path / "plain", saved_at)
        assert_equal(world, path, tmp_path / path.name)
        checkpoints(plain, tmp_path).resume("auto")
        assert stepped(plain, saved_at, 5) == expected[saved_at:]


@parallel(ranks=[4])
@pytest.mark.parametrize("sizes", [{"d": 4}, long({"c": 2, "d": 2})])
def test_who_asks_a_model_does_not_know_that_it_was_sharded(comm, tmp_path, sizes):
    """Scores, texts and what leaves for Hugging Face are those of the same state, written without
    shards."""
    world, settings = World(comm), {**CHANGES, "model.dropout": 0.0, "run.dir": str(tmp_path)}
    hybrid = {**sharded(3, 2, **sizes), "parallel.offload": "disk", "precision.compute": "bf16"}
    engine = build(world, {**settings, **hybrid})
    for name in ("hybrid", "plain"):
        world.on_root((tmp_path / name).mkdir)
    stepped(engine, 0, 2)
    saved(engine, tmp_path / "hybrid/checkpoints", 2)
    plain = build(world, {**settings, **layout(p=2, d=2), "precision.compute": "bf16"})
    checkpoints(plain, tmp_path / "hybrid/checkpoints").resume("auto")
    saved(plain, tmp_path / "plain/checkpoints", 2)
    for name, one in (("hybrid", engine), ("plain", plain)):
        text = to_toml(one.config)
        world.on_root(partial((tmp_path / name / "config.toml").write_text, text))
    alone = world.first(1)
    if alone is None:
        return
    answers = []
    for name in ("hybrid", "plain"):
        model, _ = open_inference(tmp_path / name, alone, None, None)
        scores = score(model, [Request([5, 17, 3, 90, 42], 1), Request([7, 7, 100], 2)])
        texts = generate(model, [Prompt([3, 1, 4], 9)], GREEDY, {0})
        to_hf(tmp_path / name, tmp_path / name / "hf")
        answers.append((scores, texts, (tmp_path / name / "hf/model.safetensors").read_bytes()))
    assert answers[0] == answers[1]


@parallel(ranks=[4])
@pytest.mark.parametrize(
    ("zero", "group", "shards"),
    [long(1, "all", 4), (2, 2, 2), (3, "all", 4), long(3, 2, 2)],
)
def test_shares_are_even_and_boxes_few(comm, tmp_path, zero, group, shards):
    """Each cut of a unit adds three boxes to one tensor of each kind: the rest of a row stands
    alone on both sides."""
    world = World(comm)
    # not too small: vectors stand together, each on a row of its own, which is mostly padding then
    engine = build(world, {**CHANGES, **sharded(zero, group, d=4), "model.hidden": 128})
    path = saved(engine, tmp_path, 1)

    def counted() -> tuple[int, list[float]]:
        tensors = read_manifest(path).tensors.values()
        sizes = [one.stat().st_size for one in sorted(path.glob("rank*"))]
        return sum(len(one.pieces) for one in tensors), [size / max(sizes) for size in sizes]

    boxes, shares = world.on_root(counted)
    assert len(shares) == 4 and min(shares) > 0.8
    whole = build(world, {**CHANGES, **layout(d=4), "model.hidden": 128})
    more = boxes - len(list(whole.state.pieces()))
    cuts = len(engine.buffer.units) * (shards - 1)
    # ranks of other groups share the writing, and cut a shard once more
    assert more <= len(engine.state.kinds) * 3 * cuts + 4
