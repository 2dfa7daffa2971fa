"""Conversions of BERT: old names, repeated tensors, missing heads."""

import json
import os
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.convert import check
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.stored import open_model
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.transformer import SentenceOrder
from tests import _stored
from tests.convert._hugging_face import saved
from tests.convert.test_convert import changed, contents

V = 51
NORM = "LayerNorm."


def there_and_back(source, folder):
    """The keys of [model] on the way."""
    from_hf(source, folder / "ours")
    to_hf(folder / "ours", folder / "back")
    assert contents(folder / "back") == contents(source)
    return open_model(folder / "ours").tree["model"]


def test_the_first_files(tmp_path):
    """As google's bert-base-uncased: TensorFlow's names of norms, both heads in the file of a model
    that calls itself BertForMaskedLM, repetitions, and buffers of positions."""
    source = saved(tmp_path / "hf", "bert")
    file = source / "model.safetensors"
    old = {
        k.replace(NORM + "weight", NORM + "gamma").replace(NORM + "bias", NORM + "beta"): v
        for k, v in load_file(file).items()
    }
    assert sum("gamma" in name for name in old) == 8
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    old["bert.embeddings.position_ids"] = torch.arange(16)[None]
    save_file(old, file, metadata={"format": "pt"})
    changed(source / "config.json", architectures=["BertForMaskedLM"], pad_token_id=0)
    model = there_and_back(source, tmp_path)
    assert model["sentence_order"] and model["norm_eps"] == 1e-12
    to_hf(tmp_path / "ours", tmp_path / "half", dtype="float16")
    with safe_open(tmp_path / "half/model.safetensors", framework="pt") as half:
        assert half.get_tensor("bert.embeddings.position_ids").dtype == torch.int64
        assert half.get_tensor("bert.pooler.dense.weight").dtype == torch.float16
        assert half.get_tensor("cls.predictions.decoder.bias").dtype == torch.float16
    save_file({**old, "cls.predictions.decoder.bias": old["cls.predictions.bias"] + 1}, file)
    with pytest.raises(InputError, match=r"decoder.bias and cls.predictions.bias differ"):
        from_hf(source, tmp_path / "ours2")
    save_file({**old, "bert.embeddings.LayerNorm.weight": torch.ones(32)}, file)
    with pytest.raises(InputError, match=r"LayerNorm.(weight|gamma) are one parameter"):
        from_hf(source, tmp_path / "ours2")
    assert sorted(os.listdir(tmp_path)) == ["back", "half", "hf", "ours"]


def test_the_two_biases_of_a_head_that_is_not_tied(tmp_path):
    """If they differ, `transformers` computes with the decoder's and keeps the other one."""
    source = saved(tmp_path / "hf", "bert", tie_word_embeddings=False)
    file = source / "model.safetensors"
    names = ["cls.predictions.bias", "cls.predictions.decoder.bias"]
    values = load_file(file)
    assert not torch.equal(*(values[name] for name in names))
    there_and_back(source, tmp_path)
    to_hf(tmp_path / "ours", tmp_path / "half", dtype="bfloat16")
    for folder in ("ours2", "back2", "ours3", "back3"):
        (tmp_path / folder).mkdir()
    save_file(values | {names[0]: values[names[1]].clone()}, file)  # equal: both are trained
    from_hf(source, tmp_path / "ours2")
    assert not (tmp_path / "ours2/hugging_face/buffers.safetensors").exists()
    to_hf(tmp_path / "ours2", tmp_path / "back2")
    assert load_file(tmp_path / "back2/model.safetensors").keys() == values.keys()
    for name in names:  # files of older versions hold one of them
        save_file({key: value for key, value in values.items() if key != name}, file)
        from_hf(source, tmp_path / "ours3")
        to_hf(tmp_path / "ours3", tmp_path / "back3")
        assert contents(tmp_path / "back3") == contents(source)
        for folder in ("ours3", "back3"):
            shutil.rmtree(tmp_path / folder)


def test_the_self_check_sees_both_heads_and_both_segments(tmp_path, monkeypatch):
    source = saved(tmp_path / "hf", "bert")
    forward = SentenceOrder.forward
    for place, name, wrong in (
        (SentenceOrder, "forward", lambda self, x: forward(self, x).flip(-1)),
        (check, "Microbatch", lambda *, types, **rest: Microbatch(types=types.flip(0), **rest)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, wrong)
            with pytest.raises(check.CheckFailed, match="logits differ by"):
                from_hf(source, tmp_path / "ours")
    assert from_hf(source, tmp_path / "ours").difference < 1e-9


def test_a_pooler_without_the_head_behind_it_is_kept(tmp_path):
    source = saved(tmp_path / "hf", "bert")
    file = source / "model.safetensors"
    values = {k: v for k, v in load_file(file).items() if "seq_relationship" not in k}
    save_file(values, file)
    assert not there_and_back(source, tmp_path)["sentence_order"]
    save_file({k: v for k, v in load_file(file).items() if "pooler" not in k}, file)
    (tmp_path / "bare").mkdir()
    assert not there_and_back(source, tmp_path / "bare")["sentence_order"]


@pytest.mark.parametrize("shard", ["1GB", "30KB"])
@pytest.mark.parametrize("family", ["bert", "megatron-bert"])
def test_a_head_that_was_not_trained_is_left_out(tmp_path, family, shard):
    """A model of both heads that was trained further with sentence_order = false has one."""
    import transformers

    sizes = {"num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": V}
    source = saved(tmp_path / "hf", family, shard, **sizes)
    from_hf(source, tmp_path / "ours")
    model = {} if family == "bert" else {"block_norm": "pre", "embedding_norm": False}
    run = _stored.stored(tmp_path / "run", V, kind="bert", sentence_order=False, **model)
    with open(run / "config.toml", "a") as file:
        file.write(f'[checkpoint]\ninitial = "{tmp_path / "ours"}"\n')
    done = to_hf(run, tmp_path / "back")
    assert "cls.seq_relationship.bias, cls.seq_relationship.weight: it was" in done.note
    theirs, info = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(info.values()), info
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back")
    )
    assert after.pop("architectures") == [type(theirs).__name__] != before.pop("architectures")
    assert before == after
    assert from_hf(tmp_path / "back", tmp_path / "again").difference < 1e-9


def test_a_base_model_is_refused(tmp_path):
    """Without the output head a model is refused."""
    import transformers

    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(InputError, match=r"cls.predictions.*is missing: this is a base model"):
        from_hf(tmp_path / "hf", tmp_path / "ours")
    more = transformers.BertForTokenClassification(transformers.BertConfig(**SMALL))
    more.save_pretrained(tmp_path / "hf2")
    with pytest.raises(InputError, match=r"tensor cls.predictions.*is missing"):
        from_hf(tmp_path / "hf2", tmp_path / "ours")


SMALL = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("hidden_act", "relu", r"hidden_act = 'relu' is not supported; legal: 'gelu' or 'gelu_n"),
        ("position_embedding_type", "relative_key", r"relative_key.* legal: 'absolute'"),
        ("is_decoder", True, r"is_decoder = True is not supported; legal: False"),
        ("add_cross_attention", True, r"add_cross_attention = True"),
        ("pruned_heads", {"0": [1]}, r"pruned_heads = "),
        ("vocab_size", 56, r"word_embeddings.weight has shape \[50, 32\], config.json .* \[56"),
        ("type_vocab_size", 4, r"token_type_embeddings.weight has shape \[2, 32\]"),
        ("type_vocab_size", 1, r"token_type_embeddings.weight has shape \[2, 32\]"),
        ("tie_word_embeddings", False, r"tensor cls.predictions.decoder.weight is missing"),
    ],
)
def test_what_config_json_may_not_say(tmp_path, key, value, message):
    source = saved(tmp_path / "hf", "bert")
    changed(source / "config.json", **{key: value})
    with pytest.raises(InputError, match=message):
        from_hf(source, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"sentence_order": False, "activation": "gelu", "token_types": 1},
        {"tie_embeddings": False, "ffn_hidden": 40, "norm_eps": 1e-5},
        {"block_norm": "pre", "embedding_norm": False},
    ],
    ids=lambda model: "-".join(map(str, model.values())) or "bert",
)
def test_transformers_loads_one_that_was_trained_here(tmp_path, model):
    import transformers

    run = _stored.stored(tmp_path / "run", V, kind="bert", **model)
    done = to_hf(run, tmp_path / "hf")
    family = "megatron-bert" if model.get("block_norm") == "pre" else "bert"
    assert done.family == family and done.difference < 1e-9
    theirs, info = transformers.AutoModelForPreTraining.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    if model.get("sentence_order", True):
        assert not any(info.values()), info
    masked = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    values = load_file(tmp_path / "hf/model.safetensors")
    bias = values["cls.predictions.bias"]
    for loaded in (theirs, masked):
        assert torch.equal(loaded.cls.predictions.decoder.bias, bias)
    names = json.loads((tmp_path / "hf/config.json").read_text())["architectures"]
    assert names == [type(theirs if model.get("sentence_order", True) else masked).__name__]
    assert from_hf(tmp_path / "hf", tmp_path / "again").difference < 1e-6


@pytest.mark.parametrize(
    "model, message",
    [
        ({"block_norm": "pre"}, r"model.embedding_norm = True: a MegatronBert of .* has False"),
        ({"positions": "rope"}, r"model.positions = 'rope': a Bert of Hugging Face has"),
        ({"token_types": 0}, r"model.token_types = 0: a Bert of Hugging Face has 2"),
        ({"output_head": "linear"}, r"model.output_head = 'linear': a Bert of Hugging Face has"),
    ],
)
def test_shapes_that_a_bert_has_not(tmp_path, model, message):
    run = _stored.stored(tmp_path / "run", V, kind="bert", **model)
    with pytest.raises(InputError, match=message):
        to_hf(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_it_cannot_be_asked_for_the_next_token(tmp_path):
    from ptdmpi.commands.evaluate import command as evaluate
    from ptdmpi.commands.generate import command as generate

    run = _stored.stored(tmp_path / "run", V, kind="bert")
    with pytest.raises(InputError, match=r"run sees both sides of a token"):
        open_inference(run, World(), None, None)
    (tmp_path / "questions.jsonl").write_text('{"context": "a", "answers": ["b"]}')
    for command, words in (
        (generate, ["--prompt", "a"]),
        (evaluate, ["--tasks", str(tmp_path / "questions.jsonl")]),
    ):
        result = CliRunner().invoke(command, [str(run), *words])
        assert result.exit_code == 2
        (line,) = [line for line in result.stderr.splitlines() if "error: " in line]
        assert "sees both sides of a token: it cannot predict the next token" in line
