"""The supervisor with a stand-in for mpirun (`conftest.py`), which does what the test says at each
start."""

import array
import contextlib
import errno
import fcntl
import http.server
import json
import os
import signal
import subprocess
import tempfile
import termios
import threading
import time

import pytest

from ptdmpi.config import InputError
from ptdmpi.supervise.environment import mpi_environment, unusable_temporary_folder
from ptdmpi.supervise.judge import Starts, judged
from ptdmpi.supervise.place import LaunchHost, LaunchPlace, place_of
from ptdmpi.supervise.start import Ended


def ends(process: subprocess.Popen) -> tuple[int, str]:
    """Return exit code and messages of a job."""
    _, text = process.communicate(timeout=60)
    return process.returncode, text


def calls(folder) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_a_killed_start_goes_on_and_asks_for_nothing_anew(job, tmp_path):
    code, text = ends(job("step(2); die()", "done(9)", options=("--set", "run.kernels=anew")))
    assert code == 0, text
    first, second = calls(tmp_path)
    assert first.startswith("-n 4 ") and second.startswith("-n 4 ")
    assert "run.kernels=kept" not in first and second.endswith("--set run.kernels=kept")
    assert "exit code 137 after step 2; starting 4 ranks again" in text


@pytest.mark.parametrize("starts", [(), ("Path('tmp').rmdir(); Path('tmp').touch(); die()",)])
def test_a_temporary_folder_that_takes_no_file_is_named_once(job, tmp_path, starts):
    """At the first start, or at a restart; mpirun's own messages do not name the folder."""
    temporary = tmp_path / "tmp"
    if starts:
        temporary.mkdir()
    else:
        temporary.touch()
    code, text = ends(job(*starts, environ={"TMPDIR": str(temporary)}))
    assert code == 2, text
    assert text.count(f"temporary folder {temporary}: Not a directory") == 1
    assert not (tmp_path / "calls").exists() or len(calls(tmp_path)) == len(starts)


def test_a_temporary_folder_without_space(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert unusable_temporary_folder({"TMPDIR": str(tmp_path)}) == ""
    assert unusable_temporary_folder({"TMPDIR": str(tmp_path / "new" / "folder")}) == ""
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert unusable_temporary_folder({"TMPDIR": "", "TMP": str(tmp_path)}) == (
        f"temporary folder {tmp_path}: No space left on device: mpirun cannot write its files; "
        "free space, or set TMPDIR to another folder"
    )


@pytest.mark.parametrize("code", [2, 3, 75])
def test_bad_input_corruption_and_a_stop_are_final(job, tmp_path, code):
    assert ends(job(f"sys.exit({code})"))[0] == code
    assert len(calls(tmp_path)) == 1


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (99_999_999, (), "-n 99999999: no machine takes so many; legal: 1 to 16777216"),
        (5000, ("--hosts", "a"), "5000 ranks on host a; legal: 1 to 4096 ranks on a host"),
        (2, ("--hosts", "a\x1b:2"), "--hosts a\\x1b:2: write name or name:ranks"),
        (2, ("--set", "run.steps=1e3"), "run.steps = 1000.0: Input should be a valid integer"),
        (2, ("--set", "log.every_steps=0"), "log.every_steps = 0: Input should be greater"),
        (5, (), "batch.global_size = 8 is not a multiple of data * micro_size = 5"),
    ],
)
def test_ranks_that_cannot_train_are_refused_before_a_launcher_starts(
    job, tmp_path, n, options, message
):
    code, text = ends(job("done(9)", n=n, options=options))
    assert code == 2 and message in text and "Traceback" not in text
    assert not (tmp_path / "calls").exists()


def test_the_start_of_the_launcher_is_said(job):
    assert "ptdmpi run: starting 4 ranks by mpirun\n" in ends(job("done(9)"))[1]


def test_a_zero_of_the_launcher_is_not_trusted(job, tmp_path):
    assert ends(job("step(2)", "done(9)"))[0] == 0
    assert len(calls(tmp_path)) == 2


def test_a_launcher_that_starts_nothing_is_reported_at_once(job, tmp_path):
    code, text = ends(job("sys.exit(0)", "done(9)"))
    assert code == 2 and "run: mpirun ended with exit code 0 and has started no rank" in text
    assert len(calls(tmp_path)) == 1
    code, text = ends(job("done(9)", options=("--launcher", "echo")))
    assert code == 2 and "run: echo ended with exit code 0 and has started no rank" in text


def test_an_error_that_repeats_at_the_same_step_is_final(job, tmp_path):
    code, text = ends(job("step(3); fail()", "fail()", "done(9)"))
    assert code == 1 and "the same step failed twice, after step 3" in text
    assert len(calls(tmp_path)) == 2


def test_deaths_without_a_new_step_are_counted(job, tmp_path):
    code, text = ends(job("step(3); die()", "die()", "done(9)", options=("--restarts", "1")))
    assert code == 137 and "1 restart in a row brought no new step" in text
    assert len(calls(tmp_path)) == 2


def test_a_bus_error_names_its_cause(job):
    code, text = ends(job("os.kill(os.getpid(), signal.SIGBUS)", "done(9)"))
    assert code == 0
    assert "exit code 135 (bus error: a file was truncated while it was read) after step 0" in text


def test_a_layout_is_searched_once(job, tmp_path):
    wrote = "step(2); Path('r/config.toml').write_text(''); die()"
    assert ends(job(wrote, "done(9)", options=("--layout", "auto")))[0] == 0
    first, second = calls(tmp_path)
    assert first.endswith("config.toml --layout auto")
    assert "train r/config.toml" in second and "--layout" not in second


def test_the_layout_of_an_earlier_job_is_not_taken(job, tmp_path):
    """Its file may be newer than the start of this job, by a clock that was wrong."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.toml").write_text("")
    future_s = time.time() + 1e6
    os.utime(tmp_path / "r" / "config.toml", (future_s, future_s))
    wrote = (
        "step(2); Path('r/config.toml').write_text('x'); os.utime('r/config.toml', (0, 0)); die()"
    )
    assert ends(job(wrote, "done(9)", options=("--layout", "auto")))[0] == 0
    first, second = calls(tmp_path)
    assert first.endswith("train config.toml --layout auto")
    assert "train r/config.toml" in second and "--layout" not in second


@pytest.mark.long
def test_a_full_disk_takes_no_output_and_ends_nothing(job, tmp_path):
    """More lines than the pipes hold, so the launcher waits if nobody reads them."""
    lines = "print('line\\n' * 100_000, flush=True); print('x\\n' * 100_000, file=sys.stderr)"
    with open("/dev/full", "w") as full:
        process = job(f"{lines}; done(9)", output=full)
        assert process.wait(60) == 0
    assert len(calls(tmp_path)) == 1


def test_a_reader_that_waits_delays_no_stop(job, tmp_path):
    """Nobody reads the output, so the supervisor waits to print, as before a stopped `less`."""
    lines = "print('line\\n' * 20_000, file=sys.stderr, flush=True)"
    process = job(f"{lines}; step(9)\nwhile not asked: time.sleep(0.01)\nopen('stop', 'w')")
    end = time.monotonic() + 30
    pipe, size, before = process.stderr.fileno(), array.array("i", [0]), -1
    while not size[0] or size[0] != before:  # until the pipe is full
        assert time.monotonic() < end
        before = size[0]
        time.sleep(0.3)
        fcntl.ioctl(pipe, termios.FIONREAD, size)
    process.send_signal(signal.SIGINT)
    while not (tmp_path / "stop").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    ends(process)


def test_ranks_may_survive_one_another(job, tmp_path):
    assert ends(job("done(9)", options=("--set", "run.on_failure=shrink")))[0] == 0
    assert calls(tmp_path)[0].startswith("--with-ft ulfm -n 4 ")


def test_never_resume_means_the_first_start_alone(job, tmp_path):
    options = ("--set", "checkpoint.resume=never")
    assert ends(job("step(1); die()", "save(2); die()", "done(9)", options=options))[0] == 0
    assert ["resume=auto" in call for call in calls(tmp_path)] == [False, False, True]


def test_lost_host_spare_host_and_growth(job, tmp_path):
    options = ("--hosts", "a:2,b:2,c:1", "--grow-every", "0.2")
    lost = "step({}); open('down/{}', 'w'); sys.exit(1)"
    process = job(
        lost.format(2, "b"),  # 4 ranks on a and b: c takes one rank, so d = 2 on a
        "step(3); os.remove('down/b'); wait()",
        "done(9)",
        options=options,
    )
    code, text = ends(process)
    assert code == 0, text
    hosts = [call.partition("--host ")[2].split()[0] for call in calls(tmp_path)]
    assert hosts == ["a:2,b:2", "a:2", "a:2,b:2"]
    ranks = [call.partition("-n ")[2].split()[0] for call in calls(tmp_path)]
    assert ranks == ["4", "2", "4"]
    assert "parallel.data=auto" in calls(tmp_path)[1]
    assert "parallel.data=auto" not in calls(tmp_path)[2]
    assert "lost: b; starting 2 ranks again" in text and "room for 4 ranks again" in text


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("second", "count"),
    [
        # the disk is full: the save never comes, and the ranks keep their state
        ("step(3); os.remove('down/b'); time.sleep(1.0); sys.exit(2) if asked else done(9)", 2),
        # the save came, but the disk was full when the ranks stopped
        ("step(3); os.remove('down/b'); wait(2)", 3),
    ],
)
def test_a_full_disk_does_not_end_a_run_that_could_grow(job, tmp_path, second, count):
    options = ("--hosts", "a:2,b:2", "--grow-every", "0.2")
    lost = "step(2); open('down/b', 'w'); sys.exit(1)"
    code, text = ends(job(lost, second, "done(9)", options=options))
    assert code == 0 and len(calls(tmp_path)) == count, text
    assert text.count("room for 4 ranks again") == 1
    assert not (tmp_path / "r" / "SAVE").exists()


@pytest.mark.long
def test_a_node_that_refuses_once_is_not_lost(job, tmp_path):
    """The daemon of the launcher that has just ended may still clean up there."""
    (tmp_path / "busy").mkdir()
    first = "step(2); open('busy/a', 'w').close(); sys.exit(1)"
    code, text = ends(job(first, "done(9)", options=("--hosts", "a:2,b:2")))
    assert code == 0 and "lost: " not in text, text
    assert [call.partition("-n ")[2].split()[0] for call in calls(tmp_path)] == ["4", "4"]


def test_ranks_that_others_went_on_without_come_back(job, tmp_path):
    settings = ("run.on_failure=shrink", "run.spare_ranks=1", "batch.global_size=12")
    options = tuple(word for setting in settings for word in ("--set", setting))
    shrunk = "step(2, 3); step(3, 2); wait()"
    code, text = ends(job(shrunk, "step(4, 3); done(9)", options=(*options, "--grow-every", "0.2")))
    assert code == 0, text
    assert len(calls(tmp_path)) == 2 and "room for 4 ranks again" in text


def test_a_spare_rank_in_the_place_of_a_lost_one_is_no_loss(job, tmp_path):
    settings = ("run.on_failure=shrink", "run.spare_ranks=1", "batch.global_size=12")
    options = tuple(word for setting in settings for word in ("--set", setting))
    whole = "step(2, 3); time.sleep(1.0); done(9)"
    assert ends(job(whole, options=(*options, "--grow-every", "0.2")))[0] == 0
    assert len(calls(tmp_path)) == 1


def test_a_request_reaches_the_ranks(job, tmp_path):
    process = job("step(1); open('ready', 'w'); wait()")
    end = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert ends(process)[0] == 75


def test_notices_of_the_launcher(job, tmp_path):
    notice = "print('-' * 76 + '\\nprterun noticed X\\n' + '-' * 76, file=sys.stderr)\n"
    error = "print('ptdmpi: error: no', file=sys.stderr, flush=True)\n"
    code, text = ends(job(error + notice + "sys.exit(2)"))
    said = ["ptdmpi run: starting 4 ranks by mpirun", "ptdmpi: error: no"]
    assert code == 2 and text.splitlines() == said
    (tmp_path / "calls").unlink()
    code, text = ends(job(notice + "die()", options=("--restarts", "0")))
    assert "prterun noticed X" in text


def test_a_file_of_bash_may_print_and_may_fail(tmp_path):
    """Bash runs the file that BASH_ENV names before each script."""
    file = tmp_path / "file"
    environ = {"PATH": os.environ["PATH"], "BASH_ENV": str(file), "A": "two\nlines"}
    file.write_text("printf 'modules are loaded'")
    assert mpi_environment(environ)["A"] == "two\nlines"
    file.write_text("echo no modules >&2; exit 3")
    with pytest.raises(InputError, match=r"mpi-env.sh: bash cannot run it: no modules; is BASH"):
        mpi_environment(environ)


def test_no_mpirun(job, tmp_path):
    (tmp_path / "bin" / "mpirun").unlink()
    with contextlib.suppress(FileNotFoundError):
        if any(os.access(f"{folder}/mpirun", os.X_OK) for folder in ("/usr/bin", "/bin")):
            pytest.skip("this machine has an mpirun of its own")
    code, text = ends(job())
    assert code == 2 and text.startswith("ptdmpi: error: no mpirun on PATH")


def test_judgement():
    killed = Ended(137, failed=False)
    assert judged(killed, Starts(), 3, asked=False, restarts=1).code is None
    # a rank that had no handlers yet: nothing was lost
    assert judged(Ended(138, failed=False), Starts(), 0, asked=True, restarts=1).code == 75
    assert judged(killed, Starts(), 3, asked=True, restarts=1).code == 137
    again = Starts(furthest=3, idle=1)
    assert judged(killed, again, 3, asked=False, restarts=1).code == 137
    assert judged(killed, again, 4, asked=False, restarts=1).code is None


def test_commands_of_launchers():
    nodes = (LaunchHost("a", 2), LaunchHost("b", 2))
    slurm = LaunchPlace("srun", nodes, ("--mpi=pmix",), ranks=4)
    expected = "srun --mpi=pmix -n 4 -N 2 --ntasks-per-node=2 --nodelist a,b"
    assert slurm.command(4, nodes) == expected.split()
    assert slurm.command(2, nodes[1:])[-1] == "b"
    assert LaunchPlace("mpiexec", nodes).command(4, nodes)[-4:] == [
        "--ppn",
        "2",
        "--hosts",
        "a,b",
    ]
    assert LaunchPlace("mpirun").command(4, ()) == ["mpirun", "-n", "4"]
    with pytest.raises(InputError, match="take 4 ranks"):
        LaunchPlace("mpirun", nodes).filled(5)
    even = LaunchPlace("mpirun", (LaunchHost("a"), LaunchHost("b"))).filled(5)
    assert [node.ranks for node in even.nodes] == [3, 3]


def program(folder, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def found(tmp_path):
    """An environment with Open MPI's mpirun."""
    program(tmp_path, "mpirun", "echo 'mpirun (Open MPI) 5'")
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_nodes_of_pbs_and_lsf(tmp_path, found):
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    for variable in ({"PBS_NODEFILE": str(tmp_path / "nodes")}, {"LSB_MCPU_HOSTS": "a 2 b 2"}):
        place = place_of("", found | variable)
        assert place.ranks == 4
        assert place.command(4, place.nodes)[-2:] == ["--host", "a:2,b:2"]
        named = place_of("c:3", found | variable)  # the user's hosts count more
        assert [node.name for node in named.nodes] == ["c"]
    for hosts in ("a 2 b", "a 2 b many", "a -1"):
        with pytest.raises(InputError, match=f"LSB_MCPU_HOSTS {hosts}: legal: host1 4 host2 4"):
            place_of("", found | {"LSB_MCPU_HOSTS": hosts})


def test_nodes_of_flux(tmp_path, found):
    """Flux does not say how many ranks its nodes take, so these are divided equally."""
    flux = found | {"FLUX_URI": "local:///run/flux/local"}
    with pytest.raises(InputError, match="FLUX_URI is set, but flux: No such file or directory"):
        place_of("", flux)
    program(tmp_path, "flux", 'test "$*" = "hostlist --expand local" && echo a b')
    place = place_of("", flux)
    assert place.ranks == 0
    place = place.filled(4)
    assert place.command(4, place.nodes)[-2:] == ["--host", "a:2,b:2"]
    program(tmp_path, "flux", "echo 'flux: no broker' >&2; exit 1")
    with pytest.raises(InputError, match="expand local: flux: no broker; legal: --hosts"):
        place_of("", flux)


def test_a_launcher_of_the_users(tmp_path):
    """With its options, which come before those of hosts and ranks."""
    for name in ("srun", "mpiexec"):
        (tmp_path / name).write_text("#!/bin/sh\necho HYDRA\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho a\necho b\n")
    (tmp_path / "scontrol").chmod(0o755)
    found = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    place = place_of("a,b", found, "mpiexec --cpu-bind depth").filled(4)
    command = "mpiexec --cpu-bind depth -n 4 --ppn 2 --hosts a,b"
    assert place.command(4, place.nodes) == command.split()
    slurm = {**found, "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    place = place_of("", slurm, f"{tmp_path}/srun --mpi=pmi2")
    words = place.command(4, place.nodes)
    assert words[0] == f"{tmp_path}/srun" and words[-2:] == ["--nodelist", "a,b"]
    assert [word for word in words if word.startswith("--mpi")] == ["--mpi=pmi2"]
    with pytest.raises(InputError, match="no aprun on PATH"):
        place_of("", found, "aprun")
    with pytest.raises(InputError, match="--launcher srun 'a: No closing quotation"):
        place_of("", found, "srun 'a")


def test_wrong_hosts(tmp_path):
    with pytest.raises(InputError, match="--hosts a:x"):
        place_of("a:x", mpi_environment())


def test_environment_is_the_scripts():
    found = mpi_environment({"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3"})
    assert found["OMP_NUM_THREADS"] == "3"
    assert json.dumps(found["OMPI_ALLOW_RUN_AS_ROOT"]) == '"1"'


@pytest.mark.parametrize(
    ("starts", "last"),
    [
        (("step(2); die()", "done(9)"), ("done", 9, "")),
        (
            ("step(2); die()", "fail()", "fail()"),
            ("failed", 2, "the same step failed twice, after step 2: not started again"),
        ),
        (("step(2); die()", "end('stopped: SIGUSR1'); sys.exit(75)"), ("stopped", 2, "SIGUSR1")),
    ],
)
def test_messages_are_sent_about_everything_that_the_supervisor_sees(job, starts, last):
    got: list[dict] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        hook = {"HOOK": f"http://127.0.0.1:{server.server_port}/T0secret"}
        _, text = ends(job(*starts, options=("--set", 'log.notify=["env:HOOK"]'), environ=hook))
        server.shutdown()
    events = [(message["event"], message["step"], message["why"]) for message in got]
    assert events[0] == ("begins", 0, "4 ranks") and events[-1] == last
    assert events[1][:2] == ("restarts", 2) and "exit code 137" in events[1][2]
    assert [message["loss"] for message in got[:2]] == [None, 1.0]
    assert "T0secret" not in text


def test_a_missing_address_is_refused_before_a_launcher_starts(job, tmp_path):
    code, text = ends(job("done(9)", options=("--set", 'log.notify=["env:HOOK"]')))
    assert code == 2 and "the environment variable HOOK is not set" in text
    assert not (tmp_path / "calls").exists()
