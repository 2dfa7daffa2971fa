"""A run whose state is corrupt: it stops before a checkpoint, names what is wrong, and goes on."""

import json

import pytest
import torch

from ptdmpi.config import InputError
from tests._configs import small
from tests._runs import after, log, loop
from tests.parallel import parallel

ASKED = {"run.steps": 6, "run.verify_every": 4, "checkpoint.every_steps": 2, "parallel.data": 2}


def newest(run) -> str:
    return (run / "checkpoints" / "latest").read_text().strip()


@pytest.mark.cases(2)
@parallel(ranks=[2])
@pytest.mark.parametrize(("wanted", "code"), [("stop", 3), ("restart", 4)])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_nothing_corrupt_is_saved(comm, tmp_path, wanted, code, asynchronous):
    """A bit flips after step 3: the save after step 4 would have kept it."""
    changes = ASKED | {"run.on_corruption": wanted, "checkpoint.asynchronous": asynchronous}
    with loop(comm, tmp_path, changes) as run:

        def flip() -> None:
            if comm.rank == 1:
                run.engine.state.kinds["exp_avg"].parts[0].view(torch.int32)[0] ^= 1 << 20

        run.engine.step = after(run.engine.step, 3, flip)
        with pytest.raises(SystemExit) as end:
            run.run()
    assert end.value.code == code
    comm.Barrier()  # rank 0 has written its log
    here = tmp_path / "run"
    told = log(here)
    assert "corrupt state: exp_avg of embedding.word.weight on rank 1 (" in told
    assert "changed between an update and the next one" in told
    assert newest(here) == "step-00000002"
    ends = [json.loads(line) for line in (here / "history.jsonl").read_text().splitlines()]
    assert "corrupt" in json.dumps(ends[-1])
    comm.Barrier()
    with loop(comm, tmp_path, changes) as again:
        assert again.first == 2
        again.run()
    assert newest(here) == "step-00000006"


@parallel(ranks=[2])
def test_a_save_is_verified_where_no_step_is(comm, tmp_path):
    """Between two verified updates, too: the first save after the fault is not made."""
    with loop(comm, tmp_path, ASKED | {"run.verify_every": 100}) as run:

        def flip() -> None:
            if comm.rank == 1:
                run.engine.state.kinds["weights"].parts[0].view(torch.int32)[0] ^= 1 << 20

        run.engine.step = after(run.engine.step, 3, flip)
        with pytest.raises(SystemExit) as end:
            run.run()
    comm.Barrier()
    assert end.value.code == 3 and newest(tmp_path / "run") == "step-00000002"
    assert "differs on rank 0 (" in log(tmp_path / "run")


def test_a_restart_needs_verification():
    with pytest.raises(
        InputError, match=r"run\.on_corruption = .* needs run\.verify_every above 0"
    ):
        small({"run.on_corruption": "restart"})
