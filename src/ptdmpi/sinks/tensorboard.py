"""TensorBoard: event files in `runs/NAME/tensorboard/`, written without TensorFlow.

The writer is tensorboardX's synchronous one. Its SummaryWriter hands events to a thread through a
queue. When a full disk ends that thread, the queue fills up and blocks the training.
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

    A later start begins with TensorBoard's own mark of a restart, after which readers drop earlier
    events of that step or later. The first start with this sink writes the existing records of the
    run, too.
    """

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
        """Write one record; flush it every few seconds, and after each checkpoint."""
        numbers = scalars(values)
        parts = [scalar(name, number).value[0] for name, number in numbers.items()]
        self._write(Event(step=values["step"], summary=Summary(value=parts)))
        # a resumed run does not record the steps before its checkpoint again
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
        """Write all events and close the file."""
        self._writer.close()
