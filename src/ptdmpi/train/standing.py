"""What the validations of a run say of it: which were the best, and whether it gets better at all.
Without MPI, so that a dry run knows it too."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from ptdmpi.config import Config
from ptdmpi.sinks.record import kept_records


@dataclass
class Standing:
    """What the validations of a run have come to, in order of their steps: (step, loss in nats per
    token). One whose loss is not below all before it is worse; NaN always is."""

    stop_after_worse: int = 0
    keep_best: int = 0
    seen: list[tuple[int, float]] = field(default_factory=list)
    worse: int = 0  # in a row, up to now

    @property
    def last(self) -> tuple[int, float] | None:
        """The newest validation."""
        return self.seen[-1] if self.seen else None

    @property
    def best(self) -> tuple[int, float] | None:
        """The first validation with the lowest loss; None before any that is finite."""
        finite = [one for one in self.seen if math.isfinite(one[1])]
        return min(finite, key=lambda one: one[1], default=None)

    def take(self, step: int, loss: float) -> bool:
        """One more; returns whether its checkpoint is among the `keep_best` best ones so far."""
        # so written for NaN, which is below nothing
        better = sum(not loss < other for _, other in self.seen if math.isfinite(other))
        self.seen.append((step, loss))
        is_best = math.isfinite(loss) and not better
        self.worse = 0 if is_best else self.worse + 1
        return math.isfinite(loss) and better < self.keep_best

    @property
    def remark(self) -> str:
        """What a line of a validation adds."""
        if not (self.stop_after_worse or self.keep_best) or self.best is None:
            return ""
        if self.best == self.last:
            return "  (the best so far)"
        worse = f"{self.worse} of {self.stop_after_worse} " if self.stop_after_worse else ""
        return f"  ({worse}worse than {self.best[1]:.4f} of step {self.best[0]})"

    @property
    def over(self) -> str:
        """Why the run ends before its last step; empty where it goes on."""
        if not 0 < self.stop_after_worse <= self.worse:
            return ""
        best = "" if self.best is None else f" than {self.best[1]:.4f} of step {self.best[0]}"
        return (
            f"run.stop_after_worse = {self.stop_after_worse}: "
            f"{self.worse} validation{'s' * (self.worse > 1)} in a row no better{best}"
        )


def standing_of(config: Config, step: int) -> Standing:
    """After the validations that the run directory has kept, up to the one after `step`."""
    standing = Standing(config.run.stop_after_worse, int(config.checkpoint.keep_best))
    for record in kept_records(Path(config.run.dir) / "metrics.jsonl"):
        if record["step"] <= step and isinstance(record.get("validation_loss"), float):
            standing.take(record["step"], record["validation_loss"])
    return standing
