"""A whole run with experts: the loss falls, its records have the loads, and it goes on in another
layout."""

import pytest

from tests._configs import layout
from tests._engines import from_root
from tests._runs import loop, records
from tests.parallel import parallel
from tests.train.test_bert_run import texts

EXPERTS = {
    "model.kind": "llama",
    "model.layers": 3,
    "model.dense_layers": 1,
    "model.expert_hidden": 16,
    "model.experts": 4,
    "model.experts_per_token": 2,
    "model.shared_experts": 1,
    "optimizer.learning_rate": 1e-2,
    "optimizer.decay": "constant",
    "log.validate_every_steps": 6,
}
STEPS = 12


@pytest.mark.long
@parallel(ranks=[2])
def test_the_loss_falls_and_records_have_the_loads(comm, tmp_path):
    if comm.rank == 0:
        texts(tmp_path)
    from_root(comm, None)
    dealt = {**layout(d=2), "parallel.expert": 2, "run.verify_every": 2}
    for steps, where in ((STEPS // 2, layout(t=2)), (STEPS, dealt)):
        more = {"run.steps": steps, "data.valid": str(tmp_path / "valid"), **where}
        with loop(comm, tmp_path, EXPERTS | more) as made:
            made.run()
    found = from_root(comm, records(tmp_path / "run") if comm.rank == 0 else None)
    steps = [record for record in found if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert any("validation_loss" in record for record in found)
    for record in steps:
        assert len(record["fullest_expert"]) == len(record["dead_experts"]) == 2
        assert all(0.25 <= share <= 0.5 for share in record["fullest_expert"])
        for tokens, share in zip(record["expert_tokens"], record["fullest_expert"], strict=True):
            assert len(tokens) == 4 and max(tokens) / sum(tokens) == share
