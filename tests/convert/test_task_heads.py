"""Heads for tasks of Hugging Face, both ways: the same files, and in padded batches the same
scores."""

import json
import os
import tomllib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.convert import check
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.data.labelled import LabelledFile, LabelledForm, LabelledRow
from ptdmpi.evaluate.run import evaluate
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.stored import open_model
from ptdmpi.inference.tensors import as_tensors
from ptdmpi.model.transformer import Classes
from tests import _stored
from tests._runs import loop
from tests.convert._hugging_face import V, saved, task_model
from tests.convert.test_convert import changed, contents
from tests.data.test_words import word_piece
from tests.evaluate.test_task_heads import OPTIONS
from tests.parallel import parallel

LABELS = ["no", "perhaps", "yes"]
NAMED = {"id2label": dict(enumerate(LABELS)), "label2id": {k: n for n, k in enumerate(LABELS)}}
CASES = {
    "GPT2ForSequenceClassification": NAMED,
    "LlamaForSequenceClassification": {},
    "Gemma2ForSequenceClassification": NAMED,
    "BertForSequenceClassification": NAMED,
    "BertForMultipleChoice": {},
    "MegatronBertForSequenceClassification": {},
}
AS_TENSORS = {"padding": True, "return_tensors": "pt"}
LENGTHS = (5, 16, 1, 9, 12, 16)


def rows(first: bool) -> list[LabelledRow]:
    """Sequences of several lengths without the id 0; of a BERT the later half is a second text."""
    draw = np.random.default_rng(3)
    drawn = [draw.integers(1, V, length).astype(np.int32) for length in LENGTHS]
    return [LabelledRow(ids, len(ids) // 2 if first else len(ids)) for ids in drawn]


def ours(comm, folder, candidates: int, adapter=None) -> torch.Tensor:
    """The scores [samples, n] that the model at `folder` gives the rows."""
    model, _ = open_inference(folder, World(comm), None, None, classifies=True, adapter=adapter)
    first = model.config.model.masked
    samples = len(LENGTHS) // candidates
    nothing = np.zeros(samples, dtype=np.int64)
    file = LabelledFile("", "", "", "", rows(first), candidates, nothing, 0, 0)
    form = LabelledForm(model.seq_length, 0, first, 1)
    some = [(file, sample) for sample in range(samples)]
    batch = as_tensors(form.microbatch(some, np.arange(samples), np.ones(samples)))
    scores = model.scores(batch)
    model.finish()
    return scores


def theirs(model, candidates: int) -> torch.Tensor:
    """Return the scores of a model of `transformers`, from one padded batch with a mask."""
    first = "Bert" in type(model).__name__
    some = rows(first)
    size = max(LENGTHS)
    ids, mask, types = (torch.zeros(len(some), size, dtype=torch.int64) for _ in range(3))
    for n, row in enumerate(some):
        ids[n, : len(row.ids)] = torch.from_numpy(row.ids)
        mask[n, : len(row.ids)] = 1
        types[n, row.second : len(row.ids)] = 1
    given = {"input_ids": ids, "attention_mask": mask}
    given |= {"token_type_ids": types} if first else {}
    if candidates > 1:
        given = {key: value.view(-1, candidates, size) for key, value in given.items()}
    with torch.no_grad():
        return model(**given).logits


def difference(scores: torch.Tensor, other: torch.Tensor) -> float:
    return float((scores - other).abs().max() / other.abs().max())


def candidates_of(name: str) -> int:
    return 3 if name.endswith("Choice") else 1


@parallel(ranks=[1], limit_s=120)
@pytest.mark.parametrize("name", CASES)
def test_there_and_back(comm, tmp_path, name):
    """The same bytes, and the scores of a padded batch of several lengths."""
    model = task_model(name, **CASES[name])
    model.save_pretrained(tmp_path / "hf")
    done = from_hf(tmp_path / "hf", tmp_path / "ours")
    assert done.difference < 1e-6 and done.parameters == model.num_parameters()
    task = tomllib.loads((tmp_path / "ours/config.toml").read_text())["task"]
    if candidates_of(name) == 1:
        labels = list(model.config.id2label.values())
        assert task == {"kind": "classification", "labels": labels}
    else:
        assert task == {"kind": "choice"} and "add task.choices" in done.note
    back = to_hf(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "hf") and not back.note
    count = candidates_of(name)
    scores = ours(comm, tmp_path / "ours", count)
    expected = theirs(model, count)
    assert scores.shape == expected.shape and difference(scores, expected) < 1e-5


NEW = {
    "BertForSequenceClassification": {"kind": "bert"},
    "BertForMultipleChoice": {"kind": "bert"},
    "MegatronBertForMultipleChoice": {
        "kind": "bert",
        "block_norm": "pre",
        "embedding_norm": False,
    },
    "GPT2ForSequenceClassification": {},
    "LlamaForSequenceClassification": _stored.LLAMA,
    "Qwen3ForSequenceClassification": {**_stored.LLAMA, "kind": "qwen3"},
}


def trained_here(folder, name: str, shape=None):
    """A run with random weights and the head that a model of `transformers` has."""
    choice = candidates_of(name) > 1
    head = {"output_head": "classes", "classes": 1 if choice else len(LABELS)}
    head |= {"tie_embeddings": False, "sentence_order": False}
    run = _stored.stored(folder, V, **(shape or NEW[name]), **head)
    labels = f'kind = "classification"\nlabels = {json.dumps(LABELS)}\n'
    with open(run / "config.toml", "a") as file:
        file.write("[task]\n" + ('kind = "choice"\nchoices = 3\n' if choice else labels))
    return run


@pytest.mark.cases(3)
@parallel(ranks=[1], limit_s=120)
@pytest.mark.parametrize("name", NEW)
def test_trained_here_it_is_theirs(comm, tmp_path, name):
    """Under its own name, with its labels; no weight missing, the scores of a padded batch alike,
    and back again the same to the bit."""
    import transformers

    run = trained_here(tmp_path / "run", name)
    done = to_hf(run, tmp_path / "hf")
    kind = getattr(transformers, name)
    model, info = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.architectures == [name]
    count = candidates_of(name)
    if count == 1:
        assert list(model.config.id2label.values()) == LABELS
        assert model.config.label2id == NAMED["label2id"]
    else:
        assert "cannot store task.choices = 3" in done.note
    model.config.pad_token_id = 0  # what fills up here; its tokenizer is not known
    expected = theirs(model.eval(), count)
    assert difference(ours(comm, run, count), expected) < 1e-5
    from_hf(tmp_path / "hf", tmp_path / "ours")
    assert torch.equal(ours(comm, tmp_path / "ours", count), ours(comm, run, count))


def test_the_self_check_sees_the_head(tmp_path, monkeypatch):
    """Another head, or one that looks elsewhere."""
    forward = Classes.forward
    for name in ("BertForSequenceClassification", "LlamaForSequenceClassification"):
        task_model(name).save_pretrained(tmp_path / "hf")
        with monkeypatch.context() as patch:
            patch.setattr(Classes, "forward", lambda self, x, c: forward(self, x, c).flip(-1))
            with pytest.raises(check.CheckFailed, match="logits differ by"):
                from_hf(tmp_path / "hf", tmp_path / "ours")
        with monkeypatch.context() as patch:
            patch.setattr(check.torch, "full", lambda size, at: torch.ones(size, dtype=int) * 5)
            with pytest.raises(check.CheckFailed, match="logits differ by"):
                from_hf(tmp_path / "hf", tmp_path / "ours")
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"id2label": {"0": "one"}}, "1 labels are a regression, which is not supported; legal: t"),
        ({"problem_type": "multi_label_classification"}, "problem_type = 'multi.*legal: 'single_l"),
        ({"id2label": {"0": "a", "2": "b", "1": "a"}}, "id2label = .* a different name for each"),
        ({"id2label": ["a", "b", "c"]}, "id2label = .* is not supported; legal: a different name"),
        (
            {"id2label": {"0": "a", "1": "b"}},
            r"score.weight has shape \[3, 32\], config.json makes",
        ),
        ({"architectures": ["GPT2LMHeadModel"]}, "unexpected tensor score.weight"),
        ({"architectures": ["GPT2ForMultipleChoice"]}, 'task.kind = "choice": a gpt2 of Hugging F'),
    ],
)
def test_what_is_no_class_here_is_refused(tmp_path, wrong, message):
    task_model("GPT2ForSequenceClassification", **NAMED).save_pretrained(tmp_path / "hf")
    changed(tmp_path / "hf/config.json", **wrong)
    with pytest.raises(InputError, match=message):
        from_hf(tmp_path / "hf", tmp_path / "ours")
    assert os.listdir(tmp_path) == ["hf"]


def test_a_decoder_that_chooses_is_refused(tmp_path):
    """No model of theirs is the same: one with a single label would be a regression."""
    head = {"output_head": "classes", "classes": 1, "tie_embeddings": False}
    run = _stored.stored(tmp_path / "run", V, **head)
    with pytest.raises(InputError, match=r'kind = "none" and its head are in conflict'):
        to_hf(run, tmp_path / "hf")
    with open(run / "config.toml", "a") as file:
        file.write('[task]\nkind = "choice"\nchoices = 4\n')
    with pytest.raises(InputError, match=r'task.kind = "choice": a gpt2 .*; legal: "classif'):
        to_hf(run, tmp_path / "hf")
    assert os.listdir(tmp_path) == ["run"]


def write_texts(path, task: str, label) -> None:
    """Texts with a label by their first word, or any answer; no two candidates are equal."""
    draw = np.random.default_rng(5)
    with open(path, "w") as file:
        for _ in range(12):
            sizes = draw.permutation(3) + 1
            words = ["".join(draw.choice(list("Hewalkd"), n)) for n in sizes]
            line = {"text": " ".join(words), "label": label(sizes[0] - 1)}
            if task == "choice":
                line = {"context": "He", "choices": words, "answer": int(draw.integers(3))}
            print(json.dumps(line), file=file)


def predicted_by_theirs(model, folder, path) -> tuple[list[int], float]:
    """The classes, or candidates, that `transformers` names, by its own tokenizer and padding; and
    how many of them are right."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    classes = []
    answers = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "choices" in line:
            pairs = [line["context"]] * len(line["choices"]), line["choices"]
            given = tokenizer(*pairs, return_token_type_ids=True, **AS_TENSORS)
            answer = line["answer"]
            given = {key: value[None] for key, value in given.items()}
        else:
            given = tokenizer(line["text"], **AS_TENSORS)
            answer = model.config.label2id[line["label"]]
        with torch.no_grad():
            classes.append(int(model(**given).logits.argmax()))
        answers.append(answer)
    right = sum(predicted == answer for predicted, answer in zip(classes, answers, strict=True))
    return classes, right / len(classes)


def with_tokenizer(model, folder):
    from tokenizers.processors import BertProcessing

    model.save_pretrained(folder)
    tokenizer = word_piece()
    names = tokenizer.get_vocab()
    if "Bert" in type(model).__name__:
        ends = (("[SEP]", names["[SEP]"]), ("[CLS]", names["[CLS]"]))
        tokenizer.post_processor = BertProcessing(*ends)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.cases(1)
@parallel(ranks=[2], limit_s=120)
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertForMultipleChoice"])
def test_a_head_of_theirs_is_asked_and_trained_further(comm, tmp_path, name):
    """The accuracy of `transformers` with its own tokenizer; then steps, which go back."""
    size = word_piece().get_vocab_size()
    choice = name.endswith("Choice")
    text = tmp_path / "texts.jsonl"
    hf = tmp_path / "hf"
    if comm.rank == 0:
        more = {} if choice else NAMED
        model = task_model(name, vocab_size=size, max_position_embeddings=24, **more)
        with_tokenizer(model, hf)
        write_texts(text, "choice" if choice else "", LABELS.__getitem__)
        from_hf(hf, tmp_path / "ours")
    comm.Barrier()
    options = OPTIONS | {"tasks": (text,)}
    ((task,),) = [evaluate(tmp_path / "ours", World(comm), **options)["tasks"]]
    assert task["items"] == 12 and len(task["by_class"]) == 3
    if comm.rank == 0:
        _, expected = predicted_by_theirs(model, hf, text)
        assert 0 < task["accuracy"] < 1
        assert task["accuracy"] == pytest.approx(expected)
    tree = tomllib.loads((tmp_path / "ours/config.toml").read_text())
    wanted = {f"model.{key}": value for key, value in tree["model"].items()}
    wanted |= {f"task.{key}": value for key, value in tree["task"].items()}
    wanted |= {"task.choices": 3} if choice else {}
    wanted |= {"checkpoint.initial": str(tmp_path / "ours"), "run.steps": 2}
    wanted |= {"data.train": [{"path": str(text)}], "batch.global_size": 6, "batch.micro_size": 3}
    with loop(comm, tmp_path, wanted | {"parallel.tensor": 2}) as made:
        assert "drawn" not in made.attempt.how
        made.run()
    if comm.rank == 0:
        to_hf(tmp_path / "run", tmp_path / "back")
        before, after = (load_file(f / "model.safetensors") for f in (hf, tmp_path / "back"))
        assert before.keys() == after.keys()
        assert not torch.equal(before["classifier.weight"], after["classifier.weight"])
        for file in ("config.json", "tokenizer.json"):
            assert (hf / file).read_bytes() == (tmp_path / "back" / file).read_bytes()


@pytest.mark.cases(1)
@parallel(ranks=[2], limit_s=120)
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_a_fresh_head_on_a_model_of_text(comm, tmp_path, family):
    """It begins from what from-hf made of a model without one, and goes back as theirs: other
    head, other labels, fewer positions, and its padding."""
    import transformers

    text = tmp_path / "texts.jsonl"
    if comm.rank == 0:
        from_hf(saved(tmp_path / "hf", family, vocab_size=260), tmp_path / "ours")
        write_texts(text, "", LABELS.__getitem__)
    comm.Barrier()
    tree = tomllib.loads((tmp_path / "ours/config.toml").read_text())
    heads = ("output_head", "classes", "tie_embeddings", "sentence_order")
    wanted = {f"model.{k}": value for k, value in tree["model"].items() if k not in heads}
    wanted |= {"task.kind": "classification", "task.labels": LABELS, "task.tokenizer": "bytes"}
    wanted |= {"checkpoint.initial": str(tmp_path / "ours"), "run.steps": 1}
    wanted |= {"data.train": [{"path": str(text)}], "batch.global_size": 4, "batch.micro_size": 2}
    with loop(comm, tmp_path, wanted | {"parallel.pipeline": 2, "model.seq_length": 14}) as made:
        assert "drawn from run.seed: sentence.classes.weight" in made.attempt.how
        made.run()
    if comm.rank:
        return
    done = to_hf(tmp_path / "run", tmp_path / "back")
    assert "id2label" in done.note
    assert ("cls.predictions" in done.note) == (family == "bert")
    name = {"gpt2": "GPT2", "llama": "Llama", "bert": "Bert"}[family] + "ForSequenceClassification"
    kind = getattr(transformers, name)
    model, info = kind.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert list(model.config.id2label.values()) == LABELS
    assert model.config.pad_token_id == 0  # a BERT's own; of a decoder what ends its texts
    length = getattr(model.config, "max_position_embeddings", None)
    assert length == (16 if family == "llama" else 14)
    ids = torch.arange(1, 15).repeat(2, 1)
    ids[1, 9:] = 0
    with torch.no_grad():
        model.eval()(ids, attention_mask=(ids > 0).long())
    assert from_hf(tmp_path / "back", tmp_path / "again").difference < 1e-6
    assert open_model(tmp_path / "again").task.labels == tuple(LABELS)
