"""The sink for TensorBoard: event files in `runs/NAME/tensorboard/`, which are written without
TensorFlow.

The events are written with tensorboardX's synchronous `EventsWriter`. The SummaryWriter of
tensorboardX is not used, because it passes events through a queue to a thread. If the disk is full,
that thread ends. The queue would then fill up and block the training.
"""

import os
import time
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import scalar, text

from ptdmpi.config import Config, to_toml
from ptdmpi.sinks.contract import Past
from ptdmpi.sinks.record import kept_records, scalars

FOLDER = "tensorboard"
FLUSH_S = 5.0


class TensorBoard:
    """A sink that writes one event file for each start of a run.

    When the run is resumed, the new file begins with a SessionLog event that marks a restart at a
    step. TensorBoard then ignores this step and later steps in older files. The first file also
    contains the records that the run wrote before this sink was enabled.
    """

    def __init__(self, config: Config, past: Past) -> None:
        folder = past.path / FOLDER
        folder.mkdir(exist_ok=True)
        before = any(folder.glob("*.tfevents.*"))
        # the process id and the time make the file name unique, even if a run starts twice within a
        # second, or on two hosts with the same name
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.time_ns()}")
        self._flushed_s = time.monotonic()
        if before:
            restart = SessionLog(status=SessionLog.START)
            self._write(Event(step=past.step + 1, session_log=restart))
        else:
            for record in kept_records(past.path / "metrics.jsonl"):
                self.record(record)
        shown = f"```\n{to_toml(config)}\n```"
        self._write(Event(step=past.step + 1, summary=text("config", shown)))
        self._flush()

    def record(self, values: dict[str, Any]) -> None:
        """Write one record. Flush the file every few seconds, and after each checkpoint."""
        numbers = scalars(values)
        parts = [scalar(name, number).value[0] for name, number in numbers.items()]
        self._write(Event(step=values["step"], summary=Summary(value=parts)))
        # Flush after a checkpoint: a run that resumes from this checkpoint does not record earlier
        # steps again.
        saved = "checkpoint_bytes" in values
        if saved or time.monotonic() - self._flushed_s >= FLUSH_S:
            self._flush()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)

    def _flush(self) -> None:
        self._writer.flush()
        self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Write the remaining events to the event file, and close the file."""
        self._writer.close()
