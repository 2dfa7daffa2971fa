"""What launchers say of a process."""

import pytest

from ptdmpi.comm import launch
from ptdmpi.terminal.launched import launched_rank, launched_size


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
