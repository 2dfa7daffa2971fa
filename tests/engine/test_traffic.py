"""What ranks send in a step, counted on the wires, is what the closed forms say: to the byte, and
in as many messages, on every rank."""

from ptdmpi.comm.world import World
from ptdmpi.plan.cost.traffic import StepTraffic
from ptdmpi.plan.machine.cluster import Model
from tests._configs import layout
from tests._engines import VOCAB_SIZE, build, microbatches
from tests.parallel import parallel

BERT = {"model.kind": "bert", "model.layers": 4}
SHARED_KEYS = {"model.kind": "qwen3", "model.kv_heads": 1, "model.head_size": 6}
DIVIDED = {"parallel.sequence_parallel": True}
WHOLE = {"parallel.scatter_gather": False}
CASES = {
    "alone": {},
    "t2": layout(t=2),
    "t2 bf16": layout(t=2) | {"precision.compute": "bf16"},
    "t2 fp64": layout(t=2) | {"precision.compute": "fp64"},
    "t2 divided": layout(t=2) | DIVIDED,
    "t2 full": layout(t=2) | {"recompute.mode": "full"},
    "t2 divided full of some": layout(t=2)
    | DIVIDED
    | {"recompute.mode": "full", "recompute.layers": 2},
    "t2 selective dropout": layout(t=2) | {"recompute.mode": "selective", "model.dropout": 0.1},
    "t2 bert": layout(t=2) | BERT,
    "t2 bert divided": layout(t=2) | BERT | DIVIDED,
    "t2 bert divided full": layout(t=2) | BERT | DIVIDED | {"recompute.mode": "full"},
    "t2 llama": layout(t=2) | {"model.kind": "llama", "model.ffn_hidden": 48},
    "t2 untied divided": layout(t=2) | DIVIDED | {"model.tie_embeddings": False},
    "t2 shared keys": layout(t=2) | SHARED_KEYS | {"model.ffn_hidden": 48},
    "t2 shared keys divided full": layout(t=2)
    | SHARED_KEYS
    | DIVIDED
    | {"model.ffn_hidden": 48, "recompute.mode": "full"},
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
    "d2 p2 zero 3 full": layout(d=2, p=2) | {"parallel.zero": 3, "recompute.mode": "full"},
    "d2 p2 v2 zero 3 untied": layout(d=2, p=2, v=2)
    | {"parallel.zero": 3, "model.layers": 4, "model.tie_embeddings": False},
    "t2 p2 d2 tree": layout(t=2, p=2, d=2) | {"run.reproducible": True},
}


@parallel(ranks=[1, 2, 3, 4, 8])
def test_a_step_sends_what_the_closed_forms_say(comm):
    for name, changes in CASES.items():
        sizes = [changes.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "data")]
        if sizes[0] * sizes[1] * sizes[2] != comm.size:
            continue
        engine = build(World(comm), changes)
        config, axes = engine.config, engine.axes
        expected = StepTraffic(
            Model("small", config.model, VOCAB_SIZE),
            config.layout,
            config.batch.global_size,
            config.precision.compute,
            reproducible=config.run.reproducible,
        ).of(axes["pipeline"].rank, axes["shard"].rank)
        for step in range(2):  # the second is as the first
            found = engine.step(step, microbatches(config, step, axes["data"].rank)).traffic
            assert found.sent_bytes == expected.sent_bytes, name
            assert found.messages == expected.messages, name
