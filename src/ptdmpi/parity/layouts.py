"""The layouts and models that are compared: every legal pair of settings stands in one of them.

Most faults need two settings to meet (sequence parallelism and dropout, an uneven split and a tied
embedding), so all pairs are covered, not all combinations (Cohen et al. 1997, "The AETG system").
The candidates are few enough to be listed, so the greedy choice needs no random search: it is the
same set on every machine.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ptdmpi.base.words import counted
from ptdmpi.config import Layout, ModelConfig
from ptdmpi.config.zero import STAGES

HIDDEN, HEADS, SEQ_LENGTH = 32, 4, 16
MOST_RANKS = 16  # a pair of settings needs no more: t = 4 with p = 4, say
GLOBAL_SIZE = 16  # sequences: every d and b below divides it

LAYOUT_FACTORS: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4),
    "pipeline": (1, 2, 4),
    "virtual": (1, 2, 3),
    "data": (1, 2, 4),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
    "sequence_parallel": (False, True),
    "scatter_gather": (False, True),
    "recompute": ("none", "selective", "full"),
    "partition_activations": (False, True),
    "micro_size": (1, 2, 4),
    "zero": STAGES,
    "shard_group": (None, 2),
    "offload": ("none", "disk"),
}
# Of all combinations one in so many is a candidate: a prime, so that each value of each factor
# meets each of any other, and as many as are listed in a few seconds.
STRIDE = 41
# 12 layers hold p v = 12 stages; no p v but 1 divides 7. No t but 1 divides 53.
MODEL_FACTORS: dict[str, tuple[Any, ...]] = {
    "kind": ("gpt", "llama", "bert"),
    "layers": (12, 7),
    "vocab_size": (52, 53),
    "tied": (True, False),
    "dropout": (False, True),
    "masked": (True, False),
    "documents": (False, True),
}

# Beside the defaults of a kind: at this size, all that models after LLaMA brought.
MORE = {
    "gemma2": {
        "kv_heads": 1,
        "head_size": 6,
        "qk_norm": True,
        "sliding_window": 5,
        "query_scalar": 4.0,
        "attention_softcap": 0.5,
        "logit_softcap": 0.5,
    }
}


@dataclass(frozen=True)
class ComparedModel:
    """What is trained; all layouts of one model are compared with one reference."""

    kind: str = "gpt"
    layers: int = 7
    vocab_size: int = 53
    tied: bool = True
    dropout: bool = False
    masked: bool = True
    documents: bool = False

    @property
    def keys(self) -> dict[str, Any]:
        """Its keys of [model]."""
        return {
            "kind": self.kind,
            **MORE.get(self.kind, {}),
            "layers": self.layers,
            "hidden": HIDDEN,
            "heads": HEADS,
            "ffn_hidden": 2 * HIDDEN,
            "seq_length": SEQ_LENGTH,
            "tie_embeddings": self.tied,
        }


@dataclass(frozen=True)
class AdaptedModel(ComparedModel):
    """The same, frozen, with adapters beside it that train."""

    method: str = "lora"

    @property
    def adapt(self) -> dict[str, Any]:
        """Its keys of [adapt]."""
        if self.method == "ia3":
            return {"method": self.method}
        return {"method": self.method, "rank": 4, "dropout": 0.1 if self.dropout else 0.0}


@dataclass(frozen=True)
class MuonModel(ComparedModel):
    """The same, its matrices made orthogonal."""


@dataclass(frozen=True)
class ComparedLayout(Layout):
    """How it is trained. The defaults are the plainest layout: one rank, nothing recomputed."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    schedule: str = "gpipe"
    scatter_gather: bool = False
    reproducible: bool = False

    @property
    def reference(self) -> "ComparedLayout":
        """One rank and the whole global batch in one microbatch: nothing is divided or summed."""
        return ComparedLayout(micro_size=GLOBAL_SIZE)

    @property
    def base(self) -> "ComparedLayout":
        """The plainest layout whose training must have the same bits.

        It keeps what decides the order of a sum: t, b, sequence parallelism and, unless the run is
        reproducible, d; of the sharding, whether ranks are summed before microbatches, or within
        groups first.
        """
        plain = ComparedLayout(
            tensor=self.tensor,
            data=1 if self.reproducible else self.data,
            sequence_parallel=self.sequence_parallel,
            micro_size=self.micro_size,
            reproducible=self.reproducible,
        )
        if self.reproducible or not (self.has_copies or self.sums_by_microbatch):
            return plain
        group = self.shard_group if self.has_copies else None
        return replace(plain, zero=2 if self.sums_by_microbatch else 1, shard_group=group)

    @property
    def has_copies(self) -> bool:
        """Whether groups of data ranks share state out, and other groups hold the same."""
        return 1 < self.shards < self.data

    @property
    def sums_by_microbatch(self) -> bool:
        """Whether gradients are summed over ranks before they are over several microbatches."""
        return self.shards_gradients and self.microbatches(GLOBAL_SIZE) > 1


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    layout: ComparedLayout
    model: ComparedModel

    @property
    def settings(self) -> dict[str, Any]:
        """The value of every factor."""
        known = LAYOUT_FACTORS | MODEL_FACTORS
        values = vars(self.layout) | vars(self.model)
        return {name: values[name] for name in known}

    @property
    def work(self) -> float:
        """What a step costs: layers computed by all ranks, each microbatch and tensor rank apart,
        for at this size a layer takes the same time however little it holds."""
        again = 4 / 3 if self.layout.recompute == "full" else 1.0
        microbatches = GLOBAL_SIZE // self.layout.micro_size
        return again * microbatches * self.layout.tensor * self.model.layers

    @property
    def effects(self) -> dict[str, Any]:
        """What settings come to: a switch that is on need not do anything in a given layout.

        Pairs of effects are covered too; otherwise sequence parallelism could meet dropout only
        where t = 1.
        """
        layout, model = self.layout, self.model
        divided = layout.sequence_parallel and layout.tensor > 1
        scattered = layout.scatter_gather and layout.tensor > 1 and layout.pipeline > 1
        plain = layout.schedule == "interleaved" and layout.virtual == 1
        return {
            "order": "1f1b" if plain else layout.schedule,
            "divided_sequence": divided,
            "scattered_boundary": scattered and not divided,
            "partitioned": layout.partition_activations and layout.tensor > 1,
            "uneven_stages": model.layers % layout.stages > 0,
            "padded_vocabulary": model.vocab_size % layout.tensor > 0,
            "sharded": layout.zero if layout.shards_state else 0,
            "copies": layout.has_copies,
            "summed_by_microbatch": layout.sums_by_microbatch,
        }


# A rule of layouts by its name -> why a case breaks it, in the words of the table.
REASONS = {
    "chunks": "1f1b and zb-h1 have one chunk per rank, zb-v two",
    "stages": "more stages than layers",
    "zero": "zb-h1 and zb-v put off what zero 2 and 3 sum at once",
    "shard_group": "groups share out what zero shards, of several data ranks",
    "partition_mode": "only what full recomputation keeps is partitioned",
    "partition_sequence": "sequence parallelism divides activations already",
}
# What a setting cannot do without, where nothing else is said.
NEEDED: dict[tuple[str, Any], dict[str, Any]] = {
    ("schedule", "zb-v"): {"virtual": 2},
    ("shard_group", 2): {"zero": 1, "data": 2},
    ("partition_activations", True): {"recompute": "full"},
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(values: dict[str, Any]) -> Iterator[Pair]:
    """All pairs of (name, value), in the order of the names."""
    return itertools.combinations(values.items(), 2)


def refusal(case: Case, ranks: int) -> str | None:
    """Why the case cannot be trained on `ranks` ranks; None if it can."""
    layout = case.layout
    if layout.ranks > ranks:
        return f"more than {counted(ranks, 'rank')}"
    rules = layout.rules(_shape(case.model), GLOBAL_SIZE)
    broken = next((rule.name for rule in rules if rule.broken), None)
    return None if broken is None else REASONS.get(broken, broken)


@cache
def _shape(model: ComparedModel) -> ModelConfig:
    return ModelConfig.model_validate(model.keys)


def models() -> list[ComparedModel]:
    """A few models in which every pair of the model's settings occurs."""
    every = [ComparedModel(*values) for values in itertools.product(*MODEL_FACTORS.values())]
    return [every[i] for i in _cover([vars(model) for model in every], [1.0] * len(every))]


def covering_set(ranks: int = MOST_RANKS) -> list[Case]:
    """Cases of at most `ranks` ranks that hold every pair of settings and effects that any legal
    case holds. The first few hold most for the time they take."""
    every = itertools.product(*LAYOUT_FACTORS.values(), models())
    cases = (
        Case(ComparedLayout(**dict(zip(LAYOUT_FACTORS, values, strict=True))), model)
        for *values, model in itertools.islice(every, 0, None, STRIDE)
    )
    candidates = [case for case in cases if refusal(case, ranks) is None]
    held = [case.settings | case.effects for case in candidates]
    return [candidates[i] for i in _cover(held, [case.work for case in candidates])]


def missing_pairs(cases: Sequence[Case], ranks: int = MOST_RANKS) -> dict[str, list[Pair]]:
    """Pairs of settings that are in no case, by the reason that forbids them ("" is none)."""
    covered = {pair for case in cases for pair in pairs(case.settings)}
    factors = LAYOUT_FACTORS | MODEL_FACTORS
    missing: dict[str, list[Pair]] = {}
    for one, other in itertools.combinations(factors, 2):
        for pair in itertools.product(
            [(one, value) for value in factors[one]], [(other, value) for value in factors[other]]
        ):
            if pair not in covered:
                missing.setdefault(refusal(_mildest(dict(pair)), ranks) or "", []).append(pair)
    return missing


def _mildest(values: dict[str, Any]) -> Case:
    """The case with these values that breaks a rule only if the values do."""
    most_layers = {"layers": max(MODEL_FACTORS["layers"])}
    for setting in values.items():
        values = NEEDED.get(setting, {}) | values
    of_model = {k: v for k, v in (most_layers | values).items() if k in MODEL_FACTORS}
    of_layout = {k: v for k, v in values.items() if k in LAYOUT_FACTORS}
    return Case(ComparedLayout(**of_layout), ComparedModel(**of_model))


def _cover(rows: Sequence[dict[str, Any]], costs: Sequence[float]) -> list[int]:
    """Indices of rows that together hold every pair that any row holds.

    Each time the row is taken that adds most pairs over the root of its cost. Of the candidates
    here that gives a third more rows than the number of pairs alone, in a quarter less time.
    """
    codes: dict[str, dict[Any, int]] = {name: {} for name in rows[0]}
    table = np.array(
        [[code.setdefault(row[name], len(code)) for name, code in codes.items()] for row in rows],
        dtype=np.int32,
    )
    columns, offset = [], 0
    sizes = [len(code) for code in codes.values()]
    for i, j in itertools.combinations(range(len(sizes)), 2):
        columns.append(offset + table[:, i] * sizes[j] + table[:, j])
        offset += sizes[i] * sizes[j]
    held = np.stack(columns, axis=1)  # [rows, pairs of columns]: number of the pair of values
    wanted = np.zeros(offset, dtype=bool)
    wanted[held] = True
    weights = 1.0 / np.sqrt(np.array(costs))
    chosen: list[int] = []
    while wanted.any():
        chosen.append(int((wanted[held].sum(axis=1) * weights).argmax()))
        wanted[held[chosen[-1]]] = False
    return chosen


def reproducible_cases(ranks: int = MOST_RANKS) -> list[Case]:
    """Layouts whose bits must not depend on d either; the model has all that could disturb them."""
    model = ComparedModel(dropout=True)
    layouts = [
        ComparedLayout(data=2, pipeline=2, schedule="1f1b"),
        ComparedLayout(1, 2, 4, 3, schedule="interleaved", recompute="full", zero=1),
        ComparedLayout(data=4, micro_size=2, zero=1, shard_group=2),
        ComparedLayout(data=2, tensor=2, pipeline=2, sequence_parallel=True),
    ]
    cases = [Case(replace(layout, reproducible=True), model) for layout in layouts]
    return [case for case in cases if refusal(case, ranks) is None]


def modern_cases(ranks: int = MOST_RANKS) -> list[Case]:
    """A model with windows, caps, norms of queries and keys, and one key head for all tensor ranks,
    where these meet what divides, recomputes or cuts into documents."""
    model = ComparedModel(kind="gemma2", documents=True)
    layouts = [
        ComparedLayout(4, 1, 1, sequence_parallel=True, recompute="full", micro_size=2),
        ComparedLayout(2, 2, 2, schedule="1f1b", scatter_gather=True, micro_size=2),
        ComparedLayout(1, 2, 1, 3, 4, "interleaved", "selective"),
    ]
    models = [replace(model, dropout=True), model, replace(model, documents=False)]
    cases = [Case(*both) for both in zip(layouts, models, strict=True)]
    return [case for case in cases if refusal(case, ranks) is None]


def adapted_cases(ranks: int = MOST_RANKS) -> list[Case]:
    """Adapters where their sums, splits and random masks meet what divides, shards or puts off."""
    lora = AdaptedModel("llama", layers=4, dropout=True)
    layouts = [
        ComparedLayout(2, 2, 1, schedule="zb-h1", sequence_parallel=True, micro_size=2),
        ComparedLayout(2, 1, 2, recompute="full", zero=3, micro_size=2),
        ComparedLayout(4, 2, 1, 2, schedule="zb-v", micro_size=4),
        ComparedLayout(2, 2, 2, schedule="1f1b", recompute="selective", zero=1),
    ]
    models = [lora, lora, replace(lora, dropout=False), replace(lora, method="ia3")]
    cases = [Case(*both) for both in zip(layouts, models, strict=True)]
    return [case for case in cases if refusal(case, ranks) is None]


def muon_cases(ranks: int = MOST_RANKS) -> list[Case]:
    """Matrices that are updated as wholes, where the tensor axis divides them and shards cut them:
    in one group, in groups with copies, and by microbatch."""
    model = MuonModel("llama", layers=4)
    layouts = [
        ComparedLayout(data=2, zero=1, micro_size=2),
        ComparedLayout(2, 1, 2, zero=3, recompute="full", micro_size=8),
        ComparedLayout(data=4, zero=2, shard_group=2, micro_size=2),
        ComparedLayout(2, 2, 2, schedule="1f1b", sequence_parallel=True, zero=1, micro_size=2),
    ]
    cases = [Case(layout, model) for layout in layouts]
    return [case for case in cases if refusal(case, ranks) is None]
