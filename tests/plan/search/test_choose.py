"""The layout that a run is given: that of the search, as keys of its configuration."""

import pytest

from ptdmpi.config import InputError, resolve, to_toml
from ptdmpi.plan.machine.cluster import load_cluster
from ptdmpi.plan.search import choose
from tests._configs import tree

RANKS = 8


def small(**changes):
    return tree(
        {"model.layers": 4, "batch.global_size": 16, "precision.compute": "bf16", **changes}
    )


def test_what_is_chosen_is_the_best_layout_and_resolves():
    # sizes that 8 ranks cannot have are left aside
    given = small(**{"parallel.tensor": 3, "batch.micro_size": 5, "recompute.mode": "full"})
    prices, pricer = choose.choose(choose.bare(given), 53, load_cluster("dgx-h100"), RANKS)
    assert prices[0].step_time_s == min(price.step_time_s for price in prices)
    config = resolve(choose.applied(given, prices[0].layout.sections()), RANKS)
    best = prices[0].layout
    assert (config.parallel.tensor, config.parallel.pipeline, config.data_size) == (
        best.tensor,
        best.pipeline,
        best.data,
    )
    assert config.batch.micro_size == best.micro_size
    assert (config.recompute.mode, config.parallel.schedule) == (best.recompute, best.schedule)
    text = choose.words(prices, pricer)
    assert f"layout auto on dgx-h100: {best}" in text and text.count("\n") == 1 + len(prices)


def test_mistakes_that_are_not_of_the_layout_stay_mistakes():
    with pytest.raises(InputError, match="did you mean"):
        choose.bare(small(**{"model.layer": 3}))
    with pytest.raises(InputError, match="legal are 0 to 7"):
        choose.working_ranks(small(**{"run.spare_ranks": 8}), RANKS)
    with pytest.raises(InputError, match="is legal on 8 ranks"):
        odd = choose.bare(small(**{"batch.global_size": 7, "model.layers": 1, "model.heads": 1}))
        choose.choose(odd, 53, load_cluster("dgx-h100"), RANKS)


@pytest.mark.parametrize("key", ["parallel.tensor", "batch.micro_size", "recompute.mode"])
def test_a_key_that_was_set_is_not_lost(key):
    with pytest.raises(InputError, match=f"--layout auto chooses {key}, so --set {key}=2 would"):
        choose.require_free(["run.steps=3", f"{key}=2"])
    choose.require_free(["run.steps=3", "batch.global_size=8", "model.layers=2"])


def test_a_run_with_a_checkpoint_keeps_its_layout(tmp_path):
    where = {"run.dir": str(tmp_path)}
    before = resolve(small(**where, **{"parallel.tensor": 2, "batch.micro_size": 2}), RANKS)
    (tmp_path / "config.toml").write_text(to_toml(before))
    again = choose.bare(small(**where))
    assert choose.begun(again, RANKS) is None  # nothing is saved yet
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    kept = choose.begun(again, RANKS)
    config = resolve(choose.applied(small(**where), kept), RANKS)
    assert (config.parallel, config.batch) == (before.parallel, before.batch)
    for change in ({"checkpoint.resume": "never"}, {"batch.global_size": 32}, {"model.layers": 8}):
        assert choose.begun(choose.bare(small(**where, **change)), RANKS) is None
    assert choose.begun(again, 4) is None


@pytest.mark.parametrize("method", ["local", "ring"])
def test_what_the_method_refuses_is_not_chosen(method):
    given = small(**{"data_parallel.method": method})
    prices, _ = choose.choose(choose.bare(given), 53, load_cluster("dgx-h100"), RANKS)
    for price in prices:
        resolve(choose.applied(given, price.layout.sections()), RANKS)


LONG = {"model.seq_length": 2**16, "model.positions": "rope", "batch.global_size": 2}


def chosen_contexts(**changes):
    """The sizes of the context axis in the best layouts of a long sequence; all resolve."""
    given = small(**LONG, **changes)
    prices, _ = choose.choose(choose.bare(given), 53, load_cluster("dgx-h100"), RANKS)
    layouts = [price.layout for price in prices]
    for layout in layouts:
        resolve(choose.applied(given, layout.sections()), RANKS)
    return {layout.context for layout in layouts}


def test_a_long_sequence_is_cut_unless_a_setting_excludes_it():
    assert max(chosen_contexts()) > 1
    assert chosen_contexts(**{"run.reproducible": True}) == {1}
    assert chosen_contexts(**{"data_parallel.method": "local"}) == {1}


def test_a_graph_in_a_file_and_dealt_datasets_choose_d(tmp_path):
    (tmp_path / "edges").write_text("0 1\n1 2\n2 3\n")
    gossip = {"data_parallel.method": "decentralized"}
    gossip["data_parallel.topology"] = str(tmp_path / "edges")
    where = {"run.cluster": "dgx-h100", "run.dir": str(tmp_path / "run")}
    found = choose.settled(small(**gossip, **where), RANKS, lambda config: 53)
    assert found is not None and resolve(found[0], RANKS).data_size == 4
    with pytest.raises(
        InputError, match="over 4 data ranks: no layout of 6 ranks has a legal data-parallel"
    ):
        choose.settled(small(**gossip, **where), 6, lambda config: 53)
    three = tree({"batch.global_size": 12, "data.split": "by_rank"})
    three["data"]["train"] = [{"path": name} for name in "abc"]
    config = choose.bare(three)
    assert choose.replicas(config, 12) == (1, 3)
    assert choose.replicas(choose.bare(small()), 12) is None
