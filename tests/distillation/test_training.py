"""Runs with a teacher: its stored outputs, training, resuming, and what is refused."""

import numpy as np
import pytest
from click.testing import CliRunner

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.data.scores.teacher import IDS, LOGS, TEACHER
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate.stored_scores import score
from tests._runs import loop, records, shard
from tests.parallel import parallel

OPTIONS = {"precision": None, "adapter": None, "ema": False}
KEPT = 6
KEYS = ("loss", "grad_norm", "distillation_loss")


def begun(comm, folder):
    """Make shards and train a teacher for two steps; return the changes of a student's run."""
    if comm.rank == 0:
        for name, seed in (("train", 1), ("more", 2), ("held", 3)):
            shard(folder / name, 600, seed)
    comm.Barrier()
    usual = {
        "run.steps": 2,
        "run.dir": str(folder / "teacher"),
        "batch.global_size": 4,
        "data.train": [{"path": str(folder / "train")}, {"path": str(folder / "more")}],
        "optimizer.decay": "constant",
    }
    with loop(comm, folder, usual) as made:
        made.run()
    return usual | {
        "run.dir": str(folder / "student"),
        "run.steps": 4,
        "run.seed": 7,
        "data.valid": str(folder / "held"),
        "distillation.weight": 0.5,
    }


def trained(comm, folder, name, changes):
    """Train in a directory of this name; return the compared numbers of each step."""
    with loop(comm, folder, changes | {"run.dir": str(folder / name)}) as made:
        made.run()
    comm.Barrier()
    of_run = records(folder / name)
    assert any("validation_loss" in record for record in of_run)
    assert not any("validation_distillation_loss" in record for record in of_run)
    return [[record[key] for key in KEYS] for record in of_run if "loss" in record]


def refused(comm, folder, changes, message):
    with pytest.raises(InputError, match=message), loop(comm, folder, changes):
        pass


def stored(folder, comm):
    """Return the stored outputs of the shard in `folder`."""
    (header,) = Dataset(folder).headers
    arrays = [np.load(TEACHER.path(header, suffix)) for suffix in (IDS, LOGS)]
    comm.Barrier()  # before rank 0 writes the next ones
    return arrays


@parallel(ranks=[2])
def test_a_student_learns_from_stored_outputs(comm, tmp_path):
    changes = begun(comm, tmp_path)
    refused(comm, tmp_path, changes, "no outputs of a teacher; make them with ptdmpi-data score")
    paths = (tmp_path / "train", tmp_path / "more")
    seen = []
    for where in ("t=2", "p=2", "d=2"):
        tables = score(tmp_path / "teacher", paths, World(comm), top=KEPT, layout=where, **OPTIONS)
        seen.append(stored(paths[0], comm))
    for ids, logs in seen[1:]:
        assert np.array_equal(ids, seen[0][0])
        assert np.allclose(logs, seen[0][1], rtol=1e-5, atol=1e-6)
    ids, logs = seen[0]
    assert ids.dtype == np.uint16 and ids.shape == logs.shape == (600, KEPT)
    # 37 windows of 16 tokens; the first token and the last 7 are no labels
    assert np.isneginf(logs[[0, *range(593, 600)]]).all() and np.isfinite(logs[1:593]).all()
    assert (np.diff(logs[1:593]) <= 0).all()
    assert tables[0]["labels"] == 592
    kept = np.exp(logs[1:593].astype(np.float64)).sum(-1).mean()
    assert tables[0]["probability_kept"] == pytest.approx(kept, rel=1e-6)

    whole = trained(comm, tmp_path, "whole", changes)
    assert len(whole) == 4 and all(divergence > 0 for *_, divergence in whole)
    trained(comm, tmp_path, "stopped", changes | {"run.steps": 2})
    assert trained(comm, tmp_path, "stopped", changes)[-2:] == whole[-2:]
    cut = trained(comm, tmp_path, "cut", changes | {"parallel.context": 2})
    assert cut == [pytest.approx(row, rel=1e-4) for row in whole]
    without = trained_without(comm, tmp_path, changes)
    assert without[0][0] == pytest.approx(whole[0][0] - whole[0][2], rel=1e-5)

    boundaries = {"data.document_boundaries": True}
    refused(comm, tmp_path, changes | boundaries, "document_boundaries = False, but the run has Tr")
    refused(comm, tmp_path, changes | {"model.seq_length": 8}, "seq_length = 16, but the run has 8")
    again = changes | {"run.dir": str(tmp_path / "whole"), "run.steps": 5}
    refused(comm, tmp_path, again | {"distillation.weight": 0.0}, "data.train")
    damaged(comm, tmp_path, changes)


def trained_without(comm, folder, changes):
    """Return the (loss, norm) of each step of a run without a teacher."""
    plain = changes | {"run.dir": str(folder / "plain"), "distillation.weight": 0.0}
    with loop(comm, folder, plain) as made:
        made.run()
    comm.Barrier()
    return [[r["loss"], r["grad_norm"]] for r in records(folder / "plain") if "loss" in r]


def damaged(comm, folder, changes):
    """Change one byte of the stored outputs, then their header, and see the run refuse them."""
    (header,) = Dataset(folder / "more").headers
    if comm.rank == 0:
        path = TEACHER.path(header, LOGS)
        values = bytearray(path.read_bytes())
        values[-100] ^= 1
        path.write_bytes(values)
    comm.Barrier()
    new = changes | {"run.dir": str(folder / "damaged")}
    with pytest.raises(InputError, match="is damaged"), loop(comm, folder, new) as made:
        made.run()
    comm.Barrier()  # before rank 0 writes the file again
    if comm.rank == 0:
        values[values.index(b")")] ^= 1  # numpy raises TokenError for this header
        path.write_bytes(values)
    comm.Barrier()
    refused(comm, folder, new, "is not an array of numpy; make them with")


def test_options_of_a_teacher_belong_together():
    from data_prep.cli import commands

    result = CliRunner().invoke(commands, ["score", "x", "y", "--seq-length", "8"])
    assert "--seq-length and --document-boundaries belong to --top K" in str(result.exception)


def test_no_data_of_your_own():
    from ptdmpi.train.feed import source_of
    from tests._configs import small

    config = small({"distillation.weight": 1.0}, 1)
    part = config.data.train[0].model_copy(update={"path": "tests._own:Words"})
    config = config.replace("data", train=(part,))
    with pytest.raises(InputError, match="needs shards with the outputs of a teacher"):
        source_of(config)


REFUSED = {
    "own loss": {"run.loss": "tests._own:loss"},
    "masked": {"model.kind": "bert"},
    "pairs": {"preference.method": "dpo", "data.document_boundaries": True},
    "task": {"task.kind": "classification", "task.labels": ["no", "yes"]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_objectives_are_refused(name):
    from tests._configs import small

    with pytest.raises(InputError, match=r"\[distillation\] cannot be combined with"):
        small({"distillation.weight": 1.0, **REFUSED[name]})
