"""A converted model is trained further on several ranks, and goes back under its old names."""

import json
import shutil
import tomllib

import numpy as np
import pytest
from safetensors.torch import load_file

from ptdmpi.config import SharedInputError
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.data.shard_writer import ShardWriter
from tests import _stored
from tests._configs import layout
from tests._engines import whole_weights
from tests._runs import VOCAB_SIZE, log, loop, records
from tests.parallel import parallel

SHAPE = _stored.LLAMA | {"layers": 3, "norm_eps": 1e-6}


@parallel(ranks=[2], limit_s=120)
def test_train_from_a_converted_model(comm, tmp_path):
    ours = tmp_path / "ours"
    if comm.rank == 0:  # its tables have more rows than the shards have ids
        _stored.stored(tmp_path / "random", VOCAB_SIZE + 11, **SHAPE)
        to_hf(tmp_path / "random", tmp_path / "hf")
        from_hf(tmp_path / "hf", ours)
    comm.Barrier()
    changes = {
        **{f"model.{key}": value for key, value in SHAPE.items()},
        "model.vocab_size": VOCAB_SIZE + 11,
        "checkpoint.initial": str(ours),
        "run.steps": 2,
        **layout(t=2),
    }
    theirs = load_file(tmp_path / "hf/model.safetensors")
    with loop(comm, tmp_path, changes) as made:
        begun = whole_weights(made.engine)
        assert (begun["head.weight"] == theirs["lm_head.weight"]).all()
        assert not made.engine.state.kinds["exp_avg"].parts[0].any()
        made.run()
        trained = whole_weights(made.engine)
    # run again, for more steps, it continues from the run's own checkpoint
    with loop(comm, tmp_path, {**changes, "run.steps": 3}) as made:
        assert made.first == 2
        assert (whole_weights(made.engine)["head.weight"] == trained["head.weight"]).all()
    if comm.rank == 0:
        assert f"begins from the weights of {ours}" in log(tmp_path / "run")
        assert [record["step"] for record in records(tmp_path / "run") if "loss" in record] == [
            1,
            2,
        ]
        to_hf(tmp_path / "run", tmp_path / "back")
        back = load_file(tmp_path / "back/model.safetensors")
        assert back.keys() == theirs.keys()
        assert (back["lm_head.weight"] == trained["head.weight"]).all()
        assert (back["lm_head.weight"] != theirs["lm_head.weight"]).any()
        before, after = (
            json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back")
        )
        assert before == after
        shutil.rmtree(tmp_path / "run")
    comm.Barrier()
    for wrong, message in (
        ({"checkpoint.resume": str(ours / "checkpoints/latest")}, r"no optimizer state: a run"),
        ({"model.hidden": 64}, r"trained with model.hidden = 32, this run has 64; legal: the prev"),
        (
            {"model.ffn_hidden": 64},
            r"weight has shape .*, this model needs .*; changed since: .*ffn_hidden \d+ -> 64",
        ),
        (
            {"model.vocab_size": VOCAB_SIZE - 1},
            r"model.vocab_size = 52, but .* needs 53; legal: 53",
        ),
        ({"checkpoint.initial": "nowhere"}, r"nowhere is no checkpoint"),
    ):
        refused = pytest.raises(SharedInputError, match=message)
        with refused, loop(comm, tmp_path, {**changes, **wrong}):
            pass


@pytest.mark.long
@parallel(ranks=[1], limit_s=120)
def test_a_bert_is_trained_further_with_its_own_tokenizer(comm, tmp_path):
    """WordPiece with [CLS], [SEP], [MASK]: shards of it have exactly the model's vocabulary."""
    from data_prep.vocabulary import load_tokenizer
    from ptdmpi.data.shards import Dataset
    from tests.convert._hugging_face import saved
    from tests.data.test_words import TEXT, word_piece

    source = saved(tmp_path / "hf", "bert", vocab_size=word_piece().get_vocab_size())
    (source / "tokenizer.json").write_text(word_piece().to_str())
    from_hf(source, tmp_path / "ours")
    tokenizer = load_tokenizer(source / "tokenizer.json")
    (tmp_path / "train").mkdir()
    shutil.copy(source / "tokenizer.json", tmp_path / "train")
    text = [*tokenizer.encode([TEXT])[0].tolist(), tokenizer.eod_id]
    with ShardWriter(
        tmp_path / "train/a.h5",
        "tokenizer.json",
        tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eod_id=text[-1],
    ) as writer:
        writer.write(np.array(text * 40), np.arange(1, 41) * len(text))
    assert Dataset(tmp_path / "train").vocab_size == word_piece().get_vocab_size()
    model = tomllib.loads((tmp_path / "ours/config.toml").read_text())["model"]
    changes = {f"model.{key}": value for key, value in model.items()}
    changes |= {"checkpoint.initial": str(tmp_path / "ours"), "run.steps": 16}
    with loop(comm, tmp_path, changes) as made:
        made.run()
    steps = [record for record in records(tmp_path / "run") if "loss" in record]
    losses, orders = ([step[key] for step in steps] for key in ("loss", "sentence_order_loss"))
    assert sum(losses[-4:]) < sum(losses[:4])
    assert all(0 < order < loss for order, loss in zip(orders, losses, strict=True))
    to_hf(tmp_path / "run", tmp_path / "back")
    before, back = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == back.keys()
    for name in ("cls.seq_relationship.weight", "bert.embeddings.word_embeddings.weight"):
        assert (before[name] != back[name]).any()
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()
