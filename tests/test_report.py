"""`ptdmpi report`: the numbers of a run directory, and the pictures and the trace in it."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ptdmpi import report
from ptdmpi.base.words import file_size
from ptdmpi.commands.report import command
from ptdmpi.config import InputError, resolve, to_toml
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.simulate import Costs, Span, Timeline, simulate
from ptdmpi.plan.shape.parameters import parameter_count
from ptdmpi.report import compare, traffic
from tests._configs import small

TREE = {
    "run": {"steps": 3, "name": "r"},
    "model": {"layers": 4, "hidden": 8, "heads": 2, "seq_length": 8},
    "parallel": {"pipeline": 2, "virtual": 2},
    "batch": {"global_size": 4},
    "data": {"train": [{"path": "x"}]},
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(resolve(TREE, 2)))
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step, loss in ((1, 4.0), (2, 3.0), (3, 2.5)):
            record = {
                "step": step,
                "loss": loss,
                "tokens": 32 * step,
                "samples_drawn": [4 * step],
                "epochs": [0.5 * step],
                "step_time_s": 0.1 * step,
                "tokens_per_s": 320 / step,
                "model_tflops_per_rank": 1.0,
                "mfu": 0.5,
                "peak_memory_bytes": 2**20 * step,
                "rank_count": 2,
                "layout": "t=1,p=2,d=1,v=2,b=1",
                "vocab_size": 50,
            }
            file.write(json.dumps(record) + "\n")
        validation = {"step": 3, "validation_loss": 2.6, "validation_perplexity": 13.5}
        file.write(json.dumps({**validation, "bigram_validation_loss": 3.1}) + "\n")
        file.write('{"step": 4, "lo')  # still being written
    (tmp_path / "timeline").mkdir()
    measured = simulate(build("interleaved", 2, 2, 4), Costs(0.01, 0.02, 0.005))
    text = Timeline(measured.spans, "measured, step 2").to_json()
    (tmp_path / "timeline/step-00000002.json").write_text(text)
    return tmp_path


def test_numbers_pictures_and_trace(run):
    result = CliRunner().invoke(command, [str(run), "--json"])
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.output)
    assert numbers["validation_loss"] == 2.6
    assert numbers["bigram_validation_loss"] == 3.1
    assert numbers["last_loss"] == 2.5
    assert numbers["median_step_time_s"] == pytest.approx(0.2)
    assert numbers["peak_memory_bytes"] == 3 * 2**20
    # without messages the schedule reaches its closed form (p-1)/(v m)
    assert numbers["bubble_fraction_planned"] == pytest.approx(1 / 8)
    assert numbers["bubble_fraction_measured"] > 1 / 8
    assert sum(numbers["step_shares"].values()) == pytest.approx(1.0)
    for name in ("loss.png", "timeline.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "trace.json").read_text())["traceEvents"]


def test_pictures_elsewhere(run, tmp_path_factory, monkeypatch):
    """A read-only run has a table all the same, and pictures with --output."""
    other = tmp_path_factory.mktemp("x") / "there/it/is"
    done = CliRunner().invoke(command, [str(run), "--output", str(other), "--json"])
    assert done.exit_code == 0 and len(json.loads(done.stdout)["files"]) == 4
    assert len(list(other.iterdir())) == 4 and not (run / "loss.png").exists()

    def refused(self, path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", refused)
    for words in ([], ["--json"]):
        done = CliRunner().invoke(command, [str(run), *words])
        assert done.exit_code == 0, done.output
        assert "last_loss" in done.stdout.replace(" ", "_")
        (line,) = done.stderr.splitlines()
        assert "loss.png: cannot be written: Permission denied" in line and "--output" in line
    with pytest.raises(InputError, match="cannot be written"):
        CliRunner().invoke(
            command,
            [str(run), "--output", str(other)],
            standalone_mode=False,
            catch_exceptions=False,
        )


def test_a_damaged_timeline_is_named(run):
    (path,) = (run / "timeline").iterdir()
    older = path.with_name("step-00000001.json")
    older.write_text(path.read_text())
    path.write_text(json.dumps({**json.loads(path.read_text()), "spans": [[1]]}))
    loaded = report.read(run)
    (said,) = loaded.problems
    assert said.startswith("timeline/step-00000002.json: this is not a timeline")
    assert "a key or a value is missing" in said and "Span" not in said
    # the newest readable timeline is used
    assert loaded.measured == Timeline.from_json(older.read_text())


def test_the_mean_does_not_lag():
    means, reach = report.centred_means([float(k) for k in range(500)])
    assert reach == 5 and means == pytest.approx(range(500))
    assert report.centred_means([3.0, 1.0]) == ([3.0, 1.0], 0)


def test_tokens_are_counted_in_words_of_their_size(run, monkeypatch):
    """A small run does not have "0.0004M tokens" below its curve."""
    drawn = []
    monkeypatch.setattr("ptdmpi.plan.show.draw.save", lambda figure, path: drawn.append(figure))
    report.loss_curve(report.read(run), run / "loss.png")
    words = drawn[0].axes[0].xaxis.get_major_formatter()
    assert [words(value) for value in (400, 12_000, 3.5e6, 2e9)] == ["400", "12k", "3.5M", "2G"]


def test_what_follows_the_pipeline_is_no_bubble(run):
    (path,) = (run / "timeline").iterdir()
    timeline = Timeline.from_json(path.read_text())
    end_s = timeline.makespan_s
    behind = [Span(rank, "reduce", "", end_s, 10 * end_s) for rank in timeline.ranks]
    path.write_text(Timeline((*timeline.spans, *behind)).to_json())
    numbers = json.loads(CliRunner().invoke(command, [str(run), "--json"]).output)
    assert numbers["bubble_fraction_measured"] == pytest.approx(timeline.bubble_fraction())


def test_sentence_orders_have_rows_of_their_own(run):
    text = (run / "metrics.jsonl").read_text()
    text = text.replace('"loss": 2.5', '"loss": 2.5, "sentence_order_loss": 0.61')
    text = text.replace(
        '"validation_loss"', '"validation_sentence_order_loss": 0.7, "validation_loss"'
    )
    (run / "metrics.jsonl").write_text(text)
    lines = CliRunner().invoke(command, [str(run)]).output.splitlines()
    rows = dict(line.split("  ", 1) for line in lines if "sentence order loss" in line)
    assert {key: value.strip() for key, value in rows.items()} == {
        "last sentence order loss": "0.6100",
        "validation sentence order loss": "0.7000",
    }


def test_what_rank_0_sends_stands_beside_its_closed_form(run):
    text = (run / "metrics.jsonl").read_text()
    counts = {
        "wire_bytes": {"pipeline": {"send": 2048}},
        "wire_messages": {"pipeline": {"send": 3}},
    }
    text = text.replace('"loss": 2.5', f'"loss": 2.5, {json.dumps(counts)[1:-1]}')
    (run / "metrics.jsonl").write_text(text)
    lines = CliRunner().invoke(command, [str(run)]).output.splitlines()
    (sends,) = (line for line in lines if "rank 0 sends: pipeline send" in line)
    # F0 and F2 go on, B2 goes back: 3 x 4 microbatches of 8 x 8 numbers in bf16 or fp32
    element = {"bf16": 2, "fp32": 4}[report.read(run).config["precision"]["compute"]]
    exact = 3 * 4 * 8 * 8 * element
    assert sends.endswith(f"2.0 kB a step in 3 messages; closed form: {exact:,} bytes, not 2,048")
    (run / "metrics.jsonl").write_text(text.replace("t=1,p=2,d=1,v=2,b=1", "t=2,p=1,d=1,v=1,b=1"))
    lines = CliRunner().invoke(command, [str(run)]).output.splitlines()
    (sends,) = (line for line in lines if "rank 0 sends" in line)
    assert sends.endswith("2.0 kB a step in 3 messages")


@pytest.mark.parametrize(
    ("method", "kind", "whole"),
    [
        ({"method": "compressed", "error_feedback": "mem_sgd"}, "all_gather", 3),
        ({"method": "decentralized", "topology": "complete"}, "neighbours", 3),
        ({"method": "local"}, "all_gather", 3),
    ],
)
def test_codes_stand_beside_what_they_would_be_of_large_matrices(method, kind, whole):
    """Each of four ranks sends a code of 8.125 bits an element to three others."""
    told = {**method, "compressor": "int8"}
    config = small({f"data_parallel.{key}": value for key, value in told.items()}, 4)
    record = {"layout": str(config.layout), "vocab_size": 53, "step": 2}
    counted = {"wire_bytes": {"data": {kind: 5000}}, "wire_messages": {"data": {kind: 7}}}
    table = traffic.sent(record | counted, config.model_dump())
    code = parameter_count(config.model, 53) * 8.125 / 8
    found = table["data"][kind]["closed_form_bytes"]
    assert found == pytest.approx(whole * code, rel=1e-3)
    (line,) = (text for name, text in traffic.rows(table) if kind.replace("_", "-") in name)
    size = file_size(found)
    assert line == f"5.0 kB a step in 7 messages; closed form, if matrices are large: {size}"


def test_tokens_of_distributed_experts_are_no_exact_number():
    """The router decides how many rows each rank gets; all other messages are known exactly."""
    experts = {"model.experts": 4, "model.experts_per_token": 2, "parallel.expert": 2}
    experts["model.kind"] = "llama"
    config = small({**experts, "parallel.data": 4}, 4)
    record = {"layout": str(config.layout), "vocab_size": 53, "step": 2}
    counted = {"wire_bytes": {"expert": {"all_to_all": 5000}}, "wire_messages": {}}
    table = traffic.sent(record | counted, config.model_dump())
    assumed = {
        (group, kind): entry["closed_form_assumes"]
        for group, kinds in table.items()
        for kind, entry in kinds.items()
    }
    routed = {key for key, text in assumed.items() if text}
    assert [kind for _, kind in routed] == ["all_to_all"] and len(assumed) > 1
    texts = [text for name, text in traffic.rows(table) if "all-to-all" in name]
    assert any("closed form, if all experts get equally many tokens: " in text for text in texts)


def test_text_has_the_table_and_both_timelines(run):
    output = CliRunner().invoke(command, [str(run)]).output
    assert "planned: interleaved" in output and "measured, step 2" in output
    assert "bigram validation loss" in output and "3.1000" in output
    assert f"wrote {run / 'loss.png'}" in output


def test_a_damaged_configuration_is_one_line(run):
    (run / "config.toml").write_text("[run\n")
    with pytest.raises(InputError, match="is damaged"):
        report.read(run)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "x", "loss": null}',
        '{"step": 4, "loss": 2.0}',
        '{"step": 3, "loss": "x", "layout": 1, "rank_count": 1, "tokens": 1}',
        '{"step": 3, "validation_loss": "x", "validation_perplexity": 1}',
        '{"step": 3, "validation_loss": 1.0}',
        "[1]",
        b"\xff\xfe\x00",
    ],
)
def test_a_spoilt_record_is_left_out(run, line):
    before = report.summary(report.read(run))
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    assert report.summary(report.read(run)) == before


def test_no_run_directory(tmp_path):
    with pytest.raises(InputError, match="is not a run directory"):
        report.read(tmp_path)


def test_parts_add_up_and_waiting_is_waiting_wherever_it_is_spent():
    """Rank 1 ends at 3 and waits in its reduction for rank 0, which computes until 5."""
    spans = (
        Span(0, "data", "", 0.0, 0.5),
        Span(1, "data", "", 0.0, 0.5),
        Span(0, "forward", "F0.0", 0.5, 2.0),
        Span(1, "receive", "F0.0", 0.5, 2.0),
        Span(1, "forward", "F1.0", 2.0, 2.5),
        Span(1, "backward", "B1.0", 2.5, 3.0),
        Span(0, "receive", "B1.0", 2.0, 3.0),
        Span(0, "backward", "B0.0", 3.0, 5.0),
        Span(1, "reduce", "", 3.0, 5.5),
        Span(0, "reduce", "", 5.0, 5.5),
        Span(0, "optimizer", "", 5.5, 6.0),
        Span(1, "optimizer", "", 5.5, 6.0),
    )
    found = compare.parts(Timeline(spans, inside_s={0: {"tensor": 1.0}, 1: {"tensor": 0.0}}))
    assert found == pytest.approx(
        {
            "computing": (3.5 + 1.0) / 2 - 0.5,
            "tensor axis": 0.5,
            compare.WAITING: (1.0 + 1.5 + 2.0) / 2,
            "data axis": 0.5,
            "optimizer": 0.5,
            "data": 0.5,
            "other": 0.0,
        }
    )


def test_predicted_stands_beside_measured_and_the_largest_difference_is_named(run):
    config = report.read(run).config
    foreseen = compare.predicted({**config, "precision": {"compute": "fp16"}}, 50, "selene")
    longer = [
        replace(span, end_s=span.end_s + 0.05) if span.kind == "optimizer" else span
        for span in foreseen.spans
    ]
    measured = replace(foreseen, spans=tuple(longer), title="measured, step 3")
    (run / "timeline/step-00000003.json").write_text(measured.to_json())
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('compute = "fp32"', 'compute = "fp16"'))
    result = CliRunner().invoke(command, [str(run), "--cluster", "selene"])
    assert result.exit_code == 0, result.output
    assert "predicted on selene" in result.output
    assert "largest difference: optimizer took 50.0 ms more than predicted" in result.output
    numbers = json.loads(
        CliRunner().invoke(command, [str(run), "--cluster", "selene", "--json"]).output
    )["comparison"]
    assert numbers["largest_difference"]["seconds"] == pytest.approx(0.05)
    assert sum(numbers["predicted_s"].values()) == pytest.approx(foreseen.makespan_s)
    assert sum(numbers["measured_s"].values()) == pytest.approx(foreseen.makespan_s + 0.05)
    # the price of the layout is the same step
    assert numbers["step_error"] == pytest.approx(foreseen.makespan_s / measured.makespan_s - 1)
    with pytest.raises(InputError, match="unknown"):
        compare.foreseen(run, config, 50, "selen")


def test_a_run_names_its_cluster_and_a_lost_file_is_no_mistake(run, tmp_path):
    config = {"run": {"cluster": "here/cluster.toml"}}
    assert compare.cluster_of(run, config) is None
    (run / "cluster.toml").write_text("")
    assert compare.cluster_of(run, config) == str(run / "cluster.toml")
    assert compare.cluster_of(run, {"run": {"cluster": "selene"}}) == "selene"
    assert compare.cluster_of(run, {"run": {}}) is None
