"""The directory of a run's checkpoints as saves change it: rank 0 alone does what is here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ptdmpi.checkpoint import best
from ptdmpi.checkpoint import directory as files
from ptdmpi.config import CheckpointConfig


class Retention:
    """The checkpoints of a run directory: what is set aside, kept and removed.

    `damaged` has the names of checkpoints that could not be read. They are neither counted nor
    removed.
    """

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        self.directory = directory
        self.config = config
        self.damaged: list[str] = []
        # what the first save has to do with checkpoints that the run does not come from
        self._branch: Callable[[], None] | None = None

    @property
    def branches(self) -> bool:
        """True if the run has not gone on from its own newest checkpoint."""
        return self._branch is not None

    def branch_from(self, source: Path | None, named: Path | None = None) -> None:
        """Let the next save set aside the checkpoints that the run does not come from: those after
        `source`, which was `named` so; all of them if it is None."""
        self._branch = partial(files.branch, self.directory, source, named)

    def prepare(self, step: int, needed_bytes: int) -> Path:
        """Return the empty directory to write `step` into. Checkpoints are set aside only now: a
        start that saves nothing leaves a run as it was. Raises InputError without space."""
        temporary = files.prepare(self.directory, step, needed_bytes)
        if self._branch is not None:
            self._branch()
            self._branch = None
            if (self.directory / files.BEST).is_file():  # it may name one of those
                best.point(self.directory, self.damaged)
        return temporary

    def publish(self, temporary: Path) -> None:
        """Give a written checkpoint its name, and let `latest` and `best` point to what they name.
        Raises OSError."""
        files.publish(temporary, self.damaged)
        if self.config.keep_best:
            best.point(self.directory, self.damaged)

    def remove_old(self) -> str | None:
        """Remove the checkpoints that need not be kept; return why that failed, None if not."""
        keep = self.config.keep
        try:
            spared: list[Path] = []
            if keep:
                spared = best.spared(self.directory, int(self.config.keep_best), self.damaged)
            superfluous = files.superfluous(
                self.directory, keep, self.config.keep_every, self.damaged, spared
            )
            for path in list(superfluous):
                files.discard(path)
        except OSError as error:
            return f"older checkpoints cannot be removed: {error}"
        return None
