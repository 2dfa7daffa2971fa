"""What follows from a feature of a run follows for every feature: state in checkpoints, the bytes
that the dry run shows, memory, and hashes against silent corruption.

The tests walk over every choice of every key of `Config` that has choices. A new choice is tested
with no line here; one that is illegal alone needs a line in NEEDS.
"""

from collections import Counter
from typing import Any, Literal, get_args, get_origin

import pytest

from ptdmpi.checkpoint.share import share
from ptdmpi.comm.world import World
from ptdmpi.config import Config
from ptdmpi.model.state import WEIGHTS
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.preview.forecast import stored_bytes
from tests._configs import Changes, layout
from tests._engines import VOCAB_SIZE, build, foreseen_by
from tests.parallel import parallel

# Sections whose choices reach no state: where data come from, what is logged, how tensors travel.
OUTSIDE = ("data", "log", "checkpoint", "comm")
# Choices that other keys set, or whose needs are files or nodes: their own tests have them.
ELSEWHERE = {
    ("adapt.method", "full"),
    ("model.output_head", "classes"),
    ("parallel.shard_group", "node"),
}
COMPRESSED = {"data_parallel.method": "compressed", "data_parallel.compressor": "top_k"}
DECENTRALIZED = {"data_parallel.method": "decentralized"}
MUON = {"optimizer.kind": "muon"}
BERT = {"model.kind": "bert"}
LATENT = {"model.head_size": 12, "model.rope_head_size": 4, "model.kv_lora_rank": 8}
EXPERTS = {"model.kind": "llama", "model.experts": 4, "model.experts_per_token": 2}
# What else a choice needs; a key without a value stands for all of its choices.
NEEDS: dict[str | tuple[str, Any], Changes] = {
    ("precision.fp8", "delayed"): {"precision.compute": "fp8"},
    ("optimizer.kind", "own"): {"optimizer.own": "tests._own:Momentum"},
    "adapt.rank": {"adapt.method": "lora"},
    ("run.on_corruption", "restart"): {"run.verify_every": 2},
    ("model.output_head", "mlm"): BERT,
    ("model.sentence_order", True): BERT,
    ("parallel.schedule", "zb-v"): {"parallel.virtual": 2, "model.layers": 4},
    ("data_parallel.method", "compressed"): COMPRESSED,
    ("data_parallel.overlap", True): DECENTRALIZED,
    ("data_parallel.average_moments", True): DECENTRALIZED,
    "data_parallel.compressor": COMPRESSED,
    "data_parallel.error_feedback": COMPRESSED,
    ("data_parallel.checkpoint", "average"): DECENTRALIZED,
    "quantize.weights": {"quantize.block": 8},
    ("recompute.partition_activations", True): {"recompute.mode": "full"},
    ("optimizer.nesterov", True): {"optimizer.kind": "sgd", "optimizer.momentum": 0.9},
    "optimizer.muon_scale": MUON,
    ("model.router", "sigmoid"): EXPERTS,
    ("model.kind", "deepseek"): LATENT,
    ("model.router_normalize", False): EXPERTS,
    "model.balance": EXPERTS,
    "model.rope_scaling": {"model.positions": "rope"},
    ("task.kind", "classification"): {"task.labels": ["no", "yes"]},
    ("task.kind", "choice"): {"task.choices": 2},
    ("preference.method", "dpo"): {"data.document_boundaries": True},
}
# Numbers that are choices, too.
NUMBERS = [("parallel.zero", zero) for zero in (1, 2, 3)]
NUMBERS += [("optimizer.ema_decay", 0.9), ("adapt.rank", 2)]


def choices() -> list[tuple[str, Any]]:
    """Return every (key, value) of the keys with choices, except for defaults, and NUMBERS."""
    found = list(NUMBERS)
    for name, section in Config.sections().items():
        for key, field in section.model_fields.items():
            if name not in OUTSIDE:
                values = (value for value in _literals(field.annotation) if value != field.default)
                found += [(f"{name}.{key}", value) for value in values]
    return [choice for choice in found if choice not in ELSEWHERE]


def _literals(kind: Any) -> list[Any]:
    """Return the values of all Literals inside an annotation, and those of a bool."""
    if kind is bool:
        return [False, True]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for part in get_args(kind) for value in _literals(part)]


def needed(choice: tuple[str, Any]) -> Changes:
    """Return the changes that a choice needs, itself included."""
    key, value = choice
    return {**layout(d=2), **NEEDS.get(choice, NEEDS.get(key, {})), key: value}


def _id(choice: tuple[str, Any]) -> str:
    return "-".join(map(str, choice))


@parallel(ranks=[2])
@pytest.mark.parametrize("choice", choices(), ids=_id)
def test_what_is_kept_is_stored_shown_counted_and_compared(comm, choice):
    engine = build(World(comm), needed(choice))
    config, state, buffer = engine.config, engine.state, engine.buffer
    kinds = {*config.optimizer.moments, *config.data_parallel.kinds}
    assert state.kinds.keys() == {WEIGHTS, *kinds}

    mean = config.data_parallel.checkpoint == "average"
    stored: Counter[str] = Counter()
    for kind, size in [(one.kind, one.values.nbytes) for one in share(state, engine.axes, mean)]:
        stored[kind] += size
    everywhere = sum(comm.allgather(stored), Counter())
    assert everywhere.keys() == state.kinds.keys()
    assert everywhere.total() == stored_bytes(config, VOCAB_SIZE)

    copied = comm.allreduce(sum(part.values.nbytes for part in share(state, engine.axes)))
    foreseen = MemoryModel.of(config.replace("checkpoint", memory_every_steps=1), VOCAB_SIZE)
    assert foreseen.copies_bytes(config.layout, 0) == pytest.approx(2 * copied / comm.size, abs=2)

    apart = [kind for kind in state.kinds if kind != WEIGHTS or not buffer.one_type]
    held = sum(part.nbytes for kind in apart for part in state.kinds[kind].parts)
    counted = foreseen_by(engine).peak(config.layout, 0, config.microbatches).optimizer
    # parameters begin at multiples of 256 elements, and small ones leave much of that empty
    used = sum(entry.elements for entry in buffer.entries.values()) / buffer.size
    held = max(comm.allgather(held))
    assert counted == pytest.approx(held * used, rel=0.1)

    compared = Counter(one.kind for one in state.residents())
    for kind in state.kinds:
        assert compared[kind] == len(state.kinds[kind].held)
