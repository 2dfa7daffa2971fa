"""`run.compile = "auto"`: measured at the first start on GPUs, kept, and never on a CPU."""

import contextlib
import json
from unittest import mock

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.engine.prepare import compiling
from ptdmpi.engine.prepare.compiling import is_compiled, may_compile, measured
from ptdmpi.model.kernels import agreement, compiler
from ptdmpi.model.kernels.agreement import DeviceChoice
from ptdmpi.model.kernels.timing.bench import Bench
from ptdmpi.train import attempt
from tests._configs import small
from tests._engines import build, steps_of
from tests._runs import log, loop
from tests.parallel import parallel

PROCESS = "compiler"
CUDA = torch.device("cuda")
STEPS = {"run.steps": 4, "checkpoint.every_steps": 2}


@contextlib.contextmanager
def timed(plain_s: float, compiled_s: float, least_s: float = 0.0):
    """Layers that take these seconds; graphs are run by torch's own operations."""
    times = []

    def work_s(bench, work):
        times.append(work)
        work()
        return bench.agreed(plain_s if len(times) % 2 else compiled_s)

    with (
        mock.patch.object(Bench, "work_s", work_s),
        mock.patch.object(compiler, "BACKEND", "aot_eager"),
        mock.patch.object(compiling, "LEAST_S", least_s),
    ):
        yield times


def answer(engine, passes=10**6):
    return measured(engine.stages, engine.axes.world, engine.device, passes=passes)


@parallel(ranks=[1])
def test_compiled_if_more_is_saved_than_compilation_takes(comm):
    engine = build(World(comm), {"model.layers": 2})
    for plain_s, compiled_s, passes, expected in (
        (0.02, 0.01, 10**6, True),
        (0.01, 0.02, 10**6, False),
        (2e-6, 1e-6, 1, False),  # compilation takes longer than the microseconds that are saved
    ):
        with timed(plain_s, compiled_s):
            result = answer(engine, passes)
        assert result.compiled == expected, result
        assert f"{compiled_s * 1e3:.3g} ms instead of {plain_s * 1e3:.3g} ms a layer" in result.why
        assert not is_compiled(engine.stages)


@parallel(ranks=[1])
def test_short_runs_do_not_load_the_compiler(comm):
    engine = build(World(comm), {"model.layers": 2})
    with timed(0.02, 0.01, least_s=300.0) as times:
        assert answer(engine, passes=100) == (False, "the layers take about 4 s in this run")
    assert len(times) == 1


@parallel(ranks=[2])
def test_all_ranks_agree(comm):
    """The slowest rank counts, and one rank on which the compiler fails suffices."""
    engine = build(World(comm), {"model.layers": 2, "parallel.pipeline": 2})
    with timed(0.02, 0.03 if comm.rank else 0.01):
        assert not answer(engine).compiled
    backend = "no such backend" if comm.rank else "aot_eager"
    with timed(0.02, 0.01), mock.patch.object(compiler, "BACKEND", backend):
        result = answer(engine)
    assert not result.compiled and result.why.startswith("rank 1 cannot compile them: ")
    lacks = mock.patch.object(compiler, "missing", lambda device: "triton" if comm.rank else "")
    with timed(0.02, 0.01), lacks:
        assert answer(engine) == (False, "rank 1 has no triton")


@pytest.mark.long
@parallel(ranks=[1])
def test_the_measurement_leaves_the_training_as_it_is(comm):
    known = [(each.loss, each.grad_norm) for each in steps_of(build(World(comm), {}), 2)]
    engine = build(World(comm), {})
    with timed(0.02, 0.01):
        assert answer(engine).compiled
    assert [(each.loss, each.grad_norm) for each in steps_of(engine, 2)] == known


def test_when_it_is_measured():
    config = small({}, 1)
    assert config.run.compile == "auto"
    assert may_compile(config, CUDA, 1)
    assert not may_compile(config, torch.device("cpu"), 1)
    for changes in (
        {"run.compile": True},
        {"run.compile": False},
        {"run.reproducible": True},
        {"model.dropout": 0.1},
        {"adapt.method": "lora", "adapt.base": "unused"},
        {"precision.compute": "fp8"},
    ):
        assert not may_compile(small(changes, 1), CUDA, 1), changes
    assert not may_compile(small({"parallel.tensor": 2}, 2), CUDA, 2)


@contextlib.contextmanager
def as_on_a_gpu():
    """Runs on the host whose kernels are agreed upon as on a GPU of an unknown kind."""

    def on_devices(world, place, known, say):
        return agreement._on_devices(world, place.device, known, say)

    with (
        mock.patch.object(attempt, "may_compile", lambda config, device, ranks: True),
        mock.patch.object(agreement, "_on_hosts", on_devices),
    ):
        yield


@parallel(ranks=[1])
def test_a_run_keeps_what_it_has_measured(comm, tmp_path):
    with as_on_a_gpu():
        with timed(20.0, 10.0), loop(comm, tmp_path, STEPS | {"run.steps": 2}) as made:
            made.run()
            assert is_compiled(made.engine.stages)
        assert "layers compiled: 1e+04 ms instead of 2e+04 ms a layer" in log(tmp_path / "run")
        file = tmp_path / "run" / agreement.FILE
        assert json.loads(file.read_text())["layers"] == ["compiled"]
        file.unlink()  # the checkpoint knows, too
        with timed(10.0, 20.0) as times, loop(comm, tmp_path, STEPS) as made:
            made.run()
            assert is_compiled(made.engine.stages) and times == []
        assert json.loads(file.read_text())["layers"] == ["compiled"]
        anew = STEPS | {"run.steps": 6, "run.kernels": "anew"}
        with timed(10.0, 20.0), loop(comm, tmp_path, anew) as made:
            made.run()
            assert not is_compiled(made.engine.stages)
        assert json.loads(file.read_text())["layers"] == ["uncompiled"]


@pytest.mark.long
@parallel(ranks=[1])
def test_a_full_disk_does_not_end_a_run_that_has_measured(comm, tmp_path):
    def full(path, *given):
        raise OSError(28, "No space left on device", str(path))

    disk = mock.patch.object(agreement, "write_whole", full)
    with (
        as_on_a_gpu(),
        timed(20.0, 10.0),
        disk,
        loop(comm, tmp_path, STEPS | {"run.steps": 2}) as made,
    ):
        made.run()
        assert is_compiled(made.engine.stages)
    assert "kernels.json cannot be written: No space left on" in log(tmp_path / "run")


@pytest.mark.long
@parallel(ranks=[1])
def test_a_run_that_began_without_a_measurement_stays_uncompiled(comm, tmp_path):
    with loop(comm, tmp_path, STEPS | {"run.steps": 2}) as made:
        made.run()
    with as_on_a_gpu(), timed(20.0, 10.0) as times, loop(comm, tmp_path, STEPS) as made:
        made.run()
        assert times == [] and not is_compiled(made.engine.stages)


def test_a_record_of_layers_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / agreement.FILE).mkdir()
    text = agreement.keep_layers(tmp_path, DeviceChoice(compiled=True))
    assert "kernels.json cannot be written: Is a directory; the run goes on" in text


@pytest.mark.long
@parallel(ranks=[1])
def test_a_run_that_cannot_compile_any_more_says_so_and_goes_on(comm, tmp_path):
    with as_on_a_gpu():
        with timed(20.0, 10.0), loop(comm, tmp_path, STEPS | {"run.steps": 2}) as made:
            made.run()
        lacks = mock.patch.object(compiler, "missing", lambda device: "triton")
        with timed(20.0, 10.0), lacks, loop(comm, tmp_path, STEPS) as made:
            made.run()
            assert not is_compiled(made.engine.stages)
        excluded = mock.patch.object(attempt, "may_compile", lambda config, device, ranks: False)
        with excluded, loop(comm, tmp_path, STEPS | {"run.steps": 6}) as made:
            made.run()
            assert not is_compiled(made.engine.stages)
        text = log(tmp_path / "run")
        unlike = "layers not compiled, unlike before, so the bits of results change: "
        assert text.count(unlike) == 2
        assert f"{unlike}rank 0 has no triton" in text
        assert f"{unlike}the settings exclude compiled layers" in text
        with timed(20.0, 10.0) as times, loop(comm, tmp_path, STEPS | {"run.steps": 8}) as made:
            made.run()
            assert is_compiled(made.engine.stages) and times == []
        assert text.count(unlike) == log(tmp_path / "run").count(unlike)


def test_the_record():
    assert agreement.stored(DeviceChoice(("flash",), compiled=True)) == {
        "attention": ["flash"],
        "layers": ["compiled"],
    }


@pytest.mark.long
@pytest.mark.skipif(bool(compiler.missing("cpu")), reason="no C++ compiler")
@parallel(ranks=[1], limit_s=180)
def test_real_times(comm):
    from torch._dynamo import reset

    reset()  # torch compiles a function for a few shapes only, and other tests have had theirs
    engine = build(World(comm), {"model.layers": 2})
    with mock.patch.object(compiling, "LEAST_S", 0.0):
        assert " ms a layer, compiled in " in answer(engine).why
