"""Wrong settings of latent attention: one line each, with what is legal."""

import re

import pytest

from ptdmpi.config import InputError
from tests._configs import small

LATENT = {
    "model.kind": "deepseek",
    "model.head_size": 12,
    "model.rope_head_size": 4,
    "model.kv_lora_rank": 10,
}
RULES = [
    ({"model.kv_lora_rank": 8}, r"kv_lora_rank = 8 has no effect .* legal: 0, or .*latent_att"),
    ({"model.q_lora_rank": 8}, "q_lora_rank = 8 has no effect without the sublayer"),
    ({"model.value_head_size": 8}, "value_head_size = 8 has no effect without the sublayer"),
    ({"model.rope_mscale": 1.0}, r'rope_mscale = 1.0 needs rope_scaling = "yarn"; legal: 0\.0'),
    (LATENT | {"model.kv_lora_rank": None}, "kv_lora_rank = 0, but .*; legal: 1 or more"),
    (LATENT | {"model.kv_heads": 2}, "kv_heads = 2 cannot be combined with .*; legal: 4"),
    (LATENT | {"model.norm": "layernorm"}, "norm = 'layernorm' cannot .*; legal: 'rmsnorm'"),
    (LATENT | {"model.positions": "learned"}, "positions = 'learned' cannot .*; legal: 'rope'"),
    (LATENT | {"model.qk_norm": True}, "qk_norm = True cannot be combined .*; legal: False"),
    (LATENT | {"model.block_norm": "post"}, "block_norm = 'post' cannot be .*; legal: 'pre'"),
    (LATENT | {"model.rope_head_size": 12}, "= 12 must be at least 2 and less than .* = 12"),
    (LATENT | {"model.rope_head_size": 3}, "rope_head_size = 3 must be even"),
    (LATENT | {"model.value_head_size": 13}, "= 13 is more than .* = 12; legal: 1 to 12"),
    (
        LATENT | {"model.sublayers": ["attention", "latent_attention", "mlp"]},
        "names attention and latent_attention; legal: one of the two",
    ),
    (LATENT | {"model.mup_base_hidden": 16}, "with latent_attention cannot be .*mup_base_hidden"),
    (LATENT | {"adapt.method": "lora"}, 'adapters are not supported .*; legal: method = "none"'),
]


@pytest.mark.parametrize(("changes", "line"), RULES)
def test_one_line_says_what_is_wrong_and_what_is_legal(changes, line):
    with pytest.raises(InputError) as caught:
        small(changes)
    assert [text for text in str(caught.value).splitlines() if re.search(line, text)]


def test_a_legal_model_is_taken():
    model = small(LATENT).model
    assert model.latent and model.values_width == model.attention_width == 48
    assert small({**LATENT, "model.value_head_size": 6}).model.values_width == 24
