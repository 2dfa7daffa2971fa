"""`ptdmpi submit`: the script of each scheduler, the remembered site, and what is refused."""

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ptdmpi.commands.submit import SUBMIT, command
from ptdmpi.config import InputError, load, resolve
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.preview.sites.site import Site
from tests._shell import NEEDS_SHELLCHECK, shellcheck
from tests.parallel import ROOT

SITE = """
scheduler = "{scheduler}"
account = "abc"
queue = "long"
time = "02:00:00"
setup = 'module load python; export A="b c"'
cluster = "a100"
{more}
[node]
ranks = 4
gpus = {gpus}
cores = 32
"""
CONFIG = """
[run]
steps = 10
[model]
layers = 4
hidden = 64
heads = 4
seq_length = 64
[batch]
global_size = 16
[parallel]
tensor = 2
data = 4
[[data.train]]
path = "train"
"""
IMAGE = 'container = "registry/ptdmpi:1"'
# Directives and variables that every script must have.
LINES = {
    "slurm": (
        "#SBATCH --job-name=ptdmpi-first",
        "#SBATCH --account=abc",
        "#SBATCH --partition=long",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=02:00:00",
    ),
    "pbs": (
        "#PBS -N ptdmpi-first",
        "#PBS -A abc",
        "#PBS -q long",
        "#PBS -l select=2",
        "#PBS -l walltime=02:00:00",
        "RANKS_PER_NODE=4",
        "CORES_PER_RANK=8",
        "SCRIPT=first.pbs.sh",
    ),
    "lsf": (
        "#BSUB -J ptdmpi-first",
        "#BSUB -P abc",
        "#BSUB -q long",
        "#BSUB -n 8",
        "#BSUB -R span[ptile=4]",
        "#BSUB -gpu num=4/host",
        "#BSUB -W 02:00",
        "SCRIPT=first.lsf.sh",
    ),
    "flux": (
        "# flux: --job-name=ptdmpi-first",
        "# flux: --bank=abc",
        "# flux: --queue=long",
        "# flux: --nodes=2",
        "# flux: --time-limit=120m",
        "NODES=2",
        "RANKS_PER_NODE=4",
        "SCRIPT=first.flux.sh",
    ),
}
RECORDER = """#!/bin/bash
echo "$(basename "$0") $*" > "$RECORD/call"
case "$0" in */bsub) cat ;; *) cat "${@: -1}" ;; esac > "$RECORD/script"
[ -z "$REFUSES" ] || { echo "no such account" >&2; exit 1; }
echo "job 7"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a configuration, in which the user's configuration folder is `home`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "first.toml").write_text(CONFIG)
    return tmp_path


def site(scheduler: str, *, gpus: int = 4, more: str = "") -> str:
    """Write the file of a site, and return its path."""
    more = more or (IMAGE if scheduler == "kubernetes" else "")
    path = Path(f"{scheduler}.toml")
    path.write_text(SITE.format(scheduler=scheduler, gpus=gpus, more=more))
    return str(path)


def submit(*arguments: str):
    return CliRunner().invoke(command, ["first.toml", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("scheduler", LINES)
def test_a_script_has_the_values_of_the_site(folder, scheduler):
    result = submit("--site", site(scheduler), "--set", "run.name=a b")
    lines = result.stdout.splitlines()
    for line in LINES[scheduler]:
        assert lines.count(line) == 1, line
    assert "SETUP='module load python; export A=\"b c\"'" in lines
    assert f"PTDMPI_HOME={ROOT}" in lines
    stops = "" if scheduler == "slurm" else " --set run.max_minutes=110"
    assert lines[-2] == f"set -- first.toml --set 'run.name=a b'{stops}"
    assert lines[-1].endswith('/jobs/run.sh"')
    assert not any(re.match(r"##\w+ .*(account|partition|-A|-q|-P)", line) for line in lines)
    subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)
    template = next((ROOT / "jobs").glob(f"{scheduler}-gpu.*")).read_text().splitlines()
    kept = [line for line in lines if line in template]
    assert len(kept) > 0.6 * len(template)  # it is the template, not a text of its own


@NEEDS_SHELLCHECK
@pytest.mark.parametrize("scheduler", LINES)
def test_shellcheck_finds_no_mistake_in_a_script(folder, scheduler):
    result = submit("--site", site(scheduler), "--set", "run.name=a b")
    assert shellcheck(result.stdout) == ""


def test_a_script_of_kubernetes_has_the_values_of_the_site(folder):
    yaml = pytest.importorskip("yaml")
    result = submit("--site", site("kubernetes"), "--set", 'run.name="a \\" b"')
    job = yaml.safe_load(result.stdout)
    assert job["metadata"]["name"] == "ptdmpi-first" and job["metadata"]["namespace"] == "abc"
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "long"}
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    assert job["spec"]["slotsPerWorker"] == 4 and worker["replicas"] == 2
    (container,) = launcher["template"]["spec"]["containers"]
    start = ["ptdmpi", "run", "-n", "8", "--launcher", "mpirun", "first.toml"]
    assert container["command"] == [*start, "--set", 'run.name="a \\" b"']
    (container,) = worker["template"]["spec"]["containers"]
    assert container["image"] == "registry/ptdmpi:1"
    assert container["resources"]["limits"] == {"cpu": 32, "nvidia.com/gpu": 4}
    bare = yaml.safe_load(submit("--site", site("kubernetes", gpus=0)).stdout)
    worker = bare["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"] == {"cpu": 32}


@pytest.mark.parametrize("scheduler", SUBMIT)
def test_a_script_is_handed_to_the_scheduler(folder, monkeypatch, scheduler):
    program, *options = SUBMIT[scheduler]
    (folder / "bin").mkdir()
    (folder / "bin" / program).write_text(RECORDER)
    (folder / "bin" / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(folder))
    result = submit("--site", site(scheduler), "--now")
    (file,) = folder.glob(f"first.{scheduler}.*")
    words = [program, *(word for word in options if word != "<")]
    words += [file.name] * (scheduler != "lsf")
    assert (folder / "call").read_text().split() == words
    printed = submit("--site", scheduler)  # remembered by now
    assert (folder / "script").read_text() == file.read_text() == printed.stdout
    assert result.stdout == "job 7\n"
    monkeypatch.setenv("REFUSES", "yes")
    with pytest.raises(InputError, match=f"{program} refused {file.name}: no such account"):
        submit("--site", scheduler, "--now")


def test_a_site_is_remembered_as_it_was_last_given(folder):
    path = site("slurm")
    assert "remembered in" in submit("--site", path).stderr
    os.remove(path)
    assert "--account=abc" in submit("--site", "slurm").stdout
    Path(path).write_text(SITE.format(scheduler="slurm", gpus=0, more="").replace("abc", "xyz"))
    submit("--site", path)
    script = submit("--site", "slurm").stdout
    assert "--account=xyz" in script and "gpus" not in script and "Train on CPU nodes" in script


def test_a_home_that_cannot_be_written_hinders_no_job(folder, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    result = submit("--site", site("slurm"))
    line = f"not remembered in /dev/null/.config/ptdmpi/sites/slurm.toml: {os.strerror(20)}"
    assert "--account=abc" in result.stdout and line in result.stderr


def test_a_site_has_a_template_and_a_container_of_its_own(folder):
    more = 'template = "slurm-slingshot-nvidia.sbatch"\ncontainer = "apptainer exec --nv a.sif"'
    lines = submit("--site", site("slurm", more=more)).stdout.splitlines()
    assert "#SBATCH --qos=long" in lines and "#SBATCH --constraint=gpu" in lines
    assert "CONTAINER='apptainer exec --nv a.sif'" in lines
    assert "LAUNCH=${LAUNCH:-srun --mpi=cray_shasta}" in lines


@pytest.mark.parametrize(
    ("scheduler", "template"),
    [("slurm", "pbs-gpu.sh"), ("slurm", "site.toml"), ("kubernetes", "slurm-gpu.sbatch")],
)
def test_a_template_of_another_scheduler_is_refused(folder, scheduler, template):
    image = IMAGE if scheduler == "kubernetes" else ""
    file = site(scheduler, more=f'{image}\ntemplate = "{template}"')
    with pytest.raises(InputError, match=f"template: {template} is not a template for {scheduler}"):
        submit("--site", file, "--nodes", "2")


def test_a_layout_is_planned_for_the_nodes(folder):
    (folder / "train").mkdir()
    with ShardWriter(folder / "train" / "a.h5", "t", "0" * 64, vocab_size=64, eod_id=63) as writer:
        writer.write(np.arange(20000) % 63, np.array([20000]))
    result = submit("--site", site("slurm"), "--nodes", "1", "--plan", "--set", "run.seed=3")
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("set -- "))
    settings = [word for word in shlex.split(line)[3:] if word != "--set"]
    assert settings[0] == "run.seed=3"
    layout = resolve(load("first.toml", settings), 4).layout
    assert f"layout auto on dgx-a100: {layout}, " in result.stderr
    with pytest.raises(InputError, match=r"--layout auto chooses parallel\.tensor"):
        submit("--site", "slurm", "--nodes", "1", "--plan", "--set", "parallel.tensor=4")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--site", "nowhere"), 'site "nowhere" is unknown; known: good. Adapt a copy of'),
        (("--site", "../x"), 'site "../x" is unknown'),
        (("--site", "nowhere.toml"), "site nowhere.toml: No such file"),
        (("--site", "good.toml", "--nodes", "3"), "but 12 ranks were started"),
        (("--site", "good.toml", "--set", "parallel.data=3"), "6 ranks, and a node of site good"),
        (("--site", "good.toml", "--set", "parallel.data=auto"), "how many nodes"),
        (("--site", "good.toml", "--plan"), "--plan needs --nodes"),
        (("--site", "good.toml", "--set", "run.stepz=1"), "run.stepz is not a key"),
        (("--site", "good.toml", "--now"), "no sbatch on PATH"),
    ],
)
def test_bad_input_is_one_line(folder, monkeypatch, arguments, word):
    monkeypatch.setenv("PATH", str(folder))
    shutil.move(site("slurm"), "good.toml")
    (folder / "home/ptdmpi/sites").mkdir(parents=True)
    shutil.copy("good.toml", folder / "home/ptdmpi/sites")
    with pytest.raises(InputError) as error:
        submit(*arguments)
    assert word in str(error.value) and "\n" not in str(error.value)
    assert not list(folder.glob("first.*sh"))


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ('account = "abc"\n', "", 'account: Field required; account = "" if'),
        ('"slurm"', '"sge"', "scheduler: Input should be 'slurm', 'pbs'"),
        ("02:00:00", "2h", "time: .*; write HH:MM:SS"),
        ("[node]", "[nodes]", "node: Field required"),
        ("ranks = 4", "ranks = 0", "node.ranks: Input should be greater"),
        ('queue = "long"', 'queue = "long', "is not valid TOML"),
        ('queue = "long"', 'template = "x.sbatch"', "template: no x.sbatch in"),
        ('"slurm"', '"pbs"\ncontainer = "a.sif"', "container: legal with slurm, flux"),
        ('"slurm"', '"kubernetes"', "container is missing"),
        ('"abc"', '"abc\\n#SBATCH --nodes=9"', "account: legal: letters, digits and"),
        ('"abc"', '"abc --nodes=9"', "account: legal: letters, digits and"),
        ('"long"', '"lo\'ng"', "queue: legal: letters, digits and"),
        ("02:00:00", "\u0662\u0662:00:00", "time: .*; write HH:MM:SS"),
        ("'module load python; export A=\"b c\"'", '"a\\u001b[2J"', "setup: legal: lines without"),
        ('"a100"', '"a\\n100"', "cluster: legal: one line"),
        ('queue = "long"', 'launch = "srun\\nrm"', "launch: legal: one line"),
        ('queue = "long"', 'container = "a\\tb"', "container: legal: one line"),
        ('queue = "long"', 'template = "a\\nb"', "template: legal: one line"),
    ],
)
def test_a_site_file_with_a_mistake_is_one_line_and_not_remembered(folder, before, after, word):
    path = Path(site("slurm"))
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(InputError, match=word) as error:
        submit("--site", str(path))
    assert "\n" not in str(error.value) and not (folder / "home").exists()


def test_setup_may_have_several_lines(folder):
    lines = submit("--site", site("slurm", more="#")).stdout.splitlines()
    path = Path("slurm.toml")
    old = "'module load python; export A=\"b c\"'"
    path.write_text(path.read_text().replace(old, '"""module load a\n\tmodule load b"""'))
    script = submit("--site", str(path)).stdout
    assert "\nSETUP='module load a\n\tmodule load b'\n" in script
    assert len(script.splitlines()) == len(lines) + 1
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_kubernetes_reads_each_value_as_a_text(folder):
    """A bare 123 or "yes" would be a number or a boolean."""
    yaml = pytest.importorskip("yaml")
    path = Path(site("kubernetes"))
    path.write_text(path.read_text().replace('"abc"', '"123"').replace('"long"', '"yes"'))
    setting = "run.dir=two: words"
    job = yaml.safe_load(submit("--site", str(path), "--set", setting).stdout)
    assert job["metadata"]["namespace"] == "123"
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "yes"}
    (container,) = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    assert container["command"][-1] == setting


def test_the_name_of_a_job_fits_every_scheduler(folder):
    """A label of Kubernetes has at most 63 characters."""
    name = "a" * 70
    (folder / f"{name}.toml").write_text(CONFIG)
    result = CliRunner().invoke(command, [f"{name}.toml", "--site", site("slurm")])
    assert f"#SBATCH --job-name=ptdmpi-{'a' * 56}\n" in result.stdout


def test_the_example_is_a_site():
    tree = tomllib.loads((ROOT / "jobs/site.toml").read_text())
    assert Site.model_validate({**tree, "name": "x"}).model_fields_set == Site.model_fields.keys()
