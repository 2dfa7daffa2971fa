"""The output of a start: ranks' lines are printed, the launcher's notices are held."""

import io

import pytest

from ptdmpi.supervise.output import LauncherOutput

NOTICES = [
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    "srun: error: n2: task 3: Killed",
    "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED ***",
    "[n1:01234] PRTE ERROR: Unreachable in file base.c",
]


@pytest.mark.parametrize("notice", NOTICES)
def test_a_launchers_notice_is_held_until_it_is_asked_for(notice, monkeypatch):
    printed, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", errors)
    source = io.StringIO(f"step 1/2  loss 3.0\n{notice}\nstep 2/2  loss 2.9\n")
    output = LauncherOutput([(source, printed)], on_unread=lambda: None)
    output.finish(5.0)
    assert printed.getvalue() == "step 1/2  loss 3.0\nstep 2/2  loss 2.9\n"
    output.tell()
    assert errors.getvalue() == f"{notice}\n"


@pytest.mark.parametrize(
    "line",
    [
        "[rank 1 on n1] Traceback (most recent call last):",
        "stopped: more than run.max_skips = 3 steps were skipped",
    ],
)
def test_what_a_rank_says_of_the_end_is_printed_and_noted(line):
    printed = io.StringIO()
    source = io.StringIO(f"{line}\n")
    output = LauncherOutput([(source, printed)], on_unread=lambda: None)
    output.finish(5.0)
    assert output.said and output.failed and line in printed.getvalue()
