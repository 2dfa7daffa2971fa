"""Copies of the state in the nodes' memory: complete, from the neighbour, in another layout."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ptdmpi.train.parts import copies_of_run
from tests._runs import loop
from tests.parallel import parallel

EVERY = {"checkpoint.memory_every_steps": 2, "checkpoint.every_steps": 0, "run.steps": 5}


def folder_of(comm, tmp_path, nodes: int) -> Path:
    """Return the folder of this rank's pretended node: ranks are dealt over nodes in blocks."""
    return tmp_path / f"node-{comm.rank * nodes // comm.size}"


def state_of(made) -> list[torch.Tensor]:
    return [flat.clone() for flat in made.engine.state.flats]


class Interrupted(Exception):
    """The end of a run between two steps."""


def train_until(comm, tmp_path, changes, step: int):
    """Train `step` steps and one more that is lost; return the state after `step`."""
    kept = []

    def patch(made):
        work = made._conclude

        def conclude(done, batches=None):
            if done.number == step + 1:
                raise Interrupted
            asked = work(done, batches)
            if done.number == step:
                kept.extend(state_of(made))
            return asked

        made._conclude = conclude

    with pytest.raises(Interrupted), loop(comm, tmp_path, changes, patch) as made:
        made.run()
    comm.Barrier()
    return kept


def same(found, expected) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.cases(1)
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.long), 3])
@parallel([2, 4])
def test_a_run_goes_on_from_its_copy(comm, tmp_path, nodes, zero):
    changes = {**EVERY, "parallel.zero": zero}
    os.environ["PTDMPI_COPIES"] = str(folder_of(comm, tmp_path, nodes))
    expected = train_until(comm, tmp_path, changes, 4)
    with loop(comm, tmp_path, changes) as made:
        assert made.attempt.how == "continues from the copy in memory of step 4"
        same(state_of(made), expected)


@parallel([4])
def test_a_lost_node(comm, tmp_path):
    """The neighbour has the files of a node whose memory is gone."""
    changes = {**EVERY, "parallel.zero": 3}
    own = folder_of(comm, tmp_path, 2)
    os.environ["PTDMPI_COPIES"] = str(own)
    expected = train_until(comm, tmp_path, changes, 4)
    if comm.rank == 0:
        shutil.rmtree(own)
    comm.Barrier()
    with loop(comm, tmp_path, changes) as made:
        assert made.attempt.first == 4
        same(state_of(made), expected)


@parallel([4])
def test_two_lost_nodes_are_too_many(comm, tmp_path):
    """Two neighbours of three nodes are lost: their files are gone, and a checkpoint is read."""
    changes = {**EVERY, "parallel.zero": 3, "checkpoint.every_steps": 3}
    own = tmp_path / f"node-{(0, 0, 1, 2)[comm.rank]}"
    os.environ["PTDMPI_COPIES"] = str(own)
    train_until(comm, tmp_path, changes, 4)
    if comm.rank in (0, 2):
        shutil.rmtree(own)
    comm.Barrier()
    with loop(comm, tmp_path, changes) as made:
        assert made.attempt.how == "resumed after step 3"


@parallel([4])
def test_a_copy_without_its_manifest_is_none(comm, tmp_path):
    """Ranks that die while a copy is made leave the one before: phases are two."""
    own = folder_of(comm, tmp_path, 1)
    os.environ["PTDMPI_COPIES"] = str(own)

    def patch(made):
        copies = made.saving.copies
        commit, calls = copies._commit, []

        def dying(path, manifest):
            calls.append(path)
            if len(calls) == 2:
                raise Interrupted
            return commit(path, manifest)

        copies._commit = dying

    with pytest.raises(Interrupted), loop(comm, tmp_path, EVERY, patch) as made:
        made.run()
    comm.Barrier()
    if comm.rank == 0:
        assert len(list(own.iterdir())) == 2
    comm.Barrier()
    with loop(comm, tmp_path, EVERY) as made:
        assert made.attempt.first == 2
        if comm.rank == 0:
            assert len(list(own.iterdir())) == 1


@pytest.mark.parametrize(
    "name", ["rank-00001*", pytest.param("manifest.json", marks=pytest.mark.long)]
)
@parallel([2])
def test_a_damaged_copy_is_not_used(comm, tmp_path, name):
    own = folder_of(comm, tmp_path, 1)
    os.environ["PTDMPI_COPIES"] = str(own)
    changes = {**EVERY, "checkpoint.every_steps": 3}
    train_until(comm, tmp_path, changes, 4)
    if comm.rank == 0:
        file = next(own.glob(f"*/{name}"))
        content = bytearray(file.read_bytes())
        content[-5] ^= 0x81
        file.write_bytes(content)
    comm.Barrier()
    with loop(comm, tmp_path, changes) as made:
        assert made.attempt.how == "resumed after step 3"


@parallel([4])
def test_another_layout(comm, tmp_path):
    """A copy is a checkpoint: fewer or more ranks continue from it."""
    os.environ["PTDMPI_COPIES"] = str(folder_of(comm, tmp_path, 2))
    changes = {**EVERY, "parallel.zero": 1}
    train_until(comm, tmp_path, changes, 4)
    with loop(comm, tmp_path, {**EVERY, "parallel.tensor": 2, "parallel.zero": 3}) as made:
        assert made.attempt.how == "continues from the copy in memory of step 4"
        assert all(np.isfinite(flat.numpy()).all() for flat in made.engine.state.flats)


@parallel([2])
def test_no_copies_without_a_supervisor(comm, tmp_path):
    os.environ.pop("PTDMPI_COPIES", None)
    with loop(comm, tmp_path, EVERY) as made:
        assert made.saving.copies is None
        assert copies_of_run(made.engine, made.world, made.saving.checkpoints, {}) is None


@parallel([2])
def test_a_full_memory_is_reported(comm, tmp_path):
    """The run goes on without a copy."""
    blocked = tmp_path / "blocked"
    if comm.rank == 0:
        blocked.write_text("no folder")
    comm.Barrier()
    os.environ["PTDMPI_COPIES"] = str(blocked)
    with loop(comm, tmp_path, EVERY) as made:
        made.run()
    if comm.rank == 0:
        assert "warning: no copy in memory after step 2" in (tmp_path / "run/log.txt").read_text()
