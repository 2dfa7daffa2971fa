"""`--adapter` of the commands: the model that was trained, as a merged one; not the base alone."""

import json

import pytest
from click.testing import CliRunner
from mpi4py import MPI

from ptdmpi.cli import group
from tests import _stored
from tests._runs import loop
from tests._texts import VOCAB_SIZE, byte_shards, text
from tests.adapters.test_train import LORA

SHAPE = _stored.LLAMA | {"layers": 2}


def said(*words: object) -> dict:
    """What a command prints as JSON."""
    done = CliRunner().invoke(group, [*map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def trained(tmp_path):
    """A base, adapters trained over it by large steps, and both merged by the command."""
    base, run, whole = (tmp_path / name for name in ("base", "run", "whole"))
    _stored.stored(base, VOCAB_SIZE, 0.3, **SHAPE)
    byte_shards(tmp_path / "train", [[text(600, seed) for seed in range(4)]])
    changes = {f"model.{key}": value for key, value in SHAPE.items()} | LORA
    changes |= {"adapt.base": str(base), "run.steps": 3, "optimizer.learning_rate": 0.1}
    with loop(MPI.COMM_SELF, tmp_path, changes) as made:
        made.run()
    done = CliRunner().invoke(group, ["adapter", "merge", str(base), str(run), str(whole)])
    assert done.exit_code == 0, done.output
    return base, run, whole


def test_generate_takes_adapters(trained):
    base, run, whole = trained
    options = ["--prompt", "a", "--prompt", "two", "--max-new-tokens", 12, "--tokenizer", "bytes"]
    asked = [base], [base, "--adapter", run], [whole]
    alone, adapted, merged = (
        [one["ids"] for one in said("generate", *words, *options)["samples"]] for words in asked
    )
    assert adapted == merged and adapted != alone


@pytest.mark.long
def test_evaluate_takes_adapters(trained, tmp_path):
    base, run, whole = trained
    byte_shards(tmp_path / "held-out", [[text(300, 9)]])
    options = ["--data", tmp_path / "held-out", "--tokenizer", "bytes"]
    asked = [base], [base, "--adapter", run], [whole]
    alone, adapted, merged = (
        said("evaluate", *words, *options)["perplexity"][0]["perplexity"] for words in asked
    )
    assert adapted == pytest.approx(merged, rel=1e-5)
    assert adapted != pytest.approx(alone, rel=1e-2)
