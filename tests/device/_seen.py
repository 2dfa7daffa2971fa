"""What is seen of a pretended device: waits of the host, launches, memory."""

import traceback
import weakref
from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

PROJECT = "/ptdmpi/"


@dataclass
class Record:
    """What was seen: host waits by place, launches by kind, bytes held now and at most."""

    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    held_bytes: int = 0
    peak_bytes: int = 0
    peak_at: str = ""
    storages: dict[int, int] = field(default_factory=dict)

    def begin(self) -> None:
        """Count anew; what is held stays."""
        self.waits, self.pageable, self.launches = [], [], Counter()
        self.peak_bytes, self.peak_at = self.held_bytes, ""

    def hold(self, inner: Tensor, operation: str) -> None:
        """A tensor is there; its memory counts as long as anybody holds it."""
        storage = inner.untyped_storage()
        key = storage._cdata
        if key in self.storages:
            return
        self.storages[key] = storage.nbytes()
        self.held_bytes += storage.nbytes()
        if self.held_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = self.held_bytes, operation + " at " + where_now()
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.held_bytes -= self.storages.pop(key, 0)


SEEN = Record()


def where_now() -> str:
    """The place in the project that is executed, such as `engine/engine.py:step`; of what a clock
    or a queue does, the place that wanted it."""
    frames = []
    for one in traceback.extract_stack():
        _, found, file = one.filename.rpartition(f"src{PROJECT}")
        if found and file not in ("comm/clock.py", "comm/queues.py", "comm/world.py"):
            frames.append(f"{file}:{one.name}")
    return frames[-1] if frames else "?"
