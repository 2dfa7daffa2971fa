"""Requests to stop: signals at any moment, files, the time limit; the mark of a complete run."""

import shutil
import signal
import subprocess
import sys
import time

import pytest

from ptdmpi.config import SharedInputError
from ptdmpi.model.output.losses import TASK, SummedLoss
from ptdmpi.watch import requests as module
from ptdmpi.watch.requests import Requests, Save, StopRequest, process_age_s
from tests._runs import after, log, loop, records
from tests.parallel import parallel

PIPELINE = {"parallel.pipeline": 2, "run.steps": 6}


# The ranks of `ptdmpi train` handle signals before they load MPI.
SIGNALS_AND_MPI = """
import signal
from ptdmpi.comm import launch
launch.prepare()
from ptdmpi.watch.requests import SIGNALS, StopRequest
with StopRequest() as request:
    from mpi4py import MPI
    for number in SIGNALS:
        request.received = None
        signal.raise_signal(number)
        print(number.name, request.received == number)
"""


def usr1() -> None:
    signal.raise_signal(signal.SIGUSR1)


def nothing() -> None:
    pass


def stops(made) -> None:
    with pytest.raises(SystemExit) as stopped:
        made.run()
    assert stopped.value.code == 75


def saved(folder) -> list[str]:
    return sorted(path.name for path in (folder / "run/checkpoints").glob("step-????????"))


def test_no_library_that_mpi_loads_takes_a_signal():
    """UCX took SIGHUP."""
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALS_AND_MPI], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.splitlines() == [f"{number.name} True" for number in module.SIGNALS]


@parallel(ranks=[2])
def test_a_signal_on_one_rank_stops_all_after_the_step(comm, tmp_path):
    def patch(made):
        made.engine.step = after(made.engine.step, 2, usr1 if comm.rank == 1 else nothing)

    with loop(comm, tmp_path, PIPELINE, patch) as made:
        stops(made)
        host = made.world.host
    run = tmp_path / "run"
    if comm.rank == 0:
        assert saved(tmp_path) == ["step-00000002"]
        line = f"SIGUSR1 on rank 1 ({host}): saving after step 2, then exit code 75"
        assert line in log(run).splitlines()
        assert not (run / "done").exists()
    with loop(comm, tmp_path, PIPELINE) as made:
        assert made.first == 2
        made.run()
    if comm.rank == 0:
        assert [r["step"] for r in records(run) if "loss" in r] == [1, 2, 3, 4, 5, 6]
        assert (run / "done").read_text() == '{"steps": 6}\n'
    comm.Barrier()
    with loop(comm, tmp_path, {**PIPELINE, "run.steps": 7}) as made:
        assert not (run / "done").exists()
        made.run()
    assert comm.rank or (run / "done").read_text() == '{"steps": 7}\n'


@pytest.mark.long
@parallel(ranks=[4], limit_s=120)
def test_a_sharded_run_goes_on_with_the_same_losses(comm, tmp_path):
    """There are two groups of two ranks, and state in files that end with the processes."""
    sharded = {"parallel.zero": 3, "parallel.shard_group": 2, "parallel.offload": "disk"}
    sharded |= {"precision.compute": "bf16", "run.steps": 4, "model.dropout": 0.1}
    with loop(comm, tmp_path, {**sharded, "run.dir": str(tmp_path / "straight")}) as made:
        made.run()

    def patch(made):
        made.engine.step = after(made.engine.step, 2, usr1 if comm.rank == 3 else nothing)

    with loop(comm, tmp_path, sharded, patch) as made:
        stops(made)
    with loop(comm, tmp_path, sharded) as made:
        assert made.first == 2
        made.run()
    if comm.rank == 0:
        straight, stopped = (
            [
                (record["step"], record["loss"], record["grad_norm"])
                for record in records(tmp_path / name)
                if "loss" in record
            ]
            for name in ("straight", "run")
        )
        assert stopped == straight and len(stopped) == 4


@parallel(ranks=[2])
def test_a_signal_during_the_start_stops_before_a_step(comm, tmp_path):
    with loop(comm, tmp_path, PIPELINE, lambda made: usr1() if comm.rank else None) as made:
        stops(made)
    if comm.rank == 0:
        assert "SIGUSR1 on rank 1" in log(tmp_path / "run")
        assert saved(tmp_path) == [] and not (tmp_path / "run/metrics.jsonl").exists()


@parallel(ranks=[2])
def test_a_signal_during_a_save_is_obeyed_after_it(comm, tmp_path):
    def patch(made):
        saves = made.saving.checkpoints
        saves.save = after(saves.save, 1, usr1 if comm.rank else nothing)

    with loop(comm, tmp_path, {**PIPELINE, "checkpoint.every_steps": 3}, patch) as made:
        stops(made)
    if comm.rank == 0:
        assert saved(tmp_path) == ["step-00000003"]
        assert log(tmp_path / "run").count("saved ") == 1
        assert records(tmp_path / "run")[-1]["step"] == 3


@pytest.mark.long
@parallel(ranks=[2])
def test_a_signal_during_validation_breaks_it_off(comm, tmp_path):
    def patch(made):
        act = usr1 if comm.rank else nothing
        made.engine.evaluate = after(made.engine.evaluate, 1, act)

    valid = {"data.valid": str(tmp_path / "valid"), "log.validate_every_steps": 2}
    with loop(comm, tmp_path, {**PIPELINE, **valid}, patch) as made:
        stops(made)
    if comm.rank == 0:
        assert saved(tmp_path) == ["step-00000002"]
        assert "validation after step 2 interrupted" in log(tmp_path / "run")
        assert all("validation_loss" not in record for record in records(tmp_path / "run"))
    comm.Barrier()
    best = {**PIPELINE, **valid, "checkpoint.keep_best": 1}
    with loop(comm, tmp_path, best) as made:  # what was due is made up
        made.run()
    comm.Barrier()
    if comm.rank == 0:
        validated = [
            record["step"] for record in records(tmp_path / "run") if "validation_loss" in record
        ]
        assert validated == [2, 4, 6]
    comm.Barrier()
    with loop(comm, tmp_path, {**best, "run.steps": 8}) as made:  # and nothing twice
        made.run()
    comm.Barrier()
    if comm.rank == 0:
        validated = [
            record["step"] for record in records(tmp_path / "run") if "validation_loss" in record
        ]
        assert validated == [2, 4, 6, 8]


@parallel(ranks=[2])
def test_a_validation_that_is_made_up_counts_as_the_best(comm, tmp_path):
    """The loss of a validation is its step, so that the first one, made up, is the best."""

    def stopped_in_validation(made):
        act = usr1 if comm.rank else nothing
        made.engine.evaluate = after(made.engine.evaluate, 1, act)

    def rising(made):
        after_step = made.validation.after_step

        def at(step):
            made.engine.evaluate = lambda batches: {TASK: SummedLoss(float(step), 1.0)}
            return after_step(step)

        made.validation.after_step = at

    valid = {"data.valid": str(tmp_path / "valid"), "log.validate_every_steps": 2}
    judged = {**PIPELINE, **valid, "run.steps": 8, "run.stop_after_worse": 2}
    judged["checkpoint.keep_best"] = 1
    with loop(comm, tmp_path, judged, stopped_in_validation) as made:
        stops(made)
    comm.Barrier()
    with loop(comm, tmp_path, judged, rising) as made:
        made.run()
    comm.Barrier()
    if comm.rank == 0:
        run = tmp_path / "run"
        losses = [
            (record["step"], record["validation_loss"])
            for record in records(run)
            if "validation_loss" in record
        ]
        # two worse ones after the one that was made up end the run
        assert losses == [(2, 2.0), (4, 4.0), (6, 6.0)]
        assert (run / "checkpoints/best").read_text().strip() == "step-00000002"
        assert max(record["step"] for record in records(run)) == 6


@parallel(ranks=[2])
def test_files_are_obeyed_and_removed(comm, tmp_path):
    run = tmp_path / "run"

    def patch(made):
        made.lookout.requests._looked_s = -1e9
        steps = made.engine.step
        if comm.rank == 0:
            steps = after(steps, 2, lambda: ((run / "SAVE").touch(), look_again()))
            steps = after(steps, 4, lambda: ((run / "STOP").touch(), look_again()))
        made.engine.step = steps

        def look_again():
            made.lookout.requests._looked_s = -1e9

    with loop(comm, tmp_path, PIPELINE, patch) as made:
        stops(made)
    if comm.rank == 0:
        assert saved(tmp_path) == ["step-00000002", "step-00000004"]
        assert not (run / "SAVE").exists() and not (run / "STOP").exists()
        assert "file STOP: saving after step 4" in log(run)
    comm.Barrier()
    with loop(comm, tmp_path, PIPELINE) as made:
        made.run()
    assert comm.rank or records(run)[-1]["step"] == 6


@parallel(ranks=[2])
def test_the_time_limit_leaves_one_step(comm, tmp_path):
    """A run with this limit, started again and again, makes one step each time."""
    for step in (1, 2):
        with loop(comm, tmp_path, {**PIPELINE, "run.max_minutes": 1e-3}) as made:
            stops(made)
        assert saved(tmp_path)[-1] == f"step-{step:08d}"
        comm.Barrier()
    if comm.rank == 0:
        lines = log(tmp_path / "run").splitlines()
        wishes = [line for line in lines if line.startswith("run.max_minutes")]
        saving = "run.max_minutes: saving after step {}, then exit code 75"
        assert wishes == [saving.format(1), saving.format(2)]  # and not a second time after it


def test_room_is_left_for_a_step_and_the_save(tmp_path):
    requests = Requests(StopRequest(), tmp_path, ["a"], max_minutes=10.0)
    requests.stepped(20.0)
    limit = 600.0 - 1.5 * 20.0
    for save_s, room in ((0.0, 30.0), (5.0, 10.0), (60.0, 120.0)):
        requests.saved(save_s)
        requests.began_s = time.monotonic() - (limit - room - 1.0)
        assert requests.mine(0)[0] == 0
        requests.began_s = time.monotonic() - (limit - room + 1.0)
        assert requests.reason(requests.mine(0)[0]) == "run.max_minutes"
        assert requests.mine(1)[0] == 0  # rank 0 has the clock


def test_the_age_of_a_process_includes_its_start():
    before = time.process_time()  # what it has computed so far took at least a part of its age
    assert before < process_age_s() < 3600


def test_the_most_urgent_reason_and_its_lowest_rank_are_told(tmp_path):
    requests = Requests(StopRequest(), tmp_path, ["a", "b", "c"], max_minutes=0.0)
    (tmp_path / "STOP").touch()
    assert requests.reason(requests.mine(0)[0]) == "file STOP"
    votes = [requests.mine(0)[0]]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        requests.signals.received = number
        votes += [requests.mine(rank)[0] for rank in (2, 1)]
        assert requests.reason(max(votes)) == f"{number.name} on rank 1 (b)"
    assert requests.reason(0) == ""


def test_a_save_is_due_by_the_clock(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    requests = Requests(StopRequest(), tmp_path, ["a"], max_minutes=0.0, save_minutes=15.0)
    votes = []
    for now in (101.0, 999.0, 1000.0, 1001.0):
        clock[0] = now
        votes.append(requests.mine(0)[1])
    assert votes == [Save.NO, Save.NO, Save.DUE, Save.DUE]
    requests.saved(3.0)
    assert requests.mine(0)[1] == Save.NO and requests.mine(1)[1] == Save.NO
    (tmp_path / "SAVE").touch()
    clock[0] += 901.0
    assert requests.mine(0)[1] == Save.NOW


@pytest.mark.parametrize("name", ["SAVE", "STOP"])
def test_a_directory_is_no_request(tmp_path, name):
    requests = Requests(StopRequest(), tmp_path, ["a"], max_minutes=0.0)
    (tmp_path / name).mkdir()
    assert requests.mine(0) == (0, Save.NO)
    requests.obeyed(name)  # as after a save that was due by itself
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("again", [False, True])
def test_a_run_directory_that_is_gone_or_another(tmp_path, again):
    folder = tmp_path / "run"
    folder.mkdir()
    requests = Requests(StopRequest(), folder, ["a"], max_minutes=0.0)
    assert requests.reason(requests.mine(0)[0]) == ""
    folder.rename(tmp_path / "moved")
    if again:
        folder.mkdir()
    requests.obeyed("STOP")  # looks at once
    with pytest.raises(SharedInputError, match="run was deleted or replaced while"):
        requests.reason(requests.mine(0)[0])


def test_nobody_reads_what_is_printed():
    """In `ptdmpi train ... | head` the first line without a reader asks for a stop."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from ptdmpi.watch.requests import Requests, StopRequest\n"
        "signals = StopRequest()\n"
        "for _ in range(20000): signals.show('a line')\n"
        "requests = Requests(signals, Path('.'), ['a'], max_minutes=0.0)\n"
        "sys.stderr.write(requests.reason(requests.mine(0)[0]))\n"
    )
    command = f'{sys.executable} -c "$0" | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command, code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a line\n", "nobody reads the output")


@parallel(ranks=[1])
def test_ctrl_c_saves_and_the_wish_is_told_once(comm, tmp_path):
    # where the tests run in the background of a shell, SIGINT is ignored from the start
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def patch(made):
        made._step = after(made._step, 2, lambda: signal.raise_signal(signal.SIGINT))

    with loop(comm, tmp_path, {"run.steps": 6}, patch) as made:
        stops(made)
    assert saved(tmp_path) == ["step-00000002"]
    lines = log(tmp_path / "run").splitlines()
    assert lines[0].startswith("attention by ")
    assert lines[1].startswith("to save and stop: kill -USR1 ") and "Ctrl-C" in lines[1]
    assert [line for line in lines if "stopped" in line] == [
        "stopped on request after step 2; the same command continues the run"
    ]
    assert sum("SIGINT on rank 0" in line for line in lines) <= 2  # heard, and saving


@parallel(ranks=[1])
def test_a_run_directory_that_is_deleted_is_not_made_anew(comm, tmp_path):
    def patch(made):
        made._step = after(made._step, 2, lambda: shutil.rmtree(tmp_path / "run"))

    gone = pytest.raises(SharedInputError, match=r"is gone|was deleted")
    with loop(comm, tmp_path, {"run.steps": 6, "checkpoint.every_steps": 3}, patch) as made, gone:
        made.run()
    assert not (tmp_path / "run").exists()
