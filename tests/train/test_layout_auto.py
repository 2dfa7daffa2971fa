"""`ptdmpi train --layout auto`: measured, searched, kept in the run directory, kept on resume."""

import tomllib

import pytest

from ptdmpi.config import resolve, to_toml
from ptdmpi.probe.layout_auto import unused_path
from tests._configs import tree
from tests._runs import SIZES, corpus
from tests.parallel import mpirun

# the machine is measured as quickly as can be
QUICK = """
from ptdmpi.model.kernels.timing import bench
from ptdmpi.probe import kernels, layers, machine
bench.TRIALS, bench.TRIAL_S = 2, 1e-4
machine.CPU_EFFORT = machine.Effort(
    kernels.Extent((16, 32), (1 << 10, 1 << 14), 16, 2, (8, 16)),
    (1 << 8, 1 << 12, 1 << 17),
    (layers.ProbedModel(2, 16, 8, 8, 64, 1), layers.ProbedModel(2, 32, 8, 16, 64, 2)),
    None,
)
from ptdmpi.cli import main
main()
"""


@pytest.mark.long
def test_a_run_is_laid_out_once(tmp_path):
    corpus(tmp_path)
    # three does not divide anything here: it is left aside
    changes = {"data.train": [{"path": "train"}], "run.dir": "run", "run.steps": 2}
    config = resolve(tree({**SIZES, **changes}), 1)
    text = to_toml(config).replace("tensor = 1", "tensor = 3")
    (tmp_path / "config.toml").write_text(text)
    command = ["-c", QUICK, "train", "config.toml", "--layout", "auto"]
    output = mpirun(2, command, cwd=tmp_path).stdout
    assert "so this machine is measured first" in output
    before = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    parallel = before["parallel"]
    assert parallel["tensor"] * parallel["pipeline"] * parallel["data"] == 2
    name = f"t={parallel['tensor']},p={parallel['pipeline']},d={parallel['data']}"
    assert "layout auto on probed-" in output and f": {name}," in output
    assert before["run"]["cluster"] == "run/cluster.toml"

    more = [*command, "--set", "run.steps=3"]
    output = mpirun(2, more, cwd=tmp_path).stdout
    assert (
        "layout auto: the layout of the run in run" in output and "resumed after step 2" in output
    )
    after = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert after["parallel"] == parallel and after["run"]["cluster"] == "run/cluster.toml"


def test_a_measured_cluster_is_never_overwritten(tmp_path):
    for name in ("cluster.toml", "cluster-2.toml", "cluster-3.toml"):
        assert unused_path(tmp_path) == tmp_path / name
        (tmp_path / name).touch()
