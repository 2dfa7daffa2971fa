"""Predictions of published runs, which other programs made on other machines. These predictions
show the planner's error on runs for which the planner was not calibrated.

Each source is a file in `published/` with a row for each run, and a mapping from the rows to the
planner's inputs. The mapping contains the properties of the machine that the source states, and
assumptions for properties that the source does not state. No constant of the planner was fitted to
these rows.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from benchmarks.planning.rows import read
from ptdmpi.config.choices import default_schedule
from ptdmpi.config.layout import LETTERS, Layout
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.layer.legality import is_legal
from ptdmpi.plan.machine.cluster import (
    SHORT_KEYS,
    TRAINER,
    Cluster,
    Model,
    load_cluster,
    model_of,
)

# The network in presets/clusters/selene.toml is HDR InfiniBand. The following values are for
# Omni-Path 100, in one direction, from its data sheet.
OMNI_PATH = {"adapters": 4, "adapter_bytes_per_s": 12.3e9}
# A DGX-1V has six NVLinks of 25 GB/s in each direction, and one EDR adapter.
DGX1V = {"devices": 8, "link_bytes_per_s": 150e9, "adapters": 1, "adapter_bytes_per_s": 12.4e9}
# The software properties of torchtitan are those of ptdmpi, because both have FlashAttention, and
# sum gradients in float32, layer by layer.
OURS = TRAINER.model_dump()
# computed by `make calibrate` from the measurements that FlashAttention-2 publishes for an H100
FLASH2_H100 = {"attention_fraction": 0.5}
# H100 data sheet: matrix multiplications in FP8 have twice the rate, and their operands need half
# the bytes in shared memory. Attention is computed in bf16, and its rate does not double, so its
# fraction of the doubled rate is half as large.
FP8_H100 = {"peak_flops": {"fp16": 1979e12}, "shared_bytes_per_clock": 256}
FLASH2_BESIDE_FP8 = {"attention_fraction": 0.25}
NUMBERS = {**LETTERS, "zero": "zero", **{k: k for k in ("first_layers", "recompute_layers")}}
OWN_KEYS = ("kv_heads", "ffn_hidden", "expert_hidden", "experts", "experts_per_token")
SHAPES = {**SHORT_KEYS, "V": "vocab_size", **{k: k for k in (*OWN_KEYS, "shared_experts")}}


@dataclass(frozen=True)
class MappedSource:
    """A source: a file of published runs, and the mapping of its rows to the planner's inputs.
    `device`, `node`, `software` and `efficiency` replace keys in these sections of the preset
    `cluster`. `layout` and `model` have the keys that all rows share. `chosen` describes the
    assumptions about properties that the source does not state. If `open_sizes` is True, the source
    does not state the virtual stages, the microbatch size and the recomputation. The run is then
    assumed to have used the fastest layout that fits."""

    title: str
    file: str
    cluster: str
    chosen: str
    device: Mapping[str, Any] = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    efficiency: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=lambda: {"recompute": "full"})
    model: Mapping[str, Any] = field(default_factory=dict)
    open_sizes: bool = False

    def machine(self, row: Mapping[str, str]) -> Cluster:
        """Return the cluster on which the run in a row was measured. If the text in the column
        `group` contains "bf16", each element of a gradient has 4 bytes, because the program that
        was measured adds gradients in float32. Stages are balanced with regard to the embedding if
        this text contains "embedding", or if the layers cannot be divided evenly. The software
        overlaps tensor-parallel messages with computation if the column `overlap_tensor` is
        "yes"."""
        cluster = load_cluster(self.cluster)
        software = dict(self.software)
        if "bf16" in row["group"]:
            software["gradient_bytes"] = 4
        if "embedding" in row["group"] or int(row["l"]) % int(row["p"]):
            software["balanced_stages"] = True
        if row.get("overlap_tensor") == "yes":
            software["overlap_tensor"] = True
        return cluster.model_copy(
            update={
                "device": cluster.device.model_copy(update=dict(self.device)),
                "node": cluster.node.model_copy(update=dict(self.node)),
                "software": cluster.software.model_copy(update=software),
                "efficiency": cluster.efficiency.model_copy(update=dict(self.efficiency)),
            }
        )

    def model_of(self, row: Mapping[str, str]) -> Model:
        """Return the model that the run in a row trained."""
        sizes = {name: int(row[short]) for short, name in SHAPES.items() if row.get(short)}
        return model_of("", {**self.model, **sizes})

    def layout_of(self, row: Mapping[str, str]) -> Layout:
        """Return the layout of the run. The row and the field `layout` state its sizes and
        settings. Sizes that neither of them states have their default values. With one tensor rank,
        sequence parallelism is off."""
        sizes = {name: int(row[short]) for short, name in NUMBERS.items() if row.get(short)}
        schedule = row.get("schedule") or "1f1b"
        stated = Layout(**{"schedule": schedule, **self.layout, **sizes})
        return stated.changed(sequence_parallel=stated.sequence_parallel and stated.tensor > 1)


SOURCES = (
    MappedSource(
        "vTrain, one node of 8 A100 (Bang et al. 2024, arXiv 2312.12391; data/ground_truth_single)",
        "vtrain_single",
        "selene",
        "V = 51200; full recomputation and fp16, as in vTrain's configurations",
    ),
    MappedSource(
        "vTrain, 64 to 512 A100 (data/ground_truth_multi)",
        "vtrain_multi",
        "selene",
        "as above; 4 adapters of 200 Gb/s (vTrain: 800 Gb/s per node), one GPU per PCIe switch",
        node={"adapters": 4},
        software={"groups_per_adapter": 1},
    ),
    MappedSource(
        "BigScience 176B on 384 A100 (train/tr11-176B-ml/chronicles-prequel.md, February 2022)",
        "bigscience_176b",
        "selene",
        "4 Omni-Path adapters, full recomputation, ZeRO 1, V = 250880; rows whose model is stated",
        node=OMNI_PATH,
        software={"groups_per_adapter": 1},
    ),
    MappedSource(
        "DLPerf, Megatron-LM on up to 32 V100 (Oneflow-Inc/DLPerf, Megatron-LM/README.md, 2021)",
        "dlperf_gpt",
        "v100-dgx2",
        "DGX-1V, one EDR adapter; full recomputation (their script), fp16",
        node=DGX1V,
    ),
    MappedSource(
        "Zero bubble, 1F1B and ZB-1p on 8 to 32 A100 (Qi et al. 2023, arXiv 2401.10241, Table 4)",
        "zero_bubble",
        "selene",
        "V = 32000, which gives the models the numbers of parameters in their names; attention "
        "scores in memory, no recomputation (inferred from the GB in Table 4); Selene's adapters",
        software={"groups_per_adapter": 1, "overlap_pipeline": True, "balanced_stages": True},
        layout={"recompute": "none"},
    ),
    MappedSource(
        "Megatron-LM on 48 to 6,144 H100 (its README since July 2024, images/model_table.png)",
        "megatron_h100",
        "dgx-h100",
        "the b, v and recomputation with the fastest prediction that fits; ZeRO 1, sequence "
        "parallelism and overlap of all messages, as its flags say",
        software={"overlap_tensor": True},
        layout={"sequence_parallel": True, "dp_overlap": True},
        open_sizes=True,
    ),
    MappedSource(
        "torchtitan, Llama 3 on 64 A100 (docs/performance.md, 2024)",
        "torchtitan_a100",
        "selene",
        "the network of Selene; recomputation of single ops counts as every second layer",
        software=OURS,
        layout={"recompute": "full", "dp_overlap": True},
        model={"kind": "llama"},
    ),
    MappedSource(
        "torchtitan, Llama 3 on 8 to 256 H100 in bf16 (docs/performance.md, benchmarks/, 2024-25)",
        "torchtitan_h100",
        "dgx-h100",
        "a memory bandwidth of 2.4 TB/s, but the clock frequency of 700 W; FlashAttention-2 (pull "
        "request 1196); recomputation of single ops counts as every second layer; sequence "
        "parallelism, as on its tensor axis; compiled runs are predicted like other runs",
        device={"memory_bytes_per_s": 2.4e12},
        efficiency=FLASH2_H100,
        layout={"recompute": "full", "dp_overlap": True, "sequence_parallel": True},
        model={"kind": "llama"},
    ),
    MappedSource(
        "Llama 3 405B on 8,192 and 16,384 H100, up to c = 16 (Dubey et al. 2024, Table 4)",
        "llama3_context",
        "dgx-h100",
        "v = 4, b = 1, ZeRO 1, sequence parallelism, no recomputation (stated for 8,192 "
        "positions); FLOPs of whole scores; no masks between documents; the gather of keys "
        "and values is exposed (section 3.3.2)",
        software={"overlap_context": False},
        layout={"recompute": "none", "sequence_parallel": True},
        model={"kind": "llama"},
    ),
    MappedSource(
        "NeMo, Llama 2 7B in FP8 on 4 to 1,024 H100, up to c = 32 (its docs, "
        "performance_long_sequence.md, container 24.03)",
        "nemo_context",
        "dgx-h100",
        "the b, v and recomputation with the fastest prediction that fits; ZeRO 1; overlap of all "
        "messages except messages of the context axis; linears at the FP8 peak, FlashAttention-2 "
        "in bf16; FLOPs of whole scores, as its code counted in 2024",
        device=FP8_H100,
        software={"overlap_tensor": True, "overlap_context": False},
        efficiency=FLASH2_BESIDE_FP8,
        layout={"sequence_parallel": True, "dp_overlap": True},
        model={"kind": "llama"},
        open_sizes=True,
    ),
    MappedSource(
        "torchtitan, Llama 3 with float8, up to c = 8 (benchmarks/llama3_h100_202412)",
        "torchtitan_context",
        "dgx-h100",
        "as its other H100 runs; linears at the FP8 peak, FlashAttention-2 in bf16; b = 1",
        device={"memory_bytes_per_s": 2.4e12, **FP8_H100},
        software=OURS,
        efficiency=FLASH2_BESIDE_FP8,
        layout={"recompute": "full", "dp_overlap": True, "sequence_parallel": True},
        model={"kind": "llama"},
    ),
)


@dataclass(frozen=True)
class MappedRun:
    """A published run with its measured and its predicted step time. Only runs with the same value
    of `ranked` are compared with each other."""

    layout: Layout
    ranked: tuple[str, ...]
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Return the relative error of the predicted step time."""
        return self.predicted_s / self.measured_s - 1


def fastest(pricer: Pricer, stated: Layout) -> Price:
    """Return the prediction for the fastest legal layout that fits into memory. All layouts that
    are tried have the sizes in `stated`. Every combination of a number of virtual stages, a
    microbatch size and a mode of recomputation is tried."""
    config = pricer.model.config
    batch = pricer.batch
    most_chunks = config.layers // stated.pipeline if stated.pipeline > 1 else 1
    layouts = (
        stated.changed(virtual=v, micro_size=b, schedule=default_schedule(v), recompute=mode)
        for v in range(1, most_chunks + 1)
        for b in range(1, batch // stated.data + 1)
        for mode in ("none", "selective", "full")
    )
    fitting = [
        layout for layout in layouts if is_legal(layout, config, batch) and pricer.fits(layout)
    ]
    return min(map(pricer.price, fitting), key=lambda price: price.step_time_s)


def runs(source: MappedSource) -> Iterator[MappedRun]:
    """Yield every run of a source, in the order of its file."""
    for row in read(source.file):
        pricer = Pricer.of(source.machine(row), source.model_of(row), int(row["B"]), "fp16")
        layout = source.layout_of(row)
        price = fastest(pricer, layout) if source.open_sizes else pricer.price(layout)
        same = (row["l"], row["h"], row["a"], row["B"], str(layout.ranks), row["group"])
        yield MappedRun(price.layout, same, float(row["step_time_s"]), price.step_time_s)


class Ranking(NamedTuple):
    """Two measures of how well the predicted order of layouts agrees with the measured order:
    Kendall's tau over `pairs` pairs of runs, and the mean regret. The regret is the relative
    difference between two measured times: the time of the layout with the shortest predicted time,
    and the time of the fastest layout."""

    tau: float
    pairs: int
    regret: float


def rank_correlation(mapped: list[MappedRun]) -> Ranking:
    """Return the measures of agreement, computed over runs with the same value of
    `MappedRun.ranked` (model, batch size, number of ranks and conditions of the measurement). All
    measures are zero if no two runs can be compared."""
    groups: dict[tuple[str, ...], list[MappedRun]] = defaultdict(list)
    for run in mapped:
        groups[run.ranked].append(run)
    signs = []
    regrets = []
    for group in groups.values():
        if len({run.layout for run in group}) < 2:
            continue
        for run, other in combinations(group, 2):
            product = (run.measured_s - other.measured_s) * (run.predicted_s - other.predicted_s)
            if run.layout != other.layout and product:
                signs.append(1 if product > 0 else -1)
        chosen = min(group, key=lambda run: run.predicted_s)
        regrets.append(chosen.measured_s / min(run.measured_s for run in group) - 1)
    return Ranking(
        tau=statistics.fmean(signs or [0]),
        pairs=len(signs),
        regret=statistics.fmean(regrets or [0.0]),
    )


def source_table() -> list[list[str]]:
    """Return a table of the errors of the predicted step times, with a row for each source."""
    head = ["source", "runs", "MAPE", "median", "bias", "tau", "pairs", "regret", "worst", "chosen"]
    rows = [head]
    for source in SOURCES:
        mapped = list(runs(source))
        errors = [run.error for run in mapped]
        worst = max(mapped, key=lambda run: abs(run.error))
        ranking = rank_correlation(mapped)
        rows.append(
            [
                source.title,
                str(len(mapped)),
                f"{statistics.fmean(map(abs, errors)):.1%}",
                f"{statistics.median(map(abs, errors)):.1%}",
                f"{statistics.fmean(errors):+.1%}",
                f"{ranking.tau:.2f}",
                str(ranking.pairs),
                f"{ranking.regret:.1%}",
                f"{worst.error:+.0%} {worst.layout}",
                source.chosen,
            ]
        )
    return rows


def context_table() -> list[list[str]]:
    """Return a table of every run, with its error, in the sources that use context parallelism."""
    table = [["source", "s", "layout", "recompute", "published", "predicted", "error"]]
    for source in SOURCES:
        rows = list(read(source.file))
        if "c" not in rows[0]:
            continue
        for row, run in zip(rows, runs(source), strict=True):
            times = [f"{run.measured_s:.2f} s", f"{run.predicted_s:.2f} s", f"{run.error:+.1%}"]
            sizes = [row["s"], str(run.layout), run.layout.recompute]
            table.append([source.file, *sizes, *times])
    return table


def by_size_table() -> list[list[str]]:
    """Return a table with a row for each source. A row has the mean error of the runs for each
    tensor, context and pipeline size, and for each microbatch size."""
    rows = [["source", "bias by t", "bias by c", "bias by p", "bias by b"]]
    for source in SOURCES:
        mapped = list(runs(source))
        row = [source.file]
        for name in ("tensor", "context", "pipeline", "micro_size"):
            groups: dict[int, list[float]] = defaultdict(list)
            for run in mapped:
                groups[getattr(run.layout, name)].append(run.error)
            row.append(
                ", ".join(f"{k}: {statistics.fmean(v):+.0%}" for k, v in sorted(groups.items()))
            )
        rows.append(row)
    return rows
