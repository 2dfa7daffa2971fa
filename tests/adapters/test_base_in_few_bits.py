"""LoRA over a base that stays in few bits while it trains: the numbers are those over a base that
was unpacked into an ordinary checkpoint, and memory is what the codes take."""

import json
import shutil
from typing import NamedTuple

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from benchmarks.planning.allocated import measured
from ptdmpi.checkpoint.base import base_at
from ptdmpi.cli import group
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.convert.adapters import merge
from ptdmpi.convert.quantize.write import matrices, quantize
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.stored import config_of, open_model
from ptdmpi.model.low_bit.codes import packed
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.train.checks import checked
from ptdmpi.train.tasks.measured import live_model
from tests import _stored
from tests._configs import layout
from tests._engines import HALVES, build, foreseen_by, steps_of, whole_weights
from tests._runs import VOCAB_SIZE, configuration, corpus, log, loop, records
from tests.parallel import parallel

SHAPE = _stored.LLAMA | {"layers": 2}
MODEL = {f"model.{key}": value for key, value in SHAPE.items()}
LORA = {"adapt.method": "lora", "adapt.rank": 3, "adapt.dropout": 0.1}
SAVING = {"run.steps": 2, "checkpoint.every_steps": 0}
NF4 = {"quantize.weights": "nf4", "quantize.block": 8}


def bases(comm, folder, codes: str, layers: int = 2) -> None:
    """`low`: a base in few bits; `values`: the same unpacked into an ordinary checkpoint."""
    form, shape = LowBit(codes, 8), SHAPE | {"layers": layers}
    linears = matrices(config_of(_stored.SHAPE | shape).model)

    def unpacked(name: str, weight: Tensor) -> Tensor:
        return packed(weight, form).values(torch.float32) if name in linears else weight

    if comm.rank == 0:
        _stored.stored(folder / "whole", VOCAB_SIZE, **shape)
        quantize(folder / "whole", folder / "low", form)
        _stored.stored(folder / "values", VOCAB_SIZE, changed=unpacked, **shape)
    comm.Barrier()


class Trained(NamedTuple):
    numbers: list[tuple[float, float]]
    adapters: dict[str, Tensor]
    held_bytes: int


def trained(comm, folder, changes, base: str) -> Trained:
    run = folder / f"run-{base}"
    given = MODEL | LORA | SAVING | {"adapt.base": str(folder / base), "run.dir": str(run)}
    with loop(comm, folder, given | changes) as made:
        made.run()
        adapters, held = whole_weights(made.engine), made.engine.buffer.few_bits.nbytes
    comm.Barrier()
    kept = [(one["loss"], one["grad_norm"]) for one in records(run) if "loss" in one]
    return Trained(kept, adapters, held)


def assert_same_as_unpacked(comm, folder, changes, codes: str = "nf4") -> None:
    bases(comm, folder, codes, changes.get("model.layers", 2))
    low, values = (trained(comm, folder, changes, base) for base in ("low", "values"))
    assert low.held_bytes > 0 == values.held_bytes
    assert len(low.numbers) == 2 and low.numbers == values.numbers
    assert low.adapters.keys() == values.adapters.keys()
    for name, found in low.adapters.items():
        assert torch.equal(found, values.adapters[name]), name
    if comm.rank == 0:
        said = f"the frozen base stays in {codes}, blocks of 8: its layers' matrices take"
        assert said in log(folder / "run-low")
        assert "stays in" not in log(folder / "run-values")
    comm.Barrier()


SP = {"parallel.sequence_parallel": True}
CASES = {
    1: [({}, "nf4")],
    2: [
        (layout(t=2) | SP, "uint4"),
        (layout(p=2) | {"parallel.schedule": "zb-h1"}, "uint4"),
        (layout(d=2) | {"parallel.zero": 3, "recompute.mode": "full"}, "int8"),
        (layout(t=2) | {"precision.compute": "bf16", "recompute.mode": "selective"}, "int8"),
        (layout(p=2, v=2) | {"parallel.schedule": "zb-v", "model.layers": 4}, "nf4"),
    ],
    4: [
        (layout(t=2, p=2, v=2) | {"model.layers": 4}, "nf4"),
        (layout(t=2, d=2) | SP | {"parallel.zero": 2, "recompute.mode": "full"}, "int4"),
    ],
}


@parallel(ranks=[1])
def test_it_trains_as_over_what_its_codes_stand_for(comm, tmp_path):
    assert_same_as_unpacked(comm, tmp_path, *CASES[1][0])


@parallel(ranks=[2])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(number), marks=[pytest.mark.long] if number else [])
        for number, case in enumerate(CASES[2])
    ],
)
def test_it_does_so_in_every_layout(comm, tmp_path, case):
    assert_same_as_unpacked(comm, tmp_path, *case)


@pytest.mark.long
@parallel(ranks=[4])
@pytest.mark.parametrize("case", CASES[4], ids=["t2p2v2", "t2d2"])
def test_it_does_so_where_two_axes_cut(comm, tmp_path, case):
    assert_same_as_unpacked(comm, tmp_path, *case)


@pytest.mark.long
@parallel(ranks=[1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "half",
    [pytest.param(half, marks=[] if half == "widened" else pytest.mark.long) for half in HALVES],
)
def test_memory_is_what_the_codes_take(comm, half):
    """What stands, to the byte; beside it, in a step, no more than the account has for a matrix."""
    changes = MODEL | LORA | layout(t=comm.size)
    changes |= {"precision.compute": "bf16" if half == "widened" or comm.size == 2 else "fp32"}
    changes |= {"model.ffn_hidden": 256, "batch.micro_size": 1, "batch.global_size": 2}
    plain, low = (build(World(comm), changes | more, half=half) for more in ({}, NF4))
    buffer, size = low.buffer, low.buffer.precision.compute.itemsize
    foreseen = foreseen_by(low).peak(low.config.layout, 0, low.config.microbatches)
    own = sum(entry.elements for entry in buffer.entries.values())
    frozen = sum(entry.elements for entry in buffer.frozen.values())
    elements = sum(entry.elements for entry in buffer.packed.values())
    assert elements == sum(e.elements for e in plain.buffer.frozen.values()) - frozen
    assert buffer.few_bits.nbytes == elements // 2 + elements // 8 * 4
    assert foreseen.weights == size * (frozen + own) + buffer.few_bits.nbytes
    assert foreseen.gradients == 4 * own
    peaks = []
    for engine in (plain, low):
        steps_of(engine, 1)
        peaks.append(measured(lambda one=engine: steps_of(one, 1))[1])
    least = foreseen_by(plain).peak(plain.config.layout, 0, plain.config.microbatches)
    assert 0 < peaks[1] - peaks[0] <= foreseen.working - least.working


@pytest.mark.long
@parallel(ranks=[1])
def test_a_base_may_be_unpacked_and_adapters_are_of_its_codes(comm, tmp_path):
    bases(comm, tmp_path, "int4")
    quantize(tmp_path / "whole", tmp_path / "other", LowBit("nf4", 8))
    assert base_at(tmp_path / "low")[1].sha256 != base_at(tmp_path / "other")[1].sha256
    low = trained(comm, tmp_path, {}, "low")
    (tmp_path / "run-low").rename(tmp_path / "adapter")
    whole = trained(comm, tmp_path, {"quantize.weights": "none"}, "low")
    assert whole.held_bytes == 0 and whole.numbers == low.numbers
    merge(tmp_path / "low", tmp_path / "adapter", tmp_path / "merged")
    ids = torch.arange(12).view(12, 1) * 4
    labels = torch.roll(ids, -1, 0)
    found = []
    for base, adapter in (("low", tmp_path / "adapter"), ("merged", None), ("low", None)):
        model, _ = open_inference(tmp_path / base, World(comm), None, None, adapter=adapter)
        found.append(model.log_probabilities(ids, labels)[0])
        model.finish()
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert not torch.allclose(found[0], found[2], atol=1e-3)
    with pytest.raises(SharedInputError, match="belong to the weights of"):
        open_inference(tmp_path / "other", World(comm), None, None, adapter=tmp_path / "adapter")
    assert open_model(tmp_path / "merged").manifest.form is None


@pytest.mark.long
@parallel(ranks=[2])
def test_a_resumed_run_has_the_same_bits(comm, tmp_path):
    bases(comm, tmp_path, "nf4")
    changes = layout(t=2) | {"run.steps": 4, "checkpoint.every_steps": 2, "checkpoint.keep": 0}
    once = trained(comm, tmp_path, changes, "low")
    if comm.rank == 0:  # as after a cut of the power behind the second step
        checkpoints = tmp_path / "run-low/checkpoints"
        shutil.rmtree(checkpoints / "step-00000004")
        (checkpoints / "latest").unlink()
        text = (tmp_path / "run-low/config.toml").read_text()
        assert 'weights = "nf4"' in text and "block = 8" in text
    comm.Barrier()
    again = trained(comm, tmp_path, changes, "low")
    assert again.numbers == once.numbers
    assert all(torch.equal(again.adapters[name], one) for name, one in once.adapters.items())


@parallel(ranks=[1])
def test_all_of_it_is_tuned_in_full(comm, tmp_path):
    bases(comm, tmp_path, "nf4")
    low, numbers = str(tmp_path / "low"), []
    for given in ({"adapt.method": "full", "adapt.base": low}, {"checkpoint.initial": low}):
        run = tmp_path / f"run-{len(given)}"
        with loop(comm, tmp_path, MODEL | SAVING | given | {"run.dir": str(run)}) as made:
            made.run()
            assert made.engine.buffer.few_bits.nbytes == 0
        numbers.append([(one["loss"], one["grad_norm"]) for one in records(run) if "loss" in one])
        assert f"begins from the weights of {low}" in log(run)
    assert len(numbers[0]) == 2 and numbers[0] == numbers[1]


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    corpus(tmp_path)
    _stored.stored(tmp_path / "whole", VOCAB_SIZE, **SHAPE)
    quantize(tmp_path / "whole", tmp_path / "low", LowBit("nf4", 16))
    given = MODEL | LORA | {"adapt.base": str(tmp_path / "low")}
    for wrong, ranks, told in (
        (
            layout(t=2),
            2,
            r"block = 16 .*\(32, 16, 24\); .* 2 or 4 or 8, with .* quantize --block",
        ),
        (NF4, 1, "nf4, blocks of 8, but .*low.* matrices in nf4, blocks of 16; legal: neither"),
        (NF4 | {"adapt.base": str(tmp_path / "whole")}, 1, 'in full; legal: weights = "none"'),
    ):
        with pytest.raises(InputError, match=told) as caught:
            checked(configuration(tmp_path, given | wrong), ranks)
        assert str(caught.value).count("\n") == 0
    found = checked(configuration(tmp_path, given), 1)
    assert (found.quantize.weights, found.quantize.block) == ("nf4", 16)


def test_the_planner_counts_the_codes():
    def asked(*more: str):
        command = ["plan", "--model", "l=4,h=1024,a=16,s=128,V=8192", "--cluster", "selene"]
        command += ["--layout", "t=2,p=1,d=1,b=1", "--batch", "4", "--lora", "8", "--json"]
        found = CliRunner().invoke(group, [*command, *more])
        return found if found.exception else json.loads(found.stdout)["layouts"][0]

    whole, low = asked(), asked("--base-bits", "nf4", "--base-block", "64")
    matrices_of_a_rank = 4 * 12 * 1024**2 // 2
    less = whole["memory_bytes"]["weights"] - low["memory_bytes"]["weights"]
    assert less == matrices_of_a_rank * 2 - matrices_of_a_rank * (0.5 + 4 / 64)
    assert "--base-block 7" in str(asked("--base-bits", "nf4", "--base-block", "7").exception)
    assert "does not divide" in str(asked("--base-bits", "int4", "--base-block", "384").exception)


@parallel(ranks=[2])
def test_tasks_are_asked_of_the_values_of_a_base_in_few_bits(comm):
    model = live_model(build(World(comm), MODEL | LORA | NF4 | layout(t=2)))
    ids = torch.arange(8).view(8, 1)
    found, _ = model.log_probabilities(ids, ids)
    assert torch.isfinite(found).all()
