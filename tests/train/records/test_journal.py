"""The lines of a run's steps, on the terminal and in its log."""

from types import SimpleNamespace

import click
import pytest

from ptdmpi.base.say import QUIET
from ptdmpi.engine.result import StepResult
from ptdmpi.train.live import Completed
from ptdmpi.train.records.directory import RunDirectory
from ptdmpi.train.records.journal import Journal
from ptdmpi.train.records.rates import Rates
from tests._configs import small


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_keeps_steps_off_the_terminal_but_for_the_last_one(tmp_path, quiet):
    shown: list[str] = []
    config = small({"run.steps": 3})
    journal = Journal(config, SimpleNamespace(world=SimpleNamespace(rank=0)), shown.append)
    journal.directory = RunDirectory(tmp_path, "", 0, shown.append)
    journal.rates = Rates(config, 50, 1, 1e12)
    with click.Context(click.Command("train")) as context:
        context.meta[QUIET] = quiet
        for step in (1, 2, 3):
            result = StepResult(
                loss=4.0,
                grad_norm=1.0,
                learning_rate=1e-3,
                loss_scale=1.0,
                skipped=False,
                overflow=False,
                compute_s=0.1,
            )
            journal.step(Completed(step, result, 0.5), 0.5)
        journal.say("warning: printed as ever")
    first_words = [line.partition("/")[0] for line in shown]
    steps = ["step 3"] if quiet else ["step 1", "step 2", "step 3"]
    assert first_words == [*steps, "warning: printed as ever"]
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 4
