"""The supervisor of a job. It starts the ranks, and restarts them if some of them are lost.

The supervisor is one process, which starts the launcher and has no training state. After a restart,
the run continues from a checkpoint, or from copies of the state in the memory of the nodes. These
copies remain when the ranks end.
"""

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ptdmpi.base import early
from ptdmpi.base.launched import COPIES
from ptdmpi.base.say import put
from ptdmpi.base.words import counted
from ptdmpi.config import InputError, RunConfig, resolve
from ptdmpi.config.methods import replicas_differ
from ptdmpi.supervise.environment import folder_of_copies, unusable_temporary_folder
from ptdmpi.supervise.guard import POLL_S
from ptdmpi.supervise.judge import BAD_INPUT, CORRUPT, STOPPED, Starts, code_text, judged
from ptdmpi.supervise.place import LaunchHost, LaunchPlace
from ptdmpi.supervise.progress import RunProgress
from ptdmpi.supervise.start import Ended, LauncherStart

CONFIG = "config.toml"  # the file to which the ranks write the complete configuration.
AGAIN_S = 5.0  # a further request to stop has an effect only after this number of seconds.
# exit code -> name of the event in the last message; every other code is a failure
EVENTS = {0: "done", STOPPED: "stopped", CORRUPT: "corrupt"}
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class SupervisedJob:
    """The job to run on `ranks` ranks. `tree` is the content of the configuration file `config`,
    with the values of `settings`.

    If `searched` is True, the ranks search for the best layout at their first start. `restarts` is
    the maximum number of consecutive restarts without a new step. If nodes are lost, the supervisor
    checks every `grow_s` seconds whether the lost nodes are available again.
    """

    config: str
    settings: tuple[str, ...]
    searched: bool
    tree: Mapping[str, Any]
    run: RunConfig
    ranks: int
    restarts: int
    grow_s: float


@dataclass(frozen=True)
class SavedBefore:
    """The newest checkpoint at the moment when the supervisor asks the ranks to save. `checkpoint`
    is a result of `RunProgress.newest_checkpoint`, which is None without a checkpoint."""

    checkpoint: tuple[str, int] | None


class Supervisor:
    """The supervisor of one job, from the first start of its ranks to the exit code."""

    def __init__(
        self,
        job: SupervisedJob,
        place: LaunchPlace,
        environment: Mapping[str, str],
        *,
        tell: Callable[[str, int, float | None, str], None],
    ) -> None:
        """Prepare the supervisor of `job`. `tell` is a function that sends a message about an event
        of the run. The arguments of `tell` are the name of the event, the last step, the loss of
        this step, and the reason."""
        self.job = job
        self._send = tell
        self._why = ""  # the reason, if the supervisor ends the run
        self.place = place
        self.environment = {**environment, COPIES: folder_of_copies()}
        self.progress = RunProgress(Path(job.run.dir), job.run.steps)
        self.record = Starts()
        self.ranks = job.ranks
        self.started_from = self.progress.newest_checkpoint()
        self.starts = 0
        self._config_before = self.progress.version(CONFIG)
        self._reasons_before = self.progress.versions()
        self._start: LauncherStart | None = None
        self._requests = 0
        self._asked_s = 0.0
        self._growing = False
        # Before more ranks are started, the supervisor asks the ranks to save. `_saving_since` is
        # the newest checkpoint at the time of this request, or None without a request.
        self._saving_since: SavedBefore | None = None
        self._looked_s = 0.0
        # the last recorded step before the present start of the ranks
        self._first_after = 0

    def run(self) -> int:
        """Start the ranks, and restart them until the run has ended. Return the exit code of the
        run."""
        for number in REQUESTS:
            signal.signal(number, self._request)
        early.release()
        if self._requests:  # a request came before the handlers were installed
            return STOPPED
        self._tell("begins", counted(self.ranks, "rank"))
        try:
            code = self._supervised()
        finally:
            self.place.remove(self.environment[COPIES], self.environment)
        reasons = []
        if code:
            reasons = [self.progress.why(self._reasons_before), self._why]
            reasons = [reason for reason in reasons if reason] or [code_text(code)]
        self._tell(EVENTS.get(code, "failed"), "; ".join(reasons))
        return code

    def _supervised(self) -> int:
        nodes: Sequence[LaunchHost] = self.place.nodes
        while True:
            if self._cannot_launch():
                return BAD_INPUT
            ended = self._attempt(nodes)
            if self._complete(ended):
                return 0
            # If `_growing` is True, the supervisor has asked the ranks to stop, to start more
            # ranks. If the ranks could not save at this stop, they exit with BAD_INPUT. This is no
            # reason to end the run, because it can continue from the checkpoint that was saved
            # before.
            if not self._growing or ended.code not in (STOPPED, BAD_INPUT):
                verdict = self._judge(ended)
                if verdict is not None:
                    return verdict
            self._growing = False
            nodes = self.place.living(self.environment)
            ranks = self._fitting(self.place.room(nodes))
            if not ranks:
                self._why = f"{self.place.room(nodes)} of {self.job.ranks} ranks are left: too few"
                self._say(self._why)
                return ended.code or 1
            if self._requests:
                return 75
            self.ranks = ranks
            self._say_again(ended, nodes)

    # -- one start -------------------------------------------------------------------------------

    def _cannot_launch(self) -> bool:
        """Return True, and print why, if mpirun could not write its temporary files."""
        if self.place.launcher == "mpirun":
            why = unusable_temporary_folder(self.environment)
            if why:
                self._why = why
                self._say(why)
                return True
        return False

    def _attempt(self, nodes: Sequence[LaunchHost]) -> Ended:
        """Start the ranks once, and wait until they have ended."""
        train = [*_program(), "train", *self._words(), *self._overrides()]
        command = [*self.place.command(self.ranks, nodes), *train]
        self._reasons_before = self.progress.versions()
        try:
            start = LauncherStart(command, self.environment)
        except OSError as error:
            raise InputError(f"{command[0]}: {error.strerror}") from None
        self.starts += 1
        self._start = start
        self._first_after = self.progress.newest().step
        # a request to stop may have arrived before the launcher was started: pass this request on
        # now
        if self._requests:
            start.ask_to_stop()
        self._looked_s = time.monotonic()
        while start.running():
            time.sleep(POLL_S)
            self._grow_if_possible(start)
        self._start = None
        if self._saving_since is not None:
            self.progress.withdraw()
            self._saving_since = None
        return start.finish(quiet=self._requests > 0)

    def _words(self) -> list[str]:
        """Return the arguments of `ptdmpi train` for the configuration and its settings. If the
        first start has searched for a layout, later starts read this layout from the run directory,
        so that the search and its measurements are not repeated.
        """
        settings = [word for setting in self.job.settings for word in ("--set", setting)]
        if not self.job.searched:
            return [self.job.config, *settings]
        if self.progress.version(CONFIG) not in (None, self._config_before):
            return [str(self.progress.path / CONFIG), *settings]
        return [self.job.config, *settings, "--layout", "auto"]

    def _overrides(self) -> list[str]:
        """Return the settings that this start needs in addition to the settings of the first start.
        A later start resumes the run, does not measure kernels again, and may use a layout for
        fewer ranks.
        """
        settings = []
        if self.starts:
            settings.append("run.kernels=kept")
            saved = self.progress.newest_checkpoint() != self.started_from
            if saved and self._wanted() == "never":
                settings.append("checkpoint.resume=auto")
        if self.ranks != self.job.ranks:
            settings.append("parallel.data=auto")
        return [word for setting in settings for word in ("--set", setting)]

    def _wanted(self) -> str:
        section = self.job.tree.get("checkpoint", {})
        return str(section.get("resume", "auto"))

    def _complete(self, ended: Ended) -> bool:
        done = self.progress.done()
        return done is not None and (ended.code == 0 or done >= self.job.run.steps)

    def _judge(self, ended: Ended) -> int | None:
        """Return the exit code of the run if the ranks must not be restarted; otherwise return
        None."""
        step = self.progress.newest().step
        asked = self._requests > 0
        before = self.record
        if self._has_started_nothing(ended, step) and not asked:
            launcher = self.place.program or self.place.launcher
            self._why = (
                f"{launcher} ended with exit code 0 and has started no rank; legal: a launcher "
                "that runs the program after its options, such as mpirun"
            )
            self._say(self._why)
            return BAD_INPUT
        verdict = judged(ended, before, step, asked=asked, restarts=self.job.restarts)
        self.record = before.after(ended, step)
        if verdict.why:
            self._why = verdict.why
            self._say(verdict.why)
        return verdict.code

    def _has_started_nothing(self, ended: Ended, step: int) -> bool:
        """Return True if the launcher reports success, but no rank has printed or recorded
        anything. `step` is the last recorded step."""
        unchanged = step == self._first_after and self.progress.versions() == self._reasons_before
        return ended.code == 0 and ended.silent and unchanged

    # -- fewer ranks after a loss, and more ranks later ------------------------------------------

    def _fitting(self, room: int) -> int:
        """Return the largest number of ranks on which the run can continue: at most `room`, and at
        most the number of ranks of the job. Return 0 if the run cannot continue on any of these
        numbers.

        With fewer ranks, only the data axis becomes smaller, so the optimizer's updates stay the
        same. If replicas may differ under the data-parallel method, the number of ranks must not
        change, because the results of the method depend on the number of replicas.
        """
        if room >= self.job.ranks:
            return self.job.ranks
        tree = {**self.job.tree, "parallel": {**self.job.tree.get("parallel", {}), "data": "auto"}}
        for ranks in range(room, 0, -1):
            with contextlib.suppress(InputError):
                if not replicas_differ(resolve(tree, ranks).data_parallel):
                    return ranks
        return 0

    def _grow_if_possible(self, start: LauncherStart) -> None:
        """If ranks or nodes were lost, and more ranks fit again now, ask the ranks to save. After
        this save, ask them to stop, so that more ranks can be started."""
        if self._growing or self._requests:
            return
        before = self._saving_since
        if before is not None and self.progress.newest_checkpoint() != before.checkpoint:
            self._growing = True
            start.ask_to_stop()
            return
        if time.monotonic() - self._looked_s < self.job.grow_s:
            return
        self._looked_s = time.monotonic()
        if self._training() == self._that_train(self.job.ranks):
            return
        ranks = self._fitting(self.place.room(self.place.living(self.environment)))
        if self._that_train(ranks) > self._training() and start.running() and not self._requests:
            if before is None:
                self._saving_since = SavedBefore(self.progress.newest_checkpoint())
                self._say(
                    f"there is room for {counted(ranks, 'rank')} again: saving, to start them"
                )
            self.progress.ask_to_save()

    def _training(self) -> int:
        """Return the number of ranks that train now. This number is smaller than the number of
        started ranks if ranks were lost and the run has continued without them (`run.on_failure =
        "shrink"`)."""
        newest = self.progress.newest()
        if newest.step > self._first_after:
            return newest.ranks
        return self._that_train(self.ranks)

    def _that_train(self, ranks: int) -> int:
        """Return how many of `ranks` ranks train. All other ranks are spare ranks, which take the
        places of lost ranks."""
        return ranks - self.job.run.spare_ranks

    # -- requests to stop, and lines that the supervisor prints ----------------------------------

    def _request(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: pass the request to stop on to the ranks. After the first request they
        stop after their present step, and after the second request at once. At the third request,
        make the launcher end the ranks. A signal within AGAIN_S seconds of the last request is
        ignored."""
        now = time.monotonic()
        if self._requests and now - self._asked_s < AGAIN_S:
            return
        self._requests += 1
        self._asked_s = now
        start = self._start
        name = signal.Signals(number).name
        if start is not None and self._requests < 3:
            start.ask_to_stop()
        elif start is not None:
            start.end()
        # print last, because printing may block until the output is read
        if self._requests == 1:
            self._say(f"{name}: stopping after this step, and saving; once more stops it at once")

    def _say_again(self, ended: Ended, nodes: Sequence[LaunchHost]) -> None:
        step = self.progress.newest().step
        lost = [node.name for node in self.place.nodes if node not in nodes]
        where = f"; lost: {', '.join(lost)}" if lost else ""
        text = (
            f"the ranks ended with {code_text(ended.code)} after step {step}{where}; starting "
            f"{counted(self.ranks, 'rank')} again (start {self.starts + 1})"
        )
        self._say(text)
        self._tell("restarts", text)

    def _tell(self, event: str, why: str) -> None:
        newest = self.progress.newest()
        self._send(event, newest.step, newest.loss, why)

    def _say(self, line: str) -> None:
        text = f"ptdmpi run: {line}"
        self.progress.log(text)
        # a signal handler also calls this method: Python raises RuntimeError if the signal arrived
        # while another line was being printed
        with contextlib.suppress(BrokenPipeError, RuntimeError):
            put(text, sys.stderr)


def _program() -> list[str]:
    """Return the command line that starts `ptdmpi` in the same way as this process was started."""
    beside = Path(sys.executable).with_name("ptdmpi")
    if beside.is_file():
        return [str(beside)]
    installed = shutil.which("ptdmpi")
    return [installed] if installed else [sys.executable, "-m", "ptdmpi"]
