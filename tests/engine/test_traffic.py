"""What ranks send in a step, counted on the wires, is what the closed forms say: to the byte, and
in as many messages, on every rank."""

import math
from unittest.mock import patch

import pytest

from ptdmpi.comm.world import World
from ptdmpi.engine.data_parallel import decentralized, pairwise
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.cost.traffic import StepTraffic
from ptdmpi.plan.layout import run_method
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.machine.cluster import Model
from tests._configs import layout
from tests._engines import VOCAB_SIZE, build, microbatches
from tests.parallel import parallel

BERT = {"model.kind": "bert", "model.layers": 4}
SHARED_KEYS = {"model.kind": "qwen3", "model.kv_heads": 1, "model.head_size": 6}
DIVIDED = {"parallel.sequence_parallel": True}
WHOLE = {"parallel.scatter_gather": False}
LORA = {"adapt.method": "lora", "adapt.rank": 3}
MUON = {"optimizer.kind": "muon"}
IA3 = {"adapt.method": "ia3"}
FEW = {"adapt.targets": ["attention.out", "mlp.up"]}
CHOICE = {"task.kind": "choice", "task.choices": 2}
EXPERTS = {
    "model.kind": "llama",
    "model.ffn_hidden": 48,
    "model.expert_hidden": 16,
    "model.experts": 4,
    "model.experts_per_token": 2,
    "model.shared_experts": 1,
}
# every token has all experts, so that every rank sends as many rows to each rank
LATENT = {
    "model.kind": "deepseek",
    "model.head_size": 12,
    "model.rope_head_size": 4,
    "model.value_head_size": 6,
    "model.q_lora_rank": 14,
    "model.kv_lora_rank": 10,
}
ALL_EXPERTS = {**EXPERTS, "model.experts_per_token": 4}
# no expert is divided
UNDIVIDED = {"parallel.expert_tensor": 1}
# only the last of four layers has experts
SOME = ALL_EXPERTS | {"model.layers": 4, "model.dense_layers": 2, "model.moe_every": 2}
ULYSSES = {"parallel.context": 2, "parallel.context_method": "ulysses"}
RING = ULYSSES | {"parallel.context_method": "ring"}
LATER = LORA | {"model.layers": 4, "adapt.first_layer": 2}
CASES = {
    "alone": {},
    "t2 lora later divided full": layout(t=2) | LATER | DIVIDED | {"recompute.mode": "full"},
    "t2 p2 lora later zb-h1 divided": layout(t=2, p=2)
    | LATER
    | DIVIDED
    | {"parallel.schedule": "zb-h1", "parallel.first_layers": 1},
    "d2 lora later zero 3": layout(d=2) | LATER | {"parallel.zero": 3},
    "d2 p2 lora later zero 3 full": layout(d=2, p=2)
    | LATER
    | {"parallel.zero": 3, "recompute.mode": "full"},
    "d2 p2 v2 lora later zero 3": layout(d=2, p=2, v=2) | LATER | {"parallel.zero": 3},
    "d2 p2 lora later tree": layout(d=2, p=2) | LATER | {"run.reproducible": True},
    "d2 p2 lora later muon zero 1": layout(d=2, p=2) | LATER | MUON | {"parallel.zero": 1},
    "t2 p2 lora later": layout(t=2, p=2) | LATER,
    "t2 d2 head alone divided zero 2": layout(t=2, d=2)
    | LATER
    | CHOICE
    | DIVIDED
    | {"adapt.first_layer": 4, "parallel.zero": 2},
    "t2 lora": layout(t=2) | LORA,
    "t2 lora divided full": layout(t=2) | LORA | DIVIDED | {"recompute.mode": "full"},
    "t2 lora of few divided": layout(t=2) | LORA | FEW | DIVIDED,
    "t2 lora of few full": layout(t=2) | LORA | FEW | {"recompute.mode": "full"},
    "t2 ia3 divided full": layout(t=2) | IA3 | DIVIDED | {"recompute.mode": "full"},
    "d2 lora zero 3": layout(d=2) | LORA | {"parallel.zero": 3, "precision.compute": "bf16"},
    "d2 lora zero 3 untied full": layout(d=2)
    | LORA
    | {"parallel.zero": 3, "model.tie_embeddings": False, "recompute.mode": "full"},
    "d2 p2 v2 lora zero 3": layout(d=2, p=2, v=2) | LORA | {"parallel.zero": 3, "model.layers": 4},
    "d4 lora zero 3 of pairs": layout(d=4) | LORA | {"parallel.zero": 3, "parallel.shard_group": 2},
    "d2 lora zero 3 in few bits": layout(d=2)
    | LORA
    | {"parallel.zero": 3, "quantize.weights": "nf4", "quantize.block": 8},
    "d2 lora overlapped": layout(d=2) | LORA,
    "t2 p2 lora zb-h1 divided": layout(t=2, p=2) | LORA | DIVIDED | {"parallel.schedule": "zb-h1"},
    "t4 lora shared keys": layout(t=4) | LORA | {"model.kv_heads": 2},
    "d2 p2 lora zero 2": layout(d=2, p=2) | LORA | {"parallel.zero": 2},
    "c2": {"parallel.context": 2},
    "c2 llama full": SHARED_KEYS | {"parallel.context": 2, "recompute.mode": "full"},
    "c2 p2 zb-h1": layout(p=2) | {"parallel.context": 2, "parallel.schedule": "zb-h1"},
    "c2 d2": layout(d=2) | {"parallel.context": 2},
    "c2 d2 zero 1": layout(d=2) | {"parallel.context": 2, "parallel.zero": 1},
    "c2 zero 2 full": {"parallel.context": 2, "parallel.zero": 2, "recompute.mode": "full"},
    "c2 d2 zero 3 of pairs": layout(d=2)
    | {"parallel.context": 2, "parallel.zero": 3, "parallel.shard_group": 2},
    "c4 zero 3 of pairs": layout(d=2)
    | {
        "parallel.context": 4,
        "parallel.zero": 3,
        "parallel.shard_group": 2,
        "model.seq_length": 16,
    },
    "c2 d2 t2 muon zero 1": layout(t=2, d=2) | MUON | {"parallel.context": 2, "parallel.zero": 1},
    "c2 d2 zero 3": layout(d=2) | {"parallel.context": 2, "parallel.zero": 3},
    "c2 ulysses llama full": SHARED_KEYS | ULYSSES | {"recompute.mode": "full"},
    "c2 ulysses lora later": LATER | ULYSSES,
    "c2 p2 ulysses zb-h1": layout(p=2) | ULYSSES | {"parallel.schedule": "zb-h1"},
    "t2 c2 ulysses divided": layout(t=2) | DIVIDED | ULYSSES,
    "c2 ring llama full": SHARED_KEYS | RING | {"recompute.mode": "full"},
    "c2 ring lora later selective bf16": LATER
    | RING
    | {"recompute.mode": "selective", "precision.compute": "bf16"},
    "c3 ring": RING | {"parallel.context": 3, "model.seq_length": 24},
    "c2 p2 ring zb-h1": layout(p=2) | RING | {"parallel.schedule": "zb-h1"},
    "t2 c2 divided": layout(t=2) | DIVIDED | {"parallel.context": 2},
    "t2": layout(t=2),
    "t2 bf16": layout(t=2) | {"precision.compute": "bf16"},
    "t2 fp64": layout(t=2) | {"precision.compute": "fp64"},
    "t2 muon": layout(t=2) | MUON | {"model.kind": "llama", "model.ffn_hidden": 42},
    "t2 p2 muon fp64": layout(t=2, p=2) | MUON | {"precision.compute": "fp64"},
    "t4 muon shared keys": layout(t=4) | MUON | {"model.kv_heads": 2},
    "d2 muon zero 1": layout(d=2) | MUON | {"parallel.zero": 1, "precision.compute": "bf16"},
    "d2 muon zero 1 untied": layout(d=2)
    | MUON
    | {"parallel.zero": 1, "model.tie_embeddings": False, "model.kind": "llama"},
    "d2 p2 muon zero 2 bert": layout(d=2, p=2) | MUON | BERT | {"parallel.zero": 2},
    "d2 p2 muon zero 1 bert": layout(d=2, p=2) | MUON | BERT | {"parallel.zero": 1},
    "t2 d2 muon zero 3": layout(t=2, d=2)
    | MUON
    | {"parallel.zero": 3, "precision.compute": "fp64", "model.ffn_hidden": 176},
    "d3 muon zero 2": layout(d=3) | MUON | {"parallel.zero": 2, "batch.global_size": 6},
    "d4 muon zero 1 of pairs": layout(d=4) | MUON | {"parallel.zero": 1, "parallel.shard_group": 2},
    "t2 muon lora": layout(t=2) | MUON | LORA,
    "d4 muon lora zero 3": layout(d=4) | MUON | LORA | {"adapt.rank": 9, "parallel.zero": 3},
    "t2 divided": layout(t=2) | DIVIDED,
    "t2 full": layout(t=2) | {"recompute.mode": "full"},
    "t2 divided full of some": layout(t=2)
    | DIVIDED
    | {"recompute.mode": "full", "recompute.layers": 2},
    "t2 selective dropout": layout(t=2) | {"recompute.mode": "selective", "model.dropout": 0.1},
    "t2 bert": layout(t=2) | BERT,
    "t2 bert divided": layout(t=2) | BERT | DIVIDED,
    "t2 bert divided full": layout(t=2) | BERT | DIVIDED | {"recompute.mode": "full"},
    "t2 choice": layout(t=2) | BERT | CHOICE,
    "t2 choice divided": layout(t=2) | CHOICE | DIVIDED,
    "t2 lora choice divided": layout(t=2) | LORA | BERT | CHOICE | DIVIDED,
    "d2 p2 lora choice zero 3": layout(d=2, p=2) | {"parallel.zero": 3} | LORA | BERT | CHOICE,
    "t2 llama": layout(t=2) | {"model.kind": "llama", "model.ffn_hidden": 48},
    "t2 untied divided": layout(t=2) | DIVIDED | {"model.tie_embeddings": False},
    "t2 shared keys": layout(t=2) | SHARED_KEYS | {"model.ffn_hidden": 48},
    "t2 shared keys divided full": layout(t=2)
    | SHARED_KEYS
    | DIVIDED
    | {"model.ffn_hidden": 48, "recompute.mode": "full"},
    "t2 experts divided full": layout(t=2) | EXPERTS | DIVIDED | {"recompute.mode": "full"},
    "t2 p2 experts zb-h1": layout(t=2, p=2) | EXPERTS | {"parallel.schedule": "zb-h1"},
    "t2 experts muon": layout(t=2) | EXPERTS | MUON,
    "d2 experts zero 3": layout(d=2) | EXPERTS | {"parallel.zero": 3},
    "t2 p2 v2 some experts divided full": layout(t=2, p=2, v=2)
    | SOME
    | DIVIDED
    | {"recompute.mode": "full"},
    "d2 p2 v2 some experts zero 3": layout(d=2, p=2, v=2) | SOME | {"parallel.zero": 3},
    "d2 p2 some experts muon zero 1": layout(d=2, p=2) | SOME | MUON | {"parallel.zero": 1},
    "d4 e2 experts muon zero 1": layout(d=4)
    | ALL_EXPERTS
    | MUON
    | {"parallel.expert": 2, "parallel.zero": 1},
    "d4 e2 some experts muon zero 3": layout(d=4)
    | SOME
    | MUON
    | {"parallel.expert": 2, "parallel.zero": 3},
    "d4 e2 lora of experts muon zero 1": layout(d=4)
    | ALL_EXPERTS
    | LORA
    | MUON
    | {"parallel.expert": 2, "parallel.zero": 1},
    "d2 p2 e2 some experts": layout(d=2, p=2) | SOME | {"parallel.expert": 2},
    "d4 e2 some experts zero 3": layout(d=4) | SOME | {"parallel.expert": 2, "parallel.zero": 3},
    "t2 lora of experts divided": layout(t=2) | EXPERTS | DIVIDED | LORA,
    "t2 lora beside experts": layout(t=2)
    | EXPERTS
    | DIVIDED
    | LORA
    | {"adapt.targets": ["attention.*"]},
    "t2 p2 lora of experts zb-h1": layout(t=2, p=2)
    | EXPERTS
    | DIVIDED
    | LORA
    | {"parallel.schedule": "zb-h1", "adapt.targets": ["mlp.experts.*"]},
    "d2 e2 lora of experts": layout(d=2)
    | ALL_EXPERTS
    | LORA
    | {"parallel.expert": 2, "adapt.targets": ["mlp.*"]},
    "d4 e2 lora of experts zero 3": layout(d=4)
    | ALL_EXPERTS
    | LORA
    | {"parallel.expert": 2, "parallel.zero": 3},
    "d2 e2": layout(d=2) | ALL_EXPERTS | {"parallel.expert": 2},
    "d4 e2 zero 1": layout(d=4) | ALL_EXPERTS | {"parallel.expert": 2, "parallel.zero": 1},
    "d4 e2 zero 3 full": layout(d=4)
    | ALL_EXPERTS
    | {"parallel.expert": 2, "parallel.zero": 3, "recompute.mode": "full"},
    "d2 p2 e2 zb-h1": layout(d=2, p=2)
    | ALL_EXPERTS
    | {"parallel.expert": 2, "parallel.schedule": "zb-h1"},
    "t2 d2 e2 divided full": layout(t=2, d=2)
    | ALL_EXPERTS
    | DIVIDED
    | {"parallel.expert": 2, "recompute.mode": "full"},
    "c2 d2 e4": layout(d=2) | ALL_EXPERTS | {"parallel.context": 2, "parallel.expert": 4},
    "t2 undivided": layout(t=2) | EXPERTS | UNDIVIDED,
    "t2 undivided sequence divided full": layout(t=2)
    | EXPERTS
    | UNDIVIDED
    | DIVIDED
    | {"model.balance": "sequence", "recompute.mode": "full"},
    "c2 sequence balance full": EXPERTS
    | {"parallel.context": 2, "model.balance": "sequence", "recompute.mode": "full"},
    "t2 c2 undivided sequence balance": layout(t=2)
    | EXPERTS
    | UNDIVIDED
    | {"parallel.context": 2, "model.balance": "sequence"},
    "t2 e2 undivided": layout(t=2) | ALL_EXPERTS | UNDIVIDED | {"parallel.expert": 2},
    "t4 e2 undivided divided": layout(t=4)
    | ALL_EXPERTS
    | UNDIVIDED
    | DIVIDED
    | {"parallel.expert": 2},
    "t2 p2 e2 undivided zb-h1": layout(t=2, p=2)
    | ALL_EXPERTS
    | UNDIVIDED
    | {"parallel.expert": 2, "parallel.schedule": "zb-h1"},
    "t2 d2 e4 undivided": layout(t=2, d=2) | ALL_EXPERTS | UNDIVIDED | {"parallel.expert": 4},
    "c2 d2 e2 zero 2": layout(d=2)
    | ALL_EXPERTS
    | {"parallel.context": 2, "parallel.expert": 2, "parallel.zero": 2},
    "t2 latent": layout(t=2) | LATENT,
    "t2 latent divided full": layout(t=2) | LATENT | DIVIDED | {"recompute.mode": "full"},
    "t2 p2 latent zb-h1": layout(t=2, p=2) | LATENT | {"parallel.schedule": "zb-h1"},
    "p2": layout(p=2),
    "p2 untied": layout(p=2) | {"model.tie_embeddings": False},
    "p2 v2": layout(p=2, v=2) | {"model.layers": 4},
    "p2 zb-v": layout(p=2, v=2) | {"model.layers": 4, "parallel.schedule": "zb-v"},
    "d2": layout(d=2),
    "d2 bf16": layout(d=2) | {"precision.compute": "bf16"},
    "d2 tree": layout(d=2) | {"run.reproducible": True},
    "t2 p2": layout(t=2, p=2),
    "t2 p2 bf16": layout(t=2, p=2) | {"precision.compute": "bf16"},
    "t2 p2 whole": layout(t=2, p=2) | WHOLE,
    "t2 p2 v2 divided": layout(t=2, p=2, v=2) | DIVIDED | {"model.layers": 4},
    "t2 p2 zb-h1 divided full": layout(t=2, p=2)
    | DIVIDED
    | {"parallel.schedule": "zb-h1", "recompute.mode": "full"},
    "t2 p2 zb-v": layout(t=2, p=2, v=2) | {"model.layers": 4, "parallel.schedule": "zb-v"},
    "t2 p2 bert divided": layout(t=2, p=2) | BERT | DIVIDED,
    "t2 d2": layout(t=2, d=2),
    "t4 gemma2": layout(t=4)
    | {"model.kind": "gemma2", "model.kv_heads": 2, "model.head_size": 6, "model.ffn_hidden": 48},
    "t4 shared keys with biases": layout(t=4) | {"model.kv_heads": 2},
    "p3": layout(p=3),
    "d3": layout(d=3) | {"batch.global_size": 6},
    "d3 tree": layout(d=3) | {"batch.global_size": 18, "run.reproducible": True},
    "d4 p2": layout(d=4, p=2) | {"batch.global_size": 16},
    "t2 p2 d2 divided": layout(t=2, p=2, d=2) | DIVIDED,
    "d2 zero 1": layout(d=2) | {"parallel.zero": 1, "precision.compute": "bf16"},
    "d2 zero 2": layout(d=2) | {"parallel.zero": 2, "precision.compute": "bf16"},
    "d2 zero 1 untied": layout(d=2) | {"parallel.zero": 1, "model.tie_embeddings": False},
    "d4 zero 2 of pairs": layout(d=4) | {"parallel.zero": 2, "parallel.shard_group": 2},
    "d2 p2 zero 2 untied": layout(d=2, p=2) | {"parallel.zero": 2, "model.tie_embeddings": False},
    "t2 d2 zero 1": layout(d=2, t=2) | {"parallel.zero": 1},
    "d2 zero 3": layout(d=2) | {"parallel.zero": 3, "precision.compute": "bf16"},
    "d2 zero 3 untied of one": layout(d=2)
    | {"parallel.zero": 3, "model.tie_embeddings": False, "batch.micro_size": 4},
    "d2 zero 3 bert": layout(d=2) | {"parallel.zero": 3} | BERT,
    "d2 p2 zero 3 choice": layout(d=2, p=2) | {"parallel.zero": 3} | BERT | CHOICE,
    "d2 p2 zero 3 full": layout(d=2, p=2) | {"parallel.zero": 3, "recompute.mode": "full"},
    "d2 p2 v2 zero 3 untied": layout(d=2, p=2, v=2)
    | {"parallel.zero": 3, "model.layers": 4, "model.tie_embeddings": False},
    "t2 p2 d2 tree": layout(t=2, p=2, d=2) | {"run.reproducible": True},
}


# Of each kind of message one, and what goes together.
FEW = ("alone", "t2 divided", "t2 selective dropout", "t2 bert divided full", "p2 zb-v", "d2 tree")
FEW += ("d2 bf16", "d2 zero 3", "d3", "t4 shared keys with biases", "t2 p2 v2 divided")
FEW += ("d2 muon zero 1", "d3 muon zero 2", "t2 d2 muon zero 3")
FEW += ("t2 muon", "d4 zero 2 of pairs", "d2 lora zero 3 in few bits")
FEW += ("d2 p2 v2 lora later zero 3", "t2 experts divided full", "d2 experts zero 3")
FEW += ("t2 p2 lora of experts zb-h1",)
FEW += ("t2 p2 bert divided", "d2 p2 v2 zero 3 untied", "t2 p2 d2 divided")
FEW += ("c3 ring", "t2 c2 ulysses divided", "d2 e2", "t2 e2 undivided", "t4 e2 undivided divided")
FEW += ("d2 p2 v2 some experts zero 3", "d2 p2 e2 some experts")
FEW += ("t2 latent divided full", "t2 c2 undivided sequence balance")
FEW += ("c2 zero 2 full", "c2 d2 zero 3", "c4 zero 3 of pairs")
OTHERS = tuple(name for name in CASES if name not in FEW)


@parallel(ranks=[1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3)), 4, 8])
@pytest.mark.parametrize("names", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=len)
def test_a_step_sends_what_the_closed_forms_say(comm, names):
    for name in names:
        changes = CASES[name]
        axes_of = ("tensor", "context", "pipeline", "data")
        if math.prod(changes.get(f"parallel.{axis}", 1) for axis in axes_of) != comm.size:
            continue
        engine = build(World(comm), changes)
        axes, here = engine.axes, engine.context.positions
        expected = closed_forms(engine).of(axes["pipeline"].rank, axes["shards"].rank)
        for step in range(2):  # the second is as the first
            batches = microbatches(engine.config, step, axes["data"].rank)
            found = engine.step(step, [batch.at(here) for batch in batches]).traffic
            assert found.sent_bytes == expected.sent_bytes, name
            assert found.messages == expected.messages, name


# Tensor ranks sum gradients, and each rank sums its own shard of them only.
SHARED = layout(t=2, d=2) | SHARED_KEYS | {"model.ffn_hidden": 48}
SHARDED = {
    "t2 d2 divided zero 1": layout(t=2, d=2) | DIVIDED | {"parallel.zero": 1},
    "t2 d2 zero 3 shared keys": SHARED | {"parallel.zero": 3},
    "t2 p2 d2 divided zero 2 shared keys": SHARED
    | DIVIDED
    | {"parallel.pipeline": 2, "parallel.zero": 2},
    "t2 d4 divided zero 2 of pairs": layout(t=2, d=4)
    | DIVIDED
    | {"parallel.zero": 2, "parallel.shard_group": 2},
}


@parallel(ranks=[4, pytest.param(8, marks=pytest.mark.long)])
def test_sharded_sums_are_counted_in_the_mean_over_the_shards(comm):
    for name, changes in SHARDED.items():
        if math.prod(changes[f"parallel.{axis}"] for axis in ("tensor", "pipeline", "data")) != (
            comm.size
        ):
            continue
        engine = build(World(comm), changes)
        axes, forms = engine.axes, closed_forms(engine)
        expected = forms.of(axes["pipeline"].rank, axes["shards"].rank).sent_bytes
        sent = engine.step(0, microbatches(engine.config, 0, axes["data"].rank)).traffic.sent_bytes
        every = axes["shards"].all_gather_object(sent["tensor"]["all_reduce"])
        mean = sum(every) / len(every)
        assert not forms.is_exact and forms.assumption("tensor", "all_reduce"), name
        assert expected["tensor"]["all_reduce"] == pytest.approx(mean, abs=64), name
        rest = [{**bytes_of, "tensor": {}} for bytes_of in (sent, expected)]
        assert rest[0] == rest[1], name


def closed_forms(engine: Engine) -> StepTraffic:
    config = engine.config
    return StepTraffic(
        Model("small", config.model, VOCAB_SIZE),
        config.layout,
        config.batch.global_size,
        config.precision.compute,
        method=RunMethod.of(config),
    )


def method(name: str, **keys: object) -> dict[str, object]:
    return {f"data_parallel.{key}": value for key, value in {"method": name, **keys}.items()}


GOSSIP = method("decentralized")
METHODS = {
    "d2 ring": layout(d=2) | method("ring"),
    "d2 server": layout(d=2) | method("parameter_server"),
    "d2 gossip bf16": layout(d=2) | GOSSIP | {"precision.compute": "bf16"},
    "d3 ring": layout(d=3) | method("ring"),
    "d3 server": layout(d=3) | method("parameter_server"),
    "d3 pairs": layout(d=3) | method("decentralized", topology="random", average_moments=True),
    "d3 grid": layout(d=3) | method("decentralized", topology="grid", consensus_every=2),
    "d4 ring": layout(d=4) | method("ring"),
    "d4 one peer": layout(d=4)
    | method("decentralized", topology="one_peer_exponential", average_every=2, overlap=True),
    "d4 local": layout(d=4) | method("local", local_steps=2, average_moments=True),
    "d2 p2 ring lora later": layout(d=2, p=2) | LATER | method("ring"),
    "d2 p2 server lora later": layout(d=2, p=2) | LATER | method("parameter_server"),
    "d2 p2 sum lora later": layout(d=2, p=2) | LATER | method("all_reduce"),
    "d2 p2 gossip lora later": layout(d=2, p=2) | LATER | GOSSIP,
    "d2 p2 gossip": layout(d=2, p=2) | GOSSIP | {"data_parallel.consensus_every": 1},
    "d2 t2 noise": layout(d=2, t=2) | {"log.gradient_noise_every_steps": 2},
    "d2 t2 local": layout(d=2, t=2) | method("local", local_steps=2, consensus_every=2),
}


@pytest.mark.cases(1)
@parallel(ranks=[pytest.param(2, marks=pytest.mark.long), 3, 4])
def test_methods_that_tell_less_send_what_the_closed_forms_say(comm):
    """In each of two steps: with and without an average, or a measurement; in several pieces."""
    for name, changes in METHODS.items():
        sizes = [changes.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "data")]
        if sizes[0] * sizes[1] * sizes[2] != comm.size:
            continue
        engine = build(World(comm), {"batch.global_size": 12, "batch.micro_size": 1} | changes)
        axes = engine.axes
        at = (axes["pipeline"].rank, axes["shard"].rank, axes["data"].rank)
        for step in range(2):
            some = microbatches(engine.config, step, axes["data"].rank)
            with patch.multiple(run_method, MESSAGE_ELEMENTS=7000, BUCKET_ELEMENTS=9000):
                expected = closed_forms(engine).of(*at, step)
            with (
                patch.object(pairwise, "MESSAGE_ELEMENTS", 7000),
                patch.object(decentralized, "BUCKET_ELEMENTS", 9000),
            ):
                found = engine.step(step, some).traffic
            assert found.sent_bytes == expected.sent_bytes, (name, step)
            assert found.messages == expected.messages, (name, step)
        engine.policy.settle()


CODED = {"method": "compressed"}
CODES = {
    "gathered": {**CODED, "compressor": "int8", "error_feedback": "mem_sgd"},
    "squeezed": {**CODED, "compressor": "top_k", "ratio": 0.1, "error_feedback": "double_squeeze"},
    "neighbours": {"method": "decentralized", "compressor": "int8"},
    "rounds": {"method": "local", "compressor": "int8", "local_steps": 2},
}


@pytest.mark.cases(2)
@parallel(ranks=[3])
@pytest.mark.parametrize("kind", CODES)
def test_codes_are_nearly_as_long_as_the_closed_forms_say(comm, kind):
    """Up to the scales and places of short units, which parameters end with."""
    changes = layout(d=3) | {"batch.global_size": 6, "run.steps": 9}
    engine = build(World(comm), changes | {f"data_parallel.{k}": v for k, v in CODES[kind].items()})
    expected, rank = closed_forms(engine), engine.axes["data"].rank
    assert not expected.is_exact
    for step in range(2):
        some = microbatches(engine.config, step, rank)
        found = engine.step(step, some).traffic.sent_bytes.get("data", {})
        expected_bytes = expected.of(0, 0, rank, step).sent_bytes.get("data", {})
        if kind == "neighbours" and step == 0:
            continue  # what neighbours know of each other comes whole, once
        assert {k for k, v in found.items() if v} == {k for k, v in expected_bytes.items() if v}
        for name, size in expected_bytes.items():
            assert found[name] == pytest.approx(size, rel=0.15), name
