"""Common parts of all commands of both programs: options, exit codes, errors of one line."""

import importlib
import inspect
import os
import subprocess
import sys

import click
import pytest

import data_prep.cli
import ptdmpi.cli
from ptdmpi.config import InputError
from ptdmpi.terminal.options import NamedPath
from ptdmpi.terminal.program import Command, CommandGroup, run
from tests.parallel import ROOT, mpirun

PROGRAMS = {"ptdmpi": ptdmpi.cli, "ptdmpi-data": data_prep.cli}


def called(monkeypatch, capsys, *words, rank=0, size=1):
    """Return (exit code, stdout, stderr) of a command line, on one rank of a launch."""
    monkeypatch.setattr(sys, "argv", list(words))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    try:
        PROGRAMS[words[0]].main()
        code = 0
    except SystemExit as error:
        code = error.code or 0
    return code, *capsys.readouterr()


def every_command():
    """Yield the words of each command and each group of both programs."""

    def below(words, command):
        yield words
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                yield from below([*words, name], command.get_command(context, name))

    yield from below(["ptdmpi"], ptdmpi.cli.group)
    yield from below(["ptdmpi-data"], data_prep.cli.commands)


@pytest.mark.parametrize("words", list(every_command()), ids=" ".join)
def test_options_that_every_command_has(monkeypatch, capsys, words):
    code, short, _ = called(monkeypatch, capsys, *words, "-h")
    assert code == 0 and "Exit codes: 0 done," in short
    assert called(monkeypatch, capsys, *words, "--help") == (0, short, "")
    assert all(option in short for option in ("--quiet", "--version"))
    version = called(monkeypatch, capsys, *words, "--version")
    assert version[0] == 0 and version[1].startswith(f"{words[0]}, version ")
    code, out, error = called(monkeypatch, capsys, *words, "--no-such-option")
    assert (code, out) == (2, "") and error.count("\n") == 1
    assert error.startswith(f"{words[0]}: error: No such option") and "-h says" in error
    for question in ("-h", "--version", "--no-such-option"):  # rank 0 says it for all
        assert called(monkeypatch, capsys, *words, question, rank=1, size=2) == (0, "", "")


# imports every command, as its help does, where slow packages cannot be imported
HELPED = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "h5py", "mpi4py", "matplotlib", "tokenizers"):
            raise ImportError(f"{name} is slow to import")

sys.meta_path.insert(0, Blocker())
import data_prep.cli, ptdmpi.cli
for name in ptdmpi.cli.COMMANDS:
    importlib.import_module(f"ptdmpi.commands.{name}")
"""


def test_the_help_of_a_command_imports_no_slow_package():
    subprocess.run([sys.executable, "-c", HELPED], check=True, cwd=ROOT, timeout=60)


def test_a_command_without_mpi_is_done_by_rank_0(monkeypatch, capsys):
    words = ("ptdmpi", "schedule", "-p", "2", "-m", "2", "--json")
    assert called(monkeypatch, capsys, *words, rank=1, size=2) == (0, "", "")
    code, out, error = called(monkeypatch, capsys, *words, size=2)
    assert code == 0 and out.startswith("{") and out.count("\n") == 1
    assert error == (
        "ptdmpi schedule works without MPI: only rank 0 of 2 ranks runs it, and the others have "
        "ended\n"
    )
    code, out, error = called(monkeypatch, capsys, "ptdmpi", "nonsense", size=2)
    assert code == 2 and error.startswith("ptdmpi: error: No such command 'nonsense'")


@pytest.mark.parametrize("name", ptdmpi.cli.COMMANDS)
def test_commands_of_all_ranks_are_those_that_load_mpi(name):
    source = inspect.getsource(importlib.import_module(f"ptdmpi.commands.{name}"))
    assert ("launch.begin(" in source) == ptdmpi.cli.COMMANDS[name].all_ranks


def test_mistakes_are_said_once_under_mpirun(tmp_path):
    command = ["-m", "ptdmpi", "train", "c.toml", "--no-such"]
    done = mpirun(2, command, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("No such option") == 1


@pytest.mark.long
def test_convert_under_mpirun_is_done_once(tmp_path):
    command = ["-m", "ptdmpi", "convert", "from-hf", "nowhere", "there"]
    done = mpirun(2, command, check=False, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("ptdmpi: error: ") == 1


def _raising(monkeypatch, capsys, error):
    @click.group(cls=CommandGroup)
    def program():
        pass

    @program.command("fail")
    def fail():
        raise error

    assert isinstance(program.commands["fail"], Command)
    monkeypatch.setattr(sys, "argv", ["prog", "fail"])
    with pytest.raises(SystemExit) as ended:
        run(program, "prog")
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InputError("a = 1: must be 2"), 2, "error: a = 1: must be 2"),
        (PermissionError(13, "Permission denied", "x\ny"), 2, "error: x\\ny: Permission denied"),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: x: No such file"),
        (OSError(28, "No space left on device", "x"), 1, "error: x: No space left on device"),
        (ChildProcessError("a worker died"), 1, "error: a worker died"),
        (
            ModuleNotFoundError("no", name="tokenizers.models"),
            2,
            "tokenizers is not installed: pip",
        ),
        (KeyboardInterrupt(), 130, "prog: interrupted"),
    ],
)
def test_what_goes_wrong_is_one_line(monkeypatch, capsys, error, code, text):
    found, line = _raising(monkeypatch, capsys, error)
    assert found == code and text in line and line.strip().count("\n") == 0


@pytest.mark.parametrize(
    ("program", "words", "found"),
    [
        ("ptdmpi", "ptdmpi con", "convert"),
        ("ptdmpi", "ptdmpi plan --clu", "--cluster"),
        ("ptdmpi-data", "ptdmpi-data tok", "tokenize"),
    ],
)
def test_completion(program, words, found):
    """The shell asks for this at the Tab key, after `_PTDMPI_COMPLETE=bash_source`."""
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    asked = {variable: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    module = PROGRAMS[program].__name__
    code = f"import {module}; {module}.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, cwd=ROOT, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    assert f"plain,{found}" in done.stdout.splitlines()


def test_an_error_with_escapes_of_a_file_leaves_the_terminal_alone(monkeypatch, capsys, tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('["\\u001b[31m"]\na = 1\n')
    code, _, errors = called(monkeypatch, capsys, "ptdmpi", "plan", str(file))
    assert code == 2 and "[\\x1b[31m] is not a section" in errors and "\x1b" not in errors


def test_a_folder_that_shadows_the_package_is_named(monkeypatch):
    """Python takes a folder `ptdmpi` with an `__init__.py` in the present directory for ours."""
    monkeypatch.setattr("ptdmpi.__file__", "/elsewhere/ptdmpi/__init__.py")
    words = r"folder /elsewhere/ptdmpi shadows the package ptdmpi in .*: rename that folder"
    with pytest.raises(InputError, match=words):
        ptdmpi.cli.group.get_command(click.Context(ptdmpi.cli.group), "plan")


def parameters(words):
    """Return the arguments and options of a command."""
    command = {"ptdmpi": ptdmpi.cli.group, "ptdmpi-data": data_prep.cli.commands}[words[0]]
    context = click.Context(command)
    for name in words[1:]:
        command = command.get_command(context, name)
    return command.params


def test_no_command_takes_a_path_that_would_change_the_terminal():
    """Every path is a NamedPath; only names of texts, which no file stores, may be any bytes."""
    paths = [
        (words, parameter)
        for words in every_command()
        for parameter in parameters(words)
        if isinstance(parameter.type, click.Path)
    ]
    assert len(paths) > 40
    others = {p.name for _, p in paths if not isinstance(p.type, NamedPath)}
    assert others == {"inputs"}


@pytest.mark.parametrize(
    "words",
    [
        ("ptdmpi", "report"),
        ("ptdmpi", "checkpoint", "inspect"),
        ("ptdmpi-data", "inspect"),
        ("ptdmpi-data", "tokenize", "texts", "--output", "x", "--tokenizer"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["a\x1b[31m", "a\udcff"])
def test_an_odd_name_is_one_line(monkeypatch, capsys, words, name):
    code, output, errors = called(monkeypatch, capsys, *words, name)
    assert (code, output) == (2, "")
    assert "a path must not contain" in errors and errors.count("\n") == 1
    assert "\x1b" not in errors


def test_no_range_contains_nan():
    ranges = [
        parameter.type
        for words in every_command()
        for parameter in parameters(words)
        if isinstance(parameter.type, click.FloatRange)
    ]
    assert len(ranges) > 1
    for kind in ranges:
        with pytest.raises(click.BadParameter, match="nan is not in the range"):
            kind.convert("nan", None, None)


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_more_samples_than_fit_into_memory(monkeypatch, capsys, command):
    code, _, errors = called(monkeypatch, capsys, "ptdmpi", command, "x", "--samples", "1000000001")
    assert code == 2 and "1<=x<=1000000" in errors


def test_threads_of_a_rank_are_bounded(monkeypatch, capsys):
    """More threads than a process can have would end the program with a traceback."""
    words = ("ptdmpi", "probe", "--output", "x.toml", "--threads", "99999999999")
    code, _, errors = called(monkeypatch, capsys, *words)
    assert code == 2 and "1<=x<=1024" in errors
