"""The losses of modules for multi-token prediction, against the formula of the paper."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.world import World
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.documents import Documents
from ptdmpi.model.sequence.ahead import TokensAhead
from ptdmpi.model.sequence.positions import Positions
from tests import _reference as reference
from tests._engines import build, load, microbatches, whole_weights
from tests._reference import Weights
from tests.latent.test_parity import WITH_EXPERTS

AHEAD = {"model.mtp_depth": 2, "model.mtp_loss_coefficient": 0.5, "precision.compute": "fp64"}
SHAPES = {
    "gpt": AHEAD,
    "untied gpt": {**AHEAD, "model.tie_embeddings": False},
    "llama": {**AHEAD, "model.kind": "llama", "model.ffn_hidden": 48},
    "deepseek": {**WITH_EXPERTS, **AHEAD, "model.mtp_depth": 1, "model.dense_layers": 0},
}


def losses_ahead(
    weights: Weights, model, ids: Tensor, labels: Tensor, token_weights: Tensor
) -> list[tuple[Tensor, float]]:
    """Return (sum, number of terms) of each module's loss for ids, labels and weights [b, s]
    (arXiv 2412.19437, equations 21 to 24)."""
    found = []
    x = reference.hidden(weights, model, ids)
    length = ids.shape[1]
    table = weights["embedding.word.weight"]
    for k in range(model.mtp_depth):
        name = f"mtp.{k}"
        # position i has the activation x[i] and the embedding of token i + 1 + k
        tokens = F.pad(labels[:, k:], (0, k))
        both = (
            reference.norm(weights, f"{name}.token_norm", table[tokens], model),
            reference.norm(weights, f"{name}.hidden_norm", x, model),
        )
        x = reference.linear(weights, f"{name}.projection", torch.cat(both, -1))
        x = reference.block(weights, name, x, model)
        x = reference.norm(weights, f"{name}.norm", x, model)
        logits = x @ (table if model.tie_embeddings else weights["head.weight"]).t()
        kept = slice(0, length - k - 1)
        each = F.cross_entropy(
            logits[:, kept].flatten(0, 1), labels[:, k + 1 :].flatten(), reduction="none"
        )
        counted = token_weights[:, k + 1 :].flatten()
        found.append(((each * counted).sum(), float(counted.sum())))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_losses_and_gradients_follow_the_paper(name):
    engine = build(World(MPI.COMM_SELF), SHAPES[name])
    model = engine.config.model
    # unlike ones, so that each gain and each norm counts
    generator = torch.Generator().manual_seed(5)
    weights = {
        key: x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        for key, x in whole_weights(engine).items()
    }
    load(engine, weights)
    weights = {key: x.requires_grad_() for key, x in weights.items()}
    batches = microbatches(engine.config, 0, 0)
    result = engine.step(0, batches)
    task, count = 0.0, 0.0
    sums, counts = [0.0] * model.mtp_depth, [0.0] * model.mtp_depth
    for batch in batches:
        parts = (batch.inputs.t(), batch.labels.t(), batch.weights.t().double())
        task = task + reference.summed_loss(weights, model, *parts)
        count += float(parts[2].sum())
        for k, (loss, terms) in enumerate(losses_ahead(weights, model, *parts)):
            sums[k], counts[k] = sums[k] + loss, counts[k] + terms
    means = [loss / terms for loss, terms in zip(sums, counts, strict=True)]
    for k, mean in enumerate(means):
        found = result.losses[f"multi_token_{k + 1}"]
        assert found.count == counts[k]
        assert found.mean == pytest.approx(mean.item(), rel=1e-10)
    assert result.losses["task"].mean == pytest.approx(task.item() / count, rel=1e-10)
    total = task / count + 0.5 * sum(means) / len(means)
    assert result.loss == pytest.approx(total.item(), rel=1e-10)
    total.backward()
    whole = {key: x.grad for key, x in weights.items() if x.grad is not None}
    norm = torch.stack([x.square().sum() for x in whole.values()]).sum().sqrt()
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-10)
    assert "mtp.0.projection.weight" in whole


def batch_of(documents: list[int] | None = None) -> Microbatch:
    """A sequence of eight tokens 10 to 17, the labels 11 to 18, and its documents."""
    ids = torch.arange(10, 19)[:, None]
    batch = Microbatch.of_ids(ids, torch.zeros(1))
    if documents is None:
        return batch
    numbers = torch.tensor([documents])
    # as in the data: the label of a document's last token is the next document's first token
    weights = (numbers[:, 1:] == numbers[:, :-1]).float()
    weights = F.pad(weights, (0, 1), value=1.0).t().contiguous()
    return replace(batch, documents=Documents.of(numbers), weights=weights)


def test_tokens_are_shifted_by_the_depth():
    ahead = batch_of().with_ahead(3).ahead
    assert isinstance(ahead, TokensAhead)
    assert ahead.ids[:, :5, 0].tolist() == [[*range(11 + k, 16 + k)] for k in range(4)]
    assert ahead.counts == (7.0, 6.0, 5.0)
    for k in range(3):
        assert ahead.weights[k, :, 0].tolist() == [1.0] * (7 - k) + [0.0] * (k + 1)


def test_no_prediction_crosses_the_end_of_a_document():
    """With documents of 3, 1 and 4 tokens: a token of two tokens further is predicted where it is
    in the same document; the last label has no document of its own, and counts as in the data."""
    ahead = batch_of([0, 0, 0, 1, 2, 2, 2, 2]).with_ahead(2).ahead
    assert ahead.weights[0, :, 0].tolist() == [1, 0, 0, 0, 1, 1, 1, 0]
    assert ahead.weights[1, :, 0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert ahead.counts == (4.0, 2.0)


def test_masked_labels_are_not_predicted_ahead():
    batch = batch_of()
    weights = torch.ones(8, 1)
    weights[4] = 0.0  # the token at position 5
    ahead = replace(batch, weights=weights).with_ahead(1).ahead
    assert ahead.weights[0, :, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 0]


def test_parts_of_a_sequence_have_the_tokens_of_the_whole():
    """Two context ranks together have every position once."""
    whole = batch_of([0, 0, 0, 1, 2, 2, 2, 2]).with_ahead(2)
    parts = [whole.at(Positions(rank, 2)).ahead for rank in range(2)]
    assert [sum(counts) for counts in zip(*(part.counts for part in parts), strict=True)] == [4, 2]
    first = [0, 1, 6, 7]
    assert torch.equal(parts[0].ids, whole.ahead.ids[:, first])
    assert torch.equal(parts[0].weights, whole.ahead.weights[:, first])


def test_validations_ignore_modules():
    """Equal losses of a model without modules, and no loss of modules."""
    engine = build(World(MPI.COMM_SELF), SHAPES["llama"])
    plain = build(
        World(MPI.COMM_SELF),
        {**SHAPES["llama"], "model.mtp_depth": 0, "model.mtp_loss_coefficient": None},
    )
    batches = microbatches(engine.config, 0, 0)
    found = engine.evaluate(microbatches(plain.config, 0, 0))
    assert found == plain.evaluate(microbatches(plain.config, 0, 0))
    assert found["task"] == engine.evaluate(batches)["task"]
