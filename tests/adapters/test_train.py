"""Runs that train adapters: over a base, resumed, killed between two steps, in another layout."""

import json
import shutil

import pytest

from ptdmpi.checkpoint.base import base_at
from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError
from ptdmpi.inference.model import open_inference
from tests import _stored
from tests._configs import layout
from tests._engines import whole_weights
from tests._layers import difference
from tests._runs import VOCAB_SIZE, log, loop, records, tensors
from tests.parallel import parallel

SHAPE = _stored.LLAMA | {"layers": 3}
SOME = ["attention.q", "attention.v", "mlp.*"]
LORA = {"adapt.method": "lora", "adapt.rank": 3, "adapt.dropout": 0.1, "adapt.targets": SOME}
SAVING = {"run.steps": 4, "checkpoint.every_steps": 2, "checkpoint.keep": 0}


def changes(folder) -> dict:
    shape = {f"model.{key}": value for key, value in SHAPE.items()}
    return {**shape, **LORA, **SAVING, "adapt.base": str(folder / "base")}


def bases(comm, folder) -> None:
    """A base, and another one of the same shapes."""
    if comm.rank == 0:
        for factor, name in ((0.3, "base"), (0.2, "other")):
            _stored.stored(folder / name, VOCAB_SIZE, factor, **SHAPE)
    comm.Barrier()


@pytest.mark.long
@parallel(ranks=[2])
def test_adapters_are_saved_alone_resumed_and_asked(comm, tmp_path):
    bases(comm, tmp_path)
    given = changes(tmp_path)
    with loop(comm, tmp_path, given | layout(t=2)) as made:
        made.run()
        trained = whole_weights(made.engine)
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    stored = tensors(checkpoint)
    assert all(".lora_" in name for name in stored)
    assert {name.partition("/")[0] for name in stored} == {"weights", "exp_avg", "exp_avg_sq"}
    for name, values in trained.items():
        assert (values.numpy() == stored[f"weights/{name}"]).all()
    said = json.loads((checkpoint / "manifest.json").read_text())["adapt"]
    directory, base = base_at(tmp_path / "base")
    assert said["base_sha256"] == base.sha256 and said["base"] == str(directory)
    comm.Barrier()
    if comm.rank == 0:  # as after a cut of the power behind the second step
        shutil.rmtree(checkpoint)
        (tmp_path / "run/checkpoints/latest").unlink()
    comm.Barrier()
    refused(comm, tmp_path, given)
    with loop(comm, tmp_path, given | layout(p=2)) as made:
        assert made.first == 2
        made.run()
        again = whole_weights(made.engine)
    assert again.keys() == trained.keys()
    assert all(difference(again[name], trained[name]) < 1e-4 for name in trained)
    if comm.rank == 0:
        assert "resumed after step 2" in log(tmp_path / "run")
        assert "of which" in log(tmp_path / "run")
        assert [one["step"] for one in records(tmp_path / "run") if "loss" in one] == [1, 2, 3, 4]
    model, _ = open_inference(tmp_path / "base", World(comm), "t=2", None, adapter=tmp_path / "run")
    assert model.config.adapt.rank == 3
    message = "contains only adapters, for the model .*base"
    with pytest.raises(SharedInputError, match=message):
        open_inference(tmp_path / "run", World(comm), None, None)
    with pytest.raises(SharedInputError, match="belong to the weights of"):
        open_inference(tmp_path / "other", World(comm), None, None, adapter=tmp_path / "run")
    comm.Barrier()


def refused(comm, folder, given) -> None:
    """What a run of adapters may not go on from, or stand on."""
    for wrong, message in (
        ({"adapt.base": str(folder / "other")}, "belong to the weights of .*base"),
        ({"adapt.rank": 4}, "lora_q.a has shape|adapt.rank = 3"),
        ({"adapt.alpha": 3.0}, "adapt.alpha = 16.0, this run has 3.0"),
        ({"adapt.base": ""}, "adapt.base is missing; legal: a run directory"),
        ({"adapt.base": str(folder / "run")}, "contains only adapters"),
        ({"checkpoint.resume": str(folder / "base")}, "contains a full model, and not adapters"),
    ):
        with pytest.raises(SharedInputError, match=message), loop(comm, folder, given | wrong):
            pass
