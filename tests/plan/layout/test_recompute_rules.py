"""What full recomputation takes and keeps: each rule, and what it says is legal."""

import pytest

from ptdmpi.config import InputError
from tests._configs import small

FULL = {"recompute.mode": "full"}
PARTITIONED = {"recompute.partition_activations": True}
# 3 divides heads and MLP, and no hidden size of 16
UNEVEN = {"model.heads": 3, "model.head_size": 4, "model.ffn_hidden": 48, "model.hidden": 16}
RULES = [
    ({"recompute.layers": 2}, 'recompute.layers has an effect only with recompute.mode = "full"'),
    (FULL | {"recompute.layers": 4}, "recompute.layers = 4: the model has 3 layers"),
    (
        PARTITIONED | {"recompute.mode": "selective"},
        'recompute.partition_activations has an effect only with recompute.mode = "full"',
    ),
    (
        PARTITIONED | FULL | {"parallel.tensor": 2, "parallel.sequence_parallel": True},
        "parallel.sequence_parallel divides activations already; legal: one of these",
    ),
    (
        PARTITIONED | FULL | UNEVEN | {"parallel.tensor": 3, "model.seq_length": 16},
        "tensor = 3 does not divide the 512 numbers of an activation",
    ),
]


@pytest.mark.parametrize(("changes", "line"), RULES)
def test_each_rule_says_what_is_legal(changes, line):
    with pytest.raises(InputError) as caught:
        small(changes, changes.get("parallel.tensor", 1))
    assert line in str(caught.value)


def test_what_is_legal_is_taken():
    for changes in (FULL | {"recompute.layers": 3}, PARTITIONED | FULL):
        small(changes)
    config = small(PARTITIONED | FULL | {"parallel.tensor": 2}, 2)
    assert config.layout.partition_activations
    assert config.layout.sections()["recompute"]["partition_activations"]
