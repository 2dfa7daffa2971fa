"""The question of `ptdmpi plan`, asked from Python."""

from dataclasses import replace

import pytest

from ptdmpi.config import InputError
from ptdmpi.plan.ask.layouts import LayoutRequest, answer

MODEL = "l=8,h=1024,a=16"


def test_one_layout_is_priced_with_the_settings_of_the_request():
    request = LayoutRequest(
        MODEL, "selene", batch=16, layout="t=2,p=1,d=4,b=1", zero=2, shard_group="all"
    )
    plan = answer(request)
    assert plan.layout.zero == 2 and plan.layout.shard_group is None
    assert plan.numbers["ranks"] == 8 and len(plan.numbers["layouts"]) == 1
    assert plan.numbers["train"]["batch"]["global_size"] == 16


def test_a_method_of_the_context_axis_is_priced_as_asked():
    asked = LayoutRequest(
        f"{MODEL},s=32768", "selene", batch=4, layout="c=4,d=1", context_method="ulysses"
    )
    (entry,) = answer(asked).numbers["layouts"]
    assert entry["context_method"] == "ulysses"
    assert "all_to_all" in entry["sent"]["context"]
    plain = answer(replace(asked, context_method=None)).numbers["layouts"][0]
    assert plain["context_method"] == "all_gather"
    with pytest.raises(InputError, match="context = 3 does not divide the 16 heads"):
        answer(replace(asked, model=f"{MODEL},s=3072", layout="c=3,d=1"))


@pytest.mark.parametrize("option", ["layout", "why"])
def test_an_empty_layout_is_refused_and_does_not_search(option):
    with pytest.raises(InputError, match='"" is not a size'):
        answer(LayoutRequest(MODEL, "selene", ranks=8, batch=16, **{option: ""}))


def test_the_default_request_searches():
    plan = answer(LayoutRequest(MODEL, "selene", ranks=8, batch=16))
    assert str(plan.layout) == plan.numbers["layouts"][0]["layout"]
    assert {"heuristic", "microbatch_model"} <= plan.numbers.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 16}, "give --ranks"),
        ({"ranks": 8}, "give --batch"),
        ({"ranks": 8, "batch": 16, "recompute_layers": 2}, "belongs to --recompute full"),
        ({"ranks": 8, "batch": 16, "base_bits": "int8"}, "belongs to --lora"),
    ],
)
def test_requests_that_contradict_themselves(options, message):
    with pytest.raises(InputError, match=message):
        answer(LayoutRequest(MODEL, "selene", **options))
