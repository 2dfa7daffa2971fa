"""Wrong settings of experts: one line each, with what is legal."""

import re
from dataclasses import replace

import pytest

from ptdmpi.config import InputError
from ptdmpi.config.configuration import Sections
from ptdmpi.config.rules.experts import may_deal
from ptdmpi.plan.layer.legality import refusals
from tests._configs import small

MIXED = {"model.kind": "llama", "model.experts": 8, "model.experts_per_token": 2}
RULES = [
    ({"model.experts_per_token": 2}, "experts_per_token = 2 has no effect without experts"),
    ({"model.router": "sigmoid"}, 'router = "sigmoid" has no effect without experts; legal: r'),
    ({"model.expert_hidden": 48}, "expert_hidden = 48 has no effect without experts; legal: 128"),
    (MIXED | {"model.experts_per_token": 9}, "= 9, but model.experts = 8; legal: 1 to 8"),
    (MIXED | {"model.experts_per_token": None}, "= 0, but model.experts = 8; legal: 1 to 8"),
    (MIXED | {"model.experts_per_token": 1}, "router has no gradient; legal: router_normalize"),
    (MIXED | {"model.router_groups": 3}, "router_groups = 3 does not divide .* = 8.*2 or 4"),
    (
        MIXED | {"model.router_groups": 8, "model.experts_per_token": 3},
        "the 8 groups contains 1 of the experts, and a token uses 3; legal: 3 to 8",
    ),
    ({"model.dense_layers": 1}, "dense_layers = 1 has no effect without experts; legal: d"),
    (MIXED | {"model.dense_layers": 3}, "dense_layers = 3 gives no layer experts.*legal: 0 to 2"),
    (
        MIXED | {"model.dense_layers": 2, "model.moe_every": 2},
        "dense_layers = 2 gives no layer experts, since .* is layer 1; legal: 0 to 1",
    ),
    (MIXED | {"model.moe_every": 4}, "moe_every = 4 gives no layer experts.*legal: 1 to 3"),
    (
        MIXED | {"model.balance": "none", "model.balance_coefficient": 0.5},
        'balance_coefficient = 0.5 has no effect with balance = "none"; legal: 0.001',
    ),
    (MIXED | {"model.kind": "gpt"}, "model.bias = true: experts have no biases"),
    (
        MIXED | {"adapt.method": "lora", "model.dense_layers": 1},
        "adapters are not supported in models in which only some layers have experts",
    ),
    (MIXED | {"quantize.weights": "nf4"}, 'excludes quantize.weights = "nf4"'),
    (MIXED | {"run.compile": True}, "excludes run.compile = true"),
    (MIXED | {"data_parallel.method": "local"}, 'excludes data_parallel.method = "local"'),
]


@pytest.mark.parametrize(("changes", "line"), RULES)
def test_one_line_says_what_is_wrong_and_what_is_legal(changes, line):
    with pytest.raises(InputError) as caught:
        small(changes)
    assert [text for text in str(caught.value).splitlines() if re.search(line, text)]


@pytest.mark.parametrize("key", ["capacity_factor", "expert_capacity", "capacity"])
def test_experts_have_no_capacity(key):
    with pytest.raises(InputError) as caught:
        small(MIXED | {f"model.{key}": 1.25})
    (line,) = [text for text in str(caught.value).splitlines() if key in text]
    assert f"model.{key} is not a key: an expert has no capacity" in line
    assert "no token is dropped; legal: no such key" in line


# on four data ranks
DEALT = [
    (
        {"parallel.expert": 3},
        "expert = 3 does not divide the data axis, 4; legal nearby: 1 or 2 or 4",
    ),
    (
        {"parallel.expert": 4, "model.experts": 6},
        "4 does not divide model.experts = 6; .* 3 or 6",
    ),
    (
        {"parallel.expert": 8, "parallel.context": 2},
        "expert = 8 does not divide c = 2, and is not c times a divisor of d = 2",
    ),
    ({"parallel.expert": 2, "run.reproducible": True}, "= 2 excludes run.reproducible = true"),
    (
        {"parallel.expert": 2, "log.gradient_noise_every_steps": 2},
        "= 2 excludes log.gradient_noise_every_steps = 2; legal: 0, or expert = 1",
    ),
    (
        {"parallel.expert": 2, "parallel.zero": 1, "parallel.shard_group": 4},
        "shard_group = 4 does not divide the 2 ranks with the same experts",
    ),
]


@pytest.mark.parametrize(("changes", "line"), DEALT)
def test_experts_that_cannot_be_dealt(changes, line):
    with pytest.raises(InputError) as caught:
        small(MIXED | changes, 4)
    assert [text for text in str(caught.value).splitlines() if re.search(line, text)]


def test_the_search_deals_experts_only_where_a_run_may():
    assert may_deal(Sections.of_config(small(MIXED)))
    assert not may_deal(Sections.of_config(small(MIXED | {"run.reproducible": True})))


def test_a_model_without_experts_has_none_to_deal():
    with pytest.raises(InputError, match=r"model\.experts = 0; legal: expert = 1"):
        small({"parallel.expert": 2}, 2)


def test_the_tensor_axis_divides_the_width_of_an_expert():
    changes = {**MIXED, "model.expert_hidden": 42, "parallel.tensor": 4}
    with pytest.raises(InputError, match=r"does not divide model\.expert_hidden = 42"):
        small(changes, 4)
    changes |= {"model.expert_hidden": 40, "model.ffn_hidden": 42}
    assert small(changes, 4).model.ffn_hidden == 42  # no layer has this width
    with pytest.raises(InputError, match=r"does not divide model\.ffn_hidden = 42"):
        small(changes | {"model.dense_layers": 1}, 4)


def test_a_norm_over_all_heads_is_not_divided():
    config = small(MIXED | {"model.qk_norm": "all"}, 2)
    assert not [*refusals(config.layout, config.model)]
    (line,) = refusals(replace(config.layout, tensor=2, data=1), config.model)
    assert line.endswith("but parallel.tensor = 2 divides them; legal: tensor = 1")


def test_an_expert_is_as_wide_as_the_dense_mlp_unless_it_is_said():
    assert small(MIXED).model.expert_hidden == small(MIXED).model.ffn_hidden
