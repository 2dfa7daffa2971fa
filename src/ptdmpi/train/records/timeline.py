"""The timeline of a run's last steps: spans of computation and communication on each rank."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ptdmpi.base.disk import write_whole
from ptdmpi.comm.world import Axes
from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.watch.stopwatch import Stopwatch

RECENT_STEPS = 20  # the timeline shows one of this number of last steps


class StepSpans(NamedTuple):
    """The measurements of one step on this rank.

    `elapsed_s` is the duration of the step in seconds. `watches` are the stopwatches that have the
    spans of this rank. `inside_s` maps the name of a group of ranks to the seconds that this rank
    spent in the collectives of this group while the rank executed ops.
    """

    elapsed_s: float
    watches: Sequence[Stopwatch]
    inside_s: Mapping[str, float]


class RecentSteps:
    """The spans of this rank's last `RECENT_STEPS` steps."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._steps: deque[StepSpans] = deque(maxlen=RECENT_STEPS)

    def add(
        self, elapsed_s: float, watches: Sequence[Stopwatch], inside_s: Mapping[str, float]
    ) -> None:
        """Store the measurements of a step (see `StepSpans`).

        The stopwatches are read only when a timeline is written.
        """
        self._steps.append(StepSpans(elapsed_s, watches, inside_s))

    def keep(self, directory: Path, last_step: int, say: Callable[[str], None]) -> None:
        """Write the timeline of the step with the median duration to
        `directory/step-NNNNNNNN.json`. Every rank calls this method.

        The file contains the spans of all ranks in the same pipeline as rank 0. `last_step` is the
        number of the newest step. If the file cannot be written, `say` prints the reason.
        """
        if not self._steps:
            return
        times = [step.elapsed_s for step in self._steps]
        place = times.index(statistics.median_low(times))
        # all ranks use the step that rank 0 has chosen, because the spans must be from the same
        # step
        place = self.axes.world.broadcast_object(place)
        self.axes.clock.settle()
        median = self._steps[place]
        mine = [span for watch in median.watches for span in watch.spans]
        parts = self.axes["pipeline"].all_gather_object((mine, median.inside_s))
        if self.axes.world.rank:
            return
        step = last_step - len(self._steps) + place + 1
        spans = tuple(span for part, _ in parts for span in part)
        waits_s = {rank: dict(seconds) for rank, (_, seconds) in enumerate(parts)}
        measured = Timeline(spans, f"measured, step {step}", inside_s=waits_s)
        path = directory / f"step-{step:08d}.json"
        try:
            directory.mkdir(exist_ok=True)
            write_whole(path, measured.to_json())
        except OSError as error:
            say(f"the timeline of step {step} is not kept: {error}")
