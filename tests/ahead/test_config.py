"""The keys of multi-token prediction: what they refuse, and which models ignore them."""

import pytest

from ptdmpi.base.errors import InputError
from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.model.output.losses import kinds_of
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.ahead import modules
from ptdmpi.plan.shape import flops, parameters
from tests._configs import small

V = 61
DEPTH = {"model.mtp_depth": 1}
REFUSED = [
    ({"model.mtp_depth": 5}, r"mtp_depth"),
    ({"model.mtp_depth": -1}, r"mtp_depth"),
    ({"model.mtp_loss_coefficient": -0.5, **DEPTH}, r"mtp_loss_coefficient"),
    (
        {"model.mtp_loss_coefficient": 0.1},
        r"mtp_loss_coefficient = 0.1 has no effect with mtp_depth = 0; legal: 0.3, or mtp_depth",
    ),
    ({"model.kind": "bert", **DEPTH}, r'mtp_depth = 1 excludes model.attention = "bidirectional"'),
    ({"model.block_norm": "post", **DEPTH}, r'excludes model.block_norm = "post"; legal: "pre"'),
    ({"run.loss": "tests._own:halved", **DEPTH}, r"excludes run.loss = .*, or mtp_depth = 0"),
    (
        {"preference.method": "dpo", "data.document_boundaries": True, **DEPTH},
        r'excludes preference.method = "dpo"; legal: method = "none", or mtp_depth = 0',
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_bad_input_is_refused_in_one_line(changes, message):
    with pytest.raises(InputError, match=message):
        small(changes)


def test_losses_have_their_share_of_the_coefficient():
    kinds = kinds_of(small({"model.mtp_depth": 2, "model.mtp_loss_coefficient": 0.5}))
    assert {name: kind.factor for name, kind in kinds.items()} == {
        "task": 1.0,
        "multi_token_1": 0.25,
        "multi_token_2": 0.25,
    }
    assert kinds["multi_token_2"].key == "multi_token_2_loss"


@pytest.mark.parametrize(
    "changes",
    [
        {"adapt.method": "lora", "adapt.rank": 2},
        {"task.kind": "classification", "task.labels": ["no", "yes"]},
    ],
)
def test_adapters_and_heads_for_tasks_have_no_modules(changes):
    config = small({**changes, **DEPTH})
    model = config.with_head().model
    assert model.mtp_depth == 1 and model.mtp_modules == 0 and model.routing_layers == ()
    assert modules.head(model, V) == describe.head(model, V)
    assert [*kinds_of(config.with_head())][1:] in ([], ["right"])


def test_counts_of_parameters_and_flops():
    """A module has a layer, a projection and three norms; and a model its tables once."""
    for tied in (True, False):
        shape = {"model.kind": "llama", "model.tie_embeddings": tied}
        plain, deep = small(shape).model, small({**shape, "model.mtp_depth": 2}).model
        h = plain.hidden
        more = parameters.layer_elements(plain) + 2 * h * h + 3 * h
        count = parameters.parameter_count(plain, V) + 2 * more
        assert parameters.parameter_count(deep, V) == count
        each = flops.layer_forward_flops(plain) + 4 * h * h + flops.head_forward_flops(plain, V)
        whole = flops.head_forward_flops(plain, V) + 2 * each
        assert flops.head_forward_flops(deep, V) == whole


def test_only_chosen_experts_of_a_module_are_active():
    shape = {"model.kind": "llama", "model.experts": 4, "model.experts_per_token": 2}
    plain, deep = small(shape).model, small({**shape, **DEPTH}).model
    h = plain.hidden
    unused = 2 * 3 * h * plain.expert_hidden
    more = parameters.layer_elements(plain) - unused + 2 * h * h + 3 * h
    assert parameters.active_count(deep, V) == parameters.active_count(plain, V) + more
    assert deep.routing_layers == (0, 1, 2, 3)


def test_the_last_stage_has_fewer_layers():
    """The work of the modules counts as work of the last stage."""
    from ptdmpi.plan.layout.stages import split_model
    from ptdmpi.plan.schedule.orders import placement

    shape = {"model.kind": "llama", "model.layers": 8}
    placed = placement("1f1b", 2, 1)
    plain = split_model(small(shape).model, V, placed)
    deep = split_model(small({**shape, "model.mtp_depth": 2}).model, V, placed)
    assert len(deep[-1]) < len(plain[-1])


def test_adapted_models_leave_modules_out_of_their_description():
    model = small(DEPTH).model.adapted(AdaptConfig(method="lora", rank=2))
    assert model.mtp_modules == 0
