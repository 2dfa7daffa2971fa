"""Runs of other programs: what is mapped, and that nothing was calibrated on it."""

import pytest

from benchmarks.planning import calibrate, elsewhere
from benchmarks.planning.rows import read
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.layer.legality import is_legal
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


@pytest.mark.long
def test_rows_of_cut_sequences_have_the_throughput_of_their_source():
    """NeMo and Llama 3 publish FLOP/s, torchtitan tokens per second of a rank; runs are listed one
    by one."""
    rows = {name: list(read(f"{name}_context")) for name in ("nemo", "llama3", "torchtitan")}
    first, *_, last = rows["nemo"]
    assert _tflops(first) == pytest.approx(768, rel=1e-3)
    assert _tflops(last) == pytest.approx(536, rel=1e-3)
    assert [_tflops(row) for row in rows["llama3"]] == pytest.approx([430, 400, 380], rel=1e-3)
    titan = rows["torchtitan"][3]
    assert int(titan["s"]) / float(titan["step_time_s"]) / 8 == pytest.approx(548, rel=1e-3)
    table = elsewhere.context_table()
    assert len(table) == 1 + sum(map(len, rows.values()))
    assert {len(line) for line in table} == {7}


def _tflops(row):
    """TFLOP/s of a rank, with whole scores: Narayanan et al. 2021 with the shape of LLaMA's
    layers."""
    s, h, layers, vocab = (int(row[name]) for name in ("s", "h", "l", "V"))
    grouped, inner = int(row["kv_heads"]) / int(row["a"]), int(row["ffn_hidden"]) / h
    each = 12 + 12 * grouped + 18 * inner + 12 * s / h + 6 * vocab / (layers * h)
    ranks = int(row["t"]) * int(row["c"]) * int(row["p"]) * int(row["d"])
    flops = int(row["B"]) * s * layers * h * h * each
    return flops / float(row["step_time_s"]) / ranks / 1e12


@pytest.mark.long
def test_what_is_not_stated_is_the_fastest_that_fits():
    """One row of Megatron-LM on H100: what is stated stays, and no smaller b is faster."""
    source = next(source for source in elsewhere.SOURCES if source.open_sizes)
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
