"""A model of the hub that is converted into the user's cache, and its name as a path."""

import json
import tomllib
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import CliRunner
from mpi4py import MPI

from ptdmpi.base.errors import InputError
from ptdmpi.base.hub import converted_at, local_model
from ptdmpi.checkpoint.examine import newest
from ptdmpi.cli import group
from tests._runs import loop
from tests._texts import VOCAB_SIZE, byte_shards, text
from tests.convert._hugging_face import model

NAME = "org/tiny"


def run(*words):
    return CliRunner().invoke(group, [*map(str, words)], catch_exceptions=False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Let a folder stand for the model org/tiny of the hub, with a cache of its own."""
    pytest.importorskip("transformers")
    model("llama", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "theirs")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / "theirs")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    byte_shards(tmp_path / "train", [[text(600, seed) for seed in range(4)]])
    return tmp_path


def test_a_model_of_the_hub_is_adapted_by_its_name(folder):
    """From the conversion to an adapter that names the model of the hub as its base."""
    with pytest.raises(InputError, match=f"hub, first run ptdmpi convert from-hf {NAME}"):
        run("init", "lora.toml", "--adapt", NAME, "--data", "train")
    assert run("convert", "from-hf", NAME).exit_code == 0
    assert newest(converted_at(NAME)).parent.parent == folder / "cache/ptdmpi/models/org--tiny"
    made = run("init", "lora.toml", "--adapt", NAME, "--data", "train", "--steps", "1")
    assert made.exit_code == 0, made.output
    tree = tomllib.loads((folder / "lora.toml").read_text())
    assert tree["adapt"]["base"] == NAME
    changes = {f"model.{key}": value for key, value in tree["model"].items()}
    changes |= {f"adapt.{key}": value for key, value in tree["adapt"].items()}
    changes |= {"run.steps": 1, "run.dir": str(folder / "run")}
    with loop(MPI.COMM_SELF, folder, changes) as trained:
        trained.run()
    words = ("--prompt", "a", "--max-new-tokens", 2, "--tokenizer", "bytes", "--json")
    by_name = run("generate", NAME, "--adapter", "run", *words)
    by_path = run("generate", converted_at(NAME), "--adapter", "run", *words)
    assert by_name.exit_code == 0, by_name.output
    assert json.loads(by_name.stdout)["samples"] == json.loads(by_path.stdout)["samples"]
    assert run("adapter", "export", "run", "peft").exit_code == 0
    exported = json.loads((folder / "peft/adapter_config.json").read_text())
    assert exported["base_model_name_or_path"] == NAME


def test_names_stand_for_no_paths_that_exist(folder):
    converted_at(NAME).mkdir(parents=True)
    assert local_model(folder) == folder
    assert str(local_model(Path(NAME))) == str(converted_at(NAME))
    (folder / "org").mkdir()  # now the name is a path below this folder
    assert str(local_model(Path(NAME))) == NAME


def test_a_path_needs_a_target(folder):
    with pytest.raises(InputError, match="TARGET is missing: theirs is a path"):
        run("convert", "from-hf", "theirs")
    with pytest.raises(InputError, match=r"SmolLM2-135M: no such folder; legal: .* as org/name"):
        run("convert", "from-hf", "SmolLM2-135M", "out")
