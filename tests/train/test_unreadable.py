"""Data that cannot be read during a run: all ranks save, end with the mistake, and lose nothing."""

import pytest

from ptdmpi.config import InputError, SharedInputError
from tests._runs import log, loop, records
from tests.parallel import parallel

# The only save is the one that the mistake asks for.
BASE = {"run.steps": 6, "parallel.data": 2, "batch.global_size": 4, "checkpoint.every_steps": 0}


class Broken:
    """A source's step, or its validation, that fails at a call."""

    def __init__(self, method, call: int) -> None:
        self.method = method
        self.left = call

    def __call__(self, *arguments):
        self.left -= 1
        if not self.left:
            raise InputError("shard 7 is gone")
        return self.method(*arguments)


def broken_training(made) -> None:
    """On rank 1, step 3 (counted from 0) cannot be read."""
    usual = made.feed.steps

    def steps(first):
        reader = usual(first)
        if made.world.rank == 1:
            for ahead in reader._ahead:  # nothing that is already read
                ahead.result()
            reader._batches.step = Broken(reader._batches.step, 2)
        return reader

    made.feed.steps = steps


def broken_validation(made) -> None:
    """On rank 1, the second validation cannot be read."""
    if made.world.rank == 1:
        made.feed.source.validation = Broken(made.feed.source.validation, 2)


def late_error(made) -> None:
    """On rank 1, the disk fails while the first validation is being read."""
    if made.world.rank == 1:
        usual = made.feed.source.validation

        def validation(*arguments):
            yield next(iter(usual(*arguments)))
            raise OSError(5, "Input/output error", "shard-7.h5")

        made.feed.source.validation = validation


@parallel(ranks=[2])
@pytest.mark.parametrize(
    ("patch", "step", "mistake"),
    [
        (broken_training, 3, "shard 7 is gone"),
        (broken_validation, 4, "shard 7 is gone"),
        (late_error, 2, "shard-7.h5: Input/output error"),
    ],
)
def test_a_run_whose_data_vanish_saves_and_names_the_mistake(comm, tmp_path, patch, step, mistake):
    tmp_path = comm.bcast(tmp_path)
    valid = {"data.valid": str(tmp_path / "valid"), "log.validate_every_steps": 2}
    straight = {**BASE, **valid, "run.dir": str(tmp_path / "straight")}
    with loop(comm, tmp_path, straight) as made:
        made.run()
    changes = {**BASE, **valid}
    with (
        pytest.raises(SharedInputError, match=rf"{mistake}; the state after step {step} is saved"),
        loop(comm, tmp_path, changes, patch) as made,
    ):
        made.run()
    run = tmp_path / "run"
    if comm.rank == 0:
        assert [path.name for path in (run / "checkpoints").glob("step-*")] == [
            f"step-0000000{step}"
        ]
        assert f"cannot read its data: saving after step {step}, then exit code 2" in log(run)
    comm.Barrier()
    with loop(comm, tmp_path, changes) as made:
        made.run()
    if comm.rank == 0:
        assert numbers(run) == numbers(tmp_path / "straight")


def numbers(run) -> list[tuple]:
    """Return the losses of a run, and its validation losses."""
    keys = ("step", "loss", "validation_loss")
    found = [tuple(record.get(key) for key in keys) for record in records(run)]
    return [one for one in found if one[1:] != (None, None)]


@parallel(ranks=[2])
def test_a_validation_that_a_program_asks_for_raises_the_mistake(comm, tmp_path):
    """Also after the last step, when no stop follows."""
    tmp_path = comm.bcast(tmp_path)
    changes = {**BASE, "run.steps": 2, "data.valid": str(tmp_path / "valid")}
    with loop(comm, tmp_path, {**changes, "log.validate_every_steps": 5}) as made:
        made.run()
        made.validation.values = {}
        if comm.rank == 1:
            made.feed.source.validation = Broken(made.feed.source.validation, 1)
        with pytest.raises(SharedInputError, match="shard 7 is gone"):
            made.validation.measured(2)
