"""The whole model as stages: loss and every gradient against plain PyTorch; what is in flight."""

import pytest
import torch

from ptdmpi.model.batch import Microbatch, MicrobatchPass
from ptdmpi.model.boundary import Boundary
from ptdmpi.model.stage import Stage
from tests import _reference as reference
from tests._configs import small
from tests._layers import CPU, TOLERANCES, Placed, difference, random_tensor, tensor_axis
from tests.parallel import parallel

VOCAB_SIZE = 19
SHAPES = {
    "gpt-tied": {},
    "gpt-untied": {"model.tie_embeddings": False},
    "llama": {"model.kind": "llama", "model.ffn_hidden": 48},
    "llama-tied": {"model.kind": "llama", "model.ffn_hidden": 48, "model.tie_embeddings": True},
}


def batch(s: int, b: int) -> Microbatch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB_SIZE, (s + 1, b), generator=generator)
    weights = (torch.rand(s, b, generator=generator) < 0.6).float()
    return Microbatch(ids[:-1], ids[1:], weights, torch.arange(b))


def whole_model(comm, changes, precision: str, sequence_parallel: bool) -> Placed:
    sizes = {"model.layers": 3, "batch.micro_size": 2, "batch.global_size": 2}
    config = small({**sizes, **changes})
    axis = tensor_axis(comm, sequence_parallel)
    stage = Stage(config, VOCAB_SIZE, range(config.model.layers), axis)
    placed = Placed(stage, axis, precision)
    stage.place_tables(config.model, CPU)
    return placed


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(("precision", "sequence_parallel"), [("fp32", False), ("fp64", True)])
@pytest.mark.parametrize("name", SHAPES)
def test_whole_model_matches_serial(comm, precision, sequence_parallel, name):
    config = small({"model.layers": 3, **SHAPES[name]})
    model = config.model
    placed = whole_model(comm, SHAPES[name], precision, sequence_parallel)
    stage, data = placed.layer, batch(model.seq_length, 2)
    microbatch = MicrobatchPass(0, data, 0, scale=0.125)
    assert stage.forward_microbatch(microbatch, None) is None
    assert stage.in_flight == 1
    assert stage.backward_microbatch(microbatch, None) is None
    assert stage.in_flight == 0

    serial = reference.leaves(placed.whole)
    rows = (data.inputs.t(), data.labels.t(), data.weights.t())
    loss = reference.summed_loss(serial, model, *rows)
    (loss * 0.125).backward()
    assert difference(microbatch.total, loss) < TOLERANCES[precision]
    placed.check_gradients(serial, precision)


@parallel(ranks=[1, 2])
def test_tied_contributions_are_kept_apart(comm):
    tied = whole_model(comm, SHAPES["gpt-tied"], "fp64", False)
    untied = whole_model(comm, SHAPES["gpt-untied"], "fp64", False)
    untied.layer.head.weight.data.copy_(untied.layer.embedding.word.weight.data)
    for placed in (tied, untied):
        microbatch = MicrobatchPass(0, batch(16, 2), 0)
        placed.layer.forward_microbatch(microbatch, None)
        placed.layer.backward_microbatch(microbatch, None)
    name = "embedding.word.weight"
    assert torch.equal(
        tied.buffer.entries[name].view(tied.buffer.gradients),
        untied.buffer.entries[name].view(untied.buffer.gradients),
    )
    assert torch.equal(
        tied.buffer.second[name].view(tied.buffer.gradients),
        untied.buffer.entries["head.weight"].view(untied.buffer.gradients),
    )
    assert "head.weight" not in tied.buffer.entries
    assert tied.layer.head.weight.data_ptr() == tied.layer.embedding.word.weight.data_ptr()


@parallel(ranks=[1])
def test_evaluation_holds_nothing_and_drops_nothing(comm):
    placed = whole_model(comm, {"model.dropout": 0.5}, "fp64", False)
    stage, data = placed.layer, batch(16, 2)
    evaluated = MicrobatchPass(0, data)
    with torch.no_grad():
        stage.forward_microbatch(evaluated, None)
    assert stage.in_flight == 0
    plain = whole_model(comm, {}, "fp64", False).layer
    trained, dropped = MicrobatchPass(0, data, 0), MicrobatchPass(0, data, 0)
    plain.forward_microbatch(trained, None)
    assert torch.equal(trained.total, evaluated.total)
    stage.forward_microbatch(dropped, None)
    assert not torch.equal(dropped.total, evaluated.total)


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("scatter_gather", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("shape", [(8, 3, 6), (4, 1, 5)])
def test_boundary_brings_activations_across(comm, scatter_gather, sequence_parallel, shape):
    axis = tensor_axis(comm, sequence_parallel)
    boundary = Boundary(shape, axis, scatter_gather)
    whole = random_tensor("x", shape, "fp32")
    x = axis.between_blocks().of(whole)
    message = boundary.pack(x)
    assert message.is_contiguous() and message.numel() == boundary.wire_elements
    assert torch.equal(boundary.unpack(message.clone()), x)
    divided = (scatter_gather or sequence_parallel) and whole.numel() % comm.size == 0
    assert message.numel() == whole.numel() // (comm.size if divided else 1)
