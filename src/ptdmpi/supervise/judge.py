"""The judgement of a start that has ended: is the run over, or are its ranks started again?"""

from dataclasses import dataclass

from ptdmpi.supervise.start import Ended

STOPPED = 75  # watch/requests.py: stopped on request after saving
BAD_INPUT = 2
CORRUPT = 3  # run.on_corruption = "stop"


@dataclass(frozen=True)
class Starts:
    """What the supervisor remembers of earlier starts.

    `furthest`: the last step that any of them has recorded. `idle`: the starts in a row that
    brought no new step. `failed_at`: the step after which the last one failed by an exception or a
    hang of the program; None if it ended in another way.
    """

    furthest: int = 0
    idle: int = 0
    failed_at: int | None = None

    def after(self, ended: Ended, step: int) -> "Starts":
        """Return the memory after one more start, which ended after `step`."""
        idle = self.idle + 1
        if step > self.furthest:
            idle = 1
        return Starts(max(step, self.furthest), idle, step if ended.failed else None)


@dataclass(frozen=True)
class Judgement:
    """The exit code of the run; None: its ranks are started again. `why`: the reason, in words."""

    code: int | None
    why: str = ""


def judged(ended: Ended, before: Starts, step: int, *, asked: bool, restarts: int) -> Judgement:
    """Return whether a start that ended after `step`, without the run being complete, is the last.

    `asked`: a stop was asked for. `restarts`: starts in a row that may bring no new step.
    """
    if ended.code in (BAD_INPUT, CORRUPT, STOPPED):
        return Judgement(ended.code)
    # mpirun can end with 0 after it has lost a node
    code = ended.code or 1
    if asked:
        # a rank whose handlers were not installed yet ends by the signal: nothing had been trained
        return Judgement(STOPPED if code in (128 + 10, 128 + 15) else code)
    now = before.after(ended, step)
    if ended.failed and before.failed_at == step:
        return Judgement(code, f"the same step failed twice, after step {step}: not started again")
    if now.idle > restarts:
        return Judgement(code, f"{now.idle} starts in a row brought no new step: not started again")
    return Judgement(None)
