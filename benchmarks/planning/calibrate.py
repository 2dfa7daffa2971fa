"""`make calibrate`: compute, only from published files, the fractions of the data sheets' rates
that software reaches.

The program writes the fractions to `src/ptdmpi/presets/efficiency.toml`. The constants of links are
fitted to published times of NCCL's all-reduces within a node. The fractions for matrix
multiplications and memory are fitted to three kinds of times on an A100:

- the times of a layer (Korthikanti et al. 2022, Table 4)
- the times of a small model on one GPU (Narayanan et al. 2021, Figure 7)
- the times of matrix multiplications (published with Anthony et al. 2024, arXiv 2401.14489)

The V100 gets the fractions of the A100, except that the constants of its links are fitted to its
own times. For newer devices, the fraction for matrix multiplications is the fraction of the A100,
multiplied by a ratio (see `others`). The fraction for attention is fitted to the measurements that
FlashAttention-2 publishes for A100 and H100. The program reads only the published files in `FILES`.
"""

from collections.abc import Iterator

import numpy as np

from benchmarks.launch import ROOT
from benchmarks.planning.rows import published, read
from ptdmpi.base.disk import write_whole
from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.layer import LayerTimes
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import Cluster, Efficiency, load_cluster, load_model
from ptdmpi.plan.machine.fit import descend, distance, fit_rings
from ptdmpi.plan.machine.kernels import Machine

OUTPUT = ROOT / "src/ptdmpi/presets/efficiency.toml"
RINGS = "vtrain_nccl_allreduce_lut_sample"
LAYERS = "korthikanti2022_table4_layer"
SMALL = "narayanan2021_figures"  # only Figure 7 of this file is used
PRODUCTS = "eleutherai_cookbook_gemm"
DEVICES = "bekman_matmul_flops"
ATTENTION = "flash_attention2"
FILES = (RINGS, LAYERS, SMALL, PRODUCTS, DEVICES, ATTENTION)
HEADER = """\
# The fractions of the data sheets' rates that software reaches. `make calibrate` computes them from
# published files only (benchmarks/planning/calibrate.py names the files); no value is set by hand.
"""


def links(gpu: str, link_bytes_per_s: float, known: dict[str, float]) -> dict[str, float]:
    """Return the constants of the following formula for the time T of an all-reduce of S bytes on n
    GPUs:

        T = c + 2 (n - 1) (step + S / (n rate))

    The constants are the start-up time c, the time `step` of one ring step, and the rate as a
    fraction of the link's peak `link_bytes_per_s`. The constants are fitted by least squares of
    relative errors.

    If `known` has c and the time of one ring step, only the rate is fitted, and only to the times
    of eight GPUs. The V100 measurements need this: they are from a machine without a switch, on
    which fewer GPUs do not use all links.
    """
    rows = [row for row in read(RINGS) if row["gpu"] == gpu]
    if known:
        rows = [row for row in rows if row["n_gpus"] == "8"]
    ranks = np.array([int(row["n_gpus"]) for row in rows])
    steps = 2.0 * (ranks - 1)
    moved = steps / ranks * np.array([float(row["size_bytes"]) for row in rows])
    times = np.array([float(row["time_ns_oop"]) for row in rows]) * 1e-9
    if known:
        left = times - known["collective_s"] - steps * known["link_step_s"]
        per_byte = float((left * moved / times**2).sum() / (moved**2 / times**2).sum())
        return {**known, "link_fraction": 1 / per_byte / link_bytes_per_s}
    start, step, rate = fit_rings(ranks, moved, times)
    return {
        "link_fraction": rate / link_bytes_per_s,
        "link_step_s": step,
        "collective_s": start,
    }


def with_efficiency(cluster: Cluster, values: dict[str, float]) -> Cluster:
    """Return a copy of the cluster with the given values in its section [efficiency]."""
    return cluster.model_copy(update={"efficiency": Efficiency(**values)})


def layer_rows(cluster: Cluster) -> Iterator[tuple[str, float, float]]:
    """Yield (name, predicted seconds, measured seconds) for the rows of Table 4 of Korthikanti et
    al. 2022, the times of one layer. `cluster` must describe the program of the paper, which
    overlaps two operations of a column-parallel layer: the all-reduce of input gradients, and the
    computation of weight gradients."""
    machine = Machine(cluster, "fp16", 2)
    for row in read(LAYERS):
        model = load_model(f"l={row['l']},h={row['h']},a={row['a']},s={row['s']}")
        parallel = "Sequence" in row["experiment"]
        mode = _recomputation(row["experiment"])
        layout = Layout(
            tensor=int(row["t"]),
            pipeline=1,
            data=1,
            virtual=1,
            micro_size=int(row["b"]),
            recompute=mode,
            sequence_parallel=parallel,
        )
        layer = LayerTimes(machine, model, layout)
        backward = layer.backward + layer.recomputed(layout)
        name = f"Table 4, {row['experiment']}"
        yield f"{name}, forward", layer.forward.total, float(row["forward_ms"]) * 1e-3
        yield f"{name}, backward", backward.total, float(row["backward_ms"]) * 1e-3


def _recomputation(experiment: str) -> str:
    """Return the mode of recomputation of an experiment in Table 4 of Korthikanti et al. 2022. The
    argument is the experiment's name in the table."""
    if "ecompute" in experiment and "no recompute" not in experiment:
        return "full" if "full" in experiment else "selective"
    return "selective" if "Selective" in experiment else "none"


def small_rows(cluster: Cluster, recomputation: str) -> Iterator[tuple[str, float, float]]:
    """Yield (name, predicted seconds, measured seconds) for the points of Figure 7 of Narayanan et
    al. 2021, a small model on one GPU. The paper does not say whether its FLOP/s include the FLOPs
    of recomputation. `recomputation` is the assumption: "counted" (the file of published runs
    assumes this) or "not counted"."""
    for row in published(SMALL):
        if row.calibrates:
            price = Pricer.of(cluster, row.model, row.batch, "fp16").price(row.layout)
            measured_s = row.step_time_s
            if recomputation == "not counted":
                measured_s *= price.model_flops_per_rank / price.hardware_flops_per_rank
            yield f"Figure 7, b={row.layout.micro_size}", price.step_time_s, measured_s


def product_rows(cluster: Cluster) -> Iterator[tuple[str, float, float]]:
    """Yield (name, predicted seconds, measured seconds) for the published matrix multiplications on
    an A100."""
    machine = Machine(cluster, "fp16", 2)
    for row in read(PRODUCTS):
        batch, m, n, k = (int(row[key]) for key in ("batch", "m", "n", "k"))
        measured_s = 2e-12 * batch * m * n * k / float(row["tflops"])
        yield f"Product, {row['product']}", machine.gemm_s(m, n, k, batch), measured_s


def attention_rows(cluster: Cluster, section: str) -> Iterator[tuple[str, float, float]]:
    """Yield (name, predicted seconds, measured seconds) for causal FlashAttention-2, forward and
    backward, with 16,384 tokens, and heads whose sizes add up to 2,048. The published rate counts
    the FLOPs of seven matrix multiplications, each with half of the attention scores."""
    machine = Machine(cluster, "fp16", 2)
    for row in read(ATTENTION):
        if row["section"] == section:
            length = int(row["seq_length"])
            size = int(row["head_size"])
            rows = 16384 * 2048 // size
            measured_s = 7 * rows * length * size / (float(row["tflops"]) * 1e12)
            predicted_s = sum(machine.flash_s(rows, length, size, count) for count in (2, 5))
            name = f"Attention, {section}, s={length}, heads of {size}"
            yield name, predicted_s, measured_s


def attention(cluster: Cluster, section: str, values: dict[str, float]) -> dict[str, float]:
    """Return `values`, extended by `attention_fraction`: the fitted rate of the matrix
    multiplications inside FlashAttention, as a fraction of the rate of other matrix
    multiplications."""

    def of(fraction: float) -> dict[str, float]:
        return {**values, "attention_fraction": fraction}

    def loss(fractions: list[float]) -> float:
        rows = attention_rows(with_efficiency(cluster, of(*fractions)), section)
        return distance((predicted, measured) for _, predicted, measured in rows)

    return of(*descend(loss, [0.8]))


def observations(cluster: Cluster, recomputation: str) -> list[tuple[str, float, float]]:
    """Return (name, predicted seconds, measured seconds) for all rows to which the fractions for
    matrix multiplications and memory are fitted."""
    hidden = cluster.software.model_copy(update={"overlap_tensor": True})
    newer = cluster.model_copy(update={"software": hidden})
    return [*layer_rows(newer), *small_rows(cluster, recomputation), *product_rows(cluster)]


def kernels(
    cluster: Cluster, ring: dict[str, float], reading: str
) -> tuple[float, dict[str, float]]:
    """Return the root mean square of log(predicted / measured time), and the fitted fractions for
    matrix multiplications and memory. `ring` has the constants of the links (see `links`), which
    are not fitted here. `reading` is the assumption about the FLOP/s of Figure 7 of Narayanan et
    al. 2021: recomputation is "counted" or "not counted"."""

    def values(pair: list[float]) -> dict[str, float]:
        return {"gemm_fraction": pair[0], "memory_fraction": pair[1], **ring}

    def loss(pair: list[float]) -> float:
        rows = observations(with_efficiency(cluster, values(pair)), reading)
        return distance((predicted, measured) for _, predicted, measured in rows)

    pair = descend(loss, [0.8, 0.8])
    return loss(pair), values(pair)


def calibrate() -> tuple[dict[str, dict[str, float]], str]:
    """Return the sections of the file to write, and the assumption about Figure 7 ("counted" or
    "not counted") that fits better.

    Print the errors of both assumptions, for gradients of 2 and of 4 bytes. The scripts of the
    published runs use only one of these two sizes (`gradient_bytes`). The errors with the other
    size are printed for comparison.
    """
    cluster = load_cluster("selene")
    volta = load_cluster("v100-dgx2")
    ring = links("a100", cluster.node.link_bytes_per_s, {})
    known = {key: ring[key] for key in ("collective_s", "link_step_s")}
    fits = {}
    for reading in ("counted", "not counted"):
        for size in (2, 4):
            software = cluster.software.model_copy(update={"gradient_bytes": size})
            other = cluster.model_copy(update={"software": software})
            fits[reading, size] = kernels(other, ring, reading)
            print(
                f"Figure 7, recomputation {reading}, gradients of {size} bytes: "
                f"root mean square error {fits[reading, size][0]:.2%}"
            )
    size = cluster.software.gradient_bytes
    reading = min(("counted", "not counted"), key=lambda reading: fits[reading, size][0])
    fitted = fits[reading, size][1]
    values = attention(cluster, "a100", fitted)
    older = {**values, **links("v100", volta.node.link_bytes_per_s, known)}
    # newer devices have no entry for attention: they use cuDNN's attention by default, whose rates
    # are not in the files
    return {"a100": values, "v100": older, **others(fitted)}, reading


def others(values: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return the sections [efficiency] of devices for which no times of a layer are published. For
    such a device,

        gemm_fraction = gemm_fraction of the A100 * r / r of the A100

    where r is the rate of the fastest matrix multiplications that Bekman measured on a device, as a
    fraction of the device's peak.
    """
    reached = {
        row["section"]: float(row["tflops"]) / float(row["theory_tflops"]) for row in read(DEVICES)
    }
    of_a100 = reached.pop("a100")
    return {
        name: {**values, "gemm_fraction": values["gemm_fraction"] * share / of_a100}
        for name, share in reached.items()
    }


def main() -> None:
    """Write the file with the fractions, and print it with the errors of all rows."""
    sections, reading = calibrate()
    text = HEADER
    for name, values in sections.items():
        text += f"\n[{name}]\n"
        text += "".join(f"{key} = {float(f'{value:.3g}'):g}\n" for key, value in values.items())
    write_whole(OUTPUT, text)
    print(f"\n{text}")
    for name, predicted, measured in observations(load_cluster("selene"), reading):
        print(f"{name:<54} {measured:8.4f} s  {predicted / measured - 1:+6.1%}")
    hopper = load_cluster("dgx-h100")
    share = attention(hopper, "h100", hopper.efficiency.model_dump())
    print(f"FlashAttention-2 on an H100: attention_fraction {share['attention_fraction']:.3g}")
    for section, cluster in (("a100", load_cluster("selene")), ("h100", hopper)):
        if section == "h100":
            cluster = with_efficiency(cluster, share)
        for name, predicted, measured in attention_rows(cluster, section):
            print(f"{name:<54} {measured:8.4f} s  {predicted / measured - 1:+6.1%}")


if __name__ == "__main__":
    main()
