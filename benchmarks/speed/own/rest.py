"""The division of ptdmpi's step time among matrix products, attention, elementwise operations,
norms, the loss, copies, the optimizer, messages, waits of the pipeline, and the host, in the rows
of the comparison.

python -m benchmarks.speed.own.rest [--rows "t2 single-bf16"] [--steps 3] [--write]

torch's profiler measures the time of each operation without the operations inside it. Each
percentage in the table is the median over the steps. `--write` writes the table into
benchmarks/README.md.
"""

import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.launch import ROOT
from benchmarks.marks import put, table
from benchmarks.speed.bench import positive
from benchmarks.speed.case import Row
from benchmarks.speed.ours import INSIDE
from benchmarks.speed.own.choices import parser_of, rows_of
from benchmarks.speed.rounds import busy_cpu_s, foreign_share
from benchmarks.speed.sides import Side, family_cpu_s
from benchmarks.speed.trials import WARM_STEPS

MARK = "rest of a step"
# The parts of a step. "messages" includes waits for a slower rank, "waits" is the time in which a
# pipeline rank has no input, and "host" is Python, autograd and the allocator.
PARTS = (
    "products",
    "attention",
    "elementwise",
    "norm",
    "loss",
    "copies",
    "optimizer",
    "messages",
    "waits",
    "host",
)
# spans of a step (`Stopwatch`), and the name of collectives in a profile -> part
SPANS = {
    "messages": "messages",
    "send": "messages",
    "gather": "messages",
    "reduce": "messages",
    "receive": "waits",
    "optimizer": "optimizer",
}
# names of PyTorch's and of ptdmpi's functions whose inner operations all belong to one part
WHOLE = {
    "loss": r"CrossEntropy|TokenLosses|Distillation",
    "norm": r"layer_norm|LayerNorm|RmsNorm|AddNorm",
    "attention": r"scaled_dot_product|ScaledDotProduct|(Product|Blocked|Ring|Filled)Attention",
}
PRODUCTS = re.compile(r"aten::(mm|addmm_?|bmm|baddbmm_?|_grouped_mm)|mkldnn::_linear_pointwise")
COPIES = re.compile(
    r"aten::(copy_|clone|cat|stack|fill_|zero_|index_select|gather|index|index_copy_|index_add_|"
    r"scatter_add_|scatter_|masked_fill_?|_foreach_copy_)"
)
ARITHMETIC = re.compile(
    r"aten::(_foreach_)?(add|sub|mul|div|neg|addcmul|addcdiv|lerp|sum|mean|amax|exp|log|pow|sqrt|"
    r"rsqrt|sigmoid|tanh|gelu|gelu_backward|silu|silu_backward|sigmoid_backward|tanh_backward|norm|"
    r"linalg_vector_norm|where|lt|ge|eq|abs|clamp|bitwise_and|bitwise_not)_?"
)


def part_of(names: Sequence[str]) -> str:
    """Return the part of a step to which the last function in `names` belongs. `names` is a call
    stack of the profile, the outermost function first."""
    spans = [SPANS[name] for name in names if name in SPANS]
    if spans:
        return "messages" if "messages" in spans else spans[0]
    for name in names:
        for part, pattern in WHOLE.items():
            if re.search(pattern, name):
                return part
    for part, operations in (
        ("products", PRODUCTS),
        ("copies", COPIES),
        ("elementwise", ARITHMETIC),
    ):
        if operations.fullmatch(names[-1]):
            return part
    return "host"


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each part's fraction of the time of a step. `seconds` is the profile of the step on
    one rank (`OurTrainer.profile`)."""
    parts: Counter[str] = Counter()
    for names, spent_s in seconds.items():
        parts[part_of(names.split(INSIDE))] += spent_s
    return {part: parts[part] / parts.total() for part in PARTS}


def measured(row: Row, steps: int) -> Iterator[tuple[str, ...]]:
    """Profile `steps` steps of a row, and yield the cells of a line of the table for each rank."""
    with Side(row, None) as side:
        side.train(WARM_STEPS)
        begin_s, busy_s, own_s = time.perf_counter(), busy_cpu_s(), family_cpu_s()
        done = [side.profile() for _ in range(steps)]
        wall_s = time.perf_counter() - begin_s
        foreign = foreign_share(busy_cpu_s() - busy_s, family_cpu_s() - own_s, wall_s)
    for rank, profiles in enumerate(zip(*done, strict=True)):
        step_s = statistics.median(sum(profile.values()) for profile in profiles)
        each = [shares(profile) for profile in profiles]
        cells = [f"{statistics.median(share[part] for share in each):.1%}" for part in PARTS]
        yield row.id, str(rank), f"{step_s:.2f}", *cells, f"{foreign:.2f}"


def main() -> None:
    """Profile the rows that the command line names, and print the table."""
    parser = parser_of("rest", __doc__)
    parser.add_argument("--steps", type=positive, default=3, help="profiled steps of a row")
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    options = parser.parse_args()
    head = ("row", "rank", "step, s", *PARTS, "other programs, cores")
    cells = []
    for row in rows_of(options.rows):
        for line in measured(row, options.steps):
            cells.append(line)
            print("  ".join(line), flush=True)
    lines = list(table(head, cells))
    if options.write:
        put(ROOT / "benchmarks/README.md", MARK, lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
