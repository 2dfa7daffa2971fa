"""Heads for tasks: BERT's in Hugging Face `transformers`, with the same weights (logits, loss and
every gradient), and those of decoders and BERT in layouts of every kind."""

import pytest
import torch
from torch import Tensor

from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.documents import Documents
from ptdmpi.model.output.losses import SummedLoss
from tests._configs import layout
from tests._engines import build, from_root, load, whole_gradients, whole_weights
from tests._layers import difference
from tests.engine.test_engine_bert import LAYER_NAMES, PARTS, random_shape, their_model
from tests.parallel import parallel

CANDIDATES, SAMPLES = 4, 3
TASKS = {
    "classification": {"task.kind": "classification", "task.labels": ["no", "maybe", "yes"]},
    "choice": {"task.kind": "choice", "task.choices": CANDIDATES},
}


def given(kind: str, length: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids [n, s], types [n, s], lengths [n] of all sequences, and labels [samples]."""
    generator = torch.Generator().manual_seed(3)
    count = SAMPLES * CANDIDATES
    ids = torch.randint(vocab_size, (count, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (count,), generator=generator)
    types = (
        (torch.arange(length) > length // 3) & (torch.arange(length) < lengths[:, None])
    ).long()
    labels = torch.arange(SAMPLES if kind == "choice" else count) % 3
    return ids, types, lengths, labels


def batches(engine: Engine, kind: str) -> list[Microbatch]:
    """This data rank's microbatches; BERT looks at the first token, GPT at the last one."""
    config, masked = engine.config, engine.config.model.masked
    ids, types, lengths, labels = given(kind, config.model.seq_length, engine.vocab_size)
    b, m, n = config.batch.micro_size, config.microbatches, config.task.sequences
    first = engine.axes["data"].rank * m * b
    found = []
    for start in range(first, first + m * b, b):
        rows = slice(start, start + b)
        padding = (torch.arange(ids.shape[1]) >= lengths[rows, None]).long()
        asked = torch.zeros(1, b, dtype=torch.int64) if masked else lengths[None, rows] - 1
        found.append(
            Microbatch(
                inputs=ids[rows].t().contiguous(),
                labels=labels[None, start // n : (start + b) // n],
                weights=None,
                samples=torch.arange(start, start + b),
                documents=Documents.of(padding) if masked and padding.any() else None,
                masked=asked,
                types=types[rows].t().contiguous(),
            )
        )
    return found


def theirs(kind: str, shape: dict[str, int]) -> tuple[dict[str, Tensor], dict, Tensor, float]:
    """Weights and gradients by our names, logits and loss of their model."""
    choice = kind == "choice"
    made = f"BertFor{'MultipleChoice' if choice else 'SequenceClassification'}"
    model = their_model(made, shape, num_labels=3)
    ids, types, lengths, labels = given(kind, shape["seq_length"], shape["vocab_size"])
    attended = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    ways = [one.view(SAMPLES, CANDIDATES, -1) if choice else one for one in (ids, attended, types)]
    out = model.train()(*ways, labels=labels)
    out.loss.backward()

    def ours(get) -> dict[str, Tensor]:
        embeddings = "bert.embeddings"
        places = {
            "embedding.norm": f"{embeddings}.LayerNorm",
            "sentence.pooler": "bert.pooler.dense",
            "sentence.classes": "classifier",
        }
        found = {
            f"embedding.{mine}.weight": get(f"{embeddings}.{their}_embeddings.weight")
            for mine, their in (
                ("word", "word"),
                ("position", "position"),
                ("token_type", "token_type"),
            )
        }
        for i in range(shape["layers"]):
            layer = f"bert.encoder.layer.{i}"
            places |= {f"layers.{i}.{a}": f"{layer}.{b}" for a, b in LAYER_NAMES.items()}
            for one in ("weight", "bias"):
                parts = (get(f"{layer}.attention.self.{part}.{one}") for part in PARTS)
                found[f"layers.{i}.attention.qkv.{one}"] = torch.cat(tuple(parts))
        for mine, their in places.items():
            found |= {f"{mine}.{one}": get(f"{their}.{one}") for one in ("weight", "bias")}
        return found

    weights = ours(lambda name: model.get_parameter(name).detach())
    gradients = ours(lambda name: model.get_parameter(name).grad)
    return weights, gradients, out.logits.detach(), float(out.loss.detach())


@pytest.mark.cases(1)
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize("kind", list(TASKS))
def test_bert_heads_equal_transformers(comm, kind):
    shape = random_shape(seed=0)
    expected = from_root(comm, theirs(kind, shape) if comm.rank == 0 else None)
    weights, gradients, logits, loss = expected
    changes = {f"model.{key}": value for key, value in shape.items() if key != "vocab_size"}
    changes |= {"model.kind": "bert", "batch.global_size": 12, "batch.micro_size": 4}
    changes |= {"optimizer.clip_norm": 0.0, **TASKS[kind]}
    divided = layout(t=2, p=2) | {"parallel.sequence_parallel": True}
    for where in (layout(), layout(t=2), divided):
        world = World(comm).first(where["parallel.tensor"] * where["parallel.pipeline"])
        if world is None:
            continue
        engine = build(world, changes | where, shape["vocab_size"])
        load(engine, weights)
        assert whole_weights(engine).keys() == weights.keys()
        some = batches(engine, kind)
        if world.size == 1:
            (stage,) = engine.stages.values()
            with torch.no_grad():
                found = [stage.scores(one, stage.hidden(one, None, None), None) for one in some]
            assert difference(torch.cat(found), logits) < 1e-5
        sums = engine.evaluate(some)
        assert sums["task"].mean == pytest.approx(loss, rel=1e-5)
        right = (
            logits.argmax(-1) == given(kind, shape["seq_length"], shape["vocab_size"])[3]
        ).sum()
        assert sums["right"] == SummedLoss(int(right), len(logits))
        assert engine.step(0, some).loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in whole_gradients(engine).items():
            their = gradients[name]
            if kind == "choice" and name == "sentence.classes.bias":
                assert gradient.abs().max() < 1e-6  # the same for all candidates: its true one is 0
                continue
            if name.endswith("qkv.bias"):  # the keys' true gradient is zero
                gradient, their = (torch.cat(one.chunk(3)[::2]) for one in (gradient, their))
            assert difference(gradient, their) < 1e-5, name


@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("bert", "choice"),
        pytest.param("llama", "classification", marks=pytest.mark.long),
        pytest.param("gpt", "choice", marks=pytest.mark.long),
        pytest.param("bert", "classification", marks=pytest.mark.long),
    ],
)
def test_every_layout_trains_alike(comm, model, kind):
    """Three steps, with dropout: losses to rounding, those of a pipeline to the bit."""
    changes = {"model.kind": model, "batch.global_size": 12, "batch.micro_size": 4, "run.steps": 3}
    changes |= {"model.layers": 4, "model.dropout": 0.1, "model.attention_dropout": 0.1}
    wheres = {
        "serial": layout(),
        "pipeline": layout(p=2) | {"parallel.schedule": "zb-h1"},
        "virtual": layout(p=2, v=2),
        "sequence": layout(t=2) | {"parallel.sequence_parallel": True, "recompute.mode": "full"},
        "shards": layout(t=2, d=1, p=2) | {"recompute.mode": "selective"},
        "zero": layout(d=3) | {"parallel.zero": 3},
    }
    losses = {}
    for name, where in wheres.items():
        sizes = [where[f"parallel.{axis}"] for axis in ("tensor", "pipeline", "data")]
        world = World(comm).first(sizes[0] * sizes[1] * sizes[2])
        found = None
        if world is not None:
            engine = build(world, changes | TASKS[kind] | where)
            found = [engine.step(k, batches(engine, kind)).loss for k in range(3)]
        losses[name] = from_root(comm, found)
    assert losses["serial"][2] < losses["serial"][0]
    for name, found in losses.items():
        assert found == pytest.approx(losses["serial"], rel=1e-4), name
    assert losses["pipeline"] == losses["serial"] == losses["virtual"]
