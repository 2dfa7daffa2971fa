"""The end of a run before its last step: which lines are printed, and which reason is recorded."""

from typing import NoReturn

from ptdmpi.base.words import counted
from ptdmpi.config import Config, SharedInputError
from ptdmpi.engine.corruption import CorruptState
from ptdmpi.train.attempt import Attempt
from ptdmpi.train.records.journal import Journal
from ptdmpi.watch.lookout import Lookout
from ptdmpi.watch.requests import STOPPED_EXIT_CODE, Asked

# The exit codes for a corrupt state: value of `run.on_corruption` -> exit code. Code 3 means that a
# person should check the named hosts before the run is restarted. Code 4 means that the run should
# be restarted at once, from a checkpoint and not from in-memory copies.
CORRUPT_EXIT_CODES = {"stop": 3, "restart": 4}
MOST_FAULTS = 8  # maximum number of faults that are printed on separate lines


class Stopping:
    """The object that ends a run before its last step, on request, by early stopping, or because of
    a corrupt state. It prints the reason.
    """

    def __init__(
        self, config: Config, lookout: Lookout, attempt: Attempt, journal: Journal
    ) -> None:
        self.config = config
        self.lookout = lookout
        self.attempt = attempt
        self.journal = journal

    def before_save(self, asked: Asked, step: int) -> None:
        """If a stop was requested, print that the run saves after `step` and then stops. This
        method is called only if the run is not complete after `step`."""
        if asked.stop:
            self.lookout.stops()
            self.attempt.why = f"stopped: {asked.stop}"
            code = STOPPED_EXIT_CODE if not asked.mistake else 2
            self.journal.say(f"{asked.stop}: saving after step {step}, then exit code {code}")

    def stop_if_asked(self, asked: Asked, step: int) -> None:
        """Raise SystemExit (75) on every rank if a stop was requested. If the reason is that a rank
        cannot read its data, raise SharedInputError instead, with the mistake of this rank. `step`
        is the last step that was trained."""
        if not asked.stop:
            return
        if asked.mistake:
            self.lookout.stops()
            self.attempt.why = ""  # the text of the error below becomes the reason
            raise SharedInputError(f"{asked.mistake}; the state after step {step} is saved")
        self.lookout.obeyed("STOP")
        self.lookout.stops()
        reason = ""
        if not self.attempt.why:  # otherwise `before_save` has already printed the reason
            reason = f"{asked.stop}: "
        self.attempt.why = f"stopped: {asked.stop}"
        then = "the same command continues the run"
        if self.config.checkpoint.resume == "never":
            then = 'checkpoint.resume = "auto" continues the run'
        self.journal.say(f"{reason}stopped on request after step {step}; {then}")
        self.lookout.finish()
        raise SystemExit(STOPPED_EXIT_CODE)

    def corrupt(self, error: CorruptState) -> NoReturn:
        """Print which tensors are corrupt, and raise SystemExit on every rank, without saving a
        checkpoint."""
        self.lookout.stops()
        name = self.lookout.ranks.name
        for fault in error.faults[:MOST_FAULTS]:
            self.journal.say(f"corrupt state: {fault.text(name)}")
        more = len(error.faults) - MOST_FAULTS
        if more > 0:
            self.journal.say(f"corrupt state: {counted(more, 'more tensor')}")
        self.attempt.why = "stopped: corrupt state"
        self.attempt.event = "corrupt"
        self.journal.say(
            "stopped: the state in memory is corrupt; the same command continues from a checkpoint"
        )
        raise SystemExit(CORRUPT_EXIT_CODES[self.config.run.on_corruption])

    def end_early(self, why: str, step: int) -> None:
        """Print that the run ends after `step` because its validation loss no longer improves."""
        self.lookout.stops()
        self.attempt.why = f"stopped early: {why}"
        self.journal.say(f"stopped early after step {step}: {why}")
