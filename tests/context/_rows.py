"""The combinations of context parallelism with other settings that are compared with one rank."""

from functools import partial

from tests._configs import Changes, layout

BASE = {"model.seq_length": 24, "precision.compute": "fp64", "model.kv_heads": 2}
LLAMA = {"model.kind": "llama", "model.ffn_hidden": 48}
EXPERTS = {
    "model.kind": "llama",
    "model.expert_hidden": 16,
    "model.experts": 4,
    "model.experts_per_token": 2,
}
ROWS = {
    "c2": (2, {"parallel.context": 2}),
    "c2 llama": (2, {"parallel.context": 2, **LLAMA}),
    "c2 windows": (2, {"parallel.context": 2, **LLAMA, "model.sliding_window": 5}),
    "c2 softcap": (2, {"parallel.context": 2, **LLAMA, "model.attention_softcap": 3.0}),
    "c2 documents": (2, {"parallel.context": 2, **LLAMA, "data.document_boundaries": True}),
    "c2 learned, documents": (2, {"parallel.context": 2, "data.document_boundaries": True}),
    "c2 dropout": (
        2,
        {"parallel.context": 2, "model.dropout": 0.1, "model.attention_dropout": 0.1},
    ),
    "c2 bert": (
        2,
        {
            "parallel.context": 2,
            "model.kind": "bert",
            "model.kv_heads": None,
            "model.dropout": 0.1,
        },
    ),
    "c2 selective": (2, {"parallel.context": 2, "recompute.mode": "selective"}),
    "c2 full": (2, {"parallel.context": 2, "recompute.mode": "full", **LLAMA}),
    "c2 muon": (2, {"parallel.context": 2, "optimizer.kind": "muon"}),
    "c2 experts": (2, {"parallel.context": 2, **EXPERTS, "recompute.mode": "full"}),
    "c3": (3, {"parallel.context": 3, **LLAMA}),
    "c4": (4, {"parallel.context": 4, "model.seq_length": 32, **LLAMA}),
    "t2 c2": (4, {**layout(t=2), "parallel.context": 2}),
    "t2 c2 sequence": (
        4,
        {
            **layout(t=2),
            "parallel.context": 2,
            "parallel.sequence_parallel": True,
            "model.dropout": 0.1,
            "model.attention_dropout": 0.1,
        },
    ),
    "t2 c2 sequence bert": (
        4,
        {
            **layout(t=2),
            "parallel.context": 2,
            "parallel.sequence_parallel": True,
            "model.kind": "bert",
            "model.kv_heads": None,
        },
    ),
    "c2 p2": (4, {**layout(p=2), "parallel.context": 2, "model.tie_embeddings": True}),
    "c2 p2 zero bubble": (
        4,
        {**layout(p=2), "parallel.context": 2, "parallel.schedule": "zb-h1", **LLAMA},
    ),
    "c2 d2": (4, {**layout(d=2), "parallel.context": 2}),
    "c2 d2 zero 1": (4, {**layout(d=2), "parallel.context": 2, "parallel.zero": 1}),
    "c2 d2 zero 2": (4, {**layout(d=2), "parallel.context": 2, "parallel.zero": 2}),
    "c2 d2 zero 3": (4, {**layout(d=2), "parallel.context": 2, "parallel.zero": 3, **LLAMA}),
    "c2 d2 zero 3 of pairs": (
        4,
        {
            **layout(d=2),
            "parallel.context": 2,
            "parallel.zero": 3,
            "parallel.shard_group": 2,
            **LLAMA,
        },
    ),
    "c4 zero 2 of pairs": (
        4,
        {
            "parallel.context": 4,
            "parallel.zero": 2,
            "parallel.shard_group": 2,
            "model.seq_length": 32,
            **LLAMA,
        },
    ),
    "c2 zero 3 full": (
        2,
        {"parallel.context": 2, "parallel.zero": 3, "recompute.mode": "full", **LLAMA},
    ),
    "c2 zero 1 offloaded": (
        2,
        {"parallel.context": 2, "parallel.zero": 1, "parallel.offload": "disk"},
    ),
    "t2 c2 zero 3": (
        4,
        {**layout(t=2), "parallel.context": 2, "parallel.zero": 3, "model.dropout": 0.1, **LLAMA},
    ),
    "t2 c2 zero 2 muon": (
        4,
        {
            **layout(t=2),
            "parallel.context": 2,
            "parallel.zero": 2,
            "optimizer.kind": "muon",
            **LLAMA,
        },
    ),
    "c2 p2 zero 3": (4, {**layout(p=2), "parallel.context": 2, "parallel.zero": 3}),
    "c2 p2 interleaved": (
        4,
        {**layout(p=2, v=2), "parallel.context": 2, "model.layers": 4, **LLAMA},
    ),
    "c2 p2 zb-v zero 1": (
        4,
        {
            **layout(p=2, v=2),
            "parallel.context": 2,
            "parallel.schedule": "zb-v",
            "parallel.zero": 1,
            "model.layers": 4,
        },
    ),
    "c2 untied": (2, {"parallel.context": 2, "model.tie_embeddings": False}),
    "c2 lora": (
        2,
        {"parallel.context": 2, "adapt.method": "lora", "adapt.rank": 3, "adapt.dropout": 0.1},
    ),
    "c2 ia3 zero 3": (
        2,
        {"parallel.context": 2, "adapt.method": "ia3", "parallel.zero": 3, **LLAMA},
    ),
}
BERT = {"model.kind": "bert", "model.kv_heads": None}
DIVIDED = {"parallel.sequence_parallel": True}
DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
DOCUMENTS = {"data.document_boundaries": True}


def context(method: str, c: int, *changes: Changes) -> Changes:
    """The changes of a row in which c ranks see all positions by a method."""
    axis = {"parallel.context": c, "parallel.context_method": method}
    return axis | {key: value for some in changes for key, value in some.items()}


ulysses = partial(context, "ulysses")
ring = partial(context, "ring")


SIX_HEADS = {"model.heads": 6, "model.hidden": 48}
ROWS |= {
    "ulysses c2 documents, window": (
        2,
        ulysses(2, LLAMA, DOCUMENTS, {"model.sliding_window": 5}),
    ),
    "ulysses c2 learned, documents": (2, ulysses(2, DOCUMENTS)),
    "ulysses c2 softcap, dropout": (2, ulysses(2, DROPOUT, {"model.attention_softcap": 3.0})),
    "ulysses c2 bert": (2, ulysses(2, BERT, DROPOUT)),
    "ulysses c2 selective": (2, ulysses(2, DROPOUT, {"recompute.mode": "selective"})),
    "ulysses c2 lora full": (
        2,
        ulysses(2, LLAMA, {"adapt.method": "lora", "adapt.rank": 2, "recompute.mode": "full"}),
    ),
    "ulysses c3": (3, ulysses(3, SIX_HEADS, LLAMA)),
    "ulysses c4 one key head": (
        4,
        ulysses(4, LLAMA, {"model.seq_length": 32, "model.kv_heads": 1}),
    ),
    "ulysses t2 c2 sequence": (4, ulysses(2, layout(t=2), DIVIDED, DROPOUT)),
    "ulysses c2 p2 v2": (
        4,
        ulysses(2, layout(p=2, v=2), LLAMA, {"model.layers": 4}),
    ),
    "ulysses c2 p2 zero bubble": (
        4,
        ulysses(2, layout(p=2), {"parallel.schedule": "zb-h1"}, LLAMA),
    ),
    "ulysses c2 d2 zero 3": (4, ulysses(2, layout(d=2), {"parallel.zero": 3}, LLAMA)),
}
ROWS |= {
    "ring c2 documents, window": (2, ring(2, LLAMA, DOCUMENTS, {"model.sliding_window": 5})),
    "ring c2 learned, documents": (2, ring(2, DOCUMENTS)),
    "ring c2 softcap, dropout": (2, ring(2, DROPOUT, {"model.attention_softcap": 3.0})),
    "ring c2 bert": (2, ring(2, BERT, DROPOUT)),
    "ring c2 selective": (2, ring(2, DROPOUT, {"recompute.mode": "selective"})),
    "ring c2 lora full": (
        2,
        ring(2, LLAMA, {"adapt.method": "lora", "adapt.rank": 2, "recompute.mode": "full"}),
    ),
    "ring c3": (3, ring(3, LLAMA)),
    "ring c4 one key head": (4, ring(4, LLAMA, {"model.seq_length": 32, "model.kv_heads": 1})),
    "ring t2 c2 sequence": (4, ring(2, layout(t=2), DIVIDED, DROPOUT)),
    "ring c2 p2 v2": (4, ring(2, layout(p=2, v=2), LLAMA, {"model.layers": 4})),
    "ring c2 p2 zero bubble": (4, ring(2, layout(p=2), {"parallel.schedule": "zb-h1"}, LLAMA)),
    "ring c2 d2 zero 3": (4, ring(2, layout(d=2), {"parallel.zero": 3}, LLAMA)),
}
LATENT = {
    "model.kind": "deepseek",
    "model.kv_heads": None,
    "model.head_size": 12,
    "model.rope_head_size": 4,
    "model.value_head_size": 6,
    "model.q_lora_rank": 14,
    "model.kv_lora_rank": 10,
}
ROWS |= {
    "c2 latent documents": (2, context("all_gather", 2, LATENT, DOCUMENTS)),
    "t2 c2 latent sequence": (4, context("all_gather", 2, layout(t=2), DIVIDED, LATENT)),
    "ulysses t2 c2 latent": (4, ulysses(2, layout(t=2), LATENT)),
    "ring c2 latent selective": (2, ring(2, LATENT, {"recompute.mode": "selective"})),
}
VIRTUAL = {**layout(p=2, v=2), "parallel.schedule": "zb-v", "model.layers": 4}
PAIRS = {**layout(d=2), "parallel.zero": 2, "parallel.shard_group": 2}
LIMITED = {**LLAMA, **DOCUMENTS, "model.sliding_window": 5}
YARN = {
    **LLAMA,
    "model.rope_scaling": "yarn",
    "model.rope_factor": 4.0,
    "model.rope_original_length": 8,
}
INT8 = {
    **LLAMA,
    "adapt.method": "lora",
    "adapt.rank": 2,
    "quantize.weights": "int8",
    "quantize.block": 16,
}
NF4 = {**INT8, "quantize.weights": "nf4"}
PARTITIONED = {
    **layout(t=2),
    **LLAMA,
    "recompute.mode": "full",
    "recompute.partition_activations": True,
}
OFFLOADED = {"parallel.zero": 1, "parallel.offload": "disk"}
FOUR = {"model.seq_length": 32}  # 8 chunks of 4 positions
ROWS |= {
    "c2 p2 gpipe": (
        4,
        context("all_gather", 2, layout(p=2), {"parallel.schedule": "gpipe"}, LLAMA),
    ),
    "c3 documents, window": (3, context("all_gather", 3, LIMITED)),
    "c4 documents, window": (4, context("all_gather", 4, LIMITED, FOUR)),
    "c2 yarn": (2, context("all_gather", 2, YARN)),
    "c2 int8": (2, context("all_gather", 2, INT8)),
    "c2 nf4": (2, context("all_gather", 2, NF4)),
    "t2 c2 partitioned": (4, context("all_gather", 2, PARTITIONED)),
}
for method in ("ulysses", "ring"):
    of = partial(context, method)
    SIX = SIX_HEADS if method == "ulysses" else {}
    ROWS |= {
        f"{method} c2 p2": (4, of(2, layout(p=2), LLAMA)),
        f"{method} c2 d2": (4, of(2, layout(d=2), LLAMA)),
        f"{method} c2 p2 gpipe": (4, of(2, layout(p=2), {"parallel.schedule": "gpipe"}, LLAMA)),
        f"{method} c2 p2 zb-v": (4, of(2, VIRTUAL, LLAMA)),
        f"{method} c2 d2 zero 2 of pairs": (4, of(2, PAIRS, LLAMA)),
        f"{method} c3 documents, window": (3, of(3, SIX, LIMITED)),
        f"{method} c4 documents, window": (4, of(4, LIMITED, FOUR)),
        f"{method} c2 yarn": (2, of(2, YARN)),
        f"{method} c2 int8": (2, of(2, INT8)),
        f"{method} c2 nf4": (2, of(2, NF4)),
        f"{method} c2 ia3": (2, of(2, LLAMA, {"adapt.method": "ia3"})),
        f"{method} c2 muon": (2, of(2, LLAMA, {"optimizer.kind": "muon"})),
        f"{method} t2 c2 partitioned": (4, of(2, PARTITIONED)),
        f"{method} c2 zero 1 offloaded": (2, of(2, OFFLOADED, LLAMA)),
    }
