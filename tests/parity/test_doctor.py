"""`ptdmpi doctor` on real ranks: what it prints, its exit codes, and sums that are wrong."""

import errno
import json
import re
from unittest.mock import patch

import pytest
import torch

from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.commands import doctor
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.parity import probe, suite
from ptdmpi.parity.layouts import Case, ComparedLayout, ComparedModel
from ptdmpi.probe import issue_report
from ptdmpi.probe.host_check import check_wires
from ptdmpi.probe.issue_report import report_text, save_report
from ptdmpi.probe.sum_check import check_sums, sum_of_known
from tests.parallel import mpirun, parallel

CLI = ["-c", "from ptdmpi.cli import main; main()", "doctor"]


@pytest.mark.long
def test_machine_on_two_ranks():
    result = mpirun(2, [*CLI, "--json"], timeout_s=100)
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["ranks"]["value"].startswith("2 on 1 node, 2 per node")
    assert findings["launcher"]["value"] != "none: one process; start with mpirun or srun"
    assert findings["tensor axis"]["value"].endswith("t = 1, 2")
    assert "right" in findings["float32 sum"]["value"]
    assert findings["wires"]["value"].startswith("mpi, torch, nccl: ")
    assert findings["wires"]["value"].endswith("; auto takes mpi")
    assert not [finding for finding in findings.values() if finding["status"] == "bad"]
    readable = mpirun(2, CLI, timeout_s=100).stdout
    assert all(name in readable for name in findings)


@parallel(ranks=[2])
def test_ranks_with_other_libraries_are_told(comm):
    have = f"libnccl 2.{30 + comm.rank} (/lib)"
    with patch("ptdmpi.comm.nccl.library.description", lambda: have):
        line = check_wires(World(comm))
    assert line.status == "bad"
    assert "ranks differ: libnccl 2.30 (/lib); libnccl 2.31 (/lib)" in line.value


def test_short_needs_parity():
    result = mpirun(1, [*CLI, "--short"], timeout_s=60, check=False)
    assert result.returncode == 2
    assert "--short belongs to --parity" in result.stderr


@pytest.mark.long
@parallel(ranks=[2])
def test_rows_by_name(comm):
    """All that have the words, and a line where none has."""
    with patch.object(suite, "STEPS", 1), patch.object(suite, "run", wraps=suite.run) as run:
        assert doctor.check_parity(World(comm), short=False, as_json=True, only="0, ZB-H1")
    assert {comparison.case.layout.schedule for comparison in run.call_args.args[1]} == {"zb-h1"}
    with pytest.raises(SharedInputError, match=r"--rows nothing: none of the \d+ rows contains it"):
        doctor.check_parity(World(comm), short=False, as_json=True, only="nothing")


@parallel(ranks=[1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 1000, 100_000])
def test_a_right_sum_is_right(comm, dtype, elements):
    right, seconds = sum_of_known(MpiCommunicator(comm), elements, dtype, torch.device("cpu"))
    assert right
    assert seconds > 0


@parallel(ranks=[2])
def test_a_wrong_sum_is_bad_on_every_rank(comm):
    right = MpiCommunicator._all_reduce

    def corrupt(axis, flat, op):
        handle = right(axis, flat, op)
        if axis.rank == 1:
            flat[-1] += 1
        return handle

    with patch.object(MpiCommunicator, "_all_reduce", corrupt):
        findings = check_sums(World(comm))
        assert {finding.status for finding in findings} == {"bad"}
        assert all("WRONG on ranks 1" in finding.value for finding in findings)
        assert not doctor.check_machine(World(comm), as_json=True)


@pytest.mark.long
@parallel(ranks=[2])
def test_a_red_row_fails_on_every_rank(comm):
    layout = ComparedLayout(tensor=2, micro_size=4)
    case = Case(layout, ComparedModel(layers=2))
    wanted = [suite.Comparison(suite.COVERING, case, Case(layout.base, case.model))]
    with (
        patch.object(suite, "comparisons", lambda ranks, short, exact: wanted),
        patch.object(suite, "SHORT_STEPS", 1),
    ):
        assert doctor.check_parity(World(comm), short=True, as_json=False)
        bars = {compute: dict.fromkeys(of, 0.0) for compute, of in suite.BARS.items()}
        # the probes, which have no bars, have run above
        with patch.dict(suite.BARS, bars), patch.object(probe, "cases", lambda ranks, short: []):
            assert not doctor.check_parity(World(comm), short=True, as_json=True)


@pytest.mark.long
def test_parity_on_two_ranks():
    result = mpirun(2, [*CLI, "--parity", "--short"], timeout_s=300)
    lines = result.stdout.splitlines()
    assert lines[-2].endswith("rows, all ok")
    assert lines[-1] == "Layouts of 3 to 16 ranks were left out."
    assert "parity:" in result.stderr


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(issue_report, "write_whole", full)
    with pytest.raises(InputError, match=r"--report .*x: No space left on device"):
        save_report(tmp_path / "x", "text")


def test_report_has_versions_and_no_secrets():
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "1",
        "SLURM_JWT": "s3cret",
        "SLURM_JOB_ACCOUNT": "s3cret",
        "PMIX_SERVER_URI21": "s3cret",
        "WANDB_API_KEY": "s3cret",
        "HOME": "s3cret",
    }
    text = report_text(["  MPI   Open MPI"], environ)
    assert "  MPI   Open MPI\n" in text and "\nOMP_NUM_THREADS=1\n" in text
    assert "\nOMPI_COMM_WORLD_SIZE=4\n" in text and "s3cret" not in text
    assert re.search(r"^torch +2\.", text, re.MULTILINE)
