"""The judgement of a start that has ended: whether the run is over or its ranks are started
again."""

from dataclasses import dataclass

from ptdmpi.supervise.start import Ended

STOPPED = 75  # watch/requests.py: stopped on request after saving
BAD_INPUT = 2
CORRUPT = 3  # run.on_corruption = "stop"


@dataclass(frozen=True)
class Starts:
    """The memory of the supervisor about earlier starts.

    `furthest` is the last step that any start has recorded. `idle` is the number of starts in a row
    that brought no new step. `failed_at` is the step after which the last start failed by an
    exception or a hang of the program; None if it ended in another way.
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
    """The exit code of the run, or None if its ranks are started again. `why` is the reason as
    text."""

    code: int | None
    why: str = ""


def judged(ended: Ended, before: Starts, step: int, *, asked: bool, restarts: int) -> Judgement:
    """Judge a start that ended after `step` although the run was not complete: is it the last one?

    `asked`: a stop was requested. `restarts` is the number of starts in a row without a new step
    that are allowed.
    """
    if ended.code in (BAD_INPUT, CORRUPT, STOPPED):
        return Judgement(ended.code)
    # mpirun can end with 0 after it has lost a node
    code = ended.code or 1
    if asked:
        # a signal ends a rank whose handlers are not installed yet; nothing has been trained then
        return Judgement(STOPPED if code in (128 + 10, 128 + 15) else code)
    now = before.after(ended, step)
    if ended.failed and before.failed_at == step:
        return Judgement(code, f"the same step failed twice, after step {step}: not started again")
    if now.idle > restarts:
        return Judgement(code, f"{now.idle} starts in a row brought no new step: not started again")
    return Judgement(None)
