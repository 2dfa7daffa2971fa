"""Adapters with a head for a task in `peft`'s format and merged: the scores of `transformers`."""

import json
import tomllib

import pytest
import torch

from ptdmpi.checkpoint.base import base_at
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError, TaskConfig
from ptdmpi.convert.adapters import LoadedAdapter, load_adapter, merge, split, write_adapter
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.peft.export import export
from ptdmpi.convert.peft.form import CONFIG_FILE
from ptdmpi.convert.peft.read import import_peft
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.evaluate.run import evaluate
from ptdmpi.inference.stored import open_model
from ptdmpi.lineage.adapted import Adapted
from tests._engines import build, whole_weights
from tests._runs import loop
from tests.convert._hugging_face import V, saved, task_model, with_large_weights
from tests.convert.test_adapters import drawn
from tests.convert.test_task_heads import (
    LABELS,
    NAMED,
    candidates_of,
    difference,
    ours,
    theirs,
    with_tokenizer,
    write_texts,
)
from tests.data.test_words import word_piece
from tests.evaluate.test_task_heads import OPTIONS
from tests.parallel import parallel

CASES = {
    "GPT2ForSequenceClassification": ("gpt2", {"method": "ia3"}),
    "LlamaForSequenceClassification": ("llama", {"method": "lora", "rank": 3}),
    "BertForSequenceClassification": ("bert", {"method": "lora", "rank": 2, "alpha": 2.0}),
    "BertForMultipleChoice": ("bert", {"method": "lora", "targets": ("attention.q",)}),
}


def task_of(name: str) -> TaskConfig:
    if candidates_of(name) > 1:
        return TaskConfig(kind="choice", choices=3)
    return TaskConfig(kind="classification", labels=tuple(LABELS))


def adapter_over(comm, base, folder, name: str):
    """A checkpoint of random adapters and a random head over the model of text at `base`."""
    model = open_model(base).config().model
    task = task_of(name)
    adapt = CASES[name][1]
    gone = ("output_head", "classes", "tie_embeddings", "sentence_order")
    keys = {f"model.{key}": value for key, value in model.model_dump().items() if key not in gone}
    keys |= {f"task.{key}": value for key, value in task.model_dump().items()}
    keys |= {f"adapt.{key}": value for key, value in adapt.items()}
    keys |= {"batch.global_size": 6, "batch.micro_size": 3}
    engine = build(World(comm), keys, V)
    tensors = {name: drawn(name, value) for name, value in whole_weights(engine).items()}
    adapted = Adapted(engine.config.adapt, base_at(base)[1], task)
    write_adapter(folder, LoadedAdapter(adapted, engine.config.model, tensors))
    return folder


def in_peft(name: str, model, folder, count: int):
    """The scores that `peft` and `transformers` give the rows, of the adapters at `folder` over the
    model of text at `model`, which has no such head."""
    peft = pytest.importorskip("peft")
    import transformers

    more = {} if count > 1 else {"num_labels": len(LABELS)}
    base = getattr(transformers, name).from_pretrained(model, **more)
    base.config.pad_token_id = 0  # what fills up here
    return theirs(_Named(peft.PeftModel.from_pretrained(base, str(folder)).eval(), name), count)


class _Named:
    """A model that goes by the name of another: of it `theirs` knows what to give."""

    def __new__(cls, model, name: str):
        return type(name, (), {"__call__": lambda self, **given: model(**given)})()


@pytest.mark.cases(1)
@parallel(ranks=[1], limit_s=120)
@pytest.mark.parametrize("name", CASES)
def test_merged_split_and_back_from_peft(comm, tmp_path, name):
    count = candidates_of(name)
    base = tmp_path / "base"
    hf = saved(tmp_path / "hf", CASES[name][0])
    from_hf(hf, base)
    adapter = adapter_over(comm, base, tmp_path / "adapter", name)
    expected = ours(comm, base, count, adapter)
    export(adapter, tmp_path / "peft")
    assert difference(in_peft(name, hf, tmp_path / "peft", count), expected) < 1e-5
    merge(base, adapter, tmp_path / "merged")
    assert difference(ours(comm, tmp_path / "merged", count), expected) < 1e-5
    to_hf(tmp_path / "merged", tmp_path / "whole")  # which checks itself
    assert open_model(tmp_path / "merged").task.labels == task_of(name).labels
    own = load_adapter(adapter)
    if count == 1:
        import_peft(tmp_path / "peft", base, tmp_path / "again")
        again = load_adapter(tmp_path / "again")
        assert again.adapted.task.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        assert difference(ours(comm, base, count, tmp_path / "again"), expected) < 1e-6
        assert own.tensors.keys() >= {"sentence.classes.weight"} <= again.tensors.keys()
    if own.adapted.adapt.method == "lora":
        left, others = split(base, tmp_path / "merged", tmp_path / "split", 8)
        assert left < 1e-5 and not others
        assert load_adapter(tmp_path / "split").adapted.task == open_model(tmp_path / "merged").task
        assert difference(ours(comm, base, count, tmp_path / "split"), expected) < 1e-5


@parallel(ranks=[1], limit_s=120)
@pytest.mark.parametrize(
    "name", ["LlamaForSequenceClassification", "BertForSequenceClassification"]
)
def test_what_peft_has_made_of_a_classifier(comm, tmp_path, name):
    """By its own task_type: it trains the last linear, and leaves a pooler as it is in the base."""
    peft = pytest.importorskip("peft")
    import transformers

    family, _ = CASES[name]
    hf = saved(tmp_path / "hf", family)
    base = tmp_path / "base"
    from_hf(hf, base)
    plain = getattr(transformers, name).from_pretrained(hf, num_labels=4)
    plain.config.pad_token_id = 0
    targets = ["query", "value"] if family == "bert" else ["q_proj", "down_proj"]
    wanted = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=targets)
    beside = peft.get_peft_model(plain, wanted)
    trained = [weight for weight in beside.parameters() if weight.requires_grad]
    with_large_weights(torch.nn.ParameterList(trained))
    beside.eval().save_pretrained(tmp_path / "peft")
    import_peft(tmp_path / "peft", base, tmp_path / "adapter")
    scores = ours(comm, base, 1, tmp_path / "adapter")
    expected = theirs(_Named(beside, name), 1)
    assert scores.shape == expected.shape == (6, 4) and difference(scores, expected) < 1e-5


@parallel(ranks=[1], limit_s=120)
def test_what_no_head_here_is_is_refused(comm, tmp_path):
    name = "LlamaForSequenceClassification"
    base = tmp_path / "base"
    from_hf(saved(tmp_path / "hf", "llama"), base)
    export(adapter_over(comm, base, tmp_path / "adapter", name), tmp_path / "peft")
    path = tmp_path / "peft" / CONFIG_FILE
    config = json.loads(path.read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    path.write_text(json.dumps(config | {"modules_to_save": ["lm_head"]}))
    with pytest.raises(
        InputError, match=r"modules_to_save = \['lm_head'\]; legal: None, or a head"
    ):
        import_peft(tmp_path / "peft", base, tmp_path / "again")
    path.write_text(json.dumps(config))
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    two = open_model(tmp_path / "merged")
    text = (two.path / "config.toml").read_text()
    (two.path / "config.toml").write_text(text.replace('"no", "perhaps", "yes"', '"no", "yes"'))
    with pytest.raises(InputError, match=r"score\.weight has 3 rows; legal: 2, as many as"):
        import_peft(tmp_path / "peft", tmp_path / "merged", tmp_path / "again")
    choice = adapter_over(comm, base, tmp_path / "choice", "BertForMultipleChoice")
    with pytest.raises(
        InputError, match=r'task\.kind = "choice": a llama of Hugging Face has no such'
    ):
        export(choice, tmp_path / "none")
    assert not (tmp_path / "again").exists() and not (tmp_path / "none").exists()


def test_a_pooler_that_nobody_has_is_refused(tmp_path):
    """`peft` does not save it, and a BERT without the second objective lacks it."""
    peft = pytest.importorskip("peft")
    import transformers

    hf = saved(tmp_path / "hf", "bert", masked_only=True)
    base = tmp_path / "base"
    from_hf(hf, base)
    plain = transformers.BertForSequenceClassification.from_pretrained(hf, num_labels=3)
    wanted = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    peft.get_peft_model(plain, wanted).save_pretrained(tmp_path / "peft")
    with pytest.raises(InputError, match=r"sentence\.pooler\.weight"):
        import_peft(tmp_path / "peft", base, tmp_path / "adapter")


@parallel(ranks=[1], limit_s=120)
def test_the_tokenizer_is_that_of_the_base(comm, tmp_path):
    """In training, with the base, and merged, the tokenizer is known without being named again."""
    name = "BertForSequenceClassification"
    text = tmp_path / "texts.jsonl"
    hf = tmp_path / "hf"
    base = tmp_path / "base"
    size = word_piece().get_vocab_size()
    model = task_model(name, vocab_size=size, max_position_embeddings=24, **NAMED)
    with_tokenizer(model, hf)
    write_texts(text, "", LABELS.__getitem__)
    from_hf(hf, base)
    tree = tomllib.loads((base / "config.toml").read_text())
    wanted = {f"model.{key}": value for key, value in tree["model"].items()}
    wanted |= {f"task.{key}": value for key, value in tree["task"].items()}
    wanted |= {"adapt.method": "lora", "adapt.base": str(base), "run.steps": 1}
    wanted |= {"data.train": [{"path": str(text)}], "batch.global_size": 6, "batch.micro_size": 3}
    with loop(comm, tmp_path, wanted) as made:
        assert made.attempt.how == "begins"
        made.run()
    beside = OPTIONS | {"tasks": (text,), "adapter": tmp_path / "run"}
    tasks = evaluate(base, World(comm), **beside)["tasks"]
    merge(base, tmp_path / "run", tmp_path / "merged")
    whole = OPTIONS | {"tasks": (text,)}
    assert evaluate(tmp_path / "merged", World(comm), **whole)["tasks"] == tasks
    with pytest.raises(SharedInputError, match=r"tokenizer bytes .* the model expects"):
        evaluate(base, World(comm), **beside | {"tokenizer": "bytes"})
