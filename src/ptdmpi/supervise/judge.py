"""The decision after the ranks of a run have ended: either the run ends, or its ranks are
restarted.
"""

import signal
from dataclasses import dataclass

from ptdmpi.base.words import counted
from ptdmpi.supervise.start import Ended

STOPPED = 75  # exit code of a run that has saved and stopped on request (see watch/requests.py)
BAD_INPUT = 2
CORRUPT = 3  # exit code for a corrupt state with run.on_corruption = "stop"

BUS_ERROR = 128 + signal.SIGBUS


def code_text(code: int) -> str:
    """Return the text "exit code N", with the probable cause if signal SIGBUS ended a rank."""
    if code == BUS_ERROR:
        return f"exit code {code} (bus error: a file was truncated while it was read)"
    return f"exit code {code}"


@dataclass(frozen=True)
class Starts:
    """The supervisor's knowledge about earlier starts of the ranks.

    `furthest` is the largest step that any start has recorded. `idle` is the number of starts since
    the last start that recorded a new step, including that start; if no start has recorded a step,
    it is the number of all starts. If the last start ended because of an exception or a hang,
    `failed_at` is the last step that was recorded before. Otherwise `failed_at` is None.
    """

    furthest: int = 0
    idle: int = 0
    failed_at: int | None = None

    def after(self, ended: Ended, step: int) -> "Starts":
        """Return the updated values after one more start. `ended` describes the end of this start,
        and `step` is its last recorded step."""
        idle = self.idle + 1
        if step > self.furthest:
            idle = 1
        return Starts(max(step, self.furthest), idle, step if ended.failed else None)


@dataclass(frozen=True)
class Judgement:
    """The decision after the ranks have ended. `code` is the exit code of the run, or None if the
    ranks must be restarted. `why` is the reason for the decision, as text.
    """

    code: int | None
    why: str = ""


def judged(ended: Ended, before: Starts, step: int, *, asked: bool, restarts: int) -> Judgement:
    """Decide whether the ranks are restarted. The ranks have ended before the run was complete, and
    `step` is the last recorded step.

    `before` describes the earlier starts. `asked` is True if a stop was requested. `restarts` is
    the maximum number of consecutive restarts without a new step; after this number of restarts the
    run ends. The run also ends if it fails twice after the same step.
    """
    if ended.code in (BAD_INPUT, CORRUPT, STOPPED):
        return Judgement(ended.code)
    # exit code 0 counts as a failure here, because mpirun can exit with 0 after it has lost a node
    code = ended.code or 1
    if asked:
        # Signals 10 (SIGUSR1) and 15 (SIGTERM) kill a rank that has not yet installed its signal
        # handlers. Such a run has not trained any step, so it counts as stopped on request.
        return Judgement(STOPPED if code in (128 + 10, 128 + 15) else code)
    now = before.after(ended, step)
    if ended.failed and before.failed_at == step:
        return Judgement(code, f"the same step failed twice, after step {step}: not started again")
    if now.idle > restarts:
        tried = f"{counted(restarts, 'restart')} in a row brought no new step"
        if restarts == 0:
            tried = "--restarts 0"
        return Judgement(code, f"{tried}: not started again")
    return Judgement(None)
