"""Profiles of a few steps, on the chosen ranks."""

import json

import pytest
import torch

from ptdmpi import report
from ptdmpi.config import InputError
from ptdmpi.watch.profile import Profile
from tests._configs import small
from tests._runs import log, loop, records
from tests.parallel import parallel


@pytest.mark.long
@parallel(ranks=[2])
def test_a_run_leaves_a_trace_and_a_memory_timeline_of_the_chosen_rank(comm, tmp_path):
    changes = {"run.steps": 4, "run.profile_steps": "2:3", "run.profile_ranks": [1]}
    with loop(comm, tmp_path, changes) as loops:
        loops.run()
    if comm.rank:
        return
    run = tmp_path / "run"
    names = sorted(path.name for path in (run / "profile").iterdir())
    assert names == ["memory-steps-2-3-rank-1.json", "trace-steps-2-3-rank-1.json"]
    events = json.loads((run / "profile" / names[1]).read_text())["traceEvents"]
    assert any("mm" in str(event.get("name")) for event in events)
    memory = json.loads((run / "profile" / names[0]).read_text())
    assert memory and all(one["total_bytes"] >= 0 for one in memory)
    assert [one["step"] for one in records(run) if "loss" in one] == [1, 2, 3, 4]
    rows = report.rows_of(report.summary(report.read(run)))
    rows = [text for name, text in rows if name == "profile"]
    assert [text.rpartition("/")[2] for text in rows] == names
    assert "warning" not in log(run)


def test_only_the_steps_and_ranks_that_are_asked_for(tmp_path):
    run = small({"run.profile_steps": "2:2", "run.dir": str(tmp_path)}).run
    said: list[str] = []
    for rank in (0, 1):
        profile = Profile(run, rank, torch.device("cpu"), said.append)
        for step in (1, 2, 3):
            with profile.step(step):
                torch.ones(10) + step
    assert len(said) == 1 and "profiled steps 2 to 2" in said[0]
    assert len(list((tmp_path / "profile").iterdir())) == 2


def test_a_profile_that_cannot_be_kept_is_told(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    run = small({"run.profile_steps": "1:1", "run.dir": str(tmp_path)}).run
    said: list[str] = []
    with Profile(run, 0, torch.device("cpu"), said.append).step(1):
        pass
    assert len(said) == 1 and "is not kept" in said[0]


@pytest.mark.parametrize("text", ["12", "0:3", "5:4", "a:b"])
def test_steps_that_are_none(text):
    with pytest.raises(InputError, match=r"run\.profile_steps"):
        small({"run.profile_steps": text})
