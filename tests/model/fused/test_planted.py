"""An error in a kernel in Triton is found: each kernel gets an error that a person could make, and
the comparison with torch's operations must then fail."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

import ptdmpi.model.kernels.fused as package
from tests.model.fused import test_gelu, test_update, test_values
from tests.model.fused._interpreted import ENVIRONMENT, NEEDS_TRITON, PROCESS
from tests.model.fused._kernels import FOLDER, kernels
from tests.parallel import parallel

__all__ = ["ENVIRONMENT", "PROCESS"]  # of the ranks that run these tests
pytestmark = NEEDS_TRITON


class Planted(NamedTuple):
    """An error in a kernel: its right and its wrong line, and the test that must find it."""

    kernel: str
    right: str
    wrong: str
    test: Callable
    case: dict[str, Any]


LOSS = (test_values.test_loss, {"chunk": 16})
NORM = (test_values.test_norm, {"adds": True, "shifts": True})
GATED = (test_values.test_gated, {"activation": "geglu"})
ROPE = (test_values.test_rotation, {"own": True})
DROPOUT = (test_values.test_dropout_has_the_bits_of_the_reference, {})
PLANTED = [
    # an earlier sum is not scaled to the new maximum
    Planted("loss._forward", "total * tl.exp(top - subtracted)", "total", *LOSS),
    # the label of another rank, or of a column that is padded
    Planted("loss._forward", "tl.load(labels + row) - first", "tl.load(labels + row) + 1", *LOSS),
    # the label's term lacks the loss's factor
    Planted("loss._backward", "tl.where(at == label, factor", "tl.where(at == label, 1.0", *LOSS),
    # the mean over the elements of a block, which are more than those of a row
    Planted("norm._forward", "tl.sum(r * r, 0) / columns", "tl.sum(r * r, 0) / BLOCK", *NORM),
    # elements outside of the row count
    Planted("norm._forward", "tl.where(inside, r - mean, 0.0)", "r - mean", *NORM),
    # the gradient of the sum is lost
    Planted("norm._backward", "d += tl.load(dtotal", "d += 0.0 * tl.load(dtotal", *NORM),
    # each program keeps the gradient of its last row alone
    Planted("norm._backward", "dweight += dz * n", "dweight = dz * n", *NORM),
    # a wrong power, and a derivative without its inner factor
    Planted("gated._forward", "CUBE * gate * gate * gate", "CUBE * gate * gate", *GATED),
    Planted("gated._backward", "gate + 3.0 * cube", "gate + cube", *GATED),
    # the backward turns forward, and angles are those of the first sequence
    Planted("rope._turn", "s = -s", "s = s", *ROPE),
    Planted("rope._turn", "sequence * angle_sequence_stride", "0", *ROPE),
    # what stays is not scaled, and all positions have the same mask
    Planted("dropout._drop", "tl.full([BLOCK], SCALE, WIDE)", "1.0", *DROPOUT),
    Planted("dropout._drop", "position * GOLDEN", "GOLDEN", *DROPOUT),
]


def with_error(planted: Planted, folder: Path) -> Any:
    """Return the kernel with the wrong line. Triton reads the source of a kernel in a file, so the
    kernel has a file of its own."""
    module, _, name = planted.kernel.partition(".")
    source = kernels()[planted.kernel]
    assert source.count(planted.right) == 1, "the line of the kernel has changed"
    text = (FOLDER / f"{module}.py").read_text(encoding="utf-8")
    path = folder / f"{module}.py"
    path.write_text(
        text.replace(source, source.replace(planted.right, planted.wrong)), encoding="utf-8"
    )
    spec = importlib.util.spec_from_file_location(f"with_error_{module}", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return getattr(made, name)


@parallel(ranks=[1])
@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_an_error_in_a_kernel_is_found(comm, tmp_path, number):
    planted = PLANTED[number]
    module, _, name = planted.kernel.partition(".")
    right = importlib.import_module(f"{package.__name__}.{module}")
    with (
        mock.patch.object(right, name, with_error(planted, tmp_path)),
        pytest.raises(AssertionError),
    ):
        planted.test.parallel_body(comm, "fp64", **planted.case)


def test_every_kernel_has_a_planted_error():
    """Here, or in the file of its own tests."""
    planted = {error.kernel for error in PLANTED}
    lines = [line for tests in (test_gelu, test_update) for line, _ in tests.ERRORS.values()]
    elsewhere = {name for name, source in kernels().items() if any(x in source for x in lines)}
    assert planted | elsewhere == kernels().keys()
