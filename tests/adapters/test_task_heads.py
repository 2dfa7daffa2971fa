"""Adapters and a head for a task, which train together beside a frozen model of text."""

import json
import shutil

import pytest
from mpi4py import MPI

from ptdmpi.base.words import short
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, Layout, SharedInputError
from ptdmpi.convert.adapters import merge
from ptdmpi.evaluate.run import evaluate
from ptdmpi.inference.model import open_inference
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import Model, load_cluster
from ptdmpi.plan.shape.flops import model_flops
from ptdmpi.train.checks import checked
from tests import _stored
from tests._configs import layout, small
from tests._engines import (
    assert_same_bits,
    build,
    from_root,
    load,
    steps_of,
    train,
    whole_gradients,
    whole_weights,
)
from tests._layers import difference
from tests._runs import configuration, log, loop, records, tensors
from tests.adapters.test_engine import EXACT, IA3, LORA, close, expected, merged, some_adapters
from tests.evaluate.test_task_heads import OPTIONS, changes, write
from tests.parallel import parallel

LABELS = {"task.kind": "classification", "task.labels": ["no", "maybe", "yes"]}
CHOICE = {"task.kind": "choice", "task.choices": 2, "model.kind": "bert"}
DIVIDED = {"parallel.sequence_parallel": True}
LAYOUTS = {
    1: [{}],
    2: [layout(t=2) | DIVIDED, layout(p=2) | {"parallel.schedule": "zb-h1"}, layout(d=2)],
    4: [layout(t=2, d=2) | {"parallel.zero": 3}, layout(p=2, v=2, d=2) | {"model.layers": 4}],
}


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("task", [CHOICE | LORA, LABELS | IA3], ids=["choice", "labels"])
def test_gradients_are_those_of_the_whole_model(comm, task):
    """Those of the adapters follow from the weights that they stand for; nothing but these and the
    head has any."""
    for chosen in LAYOUTS[comm.size]:
        whole = build(World(comm), EXACT | task | chosen | {"adapt.method": "none", **UNUSED})
        adapted = build(World(comm), EXACT | task | chosen)
        base, own = whole_weights(whole), some_adapters(adapted)
        head = {name for name in own if name.startswith("sentence.")}
        assert head == {name for name in base if name.startswith("sentence.")}
        load(adapted, own)
        load(whole, merged(base, own, adapted) | {name: own[name] for name in head})
        (dense,), (found,) = steps_of(whole, 1), steps_of(adapted, 1)
        assert found.loss == pytest.approx(dense.loss, rel=1e-12)
        known = whole_gradients(whole)
        answer = expected(base, own, known, adapted) | {name: known[name] for name in head}
        gradients = whole_gradients(adapted)
        assert gradients.keys() == answer.keys()
        for name, gradient in gradients.items():
            assert close(gradient, answer[name]), (chosen, name)


UNUSED = dict.fromkeys(("adapt.rank", "adapt.alpha"))


@pytest.mark.cases(1)
@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("task", [CHOICE, LABELS], ids=["choice", "labels"])
def test_losses_do_not_depend_on_the_layout(comm, task):
    """With dropout in front of the head and in the adapters."""
    given = task | LORA | {"adapt.dropout": 0.1, "model.dropout": 0.1}
    found, zero = {}, {"parallel.zero": 3}
    for chosen in ({}, *LAYOUTS[comm.size], layout(d=comm.size) | zero):
        each = {"batch.micro_size": 8 // chosen.get("parallel.data", 1)}
        run = found[str(chosen)] = train(comm, given | each | chosen, steps=2)
        if "model.layers" not in chosen:
            assert run.losses == pytest.approx(found["{}"].losses, rel=1e-5), chosen
    if comm.size == 2:
        assert_same_bits(run, found[str(layout(d=2))])


KINDS = {"gpt": "labels", "bert": "choice"}
SIZES = {"model.layers": 2, "model.vocab_size": 260}


def wanted(folder, model: str) -> dict:
    """A run of four steps over the model of text at `folder`/base, whose sequences are longer."""
    given = changes(folder, KINDS[model], **{"model.kind": model, **SIZES, **LORA})
    saved = {"adapt.base": str(folder / "base"), "checkpoint.every_steps": 2, "checkpoint.keep": 0}
    return given | saved


def begun(comm, folder, model: str) -> None:
    if comm.rank == 0:
        write(folder)
        _stored.stored(folder / "base", 260, kind=model, seq_length=32)
    comm.Barrier()


@pytest.mark.cases(1)
@parallel(ranks=[2], limit_s=120)
@pytest.mark.parametrize("model", ["gpt", pytest.param("bert", marks=pytest.mark.long)])
def test_a_run_over_a_model_of_text(comm, model, tmp_path):
    """Its head is drawn as in a full training, saved with the adapters and nothing else, taken up
    in another layout, and asked beside the base."""
    begun(comm, tmp_path, model)
    given, run = wanted(tmp_path, model), tmp_path / "run"
    with loop(comm, tmp_path, given | layout(p=2)) as made:
        new = "sentence.classes.weight" + ", sentence.classes.bias" * (model == "bert")
        assert made.attempt.how == f"begins; drawn from run.seed: {new}"
        made.run()
        trained = whole_weights(made.engine)
    checkpoint = run / "checkpoints/step-00000004"
    kept = tensors(checkpoint)
    assert kept.keys() == {f"{kind}/{name}" for name in trained for kind in KEPT}
    assert any(".lora_" in name for name in trained)
    assert all(".lora_" in name or name.startswith("sentence.") for name in trained)
    said = json.loads((checkpoint / "manifest.json").read_text())["adapt"]
    assert said["task"]["kind"] == given["task.kind"]
    losses = [one["loss"] for one in records(run) if "loss" in one]
    assert losses == pytest.approx(serial(comm, tmp_path, given), rel=1e-4)
    comm.Barrier()
    if comm.rank == 0:  # as after a cut of the power behind the second step
        shutil.rmtree(checkpoint)
        (run / "checkpoints/latest").unlink()
    comm.Barrier()
    with loop(comm, tmp_path, given | layout(t=2)) as made:
        assert made.attempt.how == "resumed after step 2"
        made.run()
        again = whole_weights(made.engine)
    # a bias that all candidates have in common has a gradient of rounding alone
    compared = [name for name in trained if name != "sentence.classes.bias"]
    assert all(difference(again[name], trained[name]) < 1e-4 for name in compared)
    asked(comm, tmp_path, KINDS[model])
    if comm.rank == 0:
        count = sum(one.numel() for one in trained.values())
        assert f"of which {short(count)} train" in log(run)


KEPT = ("weights", "exp_avg", "exp_avg_sq")


def asked(comm, folder, kind: str) -> None:
    """What a validation said is what `ptdmpi evaluate --adapter` finds; tokens it gives none."""
    run, base, file = folder / "run", folder / "base", folder / f"valid-{kind}.jsonl"
    (*_, last) = (one for one in records(run) if "validation_accuracy" in one)
    options = OPTIONS | {"tasks": (file,), "adapter": run}
    ((one,),) = [evaluate(base, World(comm), **options)["tasks"]]
    assert one["items"] == 13 and one["accuracy"] == last["validation_accuracy"]
    with pytest.raises(SharedInputError, match="run has a head for a task, and predicts no tokens"):
        open_inference(base, World(comm), None, None, adapter=run)
    with pytest.raises(SharedInputError, match=r"--shots: .*run has a head for a task"):
        evaluate(base, World(comm), **options | {"shots": 1})
    if comm.rank == 0:
        merge(base, run, folder / "merged")
    comm.Barrier()
    whole = OPTIONS | {"tasks": (file,)}
    assert evaluate(folder / "merged", World(comm), **whole)["tasks"] == [one]
    comm.Barrier()


def serial(comm, folder, given: dict) -> list[float]:
    """The losses of the same run on one rank."""
    found = None
    if comm.rank == 0:
        with loop(MPI.COMM_SELF, folder, given | {"run.dir": str(folder / "serial")}) as made:
            made.run()
        found = [one["loss"] for one in records(folder / "serial") if "loss" in one]
    return from_root(comm, found)


@parallel(ranks=[1])
def test_a_head_that_the_base_has_is_where_it_begins(comm, tmp_path):
    """If the classes are as many; and adapters to begin from bring theirs."""
    write(tmp_path)
    head = {"output_head": "classes", "classes": 2, "tie_embeddings": False}
    _stored.stored(tmp_path / "base", 260, kind="gpt", **head, seq_length=32)
    name = "sentence.classes.weight"
    before = tensors(tmp_path / "base/checkpoints/step-00000007")[f"weights/{name}"]
    given = wanted(tmp_path, "gpt")
    with loop(comm, tmp_path, given) as made:
        assert made.attempt.how == "begins"
        assert (whole_weights(made.engine)[name].numpy() == before).all()
        made.run()
        after = whole_weights(made.engine)
    assert not (after[name].numpy() == before).all()
    again = {"checkpoint.initial": str(tmp_path / "run"), "run.dir": str(tmp_path / "again")}
    with loop(comm, tmp_path, given | again) as made:
        assert "drawn" not in made.attempt.how
        found = whole_weights(made.engine)
        assert all((found[name] == one).all() for name, one in after.items())
    more = {"task.labels": ["odd", "even", "none"], "run.dir": str(tmp_path / "more")}
    with loop(comm, tmp_path, given | more) as made:
        assert made.attempt.how == f"begins; drawn from run.seed: {name}"


def test_no_tokenizer_is_told(tmp_path):
    """Neither the task names one nor the base, which has none beside it."""
    write(tmp_path)
    _stored.stored(tmp_path / "base", 260, kind="gpt", seq_length=32)
    given = wanted(tmp_path, "gpt") | {"task.tokenizer": ""}
    with pytest.raises(
        InputError, match=r"base does not say which tokenizer it has; set task\.tok"
    ):
        checked(configuration(tmp_path, given), 1)


def test_the_head_counts_as_what_trains():
    """Two more classes cost as many operations as in a full training."""

    def flops(labels: int, method: dict) -> float:
        task = LABELS | {"task.labels": [str(number) for number in range(labels)]}
        return model_flops(small(task | method).model, 101, 1000)

    beside, full = (flops(5, method) - flops(3, method) for method in (LORA, {}))
    assert beside == pytest.approx(full) and beside > 0


def test_the_head_takes_the_time_of_what_trains():
    """Its own gradient, too, as the planner counts it; a frozen head for tokens has none."""

    def weights_s(changes: dict) -> float:
        model = Model("small", small(changes).model, 101)
        times = Pricer.of(load_cluster("dgx-h100"), model, 8, "bf16").times
        return times.ends(Layout(1, 1, 1)).head_weights.total

    assert weights_s(LABELS | LORA) == weights_s(LABELS) > 0 == weights_s(LORA)
