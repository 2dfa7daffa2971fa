"""Size and rank of a process by the environment variables of launchers."""

import subprocess
import sys

import pytest

from ptdmpi.base.launched import launched_rank, launched_size
from ptdmpi.cli import COMMANDS, group
from ptdmpi.comm import launch


@pytest.mark.parametrize(
    ("environ", "size", "rank"),
    [
        ({}, 1, 0),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, 4, 3),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 2, 1),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "1"}, 1, 0),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, 8, 5),
        ({"PALS_NRANKS": "3", "PALS_RANKID": "0"}, 3, 0),
        ({"PMI_SIZE": ""}, 1, 0),
    ],
)
def test_ranks_of_a_launcher(environ, size, rank):
    assert (launched_size(environ), launched_rank(environ)) == (size, rank)


def test_a_start_is_said_at_once_and_by_one_rank(monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        launch.begin("train")
    assert capsys.readouterr().err == "ptdmpi train: 4 ranks, loading MPI and PyTorch\n"


@pytest.mark.parametrize("words", [["train", "c.toml", "--dry-run"], ["plan", "c.toml"]])
def test_a_preview_says_at_once_what_it_does(monkeypatch, capsys, words):
    """The line comes before the modules that read data and count memory are loaded."""
    monkeypatch.setitem(sys.modules, "ptdmpi.preview.dry_run", None)  # cannot be imported
    with pytest.raises(ImportError):
        group.main(words, standalone_mode=False)
    assert capsys.readouterr().err.endswith(": checking configuration, data and memory\n")


def test_nothing_heavy_is_loaded_before_the_start_is_said():
    """MPI, too, is loaded later, because its environment must be set before."""
    under_mpi = [name for name, line in COMMANDS.items() if line.all_ranks]
    loads = "; ".join(f"import ptdmpi.commands.{name}" for name in under_mpi)
    code = f"import sys; {loads}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"mpi4py.MPI", "torch", "h5py", "tokenizers", "matplotlib", "safetensors"}
    assert heavy & set(done.stdout.split()) == set()
