"""The layout that `ptdmpi plan` puts first, and the configuration that it writes of it."""

import json
import tomllib

import pytest
from click.testing import CliRunner

from ptdmpi.commands.cluster import command as cluster
from ptdmpi.commands.plan import command
from ptdmpi.config import InputError, resolve
from ptdmpi.plan.machine.cluster import load_cluster

SMALL = ("--model", "l=8,h=1024,a=16", "--cluster", "selene", "--batch", "16", "--ranks", "8")


def planned(*arguments):
    runner = CliRunner()
    return json.loads(runner.invoke(command, [*arguments, "--json"], catch_exceptions=False).stdout)


def axes(entry):
    sizes = dict(word.split("=") for word in entry["layout"].split(","))
    return sum(sizes.get(axis, "1") != "1" for axis in "tcpd"), int(sizes["v"])


@pytest.mark.long
def test_the_simplest_of_almost_equal_layouts_is_first():
    """On this model p = 2 with several chunks is fastest, and one chunk is hardly slower."""
    asked = ("--model", "llama3-8b", "--cluster", "h100", "--ranks", "8", "--batch", "512")
    fastest, simplest = (planned(*asked, "--order", order) for order in ("best", "simplest"))
    least_s = fastest["layouts"][0]["step_time_s"]
    times = [entry["step_time_s"] for entry in simplest["layouts"]]
    near = [entry for entry in simplest["layouts"] if entry["step_time_s"] < 1.02 * least_s]
    assert near == simplest["layouts"][: len(near)] and len(times) == 5
    assert [axes(entry) for entry in near] == sorted(map(axes, near))
    assert axes(near[0]) < axes(fastest["layouts"][0]) and min(times) == least_s
    assert times[len(near) :] == sorted(times[len(near) :])


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ranks", "batch", "layout", "recompute"),
    [
        ("gpt3-1.3b", 64, 64, "t=1,p=1,d=64,v=1,b=1", "none"),
        ("gpt3-175b", 1024, 1536, "t=4,p=8,d=32,v=6,b=2", "selective"),
    ],
)
def test_the_fastest_of_all_that_fit_is_the_recorded_layout(model, ranks, batch, layout, recompute):
    """Without headroom and without a preference for simple layouts. A change of the cost model may
    change these layouts, and must then say so."""
    asked = ("--model", model, "--cluster", "selene", "--ranks", str(ranks), "--batch", str(batch))
    (first, *_) = planned(*asked, "--precision", "fp16", "--headroom", "0", "--order", "best")[
        "layouts"
    ]
    assert (first["layout"], first["recompute"]) == (layout, recompute)


def test_a_search_keeps_memory_free_and_a_given_layout_fits_all_the_same():
    """One of the best layouts of this model fills 98 % of an A100."""
    asked = ("--model", "gpt3-1.3b", "--cluster", "selene", "--ranks", "4", "--batch", "64")
    full, default, half = (
        planned(*asked, "--order", "best", *more)["layouts"]
        for more in (("--headroom", "0"), (), ("--headroom", "50"))
    )
    for entries, share in ((full, 1.0), (default, 0.92), (half, 0.5)):
        for entry in entries:
            assert entry["peak_memory_bytes"] <= share * entry["capacity_bytes"]
            assert entry["capacity_bytes"] == 84.9e9 and entry["fits"]
    over = [entry for entry in full if entry["peak_memory_bytes"] > 0.92 * 84.9e9]
    assert over and full[0]["step_time_s"] < half[0]["step_time_s"]
    options = ("--recompute", over[0]["recompute"], "--zero", str(over[0]["zero"]))
    options += ("--recompute-layers", str(over[0]["recompute_layers"]))
    (given,) = planned(*asked[:4], "--batch", "64", "--layout", over[0]["layout"], *options)[
        "layouts"
    ]
    assert given["fits"] and given["peak_memory_bytes"] > 0.92 * given["capacity_bytes"]


def test_what_fits_only_without_headroom_says_so():
    model = ("--model", "l=24,h=4096,a=32", "--cluster", "selene", "--batch", "8", "--ranks", "1")
    with pytest.raises(InputError, match=r"9\d% of which stay free; would fit: --headroom 0"):
        planned(*model, "--headroom", "90")


def test_a_written_plan_is_a_configuration(tmp_path):
    file = tmp_path / "chosen.toml"
    told = planned(*SMALL, "--tokens", "1e6", "--write", str(file))
    tree = tomllib.loads(file.read_text())
    config = resolve(tree, 8)
    assert f"{config.layout}" == told["layouts"][0]["layout"]
    assert config.run.steps == 31 and config.run.cluster == "selene"  # 1e6 / (16 * 2048)
    assert (config.model.layers, config.batch.global_size) == (8, 16)
    for section, keys in told["train"].items():
        assert {key: tree[section][key] for key in keys} == keys
    with pytest.raises(InputError, match="exists already; give --write another name"):
        planned(*SMALL, "--write", str(file))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--dp-overlap",), "leave out --dp-overlap"),
        (("--lora", "8"), "leave out --lora"),
        (("--headroom", "91"), "--headroom 91: must be a whole number, 0 to 90"),
        (("--headroom", "-1"), "--headroom -1: must be"),
        (("--headroom", "0.08"), "--headroom 0.08: must be a whole number"),
        (("--layout", "t=1,p=1,d=8,b=2", "--model", "l=8,h=12288,a=96"), "does not fit: "),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path, arguments, word):
    file = tmp_path / "chosen.toml"
    with pytest.raises(InputError, match=word) as error:
        planned(*SMALL, "--write", str(file), *arguments)
    assert "\n" not in str(error.value) and not file.exists()


def test_a_new_cluster_file_predicts_as_its_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    runner.invoke(cluster, ["new", "mine.toml", "--from", "h100"], catch_exceptions=False)
    copy, model = load_cluster("mine.toml"), load_cluster("dgx-h100")
    assert copy.name == "mine" and copy.model_copy(update={"name": model.name}) == model
    assert "# NVIDIA H100 SXM data sheet" in (tmp_path / "mine.toml").read_text()
    for words, text in (
        (("mine.toml", "--from", "h100"), "mine.toml exists already"),
        (("mine", "--from", "h100"), "must end in .toml"),
        (("--from", "h10"), 'did you mean "dgx-h100"'),
    ):
        with pytest.raises(InputError, match=text):
            runner.invoke(cluster, ["new", *words], catch_exceptions=False)
