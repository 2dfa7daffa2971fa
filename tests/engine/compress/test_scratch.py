"""What codes are made in, as the allocator gives it out, is what the account of memory says: never
more, and not much less."""

import pytest

from benchmarks.planning.allocated import measured
from ptdmpi.comm.world import World
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.shape.codes import largest_tile
from tests._configs import layout
from tests._engines import build
from tests.parallel import parallel

COMPRESSED = [("compressed", one) for one in ("none", "double_squeeze", "ef21", "neolithic")]
WAYS = [*COMPRESSED, ("local", "mem_sgd"), ("decentralized", "none")]
FEW = [
    ("power_sgd", "compressed", "ef21"),
    ("int4", "local", "mem_sgd"),
    ("top_k", "decentralized", "none"),
]
OTHERS = ("top_k", "random_k", "sign", "qsgd", "int8", "int4")
ALL = [(name, *way) for name, way in zip(OTHERS, WAYS, strict=True)]
ALL += [("power_sgd", "local", "mem_sgd"), ("qsgd", "compressed", "double_squeeze")]
ALL += [("random_k", "compressed", "none"), ("qsgd", "compressed", "neolithic")]
LONG = [pytest.param(*one, marks=pytest.mark.long) for one in ALL if one not in FEW]


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(("compressor", "method", "feedback"), [*FEW, *LONG])
def test_what_codes_are_made_in_is_counted(comm, compressor, method, feedback):
    told = {"method": method, "compressor": compressor, "error_feedback": feedback}
    changes = {f"data_parallel.{key}": value for key, value in told.items()}
    changes |= {"model.hidden": 192, "model.heads": 4, "model.layers": 2, "model.kv_heads": 4}
    changes |= {"batch.global_size": 4, "batch.micro_size": 1, **layout(d=4)}
    engine = build(World(comm), changes)

    def work() -> None:
        if method == "compressed":
            engine.policy.reduce()
        else:
            engine.policy.after_update(0, False)

    work()  # what stands from then on
    most = max(comm.allgather(measured(work)[1]))
    config = engine.config
    batches = [batch.tiles * batch.width for batch in engine.policy.compression.batches]
    counted = RunMethod.of(config).room_bytes(4, max(batches), 4, 0)
    # servers share the work, and are counted as if each did all
    assert most <= counted <= (4.0 if feedback in ("double_squeeze", "neolithic") else 1.8) * most


@parallel(ranks=[1])
def test_the_largest_tile_is_the_one_that_is_cut(comm):
    """Tables, attention and MLP in turn have the largest, by the model's shape; adapters alone,
    where the rest is frozen."""
    sizes = ({}, {"model.seq_length": 2}, {"model.ffn_hidden": 999, "model.hidden": 16})
    lora = {"adapt.method": "lora", "adapt.rank": 3}
    adapted = (lora, {**lora, "adapt.targets": ["mlp.down"]}, {"adapt.method": "ia3"})
    llama, bert = {"model.kind": "llama", "model.ffn_hidden": 48}, {"model.kind": "bert"}
    for shape in (*sizes, llama, bert, *adapted):
        codes = {"data_parallel.method": "compressed", "data_parallel.compressor": "top_k"}
        engine = build(World(comm), {**codes, **shape})
        cut = max(batch.width for batch in engine.policy.compression.batches)
        assert largest_tile(engine.config.model, engine.vocab_size) == cut, shape
