"""A whole run on a pretended device: data, steps, validation, checkpoints, and on from these."""

import json

import pytest

from ptdmpi.comm.world import World
from tests._runs import loop
from tests.device import _pretend
from tests.device._pretend import pretended
from tests.device._seen import SEEN
from tests.parallel import parallel

PROCESS = "device"  # torch takes the pretended device on before its first backward
pytestmark = pytest.mark.skipif(bool(_pretend.available()), reason=str(_pretend.available()))

CHANGES = {
    "run.steps": 4,
    "optimizer.decay": "constant",
    "checkpoint.every_steps": 2,
    "checkpoint.asynchronous": True,
    "model.layers": 2,
    "log.validate_every_steps": 2,
    "data.document_boundaries": True,
}


def records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def run(comm, folder, changes: dict) -> list[dict]:
    with loop(comm, folder, {**CHANGES, "data.valid": str(folder / "valid"), **changes}) as made:
        made.run()
    return records(folder)


@pytest.mark.long
@parallel(ranks=[1])
def test_a_run_and_on_from_its_checkpoint(comm, tmp_path):
    with pretended() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "device", lambda world: device)
        first = run(comm, tmp_path, {})
        log = (tmp_path / "run/log.txt").read_text()
        assert "no MFU: the data sheet's fp32 peak of a pretended device is not known" in log
        changes = {"run.steps": 6, "log.validate_every_steps": 3, "checkpoint.asynchronous": False}
        again = run(comm, tmp_path, changes)
        # what is written at once is no less copied into memory that cannot be paged out
        assert SEEN.waits and not [where for where in SEEN.pageable if "checkpoint/save" in where]
    steps = [one for one in again if "loss" in one]
    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5, 6]
    assert all(one["mfu"] is None and one["peak_memory_bytes"] > 0 for one in steps)
    assert any("validation_loss" in one for one in first)
    # on the host the same run has the same losses
    (tmp_path / "host").mkdir()
    known = run(comm, tmp_path / "host", {"run.steps": 6, "log.validate_every_steps": 3})
    for one, other in zip(steps, [one for one in known if "loss" in one], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
