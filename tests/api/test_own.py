"""The user's own loss, data and optimizer: the same maths in every layout, and names that can be
found again."""

import json
import os
import sys
from pathlib import Path

import pytest
import tomlkit
import torch
from mpi4py import MPI

from ptdmpi.base.plugins import name_of, plugin, users_code
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.data.own import OwnDataset
from ptdmpi.plan.layer.describe import layer
from ptdmpi.train.run import Launch, Run
from ptdmpi.watch.requests import StopRequest
from tests._configs import layout, small
from tests._engines import build, microbatches, steps_of
from tests._mpirun import mpirun
from tests._own import (
    Counting,
    Dropping,
    Ending,
    Ends,
    Given,
    Momentum,
    Reallocating,
    Replacing,
    Resizing,
    Short,
    counted_twice,
    counts_none,
    detached,
    elsewhere,
    endless,
    ends,
    even,
    huge,
    immense,
    many,
    many_in_half,
    negative,
    no_number,
    no_tokens,
    number_of_sequences,
    of_shape,
    only_sum,
    plain,
    several,
    smoothed,
    some_tokens,
    squared,
    tiny,
    tokens_as_sequences,
    words,
)
from tests._runs import configuration, corpus
from tests.parallel import parallel

LAYOUTS = {
    1: [{}],
    2: [layout(t=2), layout(p=2), layout(d=2), {"parallel.context": 2}],
    4: [layout(t=2, d=2), layout(t=2) | {"parallel.context": 2}, layout(d=2, p=2)],
}
LONG = (even, plain, several)
EXACT = {"precision.compute": "fp64", "batch.micro_size": 1}


def trained(comm, changes) -> list[tuple[float, float]]:
    """Loss and gradient norm of each of three steps."""
    engine = build(World(comm), changes)
    steps = []
    for number in range(3):
        batches = microbatches(engine.config, number, engine.axes["data"].rank)
        result = engine.step(number, [batch.at(engine.context.positions) for batch in batches])
        steps.append((result.loss, result.grad_norm))
    return steps


def close(steps, rel=1e-12):
    return [pytest.approx(step, rel=rel) for step in steps]


@pytest.mark.cases(1)
@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "loss",
    [
        smoothed,
        squared,
        several,
        *(pytest.param(one, marks=pytest.mark.long) for one in (even, plain)),
    ],
)
def test_a_loss_of_ones_own_is_the_same_in_every_layout(comm, loss):
    """The numbers of terms differ from microbatch to microbatch."""
    changes = EXACT | {"run.loss": name_of(loss)}
    alone = trained(MPI.COMM_SELF, changes)
    for where in LAYOUTS[comm.size]:
        assert trained(comm, changes | where) == close(alone), where


@parallel(ranks=[2])
@pytest.mark.parametrize("compute", ["fp64", "fp16"])
def test_a_loss_that_counts_tokens_is_the_cross_entropy(comm, compute):
    changes = {"precision.compute": compute, "parallel.tensor": comm.size}
    usual = trained(comm, changes)
    rel = 1e-12 if compute == "fp64" else 2e-3
    assert trained(comm, changes | {"run.loss": name_of(plain)}) == close(usual, rel)


@parallel(ranks=[1])
@pytest.mark.parametrize("compute", ["fp64", "fp16"])
def test_the_mean_is_over_the_terms_that_the_loss_counts(comm, compute):
    """As the cross-entropy with weights of 0 where the loss counts nothing: loss, norm, update."""
    changes = {"precision.compute": compute, "batch.micro_size": 1}
    usual = build(World(comm), changes)
    own = build(World(comm), changes | {"run.loss": name_of(even)})
    for step in range(3):
        batches = microbatches(own.config, step, 0)
        counted = [
            type(batch)(
                batch.inputs,
                batch.labels,
                batch.weights * (batch.labels % 2 == 0),
                batch.samples,
            )
            for batch in batches
        ]
        ours, theirs = own.step(step, batches), usual.step(step, counted)
        rel = 1e-12 if compute == "fp64" else 2e-3
        assert ours.loss == pytest.approx(theirs.loss, rel=rel)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=rel)
        assert ours.loss_scale == theirs.loss_scale
    evaluated = own.evaluate(batches)["task"].mean
    assert evaluated == pytest.approx(usual.evaluate(counted)["task"].mean, rel=rel)


@parallel(ranks=[2])
def test_an_optimizer_of_ones_own_updates_sharded_state(comm):
    """Written as torch's SGD is: the same numbers in one process and under ZeRO."""
    sgd = {"optimizer.kind": "sgd", "optimizer.momentum": 0.9}
    own = sgd | {"optimizer.kind": "own", "optimizer.own": name_of(Momentum)}
    alone = trained(MPI.COMM_SELF, EXACT | sgd)
    for zero in (0, 1, 3):
        engine = build(World(comm), EXACT | own | layout(d=2) | {"parallel.zero": zero})
        losses = [(result.loss, result.grad_norm) for result in steps_of(engine, 3)]
        assert losses == close(alone)
        assert "own_momentum" in engine.state.kinds


def made(comm, folder, changes, **own):
    """The run on the ranks of a test's communicator."""
    if comm.rank == 0 and not (folder / "train").exists():
        corpus(folder)
    comm.Barrier()
    launch = Launch(World(comm), StopRequest())
    return Run(configuration(folder, changes), launch=launch, **own)


@pytest.mark.cases(1)
@parallel(ranks=[1, 2])
def test_data_of_ones_own_comes_in_the_same_order_in_every_layout(comm, tmp_path):
    """Also after a resume; and padded validation samples do not count."""
    own = {"data": Counting, "loss": even, "optimizer": Momentum}
    changes = {"data.valid": name_of(Counting), "log.validate_samples": 5, "run.steps": 4}
    losses = [step.result.loss for step in made(comm, tmp_path, changes, **own)]
    records = read_records(tmp_path / "run/metrics.jsonl")
    checks = [record for record in records if "validation_loss" in record]
    assert len(checks) == 1 and "validation_perplexity" not in checks[0]
    changes["run.dir"] = str(tmp_path / "stopped")
    run = made(comm, tmp_path, changes, **own)
    for step in run:
        if step.number == 2:
            run.save()
            break
    rest = [step.result.loss for step in made(comm, tmp_path, changes, **own)]
    assert rest == losses[2:]
    if comm.rank == 0:
        changes["run.dir"] = str(tmp_path / "alone")
        alone = [step.result.loss for step in made(MPI.COMM_SELF, tmp_path, changes, **own)]
        assert alone == pytest.approx(losses, rel=1e-5)


@parallel(ranks=[1, 2])
def test_a_validation_in_which_nothing_counts_is_refused(comm, tmp_path):
    changes = {"run.steps": 1, "parallel.pipeline": comm.size, "log.validate_every_steps": 1}
    changes["data.valid"] = str(tmp_path / "train")
    with pytest.raises(InputError, match="validation after step 1 has no loss, because no label"):
        list(made(comm, tmp_path, changes, loss=counts_none))


def read_records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@parallel(ranks=[1])
def test_data_of_another_length_is_refused(comm, tmp_path):
    with pytest.raises(InputError, match=r"sample 0 has ids of shape \[3\]; legal: \[17\]"):
        made(comm, tmp_path, {}, data=Short)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": None}, "vocab_size is None; legal: an integer from 1"),
        ({"vocab_size": 0}, "vocab_size is 0; legal"),
        ({"sample": 3}, "has no method `sample`; legal: sample"),
        ({"length": -1}, "its length is not a number of samples"),
        ({"length": "a"}, "its length is not a number of samples"),
        ({"length": 0}, "has no samples"),
        ({"given": None}, r"sample 0 has ids of shape \[\]"),
        ({"given": [0.5] * 17}, "sample 0 has ids of float64, not integers"),
        ({"given": [None] * 17}, "sample 0 has ids of object, not integers"),
        ({"given": [[1], 2]}, "sample 0: ids: "),
        ({"given": torch.ones(17, requires_grad=True)}, "sample 0: ids: "),
        ({"given": ([1] * 17, [float("nan")] * 16)}, "weights that are not finite"),
        ({"given": ([1] * 17, ["a"] * 16)}, "weights that are not finite"),
        ({"given": ([1] * 17, [1.0] * 15 + [-1])}, "a weight of -1; legal: 0, or 1e-12 to 1e"),
        ({"given": ([1] * 17, [1e-45] * 16)}, "a weight of 1e-45; legal: 0, or 1e-12"),
        ({"given": ([1] * 17, [1e300] * 16)}, "a weight of 1e\\+300; legal: 0, or 1e-12"),
    ],
)
def test_an_object_that_is_no_dataset_is_refused(monkeypatch, changes, text):
    for name, value in changes.items():
        monkeypatch.setattr(Given, name, value)
    with pytest.raises(InputError, match=text) as error:
        OwnDataset(name_of(Given), 16)
    assert "\n" not in str(error.value)


@parallel(ranks=[1])
def test_the_count_of_a_sum_in_half_precision_is_exact(comm):
    """A count of 1e5 is infinite in float16."""
    (half, *_), (full, *_) = (trained(comm, {"run.loss": name_of(x)}) for x in (many_in_half, many))
    assert half == close([full], rel=1e-2)[0]


@parallel(ranks=[1])
def test_a_loss_that_returns_something_else_is_refused(comm):
    """Also a sum without a gradient, with which nothing would train."""
    for loss, text in (
        (only_sum, "returned Tensor, not"),
        (words, r"returned \(str, str\); legal: a tensor and a number"),
        (of_shape, r"returned a sum of float32 of shape \[.*\], not one floating-point sum"),
        (detached, "returned a sum that has no gradient"),
        (huge, "returned the count inf; legal: 0, or 1e-30 to 1e[+]30"),
        (immense, r"returned the count 1e\+300; legal: 0, or 1e-30 to 1e"),
        (tiny, "returned the count 1e-300; legal: 0, or 1e-30 to 1e"),
        (no_number, "returned the count nan; legal"),
        (some_tokens, r"of_tokens got losses of shape \[3, 1\]; legal: .* of shape \[16, 1\]"),
        (no_tokens, r"of_tokens got losses of the type int; legal: a tensor of shape \[16, 1\]"),
        (tokens_as_sequences, r"of_sequences got losses of shape \[16, 1\]; legal: .* \[1\]"),
        (number_of_sequences, "of_sequences got losses of the type float; legal"),
        (elsewhere, "returned a sum on meta; legal: on cpu"),
        (counted_twice, r"returned a count of shape .*, not one number"),
        (negative, "returned the count -1.0; legal: 0, or"),
        (endless, "returned the count inf; legal"),
        (ends, "tests._own:ends ends the program"),
    ):
        with pytest.raises(InputError, match=text):
            trained(comm, {"run.loss": name_of(loss), "batch.micro_size": 1})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run.loss": "nowhere"}, "run.loss: nowhere: no installed package .*none is installed"),
        (
            {"run.loss": "os:sep"},
            "run.loss: os:sep is of the type str; legal: a function or a class",
        ),
        ({"run.loss": "os:getcwd"}, "run.loss: os:getcwd cannot be called with one argument .*one"),
        (
            {"model.sublayers": ("attention", "os:getcwd")},
            "model.sublayers: os:getcwd cannot be ca",
        ),
        ({"run.loss": "no_module:loss"}, "run.loss: no_module:loss cannot be imported: No module"),
        ({"run.loss": "__main__:nothing"}, "belongs to a program, and only this program"),
        ({"optimizer.kind": "own"}, 'optimizer.kind = "own" needs optimizer.own'),
        ({"optimizer.own": "json:dumps"}, 'own has no effect with optimizer.kind = "adamw"'),
        (
            {"optimizer.kind": "own", "optimizer.own": "json:dumps"},
            "json:dumps has no moments; legal: a class with moments and update",
        ),
        (
            {"run.loss": "json:dumps", "log.gradient_noise_every_steps": 2, "batch.micro_size": 1},
            "counts its own terms; legal: 0",
        ),
        *(
            (
                {"optimizer.kind": "own", "optimizer.own": f"tests._own:{name}"},
                f"optimizer.own: tests._own:{name} has moments = .*; legal: ",
            )
            for name in ("NumberedMoments", "RepeatedMoments", "MomentsOfWeights", "MomentsOfPaths")
        ),
        (
            {"optimizer.kind": "own", "optimizer.own": "tests._own:UpdatedByText"},
            "optimizer.own: tests._own:UpdatedByText has an update of type str",
        ),
        *(
            (
                {"optimizer.kind": "own", "optimizer.own": f"tests._own:{name}"},
                rf"{name} has an update that cannot be called \(.*\); legal: .* update\(config, gr",
            )
            for name in ("UpdatedAlone", "UpdatedAsObject")
        ),
        ({"model.sublayers": ("attention", "json:nothing")}, "model.sublayers: json:nothing"),
        ({"model.sublayers": ("mlp", "mlp")}, "model.sublayers names mlp more than once"),
    ],
)
def test_names_that_mean_nothing_are_refused(changes, text):
    with pytest.raises(InputError, match=text):
        small(changes)


def test_a_plugin_that_is_not_python_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in (
        ("broken", b"def"),
        ("latin", b"x = '\xff'"),
        ("ends", b"raise SystemExit(0)"),
    ):
        (tmp_path / f"{name}.py").write_bytes(content)
        with pytest.raises(InputError, match=f"run.loss: {name}:x cannot be imported: "):
            small({"run.loss": f"{name}:x"})


def test_an_error_of_a_file_names_the_dataset(monkeypatch):
    def failed(self, number):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Given, "sample", failed)
    with pytest.raises(InputError, match=r"Given: sample 0: .*Input/output error"):
        OwnDataset(name_of(Given), 16)


@parallel(ranks=[2])
def test_an_optimizer_that_ends_the_program_is_refused(comm):
    """And a module: then the other ranks would wait."""
    own = {"optimizer.kind": "own", "optimizer.own": name_of(Ending)}
    with pytest.raises(InputError, match=r"tests\._own:Ending ends the program"):
        trained(comm, own | layout(d=2))


@parallel(ranks=[1])
def test_an_optimizer_that_replaces_tensors_is_refused(comm):
    """The run would use the tensors of before, and nothing would train."""
    for own, text in (
        (Resizing, r"Resizing: update replaces a tensor of group\.masters, or changes its size; l"),
        (Reallocating, r"Reallocating: update replaces a tensor of group\.moments\[0\], or"),
        (Replacing, r"Replacing: update replaces a tensor of group\.masters, or changes"),
        (Dropping, "Dropping: update changes the lists of its group; legal: an update that"),
    ):
        with pytest.raises(InputError, match=text):
            trained(comm, {"optimizer.kind": "own", "optimizer.own": name_of(own)})


@pytest.mark.parametrize("in_sample", [False, True])
def test_a_dataset_that_ends_the_program_is_refused(tmp_path, monkeypatch, in_sample):
    """Its rank would end with code 0, and the others would wait. Nor may it move the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Ends, "in_sample", in_sample)
    with pytest.raises(InputError, match=r"tests\._own:Ends.* ends the program"):
        OwnDataset(name_of(Ends), 16)
    assert Path.cwd() == tmp_path


def test_the_directory_is_restored_whichever_thread_leaves_first(tmp_path, monkeypatch):
    """Samples are read in a thread of their own, while the loss is computed."""
    monkeypatch.chdir(tmp_path)
    sample, loss = users_code("sample"), users_code("loss")
    sample.__enter__()
    os.chdir("/")
    loss.__enter__()
    sample.__exit__(None, None, None)
    assert Path.cwd() == tmp_path
    loss.__exit__(None, None, None)
    assert Path.cwd() == tmp_path


def test_a_module_that_changes_the_directory_does_not_move_the_run(tmp_path, monkeypatch):
    (tmp_path / "moves.py").write_text("import os\nos.chdir('/')\ndef loss(inputs): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    small({"run.loss": "moves:loss"})
    assert Path.cwd() == tmp_path


def test_a_function_that_makes_no_sublayer_is_refused():
    model = small({"model.sublayers": ("attention", "builtins:str")}).model
    with pytest.raises(InputError, match=r"model.sublayers: builtins:str returned str, not a Subl"):
        layer(model)


def test_an_object_without_a_name_is_refused():
    for value in (lambda inputs: None, Momentum()):
        with pytest.raises(InputError, match="defined at the top of a module"):
            name_of(value)
    assert plugin("losses", name_of(plain)) is plain


@pytest.mark.long
def test_an_installed_plugin_is_found_by_its_name(tmp_path):
    """A package with entry points, as pip installs it; `ptdmpi train` names its objects."""
    site = tmp_path / "site"
    info = site / "shapes-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "shapes.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shapes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    corpus(tmp_path)
    keys = {
        "run.steps": 2,
        "run.loss": "smooth",
        "optimizer.kind": "own",
        "optimizer.own": "sign",
        "data.train": [{"path": "countdown"}],
        "model.sublayers": ["attention", "wider", "mlp"],
    }
    (tmp_path / "config.toml").write_text(tomlkit.dumps(configuration(tmp_path, keys)))
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    command = ["-m", "ptdmpi", "train", str(tmp_path / "config.toml")]
    mpirun(2, command, env={"PYTHONPATH": paths})
    steps = [record for record in read_records(tmp_path / "run/metrics.jsonl") if "loss" in record]
    assert len(steps) == 2
    manifest = (tmp_path / "run/checkpoints/step-00000002/manifest.json").read_text()
    assert "wider.up.weight" in manifest and "countdown" in manifest
    asked = ["-m", "ptdmpi", "doctor", "--parity", str(tmp_path / "config.toml"), "--short"]
    printed = mpirun(2, asked, env={"PYTHONPATH": paths}).stdout
    assert "sublayers attention, wider, mlp" in printed and "4 rows, all ok" in printed


PACKAGE = """
from ptdmpi.plan.layer.parts import Linear


def smooth(inputs):
    logs = inputs.log_softmax()
    mean = inputs.sum_over_vocabulary(logs.sum(-1)) / inputs.vocab_size
    return inputs.of_tokens(-0.9 * inputs.log_probabilities(logs) - 0.1 * mean)


class Sign:
    moments = ()

    @staticmethod
    def update(config, group, rate, updates):
        for weights, gradients in zip(group.masters, group.gradients):
            weights.sub_(rate * gradients.sign())


class Countdown:
    vocab_size = 53

    def __init__(self, seq_length):
        self.seq_length = seq_length

    def __len__(self):
        return 100

    def sample(self, number):
        return [(number - i) % self.vocab_size for i in range(self.seq_length + 1)]


def wider(build):
    hidden, std = build.model.hidden, build.residual_std
    up = Linear(hidden, (hidden,), bias=False, init_std=std, split="columns")
    down = Linear(hidden, (hidden,), bias=False, init_std=std, split="rows")
    first = build.product("wider.up", up, "y", "y")
    return build.sublayer("wider", 4, first, build.product("wider.down", down, "y", "y"))
"""
ENTRY_POINTS = """[ptdmpi.losses]
smooth = shapes:smooth

[ptdmpi.optimizers]
sign = shapes:Sign

[ptdmpi.datasets]
countdown = shapes:Countdown

[ptdmpi.sublayers]
wider = shapes:wider
"""
