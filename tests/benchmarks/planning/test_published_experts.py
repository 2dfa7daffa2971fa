"""The planner compared with published runs of models with experts."""

from dataclasses import replace

import pytest

from benchmarks.marks import table
from benchmarks.planning import calibrate, elsewhere, experts
from benchmarks.planning.rows import read
from ptdmpi.plan.cost.layer import LayerTimes
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.legality import is_legal
from ptdmpi.plan.shape.parameters import active_count, parameter_count

PEAK = 989.5e12  # the peak of the MFU in the paper


@pytest.mark.parametrize("source", experts.SOURCES, ids=lambda source: source.file)
def test_rows_are_planned_and_have_the_published_mfu(source):
    rows = read(source.file)
    assert {"moe_megatron": 40, "moe_context": 4, "moe_zero3": 7}[source.file] == len(rows)
    known = {*elsewhere.NUMBERS, *elsewhere.SHAPES, "B", "step_time_s", "group", "table", "mfu"}
    for row in rows:
        assert set(row) <= known
        model, layout, batch = source.model_of(row), source.layout_of(row), int(row["B"])
        assert is_legal(layout, model.config, batch), row
        price = Pricer.of(source.machine(row), model, batch, "bf16").price(layout)
        flops = float(row["mfu"]) / 100 * PEAK * float(row["step_time_s"])
        assert price.model_flops_per_rank == pytest.approx(flops, rel=2e-3), row
        assert 0.1 < price.step_time_s / float(row["step_time_s"]) < 4, row


def test_models_have_the_published_numbers_of_parameters():
    """Jiang et al. 2024 and Yang et al. 2024: 141 and 39 billion, 57 and 14 billion."""
    models = {row["group"]: experts.SHORT.model_of(row) for row in read(experts.SHORT.file)}
    sizes = {
        name: (
            round(parameter_count(model.config, model.vocab_size) / 1e9),
            round(active_count(model.config, model.vocab_size) / 1e9),
        )
        for name, model in models.items()
    }
    assert sizes["mixtral-8x22b"] == (141, 39)
    assert sizes["qwen2-57b-a14b"] == (57, 14)
    assert sizes["mixtral-8x22b-g8t8"][0] == 141


@pytest.mark.cases(1)
@pytest.mark.parametrize(("source", "number"), list(experts.judged()))
def test_the_page_has_the_line_of_each_run(source, number):
    (line,) = list(table((), [experts.line_of(source, number)]))[2:]
    assert f"{line}\n" in _printed("runs with experts")


@pytest.mark.long
def test_the_page_has_the_tables_of_the_command():
    for name, make in experts.TABLES.items():
        head, *rows = make()
        assert "\n".join(table(head, rows)) == _printed(name).strip(), name
    short = experts.SHORT
    ranking = elsewhere.rank_correlation(
        [experts.run_of(short, number) for number in range(len(read(short.file)))]
    )
    assert (ranking.tau, ranking.pairs, ranking.regret) == (1.0, 23, 0.0), "as the page says"


def _printed(name):
    text = experts.PAGE.read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]


def test_no_constant_is_fitted_to_them():
    assert not {source.file for source in experts.SOURCES} & set(calibrate.FILES)


def test_a_program_that_drops_tokens_keeps_the_mean_number_of_rows():
    row = read(experts.SHORT.file)[-1]
    pricer = experts._pricer(experts.SHORT, row)
    layout = experts.SHORT.layout_of(row)
    (sizes, mixture) = _mixture(pricer, layout)
    usual = replace(sizes, software=sizes.software.model_copy(update={"fullest": 2}))
    assert mixture._most_rows(sizes) == sizes.tokens * 2
    assert mixture._most_rows(usual) == 2 * mixture._most_rows(sizes)


def _mixture(pricer, layout):
    layer = LayerTimes(pricer.machine, pricer.model, layout)
    (mixture,) = (row for row in layer.rows if isinstance(row, MixExperts))
    return layer.sizes, mixture
