"""`ptdmpi doctor --coordinates`: activations by width, in a table, as JSON and in a picture."""

import json

import pytest
import tomlkit
from click.testing import CliRunner

from ptdmpi.cli import group
from ptdmpi.probe import coordinates
from ptdmpi.probe.coordinates import LAST_LAYER, LOGITS, MUP, STANDARD, Coordinates

MODEL = {"kind": "llama", "layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "seq_length": 32}
RATE = {"learning_rate": 0.015}


def written(folder, model, optimizer=RATE):
    tree = {"run": {"name": "wide", "steps": 5}, "model": {**MODEL, **model}}
    tree |= {"batch": {"global_size": 4}, "optimizer": optimizer}
    tree["data"] = {"train": [{"path": "nowhere"}]}
    path = folder / "config.toml"
    path.write_text(tomlkit.dumps(tree))
    return str(path)


def asked(*words):
    return CliRunner().invoke(group, ["doctor", *map(str, words)], catch_exceptions=False)


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(coordinates, "TIMES", (1, 4))
    monkeypatch.setattr(coordinates, "BATCH", 4)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "model",
    [
        {"mup_base_hidden": 32},
        {"mup_base_hidden": 16, "mup_base_head_size": 4, "qk_norm": True},
        {"mup_base_hidden": 32, "kind": "gpt", "kv_heads": 4},
    ],
)
def test_activations_grow_only_without_mup(tmp_path, narrow, model):
    config = written(tmp_path, model)
    picture = tmp_path / "widths.svg"
    done = asked("--coordinates", config, "--picture", picture, "--json")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    base = model["mup_base_hidden"]
    assert made["widths"] == [base, 4 * base] and made["right"]
    # at the width of the base both are the same model
    assert all(made[MUP][name][0] == made[STANDARD][name][0] for name in (LAST_LAYER, LOGITS))
    assert made[STANDARD][LAST_LAYER][1] > 2 * made[STANDARD][LAST_LAYER][0]
    assert "root mean square" in picture.read_text()


@pytest.mark.long
def test_a_table_names_what_grows(tmp_path, narrow, monkeypatch):
    config = written(tmp_path, {"mup_base_hidden": 32})
    done = asked("--coordinates", config)
    assert done.exit_code == 0 and "with muP, activations do not grow with" in done.output
    monkeypatch.setattr(coordinates, "MOST_GROWTH", 1e-3)
    done = asked("--coordinates", config)
    assert done.exit_code == 1 and "with muP, activations grow with the width" in done.output


def test_growth_is_judged_with_mup_only():
    made = Coordinates((32, 64))
    for name, sizes in ((STANDARD, (1.0, 50.0)), (MUP, (1.0, 1.5))):
        for size in sizes:
            made.add(name, {LOGITS: size})
    assert made.are_right and made.growth(STANDARD, LOGITS) == 50.0
    assert "logits, muP" in made.text() and "x 1.5" in made.text()
    made.sizes[MUP, LOGITS][1] = 3.0
    assert not made.are_right
    made.sizes[MUP, LOGITS][1] = float("nan")
    assert not made.are_right


def test_a_model_without_mup_is_refused(tmp_path):
    for model, message in (
        ({}, "mup_base_hidden = 0: without muP there is nothing to check"),
        ({"mup_base_hidden": 24}, "a model with hidden = 24 cannot have heads of size 16"),
        ({"mup_base_hidden": 32, "layers": -1}, "model.layers = -1"),
    ):
        done = asked("--coordinates", written(tmp_path, model))
        assert done.exit_code == 2 and message in done.output
    assert asked("--picture", "a.png").exit_code == 2
    assert asked("--coordinates", "a.toml", "--parity").exit_code == 2
