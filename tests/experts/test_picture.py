"""The picture of the loads of a run: a curve for each layer, in a report of a run with experts."""

from pathlib import Path

import pytest

from ptdmpi.report import pictures, read
from tests.report._made import made, record

# the first of three layers has no experts
EXPERTS = {"model.kind": "llama", "model.experts": 4, "model.experts_per_token": 2}
EXPERTS |= {"model.dense_layers": 1}
LOADS = [[0.5, 0.25], [0.4, 0.25], [0.3, 0.25]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [record(n, 3.0, fullest_expert=shares) for n, shares in enumerate(LOADS, 1)]
    return made(tmp_path / "run", len(LOADS), *records, changes=EXPERTS)


def test_each_layer_has_a_curve(run, monkeypatch):
    drawn = []
    monkeypatch.setattr("ptdmpi.plan.show.draw.save", lambda figure, path: drawn.append(figure))
    pictures.load_curves(read(run), run / "experts.png")
    (axes,) = drawn[0].axes
    curves = [list(line.get_ydata()) for line in axes.lines]
    assert curves == [[0.5, 0.4, 0.3], [0.25, 0.25, 0.25]]
    assert [line.get_label() for line in axes.lines] == ["layer 1", "layer 2"]


def test_a_report_has_it_only_with_experts(run, tmp_path):
    written = pictures.write(read(run), None, run)
    assert run / "experts.png" in written and (run / "experts.png").is_file()
    dense = made(tmp_path / "dense", len(LOADS), record(1, 3.0))
    assert not [path for path in pictures.write(read(dense), None, dense) if "experts" in path.name]
