"""Heads for tasks of decoders: asked by `ptdmpi evaluate` they name the classes that `transformers`
names; and in the forms that `convert to-hf` writes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.quantize.write import quantize
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.evaluate.classes import files_of, predictions
from ptdmpi.evaluate.run import evaluate
from ptdmpi.inference.model import open_inference
from ptdmpi.plan.layer.low_bit import LowBit
from tests import _stored
from tests.convert._hugging_face import saved, task_model
from tests.convert.test_task_heads import (
    LABELS,
    NAMED,
    difference,
    ours,
    predicted_by_theirs,
    theirs,
    trained_here,
    with_tokenizer,
    write_texts,
)
from tests.data.test_words import word_piece
from tests.evaluate.test_task_heads import OPTIONS
from tests.parallel import parallel


@pytest.mark.long
@pytest.mark.cases(1)
@parallel(ranks=[2], limit_s=120)
@pytest.mark.parametrize(
    "name", ["GPT2ForSequenceClassification", "LlamaForSequenceClassification"]
)
def test_a_decoder_of_theirs_is_asked(comm, tmp_path, name):
    """From their files by `ptdmpi evaluate`: each text has the class that `transformers` names."""
    text = tmp_path / "texts.jsonl"
    hf = tmp_path / "hf"
    if comm.rank == 0:
        model = task_model(name, vocab_size=word_piece().get_vocab_size(), **NAMED)
        with_tokenizer(model, hf)
        write_texts(text, "", LABELS.__getitem__)
        from_hf(hf, tmp_path / "ours")
    comm.Barrier()
    for layout in ("t=2", "d=2"):
        options = OPTIONS | {"tasks": (text,), "layout": layout}
        ((task,),) = [evaluate(tmp_path / "ours", World(comm), **options)["tasks"]]
        opened, stored = open_inference(
            tmp_path / "ours", World(comm), layout, None, classifies=True
        )
        form, (file,) = files_of(stored, opened.config, None, [text])
        predicted = predictions(opened, file, form).tolist()
        if comm.rank == 0:
            expected, accuracy = predicted_by_theirs(model, hf, text)
            assert predicted == expected and len(set(predicted)) > 1
            assert task["items"] == 12 and task["accuracy"] == pytest.approx(accuracy)


def of_theirs(folder, dtype: str = "float32") -> torch.Tensor:
    """The scores that the model of `transformers` in `folder` gives the rows."""
    import transformers

    kind = transformers.LlamaForSequenceClassification
    model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert model.score.weight.dtype == getattr(torch, dtype)
    model.config.pad_token_id = 0  # what fills up here
    return theirs(model.float().eval(), 1)


SQUARE = {**_stored.LLAMA, "kv_heads": 4, "ffn_hidden": 64}


@parallel(ranks=[1], limit_s=120)
def test_types_and_names_of_a_head(comm, tmp_path):
    """In another type; in the files of a model of text, whose head goes, but not the other way
    round; and quantized, except for the head itself."""
    run = trained_here(tmp_path / "run", "LlamaForSequenceClassification", SQUARE)
    expected = ours(comm, run, 1)
    to_hf(run, tmp_path / "half", dtype="bfloat16")
    assert 0 < difference(of_theirs(tmp_path / "half", "bfloat16"), expected) < 0.03
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 4, "intermediate_size": 64}
    from_hf(saved(tmp_path / "hf", "llama", **sizes), tmp_path / "text")
    done = to_hf(run, tmp_path / "like", like=tmp_path / "text", dtype="float16")
    assert "without lm_head.weight: it has a head for a task" in done.note
    assert difference(of_theirs(tmp_path / "like", "float16"), expected) < 3e-3
    from_hf(tmp_path / "like", tmp_path / "headed")
    with pytest.raises(InputError, match=r"headed.* a head for a task, but .*text predicts tokens"):
        to_hf(tmp_path / "text", tmp_path / "none", like=tmp_path / "headed")
    quantize(run, tmp_path / "low", LowBit("int8", 16))
    to_hf(tmp_path / "low", tmp_path / "plain")
    low = ours(comm, tmp_path / "low", 1)
    assert difference(of_theirs(tmp_path / "plain"), low) < 1e-5 < difference(low, expected)
    done = to_hf(tmp_path / "low", tmp_path / "packed", quantized=True)
    config = json.loads((tmp_path / "packed/config.json").read_text())
    assert done.difference < 1e-6 and config["quantization_config"]["ignore"] == ["score"]
    assert load_file(tmp_path / "packed/model.safetensors")["score.weight"].dtype == torch.float32
