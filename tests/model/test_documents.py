"""A packed sample is its documents run apart: loss and every gradient, on the tensor axis too."""

import pytest
import torch

from ptdmpi.model.batch import Microbatch, MicrobatchPass
from ptdmpi.model.documents import Documents
from ptdmpi.model.stage import Stage
from ptdmpi.plan.shape.parameters import parameter_count
from tests import _reference as reference
from tests._configs import small
from tests._layers import CPU, TOLERANCES, Placed, difference, tensor_axis
from tests.parallel import parallel

S, B, VOCAB_SIZE, FFN = 16, 3, 19, 48
SIZES = {"model.layers": 3, "model.seq_length": S, "batch.micro_size": B, "batch.global_size": B}
NUMBERS = torch.tensor([[0] * 16, [0] * 5 + [1] * 1 + [2] * 10, [4] * 8 + [3] * 8])
SHAPES = {
    "gpt": {},
    "llama-gqa": {"model.kind": "llama", "model.ffn_hidden": FFN, "model.kv_heads": 4},
    "post-rope": {"model.positions": "rope", "model.block_norm": "post"},
}
SHAPES["llama-gqa"] |= {"model.heads": 8}
# of masked models: BERT itself, and its parts mixed with those of others
MASKED = {
    "bert": {"model.kind": "bert"},
    "pre": {"model.kind": "bert", "model.block_norm": "pre", "model.embedding_norm": False},
    "bare": {
        "model.kind": "llama",
        "model.ffn_hidden": FFN,
        "model.attention": "bidirectional",
        "model.embedding_norm": True,
    },
    "untied": {"model.kind": "bert", "model.tie_embeddings": False, "model.token_types": 0},
}
LENGTHS = (16, 9, 12)  # of the masked samples; what is behind is padding
K = 3  # masked positions at most


def placed_stage(comm, changes, precision: str, sequence_parallel: bool) -> Placed:
    config = small(SIZES | changes)
    axis = tensor_axis(comm, sequence_parallel)
    placed = Placed(Stage(config, VOCAB_SIZE, range(3), axis), axis, precision)
    placed.layer.place_tables(config.model, CPU)
    return placed


def run(placed: Placed, batch: Microbatch, scale: float, order_weight: float = 0.0) -> torch.Tensor:
    weights = {"order": order_weight} if order_weight else {}
    microbatch = MicrobatchPass(0, batch, 0, scale, weights)
    placed.layer.forward_microbatch(microbatch, None)
    placed.layer.backward_microbatch(microbatch, None)
    return microbatch.total


def packed_batch() -> Microbatch:
    """Random ids; the last token of a document has no label."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB_SIZE, (S + 1, B), generator=generator)
    weights = torch.ones(B, S)
    weights[:, :-1] = (NUMBERS[:, 1:] == NUMBERS[:, :-1]).float()
    documents = Documents.of(NUMBERS)
    return Microbatch(ids[:-1], ids[1:], weights.t().contiguous(), torch.arange(B), documents)


def loss_of_documents(weights, model, batch: Microbatch) -> torch.Tensor:
    """Each document alone through the serial model."""
    losses = []
    for row, begin, end in batch.documents.pieces:
        parts = (batch.inputs, batch.labels, batch.weights)
        losses.append(
            reference.summed_loss(weights, model, *(x[begin:end, row][None] for x in parts))
        )
    return torch.stack(losses).sum()


@pytest.mark.cases(4)
@parallel(ranks=[2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("gpt", "none"), ("llama-gqa", "selective"), ("llama-gqa", "full"), ("post-rope", "full")],
)
def test_packed_loss_is_that_of_the_documents_apart(comm, sequence_parallel, name, mode):
    changes = SHAPES[name] | {"recompute.mode": mode}
    batch = packed_batch()
    for precision in ("fp32", "fp64"):
        placed = placed_stage(comm, changes, precision, sequence_parallel)
        found = run(placed, batch, 0.125)
        serial = reference.leaves(placed.whole)
        loss = loss_of_documents(serial, small(SIZES | changes).model, batch)
        (loss * 0.125).backward()
        assert difference(found, loss) < TOLERANCES[precision]
        placed.check_gradients(serial, precision)


@parallel(ranks=[2])
def test_explicit_attention_respects_documents_too(comm):
    """Under attention dropout: what the next document holds changes nothing in this one."""
    batch = packed_batch()
    placed = placed_stage(comm, {"model.attention_dropout": 0.3}, "fp64", False)
    first = [placed.layer.hidden(batch, None, 0)[:5, 1]]
    batch.inputs[5:, 1] = 0
    first.append(placed.layer.hidden(batch, None, 0)[:5, 1])
    assert torch.equal(*first)
    assert not torch.equal(placed.layer.hidden(batch, None, 1)[:5, 1], first[0])


def masked_batch(types: int) -> Microbatch:
    """Samples of LENGTHS tokens with 3, 1 and 2 masked ones; the second has no sentence order."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB_SIZE, (S, B), generator=generator)
    labels = torch.randint(VOCAB_SIZE, (K, B), generator=generator)
    masked = torch.tensor([[1, 7, 4], [15, 0, 11], [8, 0, 0]])
    weights = torch.tensor([[1.0, 1, 1], [1, 0, 1], [1, 0, 0]])
    segments = (torch.arange(S)[:, None] >= torch.tensor([7, 9, 3])).long() if types else None
    numbers = (torch.arange(S) >= torch.tensor(LENGTHS)[:, None]).long()
    return Microbatch(
        ids,
        labels,
        weights,
        torch.arange(B),
        Documents.of(numbers),
        masked,
        segments,
        torch.tensor([1, -1, 0]),
    )


def serial_losses(weights, model, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed losses of masked tokens and of sentence orders, each sample alone and without its
    padding."""
    tokens, orders = [], []
    for row, length in enumerate(LENGTHS):
        ids = batch.inputs[:length, row][None]
        types = None if batch.types is None else batch.types[:length, row][None]
        rows = reference.logits(weights, model, ids, types)[0, batch.masked[:, row]]
        losses = torch.nn.functional.cross_entropy(rows, batch.labels[:, row], reduction="none")
        tokens.append((losses * batch.weights[:, row]).sum())
        if model.sentence_order and batch.order[row] >= 0:
            logits = reference.order_logits(weights, model, ids, types)
            orders.append(torch.nn.functional.cross_entropy(logits, batch.order[row, None]))
    zero = torch.zeros((), dtype=tokens[0].dtype)
    return torch.stack(tokens).sum(), torch.stack(orders).sum() if orders else zero


@pytest.mark.cases(4)
@parallel(ranks=[2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_masked_model_matches_serial(comm, sequence_parallel, name):
    for precision in ("fp32", "fp64"):
        placed = placed_stage(comm, MASKED[name], precision, sequence_parallel)
        model = small(SIZES | MASKED[name]).model
        assert parameter_count(model, VOCAB_SIZE) == sum(map(torch.numel, placed.whole.values()))
        batch = masked_batch(model.token_types)
        found = run(placed, batch, 0.25, order_weight=3.0 * model.sentence_order)
        serial = reference.leaves(placed.whole)
        tokens, orders = serial_losses(serial, model, batch)
        loss = tokens + 3.0 * orders
        (loss * 0.25).backward()
        assert difference(found, loss) < TOLERANCES[precision]
        placed.check_gradients(serial, precision)
        evaluated = MicrobatchPass(0, batch)
        with torch.no_grad():
            placed.layer.forward_microbatch(evaluated, None)
        assert difference(evaluated.total, tokens) < TOLERANCES[precision]
