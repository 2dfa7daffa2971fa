"""The start of a run from a checkpoint: the search for the checkpoint, its checks, and its loading
on all ranks."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.examine import checkpoints, newest
from ptdmpi.checkpoint.load import drawn, load, load_tensors, on_root, took_mean
from ptdmpi.checkpoint.manifest import EXTRAS, Manifest, Progress
from ptdmpi.checkpoint.memory import MemoryCopies
from ptdmpi.checkpoint.retention import Retention
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.lineage.course import Course
from ptdmpi.model.state import State
from ptdmpi.plan.shape import parameters


class Resumption:
    """The start of a run from a checkpoint. Every rank calls every method.

    If `checkpoint.resume` names a checkpoint, but an earlier start has already resumed from it and
    has saved a checkpoint since then, this start resumes from the run's own newest checkpoint. In
    this case, `followed` is the named checkpoint. If the checkpoint stores replicas separately and
    the run continues from their mean, `mean_of` is the number of these replicas. Otherwise
    `mean_of` is 0.
    """

    def __init__(
        self, world: Communicator, state: State, course: Course, retention: Retention
    ) -> None:
        self.world = world
        self.state = state
        self.course = course
        self.retention = retention
        self.directory = retention.directory
        self.mean = course.config.data_parallel.checkpoint == "average"
        self.followed: Path | None = None
        self.mean_of = 0
        self.extras: dict[str, Any] = {}  # entries of a user's program in the loaded checkpoint

    def resume(self, wanted: str, lost: bool = False) -> tuple[Progress | None, list[str]]:
        """Load the checkpoint that `checkpoint.resume = wanted` names. Return the checkpoint's
        progress (None: the run begins at step 0), and a message for each damaged checkpoint that
        was skipped.

        "auto" means the newest complete checkpoint of the run, if there is one; "never" means none.
        Any other `wanted` is the path of a checkpoint, or of a run directory, whose newest
        checkpoint is loaded. If an earlier start has resumed from that path and has saved a
        checkpoint since then, the run's own newest checkpoint is loaded instead. `lost` is True if
        ranks were lost. In this case the remaining replicas may begin from the mean of all replicas
        that the checkpoint stores.

        Raise InputError if a named checkpoint cannot be used, or if a checkpoint is of another
        model or was trained on other data (`Course.judge`). Also raise InputError if all
        checkpoints are damaged. The run does not begin anew in this case, because it would
        overwrite checkpoints that can perhaps be repaired.
        """
        if wanted == "never":
            self.retention.branch_from(None)
            return None, []
        if on_root(self.world, lambda: self._is_own(wanted)):
            wanted = "auto"
        elif wanted != "auto" and on_root(self.world, lambda: self._went_on_from(wanted)):
            self.followed = Path(wanted)
            wanted = "auto"
        candidates, skipped = on_root(self.world, lambda: self._candidates(wanted))
        for candidate in candidates:
            mean = self.mean or lost
            loaded = load(self.state, self.world, candidate, judge=self._judge, mean=mean)
            if isinstance(loaded, Manifest):
                self.extras = dict(loaded.said.get(EXTRAS, {}))
                if took_mean(self.state, loaded):
                    self.mean_of = loaded.replicas
                if wanted != "auto":
                    self.retention.branch_from(candidate, Path(wanted))
                return loaded.progress, skipped
            skipped.append(f"{candidate}: {loaded}")
            if wanted == "auto":
                self.retention.damaged.append(candidate.name)
        if wanted != "auto":
            raise SharedInputError(f"checkpoint.resume = {'; '.join(skipped)}")
        if skipped:
            raise SharedInputError(
                f"no checkpoint in {self.directory} is complete ({'; '.join(skipped)}); "
                'checkpoint.resume = "never" begins anew'
            )
        return None, []

    def resume_from_copy(self, copies: MemoryCopies, wanted: str) -> Progress | None:
        """Load the newest copy in the nodes' memory, unless the run has since saved a later step to
        the disk. Return the progress of the copy, or None if no copy was loaded.

        An earlier start of the same job has made the copy. That start may have begun from the
        initial weights (`wanted` is "never"), or from a checkpoint of another run, and may have
        saved no checkpoint to the disk. The run directory may then still have checkpoints that are
        not part of the run's history. The next save renames these checkpoints.
        """
        step = copies.find()
        if step is None or step < on_root(self.world, lambda: self._newest_own(wanted)):
            return None
        loaded = copies.load(self._judge)
        if isinstance(loaded, str):
            return None
        self.extras = dict(loaded.said.get(EXTRAS, {}))
        if wanted == "never":
            self.retention.branch_from(None)
        elif on_root(self.world, lambda: self._names_another(wanted)):
            source = on_root(self.world, lambda: self._candidates(wanted)[0][0])
            self.retention.branch_from(source, Path(wanted))
        return loaded.progress

    def _names_another(self, wanted: str) -> bool:
        """Return True if `wanted` is the path of another run or checkpoint, from which this run has
        not resumed yet."""
        return wanted != "auto" and not self._is_own(wanted) and not self._went_on_from(wanted)

    def _newest_own(self, wanted: str) -> int:
        """Return the step of the newest checkpoint that the run itself has saved. Return 0 if there
        is none, or if this start does not continue from the run's own checkpoints."""
        if wanted == "never" or self._names_another(wanted):
            return 0
        own = files.checkpoints_in(self.directory)
        return files.step_of(own[-1]) if own else 0

    def begin_from(
        self, path: Path, tokenizer_sha256: str | None, fresh: Collection[str] = ()
    ) -> tuple[Path, list[str]]:
        """Load only the weights of the newest complete checkpoint that `path` names. Return the
        path of the checkpoint, and the names of the task head's parameters that keep their initial
        values. `fresh` has the names of the head's parameters that the base model `adapt.base`
        lacks. If the run trains adapters, only names in `fresh` are returned, because all other
        parameters of the head come from the base model.

        `tokenizer_sha256` is the hash of the tokenizer that belongs to the weights. This argument
        is used only if the checkpoint does not record its tokenizer. Raise InputError, on every
        rank, if the weights cannot be used.
        """
        directory = on_root(self.world, lambda: newest(path))

        def judge(where: Path, manifest: Manifest) -> None:
            """Raise InputError if this run may not begin from these weights."""
            self.course.judge("initial", where, manifest.said)
            if self.course.answer.note:
                self.course.require_tokenizer(path, tokenizer_sha256)

        model = self.course.config.model
        head = parameters.task_head(model)
        try:
            loaded = load_tensors(self.state, self.world, directory, judge=judge, head=head)
        except SharedInputError as error:
            changed = ", ".join(self.course.answer.changed)
            if not changed:
                raise
            raise SharedInputError(f"{error}; changed since: {changed}") from None
        if isinstance(loaded, str):
            raise SharedInputError(f"checkpoint.initial = {directory}: {loaded}")
        adapts = model.adapt.adapts
        return directory, [name for name in drawn(loaded, head) if name in fresh or not adapts]

    def _judge(self, where: Path, manifest: Manifest) -> None:
        self.course.judge("resume", where, manifest.said)

    def _is_own(self, wanted: str) -> bool:
        """Return True if `wanted` is the run's own directory or its folder `checkpoints/`. A path
        of the run itself has the same meaning as "auto"."""
        here = self.directory.resolve()
        return wanted != "auto" and Path(wanted).resolve() in (here, here.parent)

    def _went_on_from(self, wanted: str) -> bool:
        """Return True if the run has resumed from `wanted` and has saved a checkpoint since then. A
        batch job that is started again runs the same command as before, but must then continue from
        the run's own newest checkpoint."""
        return files.went_on_from(self.directory, files.named(Path(wanted)))

    def _candidates(self, wanted: str) -> tuple[list[Path], list[str]]:
        """Return two lists: the checkpoints to try, the newest first, and texts about newer
        checkpoints that are missing. Raise InputError if a named path has no checkpoint."""
        if wanted != "auto":
            try:
                return checkpoints(Path(wanted))[::-1], []
            except InputError as error:
                raise InputError(f"checkpoint.resume = {wanted}: {error}") from None
        if self.directory.is_dir():
            files.put_back(self.directory)
        own = files.of_run(self.directory)[::-1]
        return own, files.missing_newest(self.directory, own)
