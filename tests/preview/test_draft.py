"""The configurations that `ptdmpi init` writes."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ptdmpi.commands.init import command as init
from ptdmpi.commands.train import command as train
from ptdmpi.config import InputError, ModelConfig, resolve
from ptdmpi.plan.cost import relief
from ptdmpi.preview.draft import draft
from ptdmpi.preview.wish import SMALL, Wish
from tests.parallel import mpirun


def wish(corpus: Path, **changes: Any) -> Wish:
    keys = {"file": Path("x.toml"), "model": SMALL, "data": corpus / "data/train", "ranks": 4}
    return Wish(**{**keys, "memory_bytes": 2**40, **changes})


@pytest.mark.parametrize("ranks", [1, 3, 6, 8])
def test_init_finds_a_legal_layout_for_any_number_of_ranks(corpus, ranks):
    config = resolve(tomllib.loads(draft(wish(corpus, ranks=ranks))), ranks)
    assert config.data_size == ranks and config.batch.global_size % ranks == 0


def test_init_keeps_all_that_is_said_of_the_model(corpus):
    def model(text: str) -> ModelConfig:
        return resolve(tomllib.loads(draft(wish(corpus, model=text, ranks=1))), 1).model

    shape = model("qwen3-0.6b,l=2,h=64,a=4,s=32,kv_heads=2,ffn_hidden=64")
    assert (shape.layers, shape.hidden, shape.head_size, shape.qk_norm) == (2, 64, 128, True)
    assert shape.rope_theta == 1e6 and shape.tie_embeddings
    shape = model("llama3.2-1b,l=2,h=64,a=4,s=32,kv_heads=2,ffn_hidden=64,head_size=16")
    assert (shape.rope_theta, shape.rope_scaling) == (5e5, "llama3")
    shape = model("l=2,h=32,a=4,s=32,bias=false,positions=rope")
    assert (shape.bias, shape.positions) == (False, "rope")


@pytest.mark.long
def test_init_writes_adapters_of_a_trained_model(corpus, monkeypatch):
    """The sections [model] and [adapt] fit the base. Two models, or adapters, are refused."""
    monkeypatch.chdir(corpus)
    words = ["--data", "data", "--steps", "1"]
    first = [*words, "--model", "l=1,h=32,a=2,s=16", "--name", "base"]
    assert CliRunner().invoke(init, ["base.toml", *first]).exit_code == 0
    mpirun(1, ["-m", "ptdmpi", "train", "base.toml"], cwd=corpus)
    lora = ["lora.toml", *words, "--adapt", "runs/base", "--name", "lora"]
    made = CliRunner().invoke(init, lora)
    assert made.exit_code == 0, made.output
    written = tomllib.loads(Path("lora.toml").read_text())
    assert written["adapt"] == {"method": "lora", "rank": 16, "alpha": 32.0, "base": "runs/base"}
    assert written["model"]["hidden"] == 32 and "document_boundaries" not in written["data"]
    for changed, message in (("model.rope_theta=5.0", "rope_theta"), ("adapt.base=no", "no")):
        words_of_run = ["lora.toml", "--dry-run", "--ranks", "1", "--set", changed]
        with pytest.raises(InputError, match=message):  # as the run
            CliRunner().invoke(train, words_of_run, catch_exceptions=False)
    mpirun(1, ["-m", "ptdmpi", "train", "lora.toml"], cwd=corpus)
    for name, option, message in (
        ("both", ["--adapt", "runs/base", "--model", "l=1,h=32,a=2"], "both name a model"),
        ("none", ["--adapt", "nowhere"], "nowhere"),
        ("adapters", ["--adapt", "runs/lora"], "contains only adapters"),
    ):
        with pytest.raises(InputError, match=message):
            CliRunner().invoke(init, [f"{name}.toml", *words, *option], catch_exceptions=False)
        assert not Path(f"{name}.toml").exists()


def test_init_divides_a_model_that_is_too_large_for_a_rank(corpus):
    whole = resolve(tomllib.loads(draft(wish(corpus))), 4)
    need = relief.Step.of(whole, 257).largest()[1].total
    smaller = tomllib.loads(draft(wish(corpus, memory_bytes=need // 3)))
    config = resolve(smaller, 4)
    assert config.parallel.tensor * config.parallel.pipeline > 1 or config.batch.micro_size < 8
    assert relief.Step.of(config, 257).largest()[1].total <= need // 3
    with pytest.raises(InputError, match="does not fit on 4 ranks"):
        draft(wish(corpus, memory_bytes=1000))


def test_init_takes_the_best_layout_of_a_cluster(corpus):
    tree = tomllib.loads(
        draft(
            wish(corpus, ranks=8, cluster="selene", model="gpt3-125m", data=corpus / "data/train")
        )
    )
    assert (
        tree["precision"]["compute"] in ("bf16", "fp16") and tree["model"]["preset"] == "gpt3-125m"
    )
    assert resolve(tree, 8).optimizer.learning_rate == 6e-4  # as its source states it


def test_more_ranks_than_a_machine_has_memory_for_are_refused(corpus):
    """The memory of this machine does not matter for a named cluster."""
    with pytest.raises(InputError, match="--ranks 7000: this machine has no memory left"):
        draft(wish(corpus, ranks=7000, memory_bytes=1))
    assert "[parallel]" in draft(wish(corpus, ranks=8, memory_bytes=1, cluster="selene"))
