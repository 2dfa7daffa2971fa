"""A checkpoint that an older program wrote is loaded, and written again, to the same bytes.

`written_before/step-00000003` was written by commit 46cfe5a, by `write_one` on two ranks (t = 2):
three fp16 steps, the loss scale doubled after two of them.
"""

import json
from pathlib import Path

import torch

from ptdmpi.checkpoint.examine import differences
from ptdmpi.checkpoint.manifest import MANIFEST, sound_manifest
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.model.state import Counters
from tests._configs import layout
from tests._engines import build, course, microbatches
from tests.parallel import parallel

BEFORE = Path(__file__).parent / "written_before" / "step-00000003"
VOCAB_SIZE = 23
CHANGES = {
    "model.layers": 1,
    "model.hidden": 8,
    "model.heads": 2,
    "model.ffn_hidden": 16,
    "model.seq_length": 8,
    "precision.compute": "fp16",
    "precision.loss_scale_window": 2,
    "batch.global_size": 4,
    "run.steps": 6,
}


def _checkpoints(engine: Engine, path: Path) -> Checkpoints:
    return Checkpoints(path, engine.state, engine.axes, course(engine.config))


def write_one(world: World, path: Path) -> None:
    """How `BEFORE` was made; the bits of a training depend on the machine, so not compared."""
    engine = build(world, {**CHANGES, **layout(t=2)}, VOCAB_SIZE)
    for step in range(3):
        engine.step(step, microbatches(engine.config, step, 0, vocab_size=VOCAB_SIZE))
    _checkpoints(engine, path).save(3)


@parallel(ranks=[1, 2])
def test_it_loads_in_any_layout_and_is_written_again_alike(comm, tmp_path):
    world = World(comm)
    for sizes in [{}] if comm.size == 1 else [{"t": 2}, {"d": 2}]:
        engine = build(world, {**CHANGES, **layout(**sizes)}, VOCAB_SIZE)
        progress, skipped = _checkpoints(engine, tmp_path).resume(str(BEFORE))
        assert (progress.step, progress.samples, skipped) == (3, 12, [])
        assert engine.state.counters == Counters(updates=3, loss_scale=131072.0, good_steps=1)
        assert torch.equal(engine.buffer.weights, engine.buffer.masters[0].half())
        (saved,) = _checkpoints(engine, tmp_path / str(sizes)).save(3)
        assert world.on_root(lambda saved=saved: differences(BEFORE, saved.path)) == []
        if sizes == {"t": 2}:  # the layout that wrote it
            for file in BEFORE.glob("*.safetensors"):
                assert (saved.path / file.name).read_bytes() == file.read_bytes(), file.name
            before, now = (json.loads((one / MANIFEST).read_text()) for one in (BEFORE, saved.path))
            for part in ("format_version", "progress", "files", "tensors"):
                assert before[part] == now[part], part


def test_its_manifest_says_what_it_said():
    manifest = sound_manifest(BEFORE)
    assert manifest.total_bytes == 19328 and len(manifest.tensors) % 3 == 0
    table = manifest.tensors["exp_avg/embedding.word.weight"]
    assert (table.shape, table.dtype) == ((VOCAB_SIZE, 8), "float32")
    assert sum(piece.box.elements for piece in table.pieces) == VOCAB_SIZE * 8
