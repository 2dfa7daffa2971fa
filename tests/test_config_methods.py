"""What [data_parallel], [optimizer] and [adapt] refuse, a line each with the reason, and allow."""

import pytest

from ptdmpi.config import InputError, resolve, to_toml
from ptdmpi.config.methods import COMPRESSED_BY, USED_BY, said_at_start
from tests._configs import small, tree

LOCAL = {"data_parallel.method": "local", "parallel.data": 4}
TOP_K = {"data_parallel.method": "compressed", "data_parallel.compressor": "top_k"}
GOSSIP = {"data_parallel.method": "decentralized"}
SGD = {"optimizer.kind": "sgd"}
MUON = {"optimizer.kind": "muon"}
CODES = {"data_parallel.compressor": "top_k"}
FULL = {"adapt.method": "full", "adapt.base": "a"}
LOW_RANK = {"data_parallel.method": "compressed", "data_parallel.compressor": "power_sgd"}


def mistakes(changes: dict) -> list[str]:
    try:
        resolve(tree(changes), 4)
    except InputError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_parallel.local_steps": 4}, 'local_steps has an effect only with method = "local"'),
        ({**GOSSIP, "data_parallel.local_steps": 4}, "legal: local_steps = 1"),
        ({**LOCAL, "data_parallel.topology": "torus"}, "topology has an effect only with"),
        ({"data_parallel.method": "ring", **CODES}, 'has an effect only with method = "comp'),
        ({**LOCAL, **CODES, "data_parallel.error_feedback": "ef21"}, 'legal: error_feedback = "n'),
        ({**LOCAL, **CODES, "data_parallel.average_moments": True}, "sends only parameters"),
        ({**LOCAL, "data_parallel.ratio": 0.1}, 'only with compressor = "top_k" or'),
        ({**LOCAL, "data_parallel.error_feedback": "mem_sgd"}, 'effect with compressor = "none"'),
        ({**GOSSIP, "data_parallel.consensus_rate": 0.1}, "legal: consensus_rate = 0.05"),
        ({**GOSSIP, **CODES, "data_parallel.error_feedback": "ef21"}, "error_feedback has an"),
        ({**GOSSIP, **CODES, "data_parallel.overlap": True}, "legal: overlap = false"),
        ({**GOSSIP, **CODES, "data_parallel.average_every": 4}, "legal: average_every = 0"),
        ({**GOSSIP, **CODES, "data_parallel.topology": "random"}, 'legal: "ring", "grid"'),
        ({**GOSSIP, "data_parallel.compressor": "power_sgd"}, "sum its factors over all replica"),
        ({**LOW_RANK, "data_parallel.rank": 10**6}, "legal: 1 to "),
        ({**LOCAL, **SGD, "data_parallel.average_moments": True}, "legal: average_moments = false"),
        ({**TOP_K, "data_parallel.levels": 5}, 'an effect only with compressor = "qsgd"'),
        ({**TOP_K, "data_parallel.rounds": 3}, 'only with error_feedback = "neolithic"'),
        ({"data_parallel.method": "compressed"}, 'needs data_parallel.compressor; legal: "top_k"'),
        ({"data_parallel.method": "gossip"}, "data_parallel.method = 'gossip'"),
        ({"data_parallel.metod": "local"}, "did you mean method?"),
        ({**LOCAL, "parallel.zero": 1}, "replicas differ"),
        ({"data_parallel.method": "ring", "parallel.zero": 2}, "each rank needs the whole gradi"),
        ({**LOCAL, "parallel.offload": "optimizer"}, 'legal: offload = "none"'),
        ({**GOSSIP, "run.reproducible": True}, 'or method = "all_reduce"'),
        ({**TOP_K, "precision.compute": "fp16"}, "changes the scale of the loss during"),
        ({**SGD, "optimizer.beta1": 0.8}, 'beta1 has no effect with optimizer.kind = "sgd"'),
        ({"optimizer.momentum": 0.9}, "legal: momentum = 0.0"),
        ({**SGD, "optimizer.nesterov": True}, "needs optimizer.momentum above 0"),
        ({**SGD, "parallel.offload": "disk"}, "keeps no state that could be offloaded"),
        ({**MUON, "parallel.offload": "optimizer"}, 'whole matrices; legal: offload = "none"'),
        ({**MUON, "adapt.method": "ia3"}, 'orthogonalizes matrices; legal: adapt.method = "lora"'),
        ({**MUON, **LOCAL, "data_parallel.average_moments": True}, "other moments for matric"),
        ({"adapt.method": "full"}, '"full" trains all weights of a model: adapt.base is missing'),
        ({**FULL, "checkpoint.initial": "b"}, "must not name other weights; legal: one of"),
        (
            {"adapt.method": "lora", "adapt.base": "a", "adapt.targets": "q_proj"},
            'legal: "all", or a list with names or globs of attention.q, attention.k',
        ),
        (
            {**FULL, "adapt.rank": 4, "adapt.alpha": 8.0},
            'adapt.method = "full" does not use adapt.rank and adapt.alpha; legal: remove these '
            'keys, or method = "lora"',
        ),
        ({"optimizer.muon_scale": "original"}, 'legal: muon_scale = "match_rms_adamw"'),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(changes, said):
    (line,) = mistakes(changes)
    assert said in line


@pytest.mark.parametrize(
    "changes",
    [
        {**LOCAL, "precision.compute": "fp16"},
        {**LOCAL, "data_parallel.outer_momentum": 0.9, "data_parallel.outer_learning_rate": 0.7},
        {**TOP_K, "data_parallel.checkpoint": "average"},
        {**LOCAL, **CODES, "data_parallel.error_feedback": "mem_sgd"},
        {**GOSSIP, **CODES, "data_parallel.topology": "complete"},
        {**LOCAL, **SGD, "optimizer.momentum": 0.9, "data_parallel.average_moments": True},
        {"data_parallel.method": "ring", "parallel.offload": "optimizer"},
        {"data_parallel.method": "parameter_server", **SGD},
        {**SGD, "parallel.zero": 3, "optimizer.momentum": 0.9},
        {**SGD, "precision.compute": "bf16", "parallel.offload": "disk"},
    ],
)
def test_what_goes_together_is_legal(changes):
    assert mistakes(changes) == []


def test_all_of_a_base_is_trained_as_that_from_which_a_run_begins():
    assert to_toml(small(FULL)) == to_toml(small({"checkpoint.initial": "a"}))


def test_every_key_has_an_owner_or_is_the_method():
    keys = set(type(small().data_parallel).model_fields)
    assert keys - {"method"} == set(USED_BY) and set(COMPRESSED_BY) <= set(USED_BY)


def test_the_start_says_which_update_it_is():
    assert said_at_start(small().data_parallel) == ""
    assert 'method = "local", local_steps = 8' in said_at_start(
        small({**LOCAL, "data_parallel.local_steps": 8}, 4).data_parallel
    )
