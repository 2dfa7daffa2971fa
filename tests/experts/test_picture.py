"""The pictures of the loads of a run with experts: a curve for each layer, and a heat map."""

from pathlib import Path

import pytest

from ptdmpi.report import pictures, read
from ptdmpi.report.page.content import content
from ptdmpi.sinks.record import scalars
from ptdmpi.train.records.journal import Journal
from tests._configs import small
from tests.report._made import append, made, record

# the first of three layers has no experts
EXPERTS = {"model.kind": "llama", "model.experts": 4, "model.experts_per_token": 2}
EXPERTS |= {"model.dense_layers": 1}
LOADS = [[0.5, 0.25], [0.4, 0.25], [0.3, 0.25]]
TOKENS = [[8, 4, 4, 0], [4, 4, 4, 4]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [record(n, 3.0, fullest_expert=shares) for n, shares in enumerate(LOADS, 1)]
    records[0]["expert_tokens"] = [[16, 0, 0, 0], [4, 4, 4, 4]]
    records[1]["expert_tokens"] = TOKENS
    return made(tmp_path / "run", len(LOADS), *records, changes=EXPERTS)


def test_each_layer_has_a_curve(run, monkeypatch):
    drawn = []
    monkeypatch.setattr("ptdmpi.plan.show.draw.save", lambda figure, path: drawn.append(figure))
    pictures.load_curves(read(run), run / "experts.png")
    (axes,) = drawn[0].axes
    curves = [list(line.get_ydata()) for line in axes.lines]
    assert curves == [[0.5, 0.4, 0.3], [0.25, 0.25, 0.25]]
    assert [line.get_label() for line in axes.lines] == ["layer 1", "layer 2"]


def test_a_heat_map_has_the_newest_loads_of_all_experts(run, monkeypatch):
    drawn = []
    monkeypatch.setattr("ptdmpi.plan.show.draw.save", lambda figure, path: drawn.append(figure))
    loads = pictures.newest_loads(read(run))
    assert loads.step == 2
    pictures.load_map(loads, run / "loads.png")
    axes, _ = drawn[0].axes
    (image,) = axes.images
    assert image.get_array().tolist() == [[2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 1", "layer 2"]


def test_a_large_heat_map_does_not_label_all_layers(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("ptdmpi.plan.show.draw.save", lambda figure, path: drawn.append(figure))
    names = [f"layer {number}" for number in range(58)]
    pictures.load_map(pictures.Loads(2, names, [[1.0] * 256] * 58), tmp_path / "loads.png")
    labels = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert labels == names[::2]


def test_the_page_has_the_heat_map(run, tmp_path):
    loads = content(read(run))["loads"]
    assert loads["step"] == 2 and loads["layers"] == ["layer 1", "layer 2"]
    assert loads["relative"] == [[2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    assert content(read(made(tmp_path / "dense", 3, record(1, 3.0))))["loads"] is None


@pytest.mark.parametrize("damage", [[], [[1, 2], [3]], [[0, 0]], [[1, "x"]], [3], [[1, -1]]])
def test_damaged_loads_are_not_drawn(run, damage):
    append(run, record(4, 3.0, expert_tokens=damage))
    assert pictures.newest_loads(read(run)).step == 2


@pytest.mark.parametrize(("steps", "kept"), [(3, 3), (100, 100), (101, 51), (250, 84)])
def test_a_run_keeps_the_loads_of_few_steps(steps, kept):
    """A run of 250 steps keeps every third, and the last."""
    journal = Journal.__new__(Journal)
    journal.config = small({"run.steps": steps})
    found = [step for step in range(1, steps + 1) if journal._keeps_loads(step)]
    assert len(found) == kept and found[-1] == steps


def test_sinks_get_no_number_of_each_expert():
    assert not [name for name in scalars({"step": 1, "expert_tokens": TOKENS}) if "expert" in name]


def test_a_report_has_them_only_with_experts(run, tmp_path):
    written = pictures.write(read(run), None, run)
    for name in ("experts.png", "loads.png"):
        assert run / name in written and (run / name).is_file()
    dense = made(tmp_path / "dense", len(LOADS), record(1, 3.0))
    written = {path.name for path in pictures.write(read(dense), None, dense)}
    assert not written & {"experts.png", "loads.png"}
