"""The treatment of a run's older checkpoints in each save: they are kept, renamed or removed. Only
rank 0 uses this module."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ptdmpi.checkpoint import best
from ptdmpi.checkpoint import directory as files
from ptdmpi.config import CheckpointConfig


class Retention:
    """The retention of checkpoints in a run directory: this class decides which checkpoints are
    kept, renamed or removed.

    `damaged` has the names of checkpoints that could not be read. Damaged checkpoints are never
    removed, and do not reduce the number of undamaged checkpoints that are kept.
    """

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        self.directory = directory
        self.config = config
        self.damaged: list[str] = []
        # the function that renames the checkpoints that the run has abandoned, because it resumed
        # from an earlier one; the first save calls it
        self._branch: Callable[[], None] | None = None

    @property
    def branches(self) -> bool:
        """Return True if the next save will rename checkpoints, because the run has not resumed
        from its own newest checkpoint."""
        return self._branch is not None

    def branch_from(self, source: Path | None, named: Path | None = None) -> None:
        """Make the next save rename the checkpoints that the run abandons: the checkpoints after
        `source`, or all checkpoints if `source` is None. `named` is the path that the user
        gave for `source`."""
        self._branch = partial(files.branch, self.directory, source, named)

    def prepare(self, step: int, needed_bytes: int) -> Path:
        """Return an empty directory for the checkpoint of `step`. The first save also renames the
        checkpoints that the run has abandoned, if there are any. Until then they keep their names,
        so that a start that saves no checkpoint leaves the run directory unchanged. Raise
        InputError if there is not enough space."""
        temporary = files.prepare(self.directory, step, needed_bytes)
        if self._branch is not None:
            self._branch()
            self._branch = None
            # write `best` again, because it may name a checkpoint that was just renamed
            if (self.directory / files.BEST).is_file():
                best.point(self.directory, self.damaged)
        return temporary

    def publish(self, temporary: Path) -> str | None:
        """Give a completely written checkpoint its name, and update the file `latest`. If
        `checkpoint.keep_best` is set, also update the file `best`. Return None, or a warning if
        the checkpoint has its name, but one of these files could not be written. Raise OSError if
        the checkpoint could not be renamed."""
        final = files.give_name(temporary, self.damaged)
        try:
            files.point(final)
            if self.config.keep_best:
                best.point(self.directory, self.damaged)
        except OSError as error:
            return (
                f"{final} is complete, but the files latest and best may name older checkpoints: "
                f"{error}"
            )
        return None

    def remove_old(self) -> str | None:
        """Remove the checkpoints that need not be kept. Return None, or the reason why a checkpoint
        could not be removed."""
        keep = self.config.keep
        try:
            spared: list[Path] = []
            if keep:
                spared = best.spared(self.directory, int(self.config.keep_best), self.damaged)
            superfluous = files.superfluous(
                self.directory,
                keep,
                self.config.keep_every,
                damaged=self.damaged,
                spared=spared,
            )
            for path in list(superfluous):
                files.discard(path)
        except OSError as error:
            return f"older checkpoints cannot be removed: {error}"
        return None
