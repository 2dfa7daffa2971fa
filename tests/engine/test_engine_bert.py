"""BERT of Hugging Face `transformers`, with the same weights: logits of both heads, both losses and
every gradient, on random small configurations."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.documents import Documents
from ptdmpi.model.output.positions import select_positions
from tests._configs import layout
from tests._engines import build, from_root, load, logits_of, whole_gradients
from tests._layers import difference
from tests.parallel import parallel

LAYER_NAMES = {
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
OTHER_NAMES = {
    "embedding.norm": "bert.embeddings.LayerNorm",
    "mlm.dense": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "sentence.pooler": "bert.pooler.dense",
    "sentence.order": "cls.seq_relationship",
}


def random_shape(seed: int) -> dict[str, int]:
    chosen = random.Random(seed)
    heads = chosen.choice([2, 4])
    return {
        "layers": chosen.choice([2, 3]),
        "hidden": heads * chosen.choice([4, 6, 8]),
        "heads": heads,
        "ffn_hidden": chosen.choice([24, 36]),
        "seq_length": chosen.choice([12, 18]),
        "vocab_size": chosen.choice([40, 51]),  # t = 2 does not divide the second
    }


def their_model(made: str, shape: dict[str, int], **more):
    """Their model of a class, with weights large enough that every gradient matters."""
    import transformers  # slow: on one rank only

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        intermediate_size=shape["ffn_hidden"],
        max_position_embeddings=shape["seq_length"],
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        pad_token_id=None,  # or the gradient of its embedding would be left out
        **more,
    )
    model = getattr(transformers, made)(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def theirs(shape: dict[str, int]):
    return their_model("BertForPreTraining", shape, attn_implementation="sdpa").train()


def our_names(get, layers: int) -> dict[str, Tensor]:
    """Our logical tensors of `get(their name)`."""
    embeddings = "bert.embeddings"
    tensors = {
        "embedding.word.weight": get(f"{embeddings}.word_embeddings.weight"),
        "embedding.position.weight": get(f"{embeddings}.position_embeddings.weight"),
        "embedding.token_type.weight": get(f"{embeddings}.token_type_embeddings.weight"),
        "head.bias": get("cls.predictions.bias"),
    }
    places = dict(OTHER_NAMES)
    for i in range(layers):
        their = f"bert.encoder.layer.{i}"
        places |= {f"layers.{i}.{a}": f"{their}.{b}" for a, b in LAYER_NAMES.items()}
        for kind in ("weight", "bias"):
            parts = (get(f"{their}.attention.self.{part}.{kind}") for part in PARTS)
            tensors[f"layers.{i}.attention.qkv.{kind}"] = torch.cat(tuple(parts))
    for ours, their in places.items():
        tensors[f"{ours}.weight"] = get(f"{their}.weight")
        tensors[f"{ours}.bias"] = get(f"{their}.bias")
    return tensors


PARTS = ("query", "key", "value")


def samples(shape: dict[str, int], count: int) -> tuple[Tensor, ...]:
    """Ids, types, lengths, labels at masked positions (else -100), and sentence orders."""
    generator = torch.Generator().manual_seed(1)
    s = shape["seq_length"]
    ids = torch.randint(shape["vocab_size"], (count, s), generator=generator)
    lengths = torch.randint(s // 2, s + 1, (count,), generator=generator)
    valid = torch.arange(s) < lengths[:, None]
    types = ((torch.arange(s) > s // 3) & valid).long()
    chosen = (torch.rand(count, s, generator=generator) < 0.3) & valid
    chosen[:, 1] = True
    labels = torch.randint(shape["vocab_size"], (count, s), generator=generator)
    labels = labels.masked_fill(~chosen, -100)
    return ids, types, lengths, labels, torch.arange(count) % 2


def microbatches(given: tuple[Tensor, ...], size: int) -> list[Microbatch]:
    ids, types, lengths, labels, order = given
    batches = []
    for start in range(0, len(ids), size):
        rows = slice(start, start + size)
        k = int((labels[rows] >= 0).sum(1).max())
        # the masked positions first, each row's in their order
        masked = (labels[rows] < 0).long().argsort(dim=1, stable=True)[:, :k]
        targets = labels[rows].gather(1, masked)
        numbers = (torch.arange(ids.shape[1]) >= lengths[rows, None]).long()
        batches.append(
            Microbatch(
                inputs=ids[rows].t().contiguous(),
                labels=targets.clamp(min=0).t().contiguous(),
                weights=(targets >= 0).float().t().contiguous(),
                samples=torch.arange(start, start + size),
                documents=Documents.of(numbers) if numbers.any() else None,
                masked=masked.t().contiguous(),
                types=types[rows].t().contiguous(),
                order=order[rows],
            )
        )
    return batches


@dataclass(frozen=True)
class Expected:
    """What their model makes of samples, and its weights; tensors by our names."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    tokens: Tensor  # logits [b, s, V]
    orders: Tensor  # logits [b, 2]
    summed: float  # loss of the masked tokens
    loss: float  # mean of the masked tokens plus mean of the sentence orders


def expectation(shape: dict[str, int], given: tuple[Tensor, ...]) -> Expected:
    ids, types, lengths, labels, order = given
    model = theirs(shape)
    attended = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    out = model(ids, attended, types, labels=labels, next_sentence_label=order)
    out.loss.backward()
    summed = torch.nn.functional.cross_entropy(
        out.prediction_logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return Expected(
        our_names(lambda key: model.get_parameter(key).detach(), shape["layers"]),
        our_names(lambda key: model.get_parameter(key).grad, shape["layers"]),
        out.prediction_logits.detach(),
        out.seq_relationship_logits.detach(),
        float(summed.detach()),
        float(out.loss.detach()),
    )


def check_logits(engine: Engine, batch: Microbatch, expected: Expected) -> None:
    """Logits of both heads, for the first microbatch, are the expected ones."""
    if engine.axes["pipeline"].size == 1:
        (stage,) = engine.stages.values()
        with torch.no_grad():
            x = stage.hidden(batch, None, None)
            order = stage.output.sentence(select_positions(x, batch.masked[:1] * 0, stage.axis)[0])
        assert difference(order, expected.orders[: len(order)]) < 1e-5
    found = logits_of(engine, batch)  # [k, b, V]
    if found is not None:
        columns = batch.masked.t()[..., None].expand(-1, -1, found.shape[-1])
        chosen = expected.tokens[: columns.shape[0]].gather(1, columns)
        kept = batch.weights.t() > 0
        assert difference(found.transpose(0, 1)[kept], chosen[kept]) < 1e-5


@pytest.mark.long
@parallel(ranks=[4], limit_s=120)
def test_bert_equals_transformers(comm):
    """On the first ranks that a layout needs."""
    layouts = [layout(), layout(t=2), layout(p=2), layout(t=2, p=2)]
    layouts.append(layouts[-1] | {"parallel.sequence_parallel": True})
    shape = random_shape(seed=0)
    given = samples(shape, 4)
    expected = from_root(comm, expectation(shape, given) if comm.rank == 0 else None)
    for where in layouts:
        world = World(comm).first(where["parallel.tensor"] * where["parallel.pipeline"])
        if world is not None:
            check(world, where, shape, given, expected)


def check(world, where, shape, given, expected: Expected) -> None:
    changes = {f"model.{key}": value for key, value in shape.items() if key != "vocab_size"}
    changes |= {"model.kind": "bert", "batch.global_size": 4, "optimizer.clip_norm": 0.0}
    engine = build(world, changes | where, shape["vocab_size"])
    load(engine, expected.weights)
    batches = microbatches(given, engine.config.batch.micro_size)
    if not engine.config.parallel.sequence_parallel:
        check_logits(engine, batches[0], expected)
    found = engine.evaluate(batches)
    assert found["task"].count == int((given[3] >= 0).sum())
    assert found["order"].count == len(given[4])
    assert found["task"].sum == pytest.approx(expected.summed, rel=1e-5)
    order = expected.loss - expected.summed / found["task"].count
    assert found["order"].mean == pytest.approx(order, rel=1e-5)
    result = engine.step(0, batches)
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.losses["order"].mean == pytest.approx(order, rel=1e-5)
    gradients = dict(expected.gradients)
    ours = whole_gradients(engine)
    assert ours.keys() == gradients.keys()
    for key, gradient in ours.items():
        if key.endswith("qkv.bias"):  # the keys' true gradient is zero
            query, _, value = gradient.chunk(3)
            their_query, _, their_value = gradients[key].chunk(3)
            gradient = torch.cat((query, value))
            gradients[key] = torch.cat((their_query, their_value))
        assert difference(gradient, gradients[key]) < 1e-5, key
