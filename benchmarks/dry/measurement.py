"""A check that the parts of `make gpu` run on the null GPU, where their measured numbers mean
nothing."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.dry.device import NullGpu
from benchmarks.dry.steps import DEVICE, begin
from benchmarks.gpu.parts import COMPILED, parts
from benchmarks.gpu.reasons import reasons
from benchmarks.gpu.timing import Measurement, Numbers, Row, measured_rows

# The parts that are left out: they compile kernels, compare measured times, or measure another
# trainer also with compilation.
LEFT_OUT = (COMPILED, "in turn", "by transformers", "by torchtitan", "small kernels")


def rows() -> Iterator[Row]:
    """Yield the rows of the parts that compile nothing."""
    begin()
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(DEVICE, Path(folder)):
            if not part.name.endswith(LEFT_OUT):
                yield part.name, partial(of_part, part)


def of_part(part: Measurement) -> Numbers:
    """Run a part. Return the numbers of launches and syncs of the complete part, and the reasons
    why rows of it were not measured."""
    gpu = NullGpu()
    launched, before = gpu.launched(), gpu.events()
    measured = part.measure()
    if not isinstance(measured, dict):
        *_, measured = measured_rows(measured)
    why = [f"{row}: {reason}" for row, reason in reasons(measured).items()]
    return {
        "launches": gpu.launched() - launched,
        "syncs": gpu.events().syncs - before.syncs,
        "not measured": "; ".join(why),
    }
