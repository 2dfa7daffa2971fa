"""Published models by name in a configuration: sizes, and how they were trained."""

import pytest
import tomlkit

from ptdmpi.config import InputError, resolve, to_toml
from ptdmpi.config.presets import model_presets, recipe
from tests._configs import small


def test_a_preset_brings_the_sizes_and_what_is_said_beside_it_wins():
    none = {f"model.{key}": None for key in ("layers", "hidden", "heads", "seq_length")}
    model = small({**none, "model.preset": "gpt3-125m", "model.seq_length": 64}).model
    assert (model.layers, model.hidden, model.heads, model.seq_length) == (12, 768, 12, 64)
    assert recipe("gpt3-125m")["batch"] == {"global_size": 256}
    grouped = small({**none, "model.preset": "llama3-8b"}).model
    assert (grouped.norm, grouped.kv_heads, grouped.ffn_hidden) == ("rmsnorm", 8, 14336)
    with pytest.raises(InputError) as caught:
        small({**none, "model.preset": "gpt3-125"})
    assert "model.preset = 'gpt3-125' is unknown; did you mean gpt3-125m or " in str(caught.value)


def test_a_mistake_says_which_sizes_are_those_of_the_preset():
    changes = {"model.preset": "gpt3-125m", "model.layers": None, "model.hidden": None}
    with pytest.raises(InputError) as caught:
        small({**changes, "model.heads": 5})
    whose = r"(model.heads of the configuration, model.hidden of preset gpt3-125m)"
    assert "model.heads = 5 does not divide model.hidden = 768" in str(caught.value)
    assert str(caught.value).splitlines()[0].endswith(whose)
    with pytest.raises(InputError) as caught:  # a preset set on a sized configuration
        small({"model.preset": "gpt3-125m", "model.hidden": 60, "model.heads": 8})
    assert "(model.heads and model.hidden of the configuration, in place of" in str(caught.value)
    with pytest.raises(InputError) as caught:
        small({"model.heads": 7})
    assert "of the configuration" not in str(caught.value)


NO_SIZES = {f"model.{key}": None for key in ("layers", "hidden", "heads", "seq_length")}
NO_RECIPE = {"batch.global_size": None, "optimizer.learning_rate": None}
NO_RECIPE |= {"optimizer.warmup_steps": None, "batch.micro_size": 1}


def test_a_preset_brings_how_its_model_was_trained():
    changes = {**NO_SIZES, **NO_RECIPE, "model.preset": "gpt3-175b", "run.steps": 100000}
    config = small(changes)
    assert config.batch.global_size == 1536
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.min_learning_rate) == (6e-5, 6e-6)
    assert (optimizer.warmup_steps, optimizer.beta2, optimizer.weight_decay) == (119, 0.95, 0.1)
    # a short trial works as it stands, and what is said wins
    short = small({**changes, "run.steps": 50, "optimizer.learning_rate": 1e-7})
    assert short.optimizer.warmup_steps == 5
    assert (short.optimizer.learning_rate, short.optimizer.min_learning_rate) == (1e-7, 0.0)
    bert = small({**changes, "model.preset": "bert-1.3b"})
    assert (bert.model.block_norm, bert.model.masked, bert.optimizer.decay) == (
        "pre",
        True,
        "linear",
    )


@pytest.mark.parametrize("name", model_presets())
def test_every_preset_can_be_trained(name):
    config = small({**NO_SIZES, **NO_RECIPE, "batch.global_size": 4, "model.preset": name})
    assert config.model.hidden % config.model.heads == 0
    assert resolve(tomlkit.parse(to_toml(config)).unwrap(), 1) == config
