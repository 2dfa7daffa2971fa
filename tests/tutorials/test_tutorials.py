"""The tutorials of docs/tutorials run as they are printed."""

import sys

import pytest

from tests.tutorials import _page

pytestmark = [pytest.mark.together, pytest.mark.long]


def test_a_first_model(tmp_path):
    printed = _page.run("first-model.md", tmp_path)
    assert "resumed after step 60" in printed
    assert (tmp_path / "runs/first/report.html").exists()
    assert (tmp_path / "runs/comparison.png").exists()


def test_your_own_text(tmp_path):
    _page.run("your-text.md", tmp_path)
    assert (tmp_path / "mine/model/config.json").exists()
    assert (tmp_path / "runs/mine/checkpoints/best").exists()


def test_fine_tune_on_conversations(tmp_path):
    _page.run("conversations.md", tmp_path)
    assert (tmp_path / "chat/tuned/config.json").exists()
    assert (tmp_path / "chat/peft/adapter_config.json").exists()


# Stand-ins for Slurm's commands; tests/slurm submits the same templates to a real one.
SBATCH = """#!/bin/bash
set -e
export SLURM_JOB_ID=1 SLURM_SUBMIT_DIR=$PWD SLURM_NTASKS=4 SLURM_CPUS_PER_TASK=1
while [[ $1 == --* ]]; do shift; done
bash "$@"
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec mpirun -n 4 "$@"
"""


def test_a_job_on_slurm(tmp_path):
    stand_ins = tmp_path / "slurm"
    stand_ins.mkdir()
    squeue = "#!/bin/bash\n[ $* = --me ]\n"
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("squeue", squeue)):
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    folder = tmp_path / "project"
    folder.mkdir()
    printed = _page.run("slurm.md", folder, first=stand_ins)
    assert "runs/first is complete" in printed
    assert (folder / "runs/first/done").exists()


def test_coming_from_another_trainer(tmp_path):
    _page.run("coming-from.md", tmp_path)
    assert (tmp_path / "runs/theirs/done").exists()


def test_the_examples_in_python(tmp_path):
    printed = _page.run("../reference/python.md", tmp_path)
    assert "\n0 20 " in printed and "torch.Size([4, 32])" in printed
    assert (tmp_path / "runs/first/checkpoints/step-00000020").exists()


def test_the_loop_of_the_readme_prints_on_one_rank(tmp_path):
    environment = _page.prepare(tmp_path)
    make = (
        "ptdmpi-data tokenize docs/how-to --suffix .md --tokenizer bytes --output data/train "
        "--valid-output data/valid --valid-fraction 0.2\n"
        "ptdmpi init config.toml --data data --model l=1,h=32,a=2,s=32 --steps 100\n"
    )
    _page.run_block(_page.Block("bash", "", make), tmp_path, environment)
    text = (_page.ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = (
        match["body"] for match in _page.BLOCK.finditer(text) if match["kind"] == "python"
    )
    (tmp_path / "program.py").write_text(program)
    command = _page.Block("bash", "", f"mpirun -n 2 {sys.executable} program.py")
    printed = _page.run_block(command, tmp_path, environment, 120.0)
    assert printed.count("validation_loss") == 2  # after steps 50 and 100
