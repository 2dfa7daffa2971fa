"""A check that the parts of `make gpu` (the measurements of one GPU) run without errors on the null
GPU. The null GPU computes nothing, so the measured numbers have no meaning."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.dry.device import NullGpu
from benchmarks.dry.steps import DEVICE, begin
from benchmarks.gpu.parts import COMPILED, parts
from benchmarks.gpu.reasons import reasons
from benchmarks.gpu.timing import Measurement, Numbers, Row, measured_rows

# Parts whose names end with one of these words are left out, because they compile kernels, compare
# measured times, or measure compiled models of other trainers.
LEFT_OUT = (COMPILED, "in turn", "by transformers", "by torchtitan", "small kernels")


def rows() -> Iterator[Row]:
    """Yield, for each part that compiles no kernels, its name and a function that runs it."""
    begin()
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(DEVICE, Path(folder)):
            if not part.name.endswith(LEFT_OUT):
                yield part.name, partial(of_part, part)


def of_part(part: Measurement) -> Numbers:
    """Run a part of `make gpu`. Return the numbers of launches and syncs (waits for the device) in
    the complete part, and the reasons why some of its rows were not measured."""
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
