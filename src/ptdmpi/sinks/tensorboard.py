"""TensorBoard: event files in `runs/NAME/tensorboard/`, written without TensorFlow.

The writer is tensorboardX's synchronous one. Its SummaryWriter hands events to a thread through a
queue: a thread that a full disk has ended would let the queue fill, and the training with it stand.
"""

import os
import time
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import scalar, text

from ptdmpi.config import Config, to_toml
from ptdmpi.sinks.record import kept_records, scalars
from ptdmpi.sinks.sinks import Past

FOLDER = "tensorboard"
FLUSH_S = 5.0


class TensorBoard:
    """One event file for each start. A start behind others begins with TensorBoard's own mark of a
    restart, which has its readers drop what stands at that step or later; the first start of a run
    that has records already (it was switched on later) writes these first."""

    def __init__(self, config: Config, past: Past) -> None:
        folder = past.path / FOLDER
        folder.mkdir(exist_ok=True)
        before = any(folder.glob("*.tfevents.*"))
        # two starts within a second, or on two hosts of one name, must not share a file
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
        numbers = scalars(values)
        parts = [scalar(name, number).value[0] for name, number in numbers.items()]
        self._write(Event(step=values["step"], summary=Summary(value=parts)))
        # what a checkpoint has behind it must not be lost with the process
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
        self._writer.close()
