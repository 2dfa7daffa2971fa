"""`make gpu-dry` without its null GPU: what counts as moved, the counts of one layer, and the
functions that are made."""

import itertools
import re
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.dry import build, host, kinds, operators, run
from benchmarks.dry.bounds import missed
from benchmarks.dry.counting import MEMORY_RATE, PRODUCT_RATE, Counting, DeviceWork, flops_of
from benchmarks.dry.layers import of_layer
from benchmarks.dry.steps import Counts
from benchmarks.marks import replaced
from tests.device import test_engine, test_kinds
from tests.parallel import parallel

M, K, N = 3, 5, 7
X, Y = torch.randn(M, K), torch.randn(K, N)


def counting() -> Counting:
    """Return a counter for this host, on which each operator launches one kernel."""
    calls = itertools.count()
    return Counting("cpu", lambda: next(calls))


@pytest.mark.parametrize(
    ("name", "compute", "elements"),
    [
        ("mm", lambda: torch.mm(X, Y), M * K + K * N + M * N),
        ("mm", lambda: torch.mm(X, Y, out=torch.empty(M, N)), M * K + K * N + M * N),
        ("add", lambda: torch.add(X, 1.0), 2 * M * K),
        ("mul", lambda: torch.mul(X, X), 2 * M * K),  # a tensor counts once
        ("mul", lambda: torch.mul(X, X[:1].expand(M, K)), 2 * M * K + K),
        ("mul", lambda: torch.mul(X, X[0]), 2 * M * K + K),
        ("add_", lambda: X.clone().add_(X), 3 * M * K),  # it reads what it changes
        ("zero_", lambda: X.clone().zero_(), M * K),
        ("copy_", lambda: X.clone().copy_(X), 2 * M * K),
        (
            "_foreach_add_",
            lambda: torch._foreach_add_([X.clone(), Y.clone()], 1.0),
            2 * (M * K + K * N),
        ),
        ("max", lambda: torch.max(X, dim=1), M * K + M + 2 * M),  # indices have eight bytes
    ],
)
def test_an_operator_moves_its_inputs_and_outputs(name, compute, elements):
    with counting() as counted:
        compute()
    assert counted.by_operator[name].moved_bytes == 4 * elements


def test_products_are_counted_apart():
    """Those of the backward, which autograd computes, are counted too."""
    x = X.clone().requires_grad_()
    with counting() as counted:
        (x @ Y).relu().sum().backward()
    work = counted.work()
    products = counted.by_operator["mm"]
    assert products.launches == 2 and products.flops == work.flops == 2 * 2 * M * N * K
    assert products.other_bytes == 0 < work.other_bytes == work.moved_bytes - products.moved_bytes
    flops_s, bytes_s = products.flops / PRODUCT_RATE, products.moved_bytes / MEMORY_RATE
    assert products.roofline_s == pytest.approx(max(flops_s, bytes_s))


def test_flops_of_documents_need_no_positions():
    """Those on the null GPU are arbitrary, and the host would wait for them: all documents count as
    the longest one."""
    x, heads, size, longest = torch.empty(8, 2, 16), 2, 16, 4
    begins = torch.tensor([0, 10**6, -3], dtype=torch.int32)
    operator = torch.ops.aten._flash_attention_forward.default
    args = (x, x, x, begins, begins, longest, longest, 0.0, True, False)
    products = 2 * heads * longest * longest * size * 2
    assert flops_of(operator, args, {}, (x,)) == 2 * products


def test_what_launches_nothing_or_is_elsewhere_does_not_count():
    with Counting("cpu", lambda: 1) as counted:
        torch.add(X, 1.0)
    assert counted.by_operator == {} and counted.work() == DeviceWork()
    with Counting("cuda", itertools.count().__next__) as counted:
        torch.add(X, 1.0)
    assert counted.work().moved_bytes == 0


def test_a_layer_is_the_difference_of_two_models():
    """Parts that a model has once, such as the head, are not in it."""

    def count(layers: int, microbatches: int) -> Counts:
        number = 100 * layers * microbatches + 10 * layers + 7 * microbatches + 5
        return Counts(*(number * (field + 1) for field in range(len(Counts._fields))))

    layer = of_layer(count)
    assert layer.microbatch == tuple(100 * (field + 1) for field in range(len(Counts._fields)))
    assert layer.step == tuple(210 * (field + 1) for field in range(len(Counts._fields)))


def test_functions_that_compute_count_as_launches():
    lines = build.answers(
        {
            "cublasGemmEx",
            "cublasLtMatmulDescCreate",
            "cudnnBackendExecute",
            "ncclCommSplit",
            "cufftExec",
        }
    )
    counted = {line.split()[1] for line in lines.splitlines() if "NULL_LAUNCH" in line}
    assert counted == {"cublasGemmEx(void)", "cudnnBackendExecute(void)"}
    (apart,) = [line for line in lines.splitlines() if "NULL_CUDNN" in line]
    assert apart.split()[1] == "cudnnBackendExecute(void)"


def test_functions_of_the_driver_are_those_of_its_header():
    header = """
    #define cuMemAlloc    cuMemAlloc_v2
    CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
    CUresult CUDAAPI cuInit(unsigned int Flags);
    """
    assert build.declared(header) == {"cuMemAlloc", "cuMemAlloc_v2", "cuInit"}


@pytest.mark.long
@parallel(ranks=[2])
def test_nothing_is_under_way_after_a_row(comm):
    """MPI would write the neighbours' weights into memory that the next row uses."""
    engines = []

    def made(*args, **kwargs):
        engines.append(engine_on(*args, **kwargs))
        return engines[-1]

    def counted(step, **how):
        step()
        assert not engines[0].policy.settled
        return Counts(*([0] * len(Counts._fields)))

    engine_on = kinds.engine_on
    host = {"DEVICE": torch.device("cpu"), "begin": lambda: None, "offered_attention": nullcontext}
    with mock.patch.multiple(kinds, engine_on=made, counted=counted, **host):
        kinds.of_two(test_kinds.LAYOUTS["neighbours, under way"])
    assert engines[0].policy.settled


def test_every_kind_has_a_row_and_compiled_ones_have_no_bytes():
    """What compiled kernels, and those in Triton, read and write does not go through the
    dispatcher."""
    counts = Counts(*([2.0] * len(Counts._fields)))
    with mock.patch.multiple(kinds, of_step=lambda *_: counts, planned_bytes=lambda *_: 2.0):
        rows = {name: count() for name, count in kinds.rows()}
    unseen = {"GB moved", "GB outside of products", "TFLOP"}
    for how, names in {"compiled": kinds.COMPILED, "by Triton": kinds.BY_TRITON}.items():
        for name in names:
            assert rows[name].keys() - rows[f"{name}, {how}"].keys() == unseen
    assert {*test_engine.KINDS, *test_kinds.KINDS, "documents"} < rows.keys()
    assert rows["gpt bf16"].keys() - rows["documents"].keys() == {"TFLOP"}
    names = [name for name, _ in kinds.rows_of_two()]
    of_tests = [*test_engine.LAYOUTS, *test_kinds.LAYOUTS, *test_kinds.CODES]
    assert {*of_tests, "offload", "consensus"} < {*names} and len({*names}) == len(names)


def test_operators_that_move_most_have_rows():
    """Those of a layer; and no launch is lost."""
    names = [f"operator {k}" for k in range(operators.SHOWN + 3)]
    less = {name: DeviceWork(launches=1, moved_bytes=5) for name in names[1:]}
    less |= {"of the head": DeviceWork(2, 10**12), operators.OUTSIDE: DeviceWork(launches=3)}
    more = {
        name: DeviceWork(launches=2 + (k == 0), moved_bytes=5 + 10**9 * k)
        for k, name in enumerate(names)
    }
    more |= {"of the head": DeviceWork(2, 10**12), operators.OUTSIDE: DeviceWork(launches=7)}
    rows = operators.shown(operators.minus(more, less))
    most = names[: -operators.SHOWN - 1 : -1]
    assert list(rows) == [*most, "other operators", operators.OUTSIDE]
    assert rows[names[-1]] == {"launches": 1, "GB moved": operators.SHOWN + 2}
    assert rows["other operators"] == {"launches": 3 + 1 + 1, "GB moved": 3.000000005}
    assert rows[operators.OUTSIDE] == {"launches": 4}


def test_the_host_is_timed_for_each_launch(monkeypatch):
    """By the shortest of its processor times, without the first steps."""
    gpu, clock = SimpleNamespace(launches=0), SimpleNamespace(s=0.0, steps=0)

    def step() -> None:
        gpu.launches += 50
        clock.s += 0.0001 if clock.steps < host.WARM_UP else 0.001 * (1 + clock.steps % 3)
        clock.steps += 1

    monkeypatch.setattr(host, "NullGpu", lambda: SimpleNamespace(launched=lambda: gpu.launches))
    monkeypatch.setattr(host.time, "process_time", lambda: clock.s)
    numbers = host.timed(step)
    assert numbers["launches of a step"] == 50 and clock.steps == host.STEPS
    assert missed({"gpt: ptdmpi": numbers, "gpt: other": numbers}) == {}
    assert numbers["ms"] == pytest.approx(1.0) and numbers["us a launch"] == pytest.approx(20.0)


def test_rows_that_failed_are_not_in_the_table():
    rows = {"gpt": {"launches": 43, "GB": 1.23456}, "bert": {"failed": "no"}, "left": "no time"}
    assert run.lines(rows) == ["|  | launches | GB |", "|---|---|---|", "| gpt | 43 | 1.23 |"]


def test_every_part_has_a_place_on_the_page():
    text = run.PAGE.read_text(encoding="utf-8")
    for name in (*run.PARTS, "counted"):
        assert replaced(text, name, []) != replaced(text, name, ["a row"])


def test_the_page_says_with_what_it_was_counted(monkeypatch):
    """With PyTorch's CUDA build, not with the build for CPUs that this environment has."""
    monkeypatch.setattr(run, "identity", lambda: {"commit": "abc123"})
    with_what = (
        r"commit (\w+), with torch 2\.[\d.]+, triton \S+, transformers \S+, torchtitan [\d.]+\."
    )
    pattern = re.compile(rf"Counted on \d{{4}}-\d\d-\d\d, {with_what}")
    found = pattern.fullmatch(run.counted_with())
    assert found and found[1] == "abc123"
    assert pattern.search(run.PAGE.read_text(encoding="utf-8"))


BEST = {"launches": 100, "GB outside of products": 2.0, "activations, GB": 0.5}
PLANNED = {"peak, GB": 1.04, "planned peak, GB": 1.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"launches": 81}, "launches = 81, above 0.8 of 100"),
        ({"GB outside of products": 1.61}, "GB outside of products = 1.61, above 0.8 of 2"),
        ({"activations, GB": 0.51}, "activations, GB = 0.51, above 1 of 0.5"),
        ({"peak, GB": 1.06}, "its peak is 1.060 of the planned peak"),
        ({"peak, GB": 0.94}, "its peak is 0.940 of the planned peak"),
        ({"by cuDNN": 0}, "by cuDNN = 0, not 2"),
    ],
)
def test_a_layer_beside_the_best_of_the_others(change, words):
    """Those of another model do not count, and neither does a row that failed."""
    ours = {"launches": 80, "GB outside of products": 1.6, "activations, GB": 0.5} | PLANNED
    ours |= {"by cuDNN": 2}
    worse = {name: 2 * value for name, value in BEST.items()}
    better = {name: value / 2 for name, value in BEST.items()}
    rows = {"gpt: ptdmpi": ours | change, "gpt: a": worse, "gpt: b": BEST, "llama: a": better}
    rows["gpt: c"] = {"failed": "no"}
    assert missed(rows) == ({"gpt: ptdmpi": words} if words else {})


def test_every_bound_that_a_kind_misses_is_named():
    rows = {"gpt": PLANNED, "fp64": PLANNED | {"peak, GB": 1.2}, "failed": "exit code 1"}
    assert missed(rows) == {"fp64": "its peak is 1.200 of the planned peak"}
