"""Runs of other programs: what is mapped, and that nothing was calibrated on it."""

import pytest

from benchmarks.planning import calibrate, elsewhere
from benchmarks.planning.rows import read
from ptdmpi.config.legality import is_legal
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.shape.parameters import parameter_count


@pytest.mark.parametrize("source", elsewhere.SOURCES, ids=lambda source: source.file)
def test_rows_are_layouts_that_could_have_run(source):
    """Legal, whole microbatches, a positive time; every column is read or says what the row is."""
    rows = list(read(source.file))
    assert rows
    for row in rows:
        known = {*elsewhere.NUMBERS, *elsewhere.SHAPES, "schedule", "overlap_tensor"}
        assert set(row) <= known | {"B", "step_time_s", "group"}
        layout, batch = source.layout_of(row), int(row["B"])
        assert batch % (layout.data * layout.micro_size) == 0, row
        assert is_legal(layout, source.model_of(row).config, batch), row
        assert float(row["step_time_s"]) > 0


def test_the_models_of_the_zero_bubble_paper_have_the_parameters_of_their_names():
    """With 32000 tokens, which is why they are taken; with 51200 three of four have not."""
    (source,) = (source for source in elsewhere.SOURCES if source.file == "zero_bubble")
    models = {row["l"]: source.model_of(row) for row in read(source.file)}

    def billions(vocab_size):
        totals = (parameter_count(model.config, vocab_size) for model in models.values())
        return [round(total / 1e9, 1) for total in totals]

    assert {model.vocab_size for model in models.values()} == {32000}
    assert billions(32000) == [1.5, 6.2, 14.6, 28.3]
    assert billions(51200) == [1.5, 6.3, 14.7, 28.4]


def test_what_is_not_stated_is_the_fastest_that_fits():
    """One row of Megatron-LM on H100: what is stated stays, and no smaller b is faster."""
    (source,) = (source for source in elsewhere.SOURCES if source.open_sizes)
    row = next(row for row in read(source.file) if row["p"] == "2")
    pricer = Pricer.of(source.machine(row), source.model_of(row), int(row["B"]), "fp16")
    stated = source.layout_of(row)
    price = elsewhere.fastest(pricer, stated)
    sizes = ("tensor", "pipeline", "data", "zero", "sequence_parallel", "dp_overlap")
    assert all(getattr(price.layout, name) == getattr(stated, name) for name in sizes)
    assert price.fits
    for other in (1, 2):
        slower = pricer.price(price.layout.changed(micro_size=other))
        assert slower.step_time_s > price.step_time_s or not slower.fits


def test_no_constant_is_fitted_to_them():
    assert not {source.file for source in elsewhere.SOURCES} & set(calibrate.FILES)


def _run(number, measured_s, predicted_s):
    layout = elsewhere.Layout(tensor=1, pipeline=1, data=1, micro_size=number)
    return elsewhere.MappedRun(layout, ("one",), measured_s, predicted_s)


def test_ranking_of_known_orders():
    """Three runs, one pair of them the wrong way round: 1 of 3, and the second-best is taken."""
    found = [_run(1, 1.0, 2.0), _run(2, 1.5, 1.0), _run(4, 3.0, 4.0)]
    tau, pairs, regret = elsewhere.rank_correlation(found)
    assert (tau, pairs, regret) == (pytest.approx(1 / 3), 3, pytest.approx(0.5))
    alone = [elsewhere.MappedRun(run.layout, (str(i),), 1.0, 1.0) for i, run in enumerate(found)]
    assert elsewhere.rank_correlation(alone) == (0.0, 0, 0.0)
