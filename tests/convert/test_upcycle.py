"""A dense model becomes a mixture of experts that computes the same, and trains."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from ptdmpi.base.box import Box
from ptdmpi.cli import group
from ptdmpi.config import InputError
from ptdmpi.convert.upcycle.write import Experts, upcycle
from ptdmpi.inference.stored import open_model
from tests import _stored
from tests._configs import layout
from tests._runs import VOCAB_SIZE, loop, records
from tests.parallel import parallel

SHAPE = _stored.LLAMA | {"layers": 4}
DENSE = {f"model.{key}": value for key, value in SHAPE.items()}
SETTINGS = {"run.steps": 8, "optimizer.learning_rate": 1e-2, "precision.compute": "fp64"}


def weight(path, name):
    model = open_model(path)
    with model.reader() as reader:
        stored = reader.manifest[f"weights/{name}"]
        values = np.empty(stored.shape, stored.dtype)
        reader.read(f"weights/{name}", Box.whole(stored.shape), values)
    return values


def losses(comm, folder, changes):
    folder.mkdir(exist_ok=True)
    with loop(comm, folder, {**SETTINGS, **changes}) as made:
        made.run()
    return [record["loss"] for record in records(folder / "run") if "loss" in record]


@parallel(ranks=[1], limit_s=120)
def test_the_first_loss_is_that_of_the_dense_model(comm, tmp_path):
    """Where weights are normalised; and later losses fall, since the experts become different."""
    dense = _stored.stored(tmp_path / "dense", VOCAB_SIZE, 0.4, **SHAPE)
    some = Experts(4, 2, dense_layers=1, moe_every=2, router_std=0.5)
    done = upcycle(dense, tmp_path / "mixed", some)
    assert (done.layers, done.experts, done.parameters > done.active_parameters) == (2, 4, True)
    model = open_model(tmp_path / "mixed").config().model
    mixed = {f"model.{key}": value for key, value in some.keys(model).items()}
    before = losses(comm, tmp_path / "a", DENSE | {"checkpoint.initial": str(dense)})
    changes = DENSE | mixed | {"checkpoint.initial": str(tmp_path / "mixed")}
    after = losses(comm, tmp_path / "b", changes)
    assert after[0] == pytest.approx(before[0], rel=1e-12)
    assert after[1] != before[1] and after[-1] < after[0] - 0.1


def test_experts_are_copies_and_routers_are_random(tmp_path):
    dense = _stored.stored(tmp_path / "dense", VOCAB_SIZE, **SHAPE)
    args = [str(dense), str(tmp_path / "mixed"), "--experts", "3", "--moe-every", "2", "--json"]
    result = CliRunner().invoke(group, ["convert", "upcycle", *args], catch_exceptions=False)
    assert json.loads(result.output)["layers"] == 2
    for layer in range(4):
        for linear in ("up", "down"):
            whole = weight(dense, f"layers.{layer}.mlp.{linear}.weight")
            numbers = (".experts.0", ".experts.2") if layer % 2 else ("",)
            for number in numbers:
                name = f"layers.{layer}.mlp{number}.{linear}.weight"
                assert np.array_equal(weight(tmp_path / "mixed", name), whole), name
    routers = [weight(tmp_path / "mixed", f"layers.{n}.mlp.router.weight") for n in (1, 3)]
    assert routers[0].shape == (3, 32) and not np.array_equal(*routers)
    assert all(0.015 < router.std() < 0.025 for router in routers)
    assert not weight(tmp_path / "mixed", "layers.1.mlp.router.balance").any()
    other = upcycle(dense, tmp_path / "other", Experts(3, 2, moe_every=2, seed=1))
    assert not np.array_equal(weight(other.path, "layers.1.mlp.router.weight"), routers[0])


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path):
    dense = _stored.stored(tmp_path / "dense", VOCAB_SIZE, **SHAPE)
    biased = _stored.stored(tmp_path / "gpt", VOCAB_SIZE)
    mixed = upcycle(dense, tmp_path / "mixed", Experts(2, 2)).path
    for source, experts, message in (
        (dense, Experts(4, 5), r"experts_per_token = 5, but model.experts = 4; legal: 1 to 4"),
        (dense, Experts(4, 1), r"router has no gradient; legal: router_normalize = false"),
        (dense, Experts(4, 2, dense_layers=4), r"dense_layers = 4 gives no layer experts"),
        (biased, Experts(4, 2), r"model.bias = true: experts have no biases"),
        (dense, Experts(4, 2, router_std=np.nan), r"--router-std nan: legal: 0 to 1e\+06"),
        (dense, Experts(4, 2, router_std=1e39), r"--router-std 1e\+39: legal"),
        (dense, Experts(20_000, 2), r"model.experts = 20000: Input should be less"),
        (mixed, Experts(4, 2), r"has 2 experts already; legal: a model without them"),
    ):
        with pytest.raises(InputError, match=message):
            upcycle(source, tmp_path / "x", experts)
        assert not (tmp_path / "x").exists()


@parallel(ranks=[2], limit_s=120)
@pytest.mark.long
def test_an_upcycled_model_trains_in_another_layout(comm, tmp_path):
    """One expert for each token, whose weights are not normalised."""
    if comm.rank == 0:
        dense = _stored.stored(tmp_path / "dense", VOCAB_SIZE, 0.4, **SHAPE)
        upcycle(dense, tmp_path / "mixed", Experts(4, 1, normalizes=False))
    comm.Barrier()
    model = open_model(tmp_path / "mixed").config().model
    keys = Experts(4, 1, normalizes=False).keys(model)
    changes = DENSE | {f"model.{key}": value for key, value in keys.items()} | layout(p=2)
    found = losses(comm, tmp_path / "a", changes | {"checkpoint.initial": str(tmp_path / "mixed")})
    if comm.rank == 0:
        assert found[-1] < found[0] - 0.1
