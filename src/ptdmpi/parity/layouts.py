"""The layouts and models that are compared. Every legal pair of settings occurs in one of the
layouts.

Most faults occur only in a combination of two settings. Examples are sequence parallelism with
dropout, and an uneven split with a tied embedding. The cases therefore cover all pairs of settings,
but not all combinations (Cohen et al. 1997, "The AETG system"). There are so few candidate cases
that all of them can be listed. The layouts are chosen by a greedy method without random numbers, so
the set is the same on every machine.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ptdmpi.base.words import counted
from ptdmpi.config import Layout, ModelConfig
from ptdmpi.config.legality import rules_of
from ptdmpi.config.zero import STAGES

HIDDEN = 32
HEADS = 4
SEQ_LENGTH = 16
MOST_RANKS = 16  # enough for every pair of sizes, such as tensor = 4 and pipeline = 4
GLOBAL_SIZE = 16  # sequences per step; a multiple of every product data x micro_size

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
# Every STRIDE-th combination is a candidate. STRIDE is a prime that does not divide the number of
# values of any factor. Therefore each value of a factor still occurs together with each value of
# any other factor. With a STRIDE of 41, the remaining candidates can be listed in a few seconds.
STRIDE = 41
# 12 layers are enough for pipeline x virtual = 12 stages. 7 layers cannot be divided evenly into
# several stages, and a vocabulary of 53 cannot be divided evenly over several tensor ranks.
MODEL_FACTORS: dict[str, tuple[Any, ...]] = {
    "kind": ("gpt", "llama", "bert"),
    "layers": (12, 7),
    "vocab_size": (52, 53),
    "tied": (True, False),
    "dropout": (False, True),
    "masked": (True, False),
    "documents": (False, True),
}

# Keys in addition to the defaults of a kind of model. These keys switch on features of models
# published after LLaMA, with small values.
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
    """A model that is trained in several layouts. Each of these training runs is compared with the
    same reference run."""

    kind: str = "gpt"
    layers: int = 7
    vocab_size: int = 53
    tied: bool = True
    dropout: bool = False
    masked: bool = True
    documents: bool = False
    seq_length: int = SEQ_LENGTH

    @property
    def keys(self) -> dict[str, Any]:
        """Return the settings (key -> value) of the configuration section [model] that describe the
        compared model."""
        return {
            "kind": self.kind,
            **MORE.get(self.kind, {}),
            "layers": self.layers,
            "hidden": HIDDEN,
            "heads": HEADS,
            "ffn_hidden": 2 * HIDDEN,
            "seq_length": self.seq_length,
            "tie_embeddings": self.tied,
        }

    @property
    def adapt(self) -> dict[str, Any]:
        """Return the settings (key -> value) of the configuration section [adapt] for the compared
        model. The result is empty, because all parameters are trained."""
        return {}

    @property
    def optimizer(self) -> str:
        """Return the kind of optimizer that trains the model."""
        return "adamw"


@dataclass(frozen=True)
class AdaptedModel(ComparedModel):
    """A frozen model with trainable adapters."""

    method: str = "lora"

    @property
    def adapt(self) -> dict[str, Any]:
        """Return the settings (key -> value) of the configuration section [adapt], which describe
        the adapters of the compared model."""
        if self.method == "ia3":
            return {"method": self.method}
        return {"method": self.method, "rank": 4, "dropout": 0.1 if self.dropout else 0.0}


@dataclass(frozen=True)
class MuonModel(ComparedModel):
    """A model whose matrices Muon updates."""

    @property
    def optimizer(self) -> str:
        """Return the kind of optimizer that trains the model."""
        return "muon"


@dataclass(frozen=True)
class ComparedLayout(Layout):
    """A layout of a training run. The default values give the simplest layout: one rank, and
    nothing is recomputed."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    schedule: str = "gpipe"
    scatter_gather: bool = False
    reproducible: bool = False

    @property
    def reference(self) -> "ComparedLayout":
        """Return the layout in which nothing is divided: it has one rank, and the global batch is
        one microbatch."""
        return ComparedLayout(micro_size=GLOBAL_SIZE)

    @property
    def base(self) -> "ComparedLayout":
        """Return the simplest layout for which a training run must have the same bits.

        This base layout and the given layout have equal values of the settings that determine the
        order of sums: the sizes of the tensor and context axes, the microbatch size, and sequence
        parallelism. Unless the run is reproducible, three more properties are equal: the
        data-parallel size, whether gradients are summed over ranks before microbatches
        (`sums_by_microbatch`), and whether several groups shard copies of the same optimizer state
        (`has_copies`). The two layouts also distribute experts over ranks in the same way. But if
        each expert computes the tokens of each source rank separately (`computes_by_source`), the
        distribution does not change the bits, so the base layout has all experts on every rank.
        """
        microbatches = self.microbatches(GLOBAL_SIZE)
        plain = ComparedLayout(
            tensor=self.tensor,
            context=self.context,
            context_method=self.context_method,
            data=self.data,
            expert_tensor=self.expert_tensor,
            expert=1 if self.computes_by_source(microbatches) else self.expert,
            sequence_parallel=self.sequence_parallel,
            micro_size=self.micro_size,
            reproducible=self.reproducible,
        )
        if self.reproducible:
            return replace(plain, data=1)
        if self.has_copies:
            plain = replace(plain, zero=1, shard_group=self.shard_group)
        if self.sums_by_microbatch:
            plain = replace(plain, zero=2)
        return plain

    @property
    def has_copies(self) -> bool:
        """Return True if groups of ranks shard the optimizer's state, and several groups have
        copies of the same state."""
        return 1 < self.shards < self.copies

    @property
    def sums_by_microbatch(self) -> bool:
        """Return True if gradients are summed over ranks before they are summed over
        microbatches."""
        return self.shards_gradients and self.microbatches(GLOBAL_SIZE) > 1


@dataclass(frozen=True)
class Case:
    """A case of the comparison: a model and the layout in which it is trained."""

    layout: ComparedLayout
    model: ComparedModel

    @property
    def settings(self) -> dict[str, Any]:
        """Return the value of each factor of LAYOUT_FACTORS and MODEL_FACTORS, by name."""
        known = LAYOUT_FACTORS | MODEL_FACTORS
        values = vars(self.layout) | vars(self.model)
        return {name: values[name] for name in known}

    @property
    def work(self) -> float:
        """Return the cost of a step: the number of computed layers, counted for each microbatch and
        tensor rank.

        The models are so small that a layer takes the same time on a tensor rank, whether it is
        divided or not. So each tensor rank counts as a complete layer.
        """
        again = 4 / 3 if self.layout.recompute == "full" else 1.0
        microbatches = GLOBAL_SIZE // self.layout.micro_size
        return again * microbatches * self.layout.tensor * self.model.layers

    @property
    def effects(self) -> dict[str, Any]:
        """Return the effects of the case's settings, by name: for example, whether the stages have
        unequal numbers of layers. In some layouts a setting has no effect: for example, sequence
        parallelism with one tensor rank. The covering set therefore also contains all pairs of
        effects, so that each pair of settings occurs in a layout in which both have an effect.
        """
        layout = self.layout
        model = self.model
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


# Name of a rule that a layout must obey -> text in the table for cases that violate the rule.
REASONS = {
    "chunks": "1f1b and zb-h1 have one chunk per rank, zb-v two",
    "stages": "more stages than layers",
    "zero": "zb-h1 and zb-v delay gradients that zero 2 and 3 sum at once",
    "shard_group": "several groups of data ranks, each of which shards the state",
    "partition_mode": "partition_activations divides only what full recomputation keeps",
    "partition_sequence": "sequence parallelism divides activations already",
}
# A setting -> the other settings that it needs. `_mildest` adds these other settings to a case that
# does not set them.
NEEDED: dict[tuple[str, Any], dict[str, Any]] = {
    ("schedule", "zb-v"): {"virtual": 2},
    ("shard_group", 2): {"zero": 1, "data": 2},
    ("partition_activations", True): {"recompute": "full"},
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(values: dict[str, Any]) -> Iterator[Pair]:
    """Yield all pairs of two entries (name, value), in the order of `values`."""
    return itertools.combinations(values.items(), 2)


def refusal(case: Case, ranks: int) -> str | None:
    """Return the reason why the case cannot be trained on `ranks` ranks; None if it can be
    trained."""
    layout = case.layout
    if layout.ranks > ranks:
        return f"more than {counted(ranks, 'rank')}"
    rules = rules_of(layout, shape_of(case.model), GLOBAL_SIZE)
    broken = next((rule.name for rule in rules if rule.broken), None)
    if broken is None:
        return None
    return REASONS.get(broken, broken)


@cache
def shape_of(model: ComparedModel) -> ModelConfig:
    """Return the configuration section [model] of a compared model."""
    return ModelConfig.model_validate(model.keys)


def models() -> list[ComparedModel]:
    """Return a few models that together contain every pair of settings of a model."""
    all_models = [
        ComparedModel(**dict(zip(MODEL_FACTORS, values, strict=True)))
        for values in itertools.product(*MODEL_FACTORS.values())
    ]
    chosen = _cover([vars(model) for model in all_models], [1.0] * len(all_models))
    return [all_models[number] for number in chosen]


def covering_set(ranks: int = MOST_RANKS) -> list[Case]:
    """Return cases with at most `ranks` ranks. Together the cases contain every pair that occurs in
    a legal candidate.

    A pair is two settings or effects (see `Case.effects`) of one case. The first cases are those
    that contain the most pairs of settings relative to their training time.
    """
    return list(_covering_set(ranks))


@cache
def _covering_set(ranks: int) -> tuple[Case, ...]:
    """Return the cases of `covering_set`. The result is cached, because finding the cases takes
    seconds."""
    combinations = itertools.product(*LAYOUT_FACTORS.values(), models())
    cases = (
        Case(ComparedLayout(**dict(zip(LAYOUT_FACTORS, values, strict=True))), model)
        for *values, model in itertools.islice(combinations, 0, None, STRIDE)
    )
    candidates = [case for case in cases if refusal(case, ranks) is None]
    held = [case.settings | case.effects for case in candidates]
    return tuple(candidates[i] for i in _cover(held, [case.work for case in candidates]))


def missing_pairs(cases: Sequence[Case], ranks: int = MOST_RANKS) -> dict[str, list[Pair]]:
    """Return the pairs of settings that occur in no case, grouped by the reason that makes them
    illegal.

    A legal pair that occurs in no case has the reason "".
    """
    covered = {pair for case in cases for pair in pairs(case.settings)}
    factors = LAYOUT_FACTORS | MODEL_FACTORS
    missing: dict[str, list[Pair]] = {}
    for first, second in itertools.combinations(factors, 2):
        for pair in itertools.product(
            [(first, value) for value in factors[first]],
            [(second, value) for value in factors[second]],
        ):
            if pair not in covered:
                missing.setdefault(refusal(_mildest(dict(pair)), ranks) or "", []).append(pair)
    return missing


def _mildest(values: dict[str, Any]) -> Case:
    """Return a case with the given values. If this case violates a rule, the given values are the
    reason, because the values of all other settings violate no rule."""
    most_layers = {"layers": max(MODEL_FACTORS["layers"])}
    for setting in values.items():
        values = NEEDED.get(setting, {}) | values
    of_model = {k: v for k, v in (most_layers | values).items() if k in MODEL_FACTORS}
    of_layout = {k: v for k, v in values.items() if k in LAYOUT_FACTORS}
    return Case(ComparedLayout(**of_layout), ComparedModel(**of_model))


def _cover(rows: Sequence[dict[str, Any]], costs: Sequence[float]) -> list[int]:
    """Return the indices of some rows of a table of candidate cases. The chosen rows together
    contain every pair of values that occurs in any row. `costs` has the training cost of each row.

    In each turn, the chosen row is the one with the greatest number of new pairs divided by the
    root of its cost. Compared with a rule that ignores the costs, this rule chooses a third more
    rows, but training all chosen rows takes a quarter less time.
    """
    codes: dict[str, dict[Any, int]] = {name: {} for name in rows[0]}
    table = np.array(
        [[code.setdefault(row[name], len(code)) for name, code in codes.items()] for row in rows],
        dtype=np.int32,
    )
    columns = []
    offset = 0
    sizes = [len(code) for code in codes.values()]
    for i, j in itertools.combinations(range(len(sizes)), 2):
        columns.append(offset + table[:, i] * sizes[j] + table[:, j])
        offset += sizes[i] * sizes[j]
    # [rows, pairs of columns]: a number that identifies the row's pair of values in two columns
    held = np.stack(columns, axis=1)
    wanted = np.zeros(offset, dtype=bool)
    wanted[held] = True
    weights = 1.0 / np.sqrt(np.array(costs))
    chosen: list[int] = []
    while wanted.any():
        chosen.append(int((wanted[held].sum(axis=1) * weights).argmax()))
        wanted[held[chosen[-1]]] = False
    return chosen


def legal(cases: Sequence[Case], ranks: int) -> list[Case]:
    """Return the cases that can be trained on `ranks` ranks."""
    return [case for case in cases if refusal(case, ranks) is None]


def reproducible_cases(ranks: int = MOST_RANKS) -> list[Case]:
    """Return cases with run.reproducible, in which the bits of the results must not depend on the
    data-parallel size. The model of these cases has dropout."""
    model = ComparedModel(dropout=True)
    layouts = [
        ComparedLayout(data=2, pipeline=2, schedule="1f1b"),
        ComparedLayout(
            pipeline=2, data=4, virtual=3, schedule="interleaved", recompute="full", zero=1
        ),
        ComparedLayout(data=4, micro_size=2, zero=1, shard_group=2),
        ComparedLayout(data=2, tensor=2, pipeline=2, sequence_parallel=True),
    ]
    return legal([Case(replace(layout, reproducible=True), model) for layout in layouts], ranks)


def modern_cases(ranks: int = MOST_RANKS) -> list[Case]:
    """Return cases for a model with features of models published after LLaMA.

    The model has sliding windows, caps, norms of queries and keys, and one key head for all tensor
    ranks. The layouts of these cases divide the model and recompute its activations. In two of the
    cases, each sequence consists of several documents.
    """
    model = ComparedModel(kind="gemma2", documents=True)
    cases = [
        Case(
            ComparedLayout(tensor=4, sequence_parallel=True, recompute="full", micro_size=2),
            replace(model, dropout=True),
        ),
        Case(
            ComparedLayout(
                tensor=2, pipeline=2, data=2, schedule="1f1b", scatter_gather=True, micro_size=2
            ),
            model,
        ),
        Case(
            ComparedLayout(
                pipeline=2,
                virtual=3,
                micro_size=4,
                schedule="interleaved",
                recompute="selective",
            ),
            replace(model, documents=False),
        ),
    ]
    return legal(cases, ranks)


def adapted_cases(ranks: int = MOST_RANKS) -> list[Case]:
    """Return cases with adapters. The adapters have dropout in some of the cases. The layouts have
    tensor, pipeline and data parallelism, and sharded parameters."""
    lora = AdaptedModel("llama", layers=4, dropout=True)
    cases = [
        Case(
            ComparedLayout(
                tensor=2, pipeline=2, schedule="zb-h1", sequence_parallel=True, micro_size=2
            ),
            lora,
        ),
        Case(ComparedLayout(tensor=2, data=2, recompute="full", zero=3, micro_size=2), lora),
        Case(
            ComparedLayout(tensor=4, pipeline=2, virtual=2, schedule="zb-v", micro_size=4),
            replace(lora, dropout=False),
        ),
        Case(
            ComparedLayout(
                tensor=2, pipeline=2, data=2, schedule="1f1b", recompute="selective", zero=1
            ),
            replace(lora, method="ia3"),
        ),
    ]
    return legal(cases, ranks)


def muon_cases(ranks: int = MOST_RANKS) -> list[Case]:
    """Return cases with Muon, which updates complete matrices although a layout divides them.

    Two things divide the matrices: tensor parallelism, and sharding of the optimizer's state. Among
    the cases are layouts with one shard group, layouts with several shard groups that have copies
    of the state, and layouts that sum gradients over ranks in each microbatch.
    """
    model = MuonModel("llama", layers=4)
    layouts = [
        ComparedLayout(data=2, zero=1, micro_size=2),
        ComparedLayout(tensor=2, data=2, zero=3, recompute="full", micro_size=8),
        ComparedLayout(data=4, zero=2, shard_group=2, micro_size=2),
        ComparedLayout(
            tensor=2,
            pipeline=2,
            data=2,
            schedule="1f1b",
            sequence_parallel=True,
            zero=1,
            micro_size=2,
        ),
    ]
    return legal([Case(layout, model) for layout in layouts], ranks)
