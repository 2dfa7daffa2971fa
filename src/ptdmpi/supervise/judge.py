"""The decision after the ranks of a run have ended: the run is over, or its ranks are started
again.
"""

from dataclasses import dataclass

from ptdmpi.base.words import counted
from ptdmpi.supervise.start import Ended

STOPPED = 75  # exit code of a run that stopped on request after a save (see watch/requests.py)
BAD_INPUT = 2
CORRUPT = 3  # exit code for a corrupt state with run.on_corruption = "stop"


@dataclass(frozen=True)
class Starts:
    """The facts that the supervisor stores about earlier starts of the ranks.

    `furthest` is the largest step that has been recorded so far in any start of the ranks. `idle`
    is 1 if the last start recorded a new step, and otherwise increases by 1 with each start.
    `failed_at` is the step after which the last start ended because of an exception or a hang of
    the program; None if the start ended for another reason.
    """

    furthest: int = 0
    idle: int = 0
    failed_at: int | None = None

    def after(self, ended: Ended, step: int) -> "Starts":
        """Return the updated facts after one more start, which ended after `step`."""
        idle = self.idle + 1
        if step > self.furthest:
            idle = 1
        return Starts(max(step, self.furthest), idle, step if ended.failed else None)


@dataclass(frozen=True)
class Judgement:
    """The decision after the ranks have ended: `code` is the exit code of the run, or None if its
    ranks are started again. `why` is the reason for the decision, as text.
    """

    code: int | None
    why: str = ""


def judged(ended: Ended, before: Starts, step: int, *, asked: bool, restarts: int) -> Judgement:
    """Decide whether the ranks are started again. Their last start ended after `step`, before the
    run was complete.

    `asked` is True if a stop was requested. `restarts` is the maximum number of consecutive
    restarts that train no new step. If a further restart would be needed, the run ends.
    """
    if ended.code in (BAD_INPUT, CORRUPT, STOPPED):
        return Judgement(ended.code)
    # code 0 counts as a failure here, because mpirun can end with exit code 0 after it has lost a
    # node
    code = ended.code or 1
    if asked:
        # a signal kills a rank that has not yet installed its signal handlers; in this case the run
        # has trained nothing
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
