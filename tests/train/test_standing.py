"""A run that ends when it gets no better, and the checkpoints of its best validations."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ptdmpi.checkpoint.examine import newest
from ptdmpi.commands.checkpoint import command
from ptdmpi.config import InputError
from ptdmpi.inference.stored import open_model
from ptdmpi.lineage.attempts import History, attempts
from ptdmpi.model.output.losses import TASK, SummedLoss
from ptdmpi.train.loop import Loop
from ptdmpi.train.standing import Standing, standing_of
from tests import _runs
from tests._configs import small
from tests.parallel import parallel

CHANGES = {
    "run.steps": 12,
    "log.validate_every_steps": 1,
    "log.validate_samples": 8,
    "checkpoint.keep": 1,
}


def _losses(values: list[float]):
    """Return a patch of a loop whose validations give these losses, one after the other, on rank 0.

    Other ranks get higher losses: all must decide by rank 0's.
    """

    def patch(loop: Loop) -> None:
        given: Iterator[float] = iter(values)
        own = loop.world.rank

        def evaluate(batches) -> dict[str, SummedLoss]:
            return {TASK: SummedLoss(next(given) + 10.0 * own * loop.concluded, 1.0)}

        loop.engine.evaluate = evaluate

    return patch


def _run(comm, folder: Path, losses: list[float], **changes) -> Path:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    valid = {"data.valid": str(folder / "valid")}
    with _runs.loop(comm, folder, {**CHANGES, **valid, **settings}, _losses(losses)) as loop:
        loop.run()
    comm.Barrier()
    return folder / "run"


def _steps(run: Path) -> list[int]:
    names = (path.name for path in (run / "checkpoints").iterdir())
    return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))


@parallel(ranks=[2])
def test_a_run_that_gets_no_better_is_done(comm, tmp_path):
    losses = [3.0, 2.0, 2.5, 1.5, 1.5, 2.0, 1.6]
    run = _run(comm, tmp_path, losses, run__stop_after_worse=3)
    why = "run.stop_after_worse = 3: 3 validations in a row no better than 1.5000 of step 4"
    assert json.loads((run / "done").read_text()) == {"steps": 7}
    assert _steps(run) == [7] and [r["step"] for r in _runs.records(run) if "loss" in r][-1] == 7
    assert f"stopped early after step 7: {why}" in _runs.log(run)
    assert "(2 of 3 worse than 1.5000 of step 4)" in _runs.log(run)
    (attempt,) = attempts(run)
    assert (attempt.last, attempt.why) == (7, f"stopped early: {why}")
    comm.Barrier()
    # the same command again finds nothing to do, and writes nothing
    log, history = _runs.log(run), (run / "history.jsonl").read_text()
    comm.Barrier()
    _run(comm, tmp_path, [], run__stop_after_worse=3)
    assert (_runs.log(run), (run / "history.jsonl").read_text()) == (log, history)
    comm.Barrier()
    # a run that tolerates more is resumed, and counts further
    _run(comm, tmp_path, [1.7, 1.8], run__stop_after_worse=5)
    assert json.loads((run / "done").read_text()) == {"steps": 9}
    assert attempts(run)[-1].first == 7


@pytest.mark.long
@parallel(ranks=[2])
def test_the_best_stay_and_are_named(comm, tmp_path):
    losses = [3.0, 2.0, 2.5, 1.5, 1.8, 2.2]
    run = _run(comm, tmp_path, losses, run__steps=6, checkpoint__keep_best=2)
    best = run / "checkpoints/best"
    assert best.read_text() == "step-00000004\n"
    assert _steps(run) == [4, 5, 6]  # the two best ones and the newest
    assert newest(best).name == open_model(best).checkpoint.name == "step-00000004"
    comm.Barrier()
    # a resumed run knows them, and what is worse is not saved
    _run(comm, tmp_path, [1.9, 1.6, 2.0], run__steps=9, checkpoint__keep_best=True)
    assert best.read_text() == "step-00000004\n" and _steps(run) == [4, 9]
    comm.Barrier()
    # retention without the key leaves what `best` names, too
    _run(comm, tmp_path, [1.0], run__steps=10)
    assert best.read_text() == "step-00000004\n" and _steps(run) == [4, 10]
    comm.Barrier()
    # resumed from an earlier step: a later checkpoint is no longer of this run, nor its best
    resume = {"checkpoint__keep_best": True, "checkpoint__resume": str(run / "checkpoints/best")}
    _run(comm, tmp_path, [2.8, 2.7], run__steps=6, **resume)
    assert best.read_text() == "step-00000004\n"
    comm.Barrier()
    _run(comm, tmp_path, [2.8, 2.7], run__steps=2, checkpoint__resume="never")
    assert not best.exists()


@parallel(ranks=[1])
def test_pruning_leaves_the_best(comm, tmp_path):
    losses = [1.0, 3.0, 2.0, 4.0]
    run = _run(comm, tmp_path, losses, run__steps=4, checkpoint__keep=0, checkpoint__keep_best=4)
    prune = ["prune", str(run), "--keep", "1"]
    result = CliRunner().invoke(command, [*prune, "--keep-best", "2"], catch_exceptions=False)
    assert result.exit_code == 0 and _steps(run) == [1, 3, 4]
    CliRunner().invoke(command, prune, catch_exceptions=False)
    assert _steps(run) == [1, 4]


def test_what_is_no_number_is_worse_and_never_the_best():
    standing = Standing(stop_after_worse=2, keep_best=2)
    among_best = [
        standing.take(step, loss) for step, loss in enumerate([float("nan"), 2.0, 3.0], 1)
    ]
    assert among_best == [False, True, True] and standing.best == (2, 2.0) and standing.worse == 1
    assert not standing.take(4, float("inf")) and standing.over
    assert standing.take(5, 2.5) and standing.worse == 3  # the second best one, and no better


@pytest.mark.parametrize("key", ["run.stop_after_worse", "checkpoint.keep_best"])
def test_they_need_validations(key):
    with pytest.raises(InputError, match=f"{key} = 2 depends on validations: it needs data.valid"):
        small({key: 2, "log.validate_every_steps": 5})
    with pytest.raises(InputError, match=r"needs log\.validate_every_steps above 0"):
        small({key: 2, "data.valid": "valid"})


def _attempt(folder: Path, first: int, last: int | None, **settings) -> None:
    """Record an attempt in the history; it is killed if `last` is None."""
    config = {"checkpoint": {"resume": "auto"}, "data": {"valid": ["a"]}}
    config |= {"log": {"validate_every_steps": 2}} | settings
    history = History(folder)
    values = {"how": "", "ranks": 1, "layout": "", "changed": [], "trained_on": {}}
    history.begin(first=first, config=config, **values)
    if last is not None:
        history.end(last, "done")


def _standing(folder: Path, steps: list[int], checks: list[int], step: int) -> Standing:
    records = [{"step": step, "loss": 2.0} for step in steps]
    records += [{"step": step, "validation_loss": 9.0 - step} for step in checks]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = small({"run.dir": str(folder), "run.steps": 99}, 1)
    return standing_of(config, step)


def test_records_that_are_missing_in_the_middle_are_lost(tmp_path):
    """Only those that the history says were written: not those of another run, or not reached."""

    def lost(steps: list[int], checks: list[int], step: int = 8) -> str:
        return _standing(tmp_path, steps, checks, step).lost

    eight = list(range(1, 9))
    assert lost([1, 8], []) == ""  # an older version wrote no history
    _attempt(tmp_path, 0, 8)
    assert lost(eight, [2, 4, 6]) == ""  # a stop interrupts the validation after step 8
    assert lost([1, 2, 4, 7, 8], [2, 4, 6, 8]) == "the records of 3 steps (the first is step 3)"
    assert lost(eight, [6]) == "the records of 2 validations (the first is after step 2)"
    assert lost([1, 2, 4], [2], 4) == "the records of 1 step (the first is step 3)"
    _attempt(tmp_path, 4, None, log={"validate_every_steps": 0})
    assert lost(eight, [2]) == ""
    assert lost([4, 5, 7, 8], [2]) == "the records of 4 steps (the first is step 1)"
    branch = {"checkpoint": {"resume": "elsewhere"}, "log": {"validate_every_steps": 3}}
    _attempt(tmp_path, 20, None, **branch)
    assert lost([*eight[:4], 21, 23, 24], [2, 24], 24) == (
        "the records of 1 step (the first is step 22) and the records of 1 validation (the first "
        "is after step 21)"
    )
    _attempt(tmp_path, 3, 30, log=[])  # damaged
    assert lost([1, 8], []) == ""


def test_the_order_of_records_does_not_matter(tmp_path):
    standing = _standing(tmp_path, [4, 3, 2, 1], [4, 2], 4)
    assert (standing.trained, standing.worse) == (4, 0)
    assert standing.last is not None and standing.last.step == 4
