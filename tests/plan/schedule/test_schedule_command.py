"""`ptdmpi schedule`: what it prints, its JSON, its files, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from ptdmpi.commands.schedule import command
from ptdmpi.config import InputError
from ptdmpi.plan.schedule.orders import build


def run(*arguments):
    return CliRunner().invoke(command, arguments, catch_exceptions=False, env={"COLUMNS": "100"})


def test_it_prints_the_picture_and_the_numbers():
    result = run("--kind", "interleaved", "-p", "4", "-v", "2", "-m", "8")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0] == "interleaved: p=4, v=2, m=8"
    assert lines[4] == "rank 3 ...012300<11<22<33<40<51<62<73<44<55<66<77<4<5<6<7<......"
    assert "bubble fraction   0.1875 (idle over ideal time)" in lines
    assert "  closed form     0.1875 = (p - 1) / (v m)" in lines
    assert "makespan          57 units of cost" in lines
    assert any(line.startswith("peak activations  11 9 7 5 ") for line in lines)
    assert "\x1b" not in result.stdout


def test_json_is_all_that_is_printed(tmp_path):
    picture = tmp_path / "a.png"
    result = run(
        "--pipeline", "2", "--virtual", "2", "--microbatches", "3", "--json", "--png", str(picture),
        "--forward-cost", "2", "--backward-cost", "2",
    )  # fmt: skip
    schedule = build("interleaved", 2, 2, 3)
    assert json.loads(result.stdout) == {
        "kind": "interleaved",
        "pipeline": 2,
        "virtual": 2,
        "microbatches": 3,
        "bubble_fraction": pytest.approx(30 / 24 - 1),
        "bubble_fraction_closed_form": pytest.approx(1 / 6),
        "makespan": 30.0,
        "peak_activations": list(schedule.peak_activations()),
        "orders": [[str(op) for op in order] for order in schedule.orders],
    }
    assert picture.exists()


@pytest.mark.parametrize(("virtual", "kind"), [("1", "1f1b"), ("2", "interleaved")])
def test_the_default_kind_depends_on_the_chunks(virtual, kind):
    assert json.loads(run("-p", "2", "-v", virtual, "-m", "2", "--json").stdout)["kind"] == kind


def test_files_are_written_and_named(tmp_path):
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    result = run("-p", "2", "-m", "2", "--png", str(svg), "--trace", str(trace))
    assert result.stdout.splitlines()[-2:] == [f"wrote {svg}", f"wrote {trace}"]
    assert svg.exists() and json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "interlaced"), 'did you mean "interleaved"'),
        (("--kind", "1f1b", "-v", "2"), "has virtual = 1, not 2; legal"),
        (("-p", "2000", "-m", "2000"), "4000000 forwards; .* -m is at most 125"),
        (("-m", "0"), "microbatches is 0, must be at least 1"),
        (("--backward-cost", "0"), "backward cost 0.0: legal are"),
        (("--forward-cost", "1e300", "--backward-cost", "1e308"), r"forward cost 1e\+300: legal"),
        (("--png", "a.pdf"), "a.pdf: pictures are .png or .svg"),
        (("--trace", "missing/a.json"), "cannot be written"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        run("-p", "2", "-m", "2", *arguments)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
