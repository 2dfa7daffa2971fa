"""What the last steps did when: of one of them the timeline is kept."""

import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ptdmpi.base.disk import write_whole
from ptdmpi.comm.world import Axes
from ptdmpi.plan.schedule.simulate import Span, Timeline

STEPS = 20


class RecentSteps:
    """The spans of this rank's last steps."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self._steps: deque[tuple[float, list[Span], float]] = deque(maxlen=STEPS)

    def add(self, elapsed_s: float, spans: list[Span], tensor_s: float) -> None:
        """`tensor_s`: of that time, in collectives of the tensor axis."""
        self._steps.append((elapsed_s, spans, tensor_s))

    def keep(self, directory: Path, last_step: int, say: Callable[[str], None]) -> None:
        """Write the step of median time, of all ranks of one pipeline; every rank calls it."""
        if not self._steps:
            return
        times = [elapsed_s for elapsed_s, *_ in self._steps]
        place = times.index(statistics.median_low(times))
        place = self._axes.world.broadcast_object(place)
        parts = self._axes["pipeline"].all_gather_object(self._steps[place][1:])
        if self._axes.world.rank:
            return
        step = last_step - len(self._steps) + place + 1
        spans = tuple(span for part, _ in parts for span in part)
        tensor_s = {rank: seconds for rank, (_, seconds) in enumerate(parts)}
        measured = Timeline(spans, f"measured, step {step}", tensor_s=tensor_s)
        path = directory / f"step-{step:08d}.json"
        try:
            directory.mkdir(exist_ok=True)
            write_whole(path, measured.to_json())
        except OSError as error:  # a picture less
            say(f"the timeline of step {step} is not kept: {error}")
