"""A hang and a crash: the rank at fault, the ranks that wait for it, and the end of all."""

import math
import re
import signal
import socket
import time

import pytest

from ptdmpi.base.launched import COPIES, OPEN_MPI
from ptdmpi.comm.world import World
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.watch import heartbeat
from ptdmpi.watch.heartbeat import Heartbeat, Judge
from ptdmpi.watch.requests import StopRequest
from ptdmpi.watch.stopwatch import Place
from ptdmpi.watch.whereabouts import Ranks, Report, Seen, culprits, describe, waits_for
from tests._runs import configuration, corpus, log, loop, records
from tests.parallel import mpirun, parallel

HOST = socket.gethostname()

# A training in which rank RANK acts inside op OP of step 3, before it computes.
PATCHED = """
import contextlib, os, signal, time
from ptdmpi.cli import main
from ptdmpi.comm import launch
launch.prepare()
from ptdmpi.watch.stopwatch import Stopwatch
span = Stopwatch.span
@contextlib.contextmanager
def patched(self, kind, op="", peer=None):
    here = os.environ["OMPI_COMM_WORLD_RANK"] == RANK and kind in ("forward", "backward")
    def act():
        {act}
    with span(self, kind, op, peer):
        if here and self.place.step == 3 and op == OP:
            act()
        yield
Stopwatch.span = patched
main()
"""


def run_patched(folder, act: str, op: str, rank: int, **changes):
    """Run `ptdmpi train` on t=2, p=2, with `act` in one op of a rank; return the ended process."""
    import tomlkit

    corpus(folder)
    sizes = {"parallel.tensor": 2, "parallel.pipeline": 2, "run.steps": 50}
    tree = configuration(folder, {**sizes, **changes})
    (folder / "config.toml").write_text(tomlkit.dumps(tree))
    program = f"OP, RANK = {op!r}, {str(rank)!r}" + PATCHED.format(act=act)
    return mpirun(
        4, ["-c", program, "train", "config.toml"], cwd=folder, check=False, timeout_s=100
    )


def rows_of(folder) -> dict[int, str]:
    """Return each rank's row of the table in the log."""
    rows = re.findall(r"^(\d+) +\S+ +3 +(.*)$", log(folder / "run"), re.MULTILINE)
    return {int(rank): row for rank, row in rows}


@pytest.mark.long
def test_a_hang_names_the_rank_that_computes_and_who_waits_for_it(tmp_path):
    done = run_patched(tmp_path, "time.sleep(99)", "F0.2", 1, **{"run.stall_s": 2.0})
    assert done.returncode not in (0, 2, 75)
    text = log(tmp_path / "run")
    assert f"held up by rank 1 ({HOST})" in text and text in done.stdout
    table = rows_of(tmp_path)
    assert sorted(table) == [0, 1, 2, 3]
    assert re.match(r"F0\.2 +\d+ s +<-- here$", table[1])
    assert re.match(r"F0\.2, in all_reduce \(tensor\) +\d+ s +1$", table[0])
    assert re.match(r"waits for F0\.2 +\d+ s +0$", table[2])
    assert re.match(r"waits for F0\.2 +\d+ s +1$", table[3])
    stacks = tmp_path / "run/stacks"
    for rank in range(4):
        stack = (stacks / f"rank-{rank:05d}.txt").read_text()
        assert stack.startswith(f"rank {rank} ({HOST}), process ")
        assert ("in act" in stack) == (rank == 1)
    assert "held up by rank 1" in (stacks / "table.txt").read_text()


@pytest.mark.long
def test_rank_0_is_missed_too(tmp_path):
    act = "os.kill(os.getpid(), signal.SIGSTOP)"
    done = run_patched(tmp_path, act, "F0.2", 0, **{"run.stall_s": 2.0})
    assert done.returncode not in (0, 2, 75)
    line = f"stall: rank 0 ({HOST}) has not reported for "
    assert line in done.stderr and line in log(tmp_path / "run")
    stacks = {path.name for path in (tmp_path / "run/stacks").glob("rank-*.txt")}
    assert stacks >= {f"rank-{rank:05d}.txt" for rank in (1, 2, 3)}


@parallel(ranks=[3])
def test_rank_0_is_missed_from_the_start_on(comm, tmp_path):
    """Rank 1 alone misses it, even if rank 0 stops before its first beat."""
    axes, ranks = World(comm).split(training_grid(data=3)), Ranks(training_grid(data=3), [HOST] * 3)
    heart = Heartbeat(
        axes, ranks, Place(), StopRequest(), directory=tmp_path, judge=None, stall_s=60.0
    )
    assert heart.start()
    missed = heart.deputy.replaces(time.monotonic() + 61.0)
    heart.close()
    assert missed == (comm.rank == 1)


@parallel(ranks=[2])
def test_an_end_waits_for_nobody_who_has_said_goodbye(comm, tmp_path):
    """Rank 1 is done first, and rank 0's thread hears it while rank 0 still trains."""
    grid, host = training_grid(data=2), [HOST] * 2
    axes, rank_0 = World(comm).split(grid), judge(60.0)[0] if comm.rank == 0 else None
    heart = Heartbeat(
        axes,
        Ranks(grid, host),
        Place(),
        StopRequest(),
        directory=tmp_path,
        judge=rank_0,
        stall_s=60.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat, "COLLECT_S", math.inf)  # the test's own limit ends it instead
        assert heart.start()
        while rank_0 and not rank_0.table[1].report.leaves:
            time.sleep(0.01)
        heart.finish()


@pytest.mark.long
def test_a_crash_names_the_rank_and_where_the_others_are(tmp_path):
    """This is the whole; its parts: the hang above, the judge below, tests/comm/test_world.py."""
    act = "raise RuntimeError('out of luck')"
    done = run_patched(tmp_path, act, "B1.1", 2)
    assert done.returncode not in (0, 2, 75)
    assert f"[rank 2 on {HOST}] RuntimeError: out of luck" in done.stderr
    line = f"failed: rank 2 ({HOST}): RuntimeError: out of luck (in op B1.1 of this rank's schedule"
    assert line + ")" in log(tmp_path / "run").splitlines()
    table = rows_of(tmp_path)
    assert "<-- here (RuntimeError: out of luck" in table[2]
    assert table[3].startswith("B1.1, in ") and table[3].endswith(" 2")
    assert len(list((tmp_path / "run/stacks").glob("rank-*.txt"))) == 4


@pytest.mark.long
def test_a_second_signal_stops_at_once(tmp_path):
    """Rank 1 hangs, so no vote takes place, but its signals count, duplicates once."""
    act = (
        "[(time.sleep(s), os.kill(os.getpid(), signal.SIGUSR1)) for s in (0, 0.7, 6)]; "
        "time.sleep(99)"
    )
    start = time.monotonic()
    done = run_patched(tmp_path, act, "F0.2", 1)
    assert time.monotonic() - start < 60
    assert done.returncode == 75, done.stderr
    text = log(tmp_path / "run")
    assert text.count(f"SIGUSR1 on rank 1 ({HOST}): stops after this step") == 1
    assert text.count("again: stopped at once") == 1
    assert not (tmp_path / "run/checkpoints").exists()


@parallel(ranks=[2])
def test_a_slow_rank_is_named_with_its_factor(comm, tmp_path):
    def patch(made):
        step, judge = made.engine.step, made.lookout.judge
        if made.lookout.slow is not None:
            made.lookout.slow.shares_cores = False

        def slower(number, batches):
            result = step(number, batches)
            last_s = time.monotonic() + 30
            while judge and number == 39 and not judge.compute_s() and time.monotonic() < last_s:
                time.sleep(0.01)  # until both hearts have told
            # what a rank's clock said does not matter here: its neighbour takes twice as long
            return type(result)(**{**vars(result), "compute_s": 1.0 + comm.rank})

        made.engine.step = slower

    with loop(comm, tmp_path, {"run.steps": 40}, patch) as made:
        made.run()
        host = made.world.host
    if comm.rank == 0:
        assert f"work: rank 1 ({host}) 2.00 times" in log(tmp_path / "run")
        slow = [r["slow_ranks"] for r in records(tmp_path / "run") if "slow_ranks" in r]
        assert slow == [[{"rank": 1, "host": host, "factor": 2.0}]] * len(slow) and slow


@parallel(ranks=[2])
def test_own_work_is_without_waiting_for_the_tensor_axis(comm, tmp_path):
    """Rank 1 computes each step a second longer; rank 0 waits for it in a collective."""

    def patch(made):
        (stage,) = made.engine.stages.values()
        block = stage.layers["0"]
        if comm.rank == 1:
            block.register_forward_pre_hook(lambda module, inputs: time.sleep(0.5))

    changes = {"parallel.tensor": 2, "run.steps": 1, "batch.global_size": 2}
    with loop(comm, tmp_path, changes, patch) as made:
        made.run()
        (mine,) = made.lookout.place.compute_s
        waited_s = made.engine.runner.inside_s["tensor"]
    if comm.rank == 1:
        assert mine > 1.0
    else:  # a busy machine may have kept it from being there in time
        assert waited_s > 0.5 and mine < made.lookout.durations[0] - 0.5


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_own_work_is_without_waiting_for_other_data_ranks(comm, tmp_path, zero):
    """Rank 1 takes half a second longer; with shards, rank 0 waits for it inside its ops."""

    def patch(made):
        (stage,) = made.engine.stages.values()
        if comm.rank == 1:
            block = stage.layers["1"]
            block.register_forward_pre_hook(lambda module, inputs: time.sleep(0.5))

    changes = {"parallel.zero": zero, "run.steps": 1, "batch.global_size": 2}
    with loop(comm, tmp_path, changes, patch) as made:
        made.run()
        (mine,) = made.lookout.place.compute_s
        whole_s = made.lookout.durations[0]
    if comm.rank == 1:
        assert mine > 0.5
    else:
        assert mine < whole_s - 0.4


@parallel(ranks=[4])
@pytest.mark.parametrize(
    ("shards", "group", "words", "others"),
    [
        (1, "replicate", "data", {0, 1, 2}),
        (4, "shard", "data", {0, 1, 2}),
        (2, "shard", "shard", {2}),
        (2, "replicate", "replicate", {1}),
    ],
)
def test_a_rank_in_a_collective_is_told_by_its_group(comm, tmp_path, shards, group, words, others):
    """It waits for the ranks of the group: the whole data axis, or one of its two groups."""
    world, grid = World(comm), training_grid(data=4, shards=shards)
    axes, ranks = world.split(grid), Ranks(grid, [HOST] * 4)
    heart = Heartbeat(
        axes, ranks, Place(), StopRequest(), directory=tmp_path, judge=None, stall_s=1.0
    )
    elsewhere = {rank: Seen(report(1.0), 0.0) for rank in range(4)}
    reports: list[Report] = []
    axes[group].timed("all_gather", lambda: reports.append(heart._report()))
    assert describe(reports[0]).endswith(f", in all_gather ({words})")
    table = {**elsewhere, 3: Seen(reports[0], 0.0)}
    assert set(waits_for(3, table, ranks)) == others
    assert culprits(table, ranks, 0.0) == [0, 1, 2]


@pytest.mark.long
def test_a_hang_of_a_sharded_rank(tmp_path):
    """Its own group waits for it inside an op, the other group at the sum over both."""
    sizes = {"parallel.tensor": 1, "parallel.pipeline": 1, "parallel.data": 4}
    sharded = {"parallel.zero": 3, "parallel.shard_group": 2, "batch.micro_size": 2}
    act = "time.sleep(99)"
    more = {**sizes, **sharded, "run.stall_s": 8.0}
    done = run_patched(tmp_path, act, "B0.0", 3, **more)
    assert done.returncode not in (0, 2, 75)
    assert f"held up by rank 3 ({HOST})" in log(tmp_path / "run")
    table = rows_of(tmp_path)
    assert re.match(r"B0\.0 +\d+ s +<-- here$", table[3])
    assert re.match(r"B0\.0, in \w+ \(shard\) +\d+ s +3$", table[2])
    for rank in (0, 1):
        assert re.match(rf"reduce, in all_reduce \(replicate\) +\d+ s +{rank + 2}$", table[rank])


def judge(stall_s: float) -> tuple[Judge, list[str]]:
    said: list[str] = []
    return Judge(Ranks(training_grid(data=2), ["a", "b"]), stall_s, said.append), said


def report(age_s: float, phase: str = "training", **more) -> Report:
    return Report(phase, 3, "forward", "F0.0", None, "", "", age_s, **more)


@pytest.mark.parametrize(
    ("ages", "phase", "step_s", "stalls"),
    [
        ((11.0, 12.0), "training", 0.1, True),
        ((11.0, 9.0), "training", 0.1, False),  # one rank still begins things
        ((11.0, 12.0), "training", 3.0, False),  # no shorter than five steps
        ((16.0, 16.0), "training", 3.0, True),
        ((11.0, 12.0), "saving", 0.1, False),
        ((101.0, 102.0), "saving", 0.1, True),
    ],
)
def test_what_counts_as_a_stall(ages, phase, step_s, stalls):
    rank_0, _ = judge(10.0)
    rank_0.step_s = step_s
    now_s = time.monotonic()
    rank_0.hear(0, report(ages[0]), now_s)
    rank_0.hear(1, report(ages[1], phase), now_s)
    assert rank_0.look(now_s) == stalls
    off, _ = judge(0.0)
    off.table = rank_0.table
    assert not off.look(now_s)


def _beats(rank_0: Judge, start_s: float, seconds: range, phase: str = "training") -> list[bool]:
    """Return the judge's answer in each second, while rank 0 reports that it waits."""
    answers = []
    for second in seconds:
        rank_0.hear(0, report(float(second), phase), start_s + second)
        answers.append(rank_0.look(start_s + second))
    return answers


@pytest.mark.parametrize("phase", ["start-up", "training", "saving"])
def test_a_frozen_rank_is_acted_on_in_time_whatever_it_did_last(phase):
    """Its last report is old; a start-up may take longer only for ranks that report."""
    rank_0, _ = judge(6.0)
    start_s = time.monotonic()
    rank_0.hear(1, report(0.0, phase), start_s)
    assert _beats(rank_0, start_s, range(10), phase) == [*[False] * 7, True, False, False]
    assert not rank_0.complete(start_s + 7.1)  # rank 0 has not written its stacks
    rank_0.hear(0, report(7.0, shown=True), start_s + 7.2)
    assert rank_0.complete(start_s + 7.2)  # and nobody waits for those of the frozen rank


def test_the_return_of_a_rank_is_mentioned():
    rank_0, said = judge(600.0)
    start_s = time.monotonic()
    rank_0.hear(1, report(0.0), start_s)
    _beats(rank_0, start_s, range(30))
    assert [line for line in said if "rank 1 (b) has not reported" in line] == said != []
    rank_0.hear(1, report(30.0), start_s + 30)
    rank_0.look(start_s + 30)
    assert said[1:] == ["rank 1 (b) reports again after 30 s"]


def test_a_job_that_was_stopped_as_a_whole_is_not_a_stall():
    """After SIGSTOP and SIGCONT to all ranks all reports are old, but no rank hangs."""
    rank_0, _ = judge(10.0)
    start_s = time.monotonic()
    rank_0.hear(1, report(0.0), start_s)
    assert not any(_beats(rank_0, start_s, range(3)))
    assert not rank_0.look(start_s + 500.0)
    rank_0.hear(0, report(0.1), start_s + 501.0)
    rank_0.hear(1, report(0.1), start_s + 501.0)
    assert not rank_0.look(start_s + 506.0) and not rank_0.look(start_s + 507.0)


def test_the_earliest_failure_comes_first(tmp_path):
    rank_0, said = judge(10.0)
    now_s = time.monotonic()
    rank_0.hear(1, report(1.0, failure=(70.0, "late"), shown=True), now_s)
    assert rank_0.look(now_s) and not rank_0.look(now_s)
    rank_0.hear(0, report(1.0, failure=(60.0, "early")), now_s)
    assert not rank_0.complete(now_s) and rank_0.complete(now_s + 9.0)
    sent: list[str] = []
    rank_0.ended = sent.append  # the messages of `log.notify`
    rank_0.pronounce(tmp_path)
    assert said[0] == "failed: rank 0 (a): early" and said[1] == "failed: rank 1 (b): late"
    assert sent == said[:1]


def test_signals_within_five_seconds_are_one():
    rank_0, said = judge(10.0)
    usr1, term = int(signal.SIGUSR1), int(signal.SIGTERM)
    rank_0.hear(0, report(1.0, signals=((usr1, 0.0),)), 100.0)
    rank_0.hear(1, report(1.0, signals=((usr1, 0.0),)), 103.0)
    # heard late, but it came within the five seconds
    rank_0.hear(0, report(1.0, signals=((usr1, 6.0), (usr1, 2.0))), 106.0)
    assert len(said) == 1 and not rank_0.stop_at_once
    rank_0.hear(1, report(1.0, signals=((usr1, 4.0), (term, 0.5))), 107.0)
    assert rank_0.stop_at_once and said[1].startswith("SIGTERM on rank 1 (b), again")


def test_a_stop_is_not_promised_where_mpirun_kills(monkeypatch):
    """Open MPI's mpirun sends SIGTERM, and SIGKILL a quarter of a second later."""
    monkeypatch.setenv(OPEN_MPI, "2")
    acknowledged = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        for supervised in (False, True):
            monkeypatch.delenv(COPIES, raising=False)
            if supervised:
                monkeypatch.setenv(COPIES, "/dev/shm/copies")
            rank_0, said = judge(10.0)
            rank_0.hear(1, report(1.0, signals=((int(number), 0.0),)), 100.0)
            acknowledged += said
    assert ["unless mpirun kills" in line for line in acknowledged] == [True, False, False, False]


@pytest.mark.long
def test_without_threads_in_mpi_a_run_goes_on_and_says_so(tmp_path):
    import tomlkit

    corpus(tmp_path)
    tree = configuration(tmp_path, {"run.steps": 2})
    (tmp_path / "config.toml").write_text(tomlkit.dumps(tree))
    program = "import mpi4py; mpi4py.rc.thread_level = 'serialized'\n"
    program += "from ptdmpi.cli import main; main()"
    done = mpirun(1, ["-c", program, "train", "config.toml"], cwd=tmp_path, timeout_s=60)
    assert "no MPI_THREAD_MULTIPLE" in done.stdout
    assert (tmp_path / "run/done").exists()
