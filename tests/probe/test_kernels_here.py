"""`run.kernels = "auto"`: a first training measures its kernels, and no other one does."""

import contextlib
import json
import math
import time
from functools import partial
from unittest import mock

import pytest
import tomlkit
import torch

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.model.kernels import Kernels, agreement, host
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.choice import (
    BY_LIBRARY,
    BY_PYTORCH,
    AttentionByLibrary,
    AttentionByProducts,
    HostChoice,
    measured_choice,
)
from ptdmpi.model.kernels.timing import bench, here, quickest
from ptdmpi.model.kernels.timing.bench import ProbeError
from ptdmpi.plan.layout.grid import training_grid
from tests._configs import small
from tests._runs import loop
from tests.parallel import parallel

VOCAB = 50257
SIZES = here.sizes_of(small({"batch.micro_size": 2}, 1), VOCAB)
WIDE = {"model.hidden": 512, "model.heads": 4, "model.seq_length": 256}
ENTRY = {"capability": "", "type": "float32", "measured": "by hand"}
PRODUCTS = {"attention": [ENTRY | {"way": "products"}]}
AXES = ("tensor", "context")
ONE_STEP = {"run.steps": 1, "optimizer.decay": "constant"}


@contextlib.contextmanager
def cache(folder):
    """The user's cache in this folder, and short trials."""
    with (
        mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(folder)}),
        mock.patch.object(bench, "TRIALS", 2),
        mock.patch.object(bench, "TRIAL_S", 1e-4),
    ):
        yield


def slowed(function, slow):
    """Return `function`, with `slow` of the kernels times 3 ms more. The kernels are an argument
    of the function."""

    def waits(*arguments, **named):
        given = (*arguments, *named.values())
        timed = [value for value in given if isinstance(value, Kernels)]
        if timed:
            end = time.thread_time() + 3e-3 * slow(timed[0].chosen("cpu", torch.float32))
            while time.thread_time() < end:
                pass
        return function(*arguments, **named)

    return waits


def measured(comm, dtype=torch.float32, sizes=SIZES):
    world, said = World(comm), []
    axes = world.split(training_grid(data=world.size))
    return here.measured_here(world, axes, sizes, dtype, say=said.append), said


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("slow", ["library", "sigmoid"])
def test_a_slow_kernel_is_not_chosen(comm, tmp_path, slow):
    """One rank on which it is slow suffices: the slowest rank counts."""

    def is_slow(choice: HostChoice) -> bool:
        return choice.gelu == slow and comm.rank == 0

    with cache(tmp_path), mock.patch.object(quickest, "gelu", slowed(quickest.gelu, is_slow)):
        entries, said = measured(comm)
    other = {"library": "sigmoid", "sigmoid": "library"}[slow]
    assert measured_choice(torch.float32, entries).gelu == other, entries["gelu"]
    assert len(said) == 1 and said[0].startswith("kernels measured in ")


@parallel(ranks=[2])
@pytest.mark.parametrize("slow", [AttentionByLibrary, AttentionByProducts])
def test_slow_attention_is_not_chosen(comm, tmp_path, slow):
    def is_slow(choice: HostChoice) -> bool:
        return comm.rank == 0 and isinstance(choice.attention, slow)

    def attend(kernels, scores, *operands):
        return AttentionCore(scores, kernels)(*operands)

    def core(scores, kernels):
        return partial(slowed(attend, is_slow), kernels, scores)

    with cache(tmp_path), mock.patch.object(quickest, "AttentionCore", core):
        entries, _ = measured(comm)
    chosen = measured_choice(torch.float32, entries).attention
    assert not isinstance(chosen, slow), entries["attention"]


@parallel(ranks=[2])
@pytest.mark.parametrize("slow", ["library", "oneDNN"])
def test_a_slow_linear_is_not_chosen(comm, tmp_path, slow):
    def is_slow(choice: HostChoice) -> bool:
        return comm.rank == 0 and (choice == BY_LIBRARY) == (slow == "library")

    linear = slowed(quickest._linear, is_slow)
    with cache(tmp_path), mock.patch.object(quickest, "_linear", linear):
        entries, _ = measured(comm)
    by_onednn = measured_choice(torch.float32, entries).linear.output < math.inf
    able = host.has_fused(torch.float32)
    assert by_onednn == (able and slow == "library"), entries["linear"]


@parallel(ranks=[2])
def test_chunks_of_the_loss_are_measured(comm, tmp_path):
    """Chunks that are the fastest on one rank only are not chosen: the slowest rank counts."""

    def by_how_much(choice: HostChoice) -> float:
        if choice.loss == 2**17:
            return comm.rank
        return 1 / 3 if choice.loss == 2**19 else 1

    slow = slowed(quickest.cross_entropy, by_how_much)
    with cache(tmp_path), mock.patch.object(quickest, "cross_entropy", slow):
        entries, _ = measured(comm)
    assert measured_choice(torch.float32, entries).loss == 2**19, entries["loss"]
    with cache(tmp_path):
        assert measured(comm)[0]["loss"] == entries["loss"]  # from the cache


@parallel(ranks=[2])
def test_rmsnorm_is_measured_in_models_that_have_it(comm, tmp_path):
    def by_how_much(choice: HostChoice) -> float:
        if choice.norm == 2**15:
            return comm.rank
        return 1 / 3 if choice.norm == 2**16 else 1

    llama = here.sizes_of(small({"model.kind": "llama"} | WIDE, 1), VOCAB)
    slow = slowed(quickest.rms_norm, by_how_much)
    with cache(tmp_path), mock.patch.object(quickest, "rms_norm", slow):
        entries, _ = measured(comm, sizes=llama)
        assert measured_choice(torch.float32, entries).norm == 2**16, entries["norm"]
        entries, _ = measured(comm)
        assert measured_choice(torch.float32, entries).norm is None, entries["norm"]


@parallel(ranks=[2])
def test_the_cache_is_read_unless_it_is_of_other_sizes_or_damaged(comm, tmp_path):
    with cache(tmp_path):
        first, _ = measured(comm)
        comm.Barrier()
        (path,) = (tmp_path / "ptdmpi/kernels").iterdir()
        with mock.patch.object(here, "entries", side_effect=AssertionError):
            again, said = measured(comm)
        assert again == first and str(path) in said[0] and "before" in said[0]
        measured(comm, torch.float64)
        comm.Barrier()
        assert len(list(path.parent.iterdir())) == 2
        whole = path.read_text()
        for damage in (b"\xff", b"key = 1", whole.replace("attention", "at").encode()):
            comm.Barrier()
            if comm.rank == 0:
                path.write_bytes(damage)
            comm.Barrier()
            _, said = measured(comm)
            assert said[0].startswith("kernels measured in "), damage


@parallel(ranks=[2])
def test_measuring_ends_in_time(comm, tmp_path):
    """If rank 1 alone is late, all ranks stop: further kinds are left out, nothing is cached."""

    def late(bench_, dtype, sizes):
        time.sleep(0.3 * comm.rank)
        return {"measured": "late"}

    with (
        cache(tmp_path),
        mock.patch.dict(quickest.MEASURES, {"linear": late}),
        mock.patch.object(here, "LIMIT_S", 0.2),
    ):
        entries, said = measured(comm)
    assert set(entries) == {"linear"} and not (tmp_path / "ptdmpi").exists()
    assert said[0].endswith("no time was left for attention, gelu, loss, norm")


@parallel(ranks=[1])
def test_without_a_cache_or_with_wrong_kernels_training_goes_on(comm, tmp_path):
    (tmp_path / "file").write_text("")
    with cache(tmp_path / "file"):
        entries, said = measured(comm)
        assert set(entries) == set(quickest.MEASURES) and "not kept in" in said[0]
    wrong = mock.patch.object(here, "entries", side_effect=ProbeError("GELU is wrong on ranks 0"))
    with cache(tmp_path), wrong:
        assert measured(comm) == ({}, ["kernels not measured: GELU is wrong on ranks 0"])


@pytest.mark.parametrize(
    "changes",
    [
        {"model.seq_length": 32768, "model.hidden": 8192, "model.heads": 64},
        {"model.kind": "llama", "model.kv_heads": 1, "parallel.tensor": 4},
        {"model.kind": "llama", "model.experts": 4, "model.experts_per_token": 2},
        {"parallel.context": 2, "model.seq_length": 16},
    ],
)
def test_sizes_are_those_of_the_model_up_to_a_limit(changes):
    config = small(changes, math.prod(changes.get(f"parallel.{key}", 1) for key in AXES))
    sizes = here.sizes_of(config, VOCAB)
    for positions, inputs, outputs in sizes.linears:
        assert positions * inputs * outputs <= here.MOST or positions == here.LEAST_POSITIONS
        assert config.model.hidden in (inputs, outputs)
    (length,) = sizes.lengths
    assert length**2 * sizes.head_size * sizes.heads <= here.MOST
    assert sizes.heads * config.parallel.tensor <= config.model.heads
    positions, columns = sizes.loss
    assert columns * config.parallel.tensor - VOCAB < config.parallel.tensor
    assert positions * columns <= here.MOST_ELEMENTS


@parallel(ranks=[1])
def test_a_run_measures_once_and_keeps_what_it_chose(comm, tmp_path):
    changes = ONE_STEP | {"run.kernels": "auto", "checkpoint.every_steps": 1}
    other = {"run.dir": str(tmp_path / "other")}
    resumed = other | {"checkpoint.resume": str(tmp_path / "run"), "run.steps": 3}
    entries = mock.Mock(return_value={kind: [] for kind in quickest.MEASURES} | PRODUCTS)
    with cache(tmp_path), mock.patch.object(here, "entries", entries):
        for more in ({}, {"run.steps": 2}, resumed, {"run.dir": str(tmp_path / "third")}):
            with loop(comm, tmp_path, changes | more) as made:
                made.run()
        again = {"run.dir": str(tmp_path / "same bits"), "run.reproducible": True}
        with loop(comm, tmp_path, changes | again) as made:
            made.run()
    assert entries.call_count == 1  # the third run has it from the cache
    for name in ("run", "other", "third"):
        kept = json.loads((tmp_path / name / agreement.FILE).read_text())
        assert kept["attention"] == ["products"], name
    assert "kernels as measured before" in (tmp_path / "third/log.txt").read_text()
    log = (tmp_path / "same bits/log.txt").read_text()
    assert "kernels measured" not in log and "kernels as measured" not in log


@parallel(ranks=[1])
def test_on_another_machine_a_run_repeats_its_losses(comm, tmp_path):
    """Another machine has a cache with other kernels, which would give other bits."""
    names = ("first", "without a stop", "other machine", "new there")

    def train(name: str, machine: dict, **more) -> None:
        changes = ONE_STEP | {"run.kernels": "auto", "checkpoint.every_steps": 2}
        # attention of short sequences does not depend on the chosen kernel
        changes |= {"model.seq_length": 256, "model.layers": 1, "batch.global_size": 2}
        changes |= {"run.dir": str(tmp_path / name), "run.steps": 4} | more
        entries = {kind: [] for kind in quickest.MEASURES} | machine
        folder = tmp_path / f"cache of {machine['attention'][0]['way']}"
        measuring = mock.patch.object(here, "entries", lambda *given: entries)
        with cache(folder), measuring, loop(comm, tmp_path, changes) as made:
            made.run()

    library = {"attention": [ENTRY | {"way": "library"}]}
    train("first", PRODUCTS, **{"run.steps": 2})
    train("without a stop", PRODUCTS)
    train("other machine", library, **{"checkpoint.resume": str(tmp_path / "first")})
    train("new there", library)
    losses = {}
    for name in names:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        losses[name] = [record["loss"] for record in records if "loss" in record]
    straight = losses["without a stop"]
    assert losses["first"] + losses["other machine"] == straight
    assert losses["new there"] != straight


@parallel(ranks=[1])
def test_pytorch_s_kernels_or_those_of_a_file(comm, tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(tomlkit.dumps({"key": {}, "kernels": PRODUCTS}))
    with loop(comm, tmp_path, ONE_STEP | {"run.kernels": str(path)}) as made:
        made.run()
    assert json.loads((tmp_path / "run" / agreement.FILE).read_text())["attention"] == ["products"]
    plain = {"run.kernels": "default", "run.dir": str(tmp_path / "plain")}
    with loop(comm, tmp_path, ONE_STEP | plain) as made:
        made.run()
    kept = json.loads((tmp_path / "plain" / agreement.FILE).read_text())
    assert (kept["attention"], kept["linear"], kept["gelu"]) == (["library"],) * 3
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        with mock.patch.object(host, "has_fused", lambda dtype: True):
            assert measured_choice(dtype, BY_PYTORCH) == BY_LIBRARY
    for name, text in (
        ("none", None),
        ("odd", "[kernels]\nattention = 1"),
        ("other", "[attention]\n"),
    ):
        if text is not None:
            (tmp_path / f"{name}.toml").write_text(text)
        odd = ONE_STEP | {
            "run.kernels": str(tmp_path / f"{name}.toml"),
            "run.dir": str(tmp_path / "n"),
        }
        with pytest.raises(InputError, match=rf"{name}\.toml"), loop(comm, tmp_path, odd):
            pass
