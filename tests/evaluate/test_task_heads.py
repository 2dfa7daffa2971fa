"""Training on a task from a file to the accuracy, in several layouts: the same losses, and what a
validation says is what `ptdmpi evaluate` finds."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from ptdmpi.comm.world import World
from ptdmpi.commands.evaluate import _table
from ptdmpi.config import InputError, TaskConfig, resolve
from ptdmpi.data.labelled import LabelledFile, LabelledRow
from ptdmpi.evaluate.classes import accuracy
from ptdmpi.evaluate.labelled import LabelledItem, framing, items, read
from ptdmpi.evaluate.run import evaluate
from ptdmpi.plan.machine.cluster import load_cluster
from ptdmpi.plan.search import choose
from ptdmpi.train.checks import checked
from ptdmpi.train.tasks.files import task_framing
from tests._configs import tree
from tests._engines import from_root, whole_weights
from tests._runs import configuration, log, loop, records, tensors
from tests._stored import stored
from tests.parallel import parallel

CHOICE = {"task.kind": "choice", "task.choices": 3, "task.tokenizer": "bytes"}
LABELS = {"task.kind": "classification", "task.labels": ["odd", "even"], "task.tokenizer": "bytes"}
OPTIONS = dict.fromkeys(("layout", "precision", "tokenizer", "words", "stride"))
OPTIONS |= {"shots": 0, "data": (), "code": (), "lm_eval": (), "ema": False, "adapter": None}


def write(folder: Path) -> None:
    """A question is answered by the candidate that begins as the passage does; a text is odd or
    even by its first letter."""
    draw = np.random.default_rng(0)
    for name, count in (("train", 60), ("valid", 13)):
        with (
            open(folder / f"{name}-choice.jsonl", "w") as choice,
            open(folder / f"{name}-labels.jsonl", "w") as labels,
        ):
            for _ in range(count):
                a, b, c = (chr(97 + k) for k in draw.choice(26, 3, replace=False))
                answer = int(draw.integers(3))
                choices = [b * 3, c * 3]
                choices.insert(answer, a * 3)
                passage = a * int(draw.integers(2, 30))
                line = {"context": passage, "question": "?", "choices": choices, "answer": answer}
                print(json.dumps(line), file=choice)
                label = ["odd", "even"][ord(a) % 2]
                print(json.dumps({"text": passage, "label": label}), file=labels)


def changes(folder: Path, kind: str, **more) -> dict:
    return {
        **(CHOICE if kind == "choice" else LABELS),
        "run.dir": str(folder / "run"),
        "run.steps": 4,
        "model.seq_length": 24,
        "model.dropout": 0.1,
        "batch.global_size": 12,
        "batch.micro_size": 3,
        "data.train": [{"path": str(folder / f"train-{kind}.jsonl")}],
        "data.valid": str(folder / f"valid-{kind}.jsonl"),
        "log.validate_every_steps": 2,
        **more,
    }


LAYOUTS = {
    1: [("bert", "choice", {})],
    2: [
        ("bert", "choice", {"parallel.tensor": 2, "parallel.sequence_parallel": True}),
        ("gpt", "labels", {"parallel.pipeline": 2, "parallel.virtual": 2}),
    ],
    4: [
        ("bert", "choice", {"parallel.pipeline": 2, "parallel.zero": 2}),
        ("gpt", "labels", {"parallel.zero": 3}),
    ],
}


@pytest.mark.long
@pytest.mark.cases(1)
@parallel(ranks=[1, 2], limit_s=120)
def test_a_task_is_trained_and_evaluated(comm, tmp_path):
    trains_and_evaluates(comm, tmp_path)


@pytest.mark.long
@parallel(ranks=[4], limit_s=120)
def test_a_task_is_trained_sharded_and_evaluated(comm, tmp_path):
    trains_and_evaluates(comm, tmp_path)


def trains_and_evaluates(comm, tmp_path: Path) -> None:
    for number, (model, kind, layout) in enumerate(LAYOUTS[comm.size]):
        folder = tmp_path / str(number)
        if comm.rank == 0:
            folder.mkdir()
            write(folder)
        comm.Barrier()
        wanted = changes(folder, kind, **{"model.kind": model, **layout})
        with loop(comm, folder, wanted) as made:
            made.run()
        comm.Barrier()
        run = folder / "run"
        kept = records(run)
        validations = [record for record in kept if "validation_accuracy" in record]
        assert [record["step"] for record in validations] == [2, 4]
        options = OPTIONS | {"tasks": (folder / f"valid-{kind}.jsonl",)}
        ((record,),) = [evaluate(run, World(comm), **options)["tasks"]]
        assert (
            record["items"] == 13 and record["accuracy"] == validations[-1]["validation_accuracy"]
        )
        assert sum(part["items"] for part in record["by_class"].values()) == 13
        losses = [record["loss"] for record in kept if "loss" in record]
        comm.Barrier()
        if comm.rank == 0:
            assert "13 samples" in log(run) and "sequences cut by" in log(run)
        assert losses == pytest.approx(serial(comm, folder, wanted, layout), rel=1e-4)
        # begun anew from its weights: all are there, and the first loss is not that of a start
        again = wanted | {"checkpoint.initial": str(run), "run.dir": str(folder / "again")}
        with loop(comm, folder, again | {"run.steps": 1, "model.seq_length": 20}) as made:
            made.run()
            assert "drawn" not in made.attempt.how


@parallel(ranks=[2])
@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_task_begins_from_a_model_of_text(comm, model, tmp_path):
    """The weights that both have are those of the model of text, up to the positions that sequences
    reach, and the pooler if it was trained with one. The rest is drawn from the seed, and reported.
    """
    if comm.rank == 0:
        write(tmp_path)
        stored(tmp_path / "text", 260, kind=model, seq_length=32)
    comm.Barrier()
    wanted = changes(tmp_path, "labels", **{"model.kind": model, "parallel.pipeline": 2})
    wanted |= {"checkpoint.initial": str(tmp_path / "text"), "model.vocab_size": 260}
    wanted |= {"model.layers": 2, "run.steps": 1}
    with loop(comm, tmp_path, wanted) as made:
        new = "sentence.classes.weight" + ", sentence.classes.bias" * (model == "bert")
        assert made.attempt.how.endswith(f"drawn from run.seed: {new}")
        weights = whole_weights(made.engine)
    before = tensors(tmp_path / "text/checkpoints/step-00000007")
    for name, values in weights.items():
        if "classes" not in name:
            old = before[f"weights/{name}"][: len(values)]
            assert np.array_equal(values.numpy(), old), name


def serial(comm, folder: Path, wanted: dict, layout: dict) -> list[float]:
    """The losses of the same run on one rank."""
    run = folder / "serial"
    losses = None
    if comm.rank == 0:
        plain = {key: value for key, value in wanted.items() if key not in layout}
        with loop(MPI.COMM_SELF, folder, plain | {"run.dir": str(run)}) as made:
            made.run()
        losses = [record["loss"] for record in records(run) if "loss" in record]
    return from_root(comm, losses)


def test_a_class_without_samples_has_no_accuracy():
    """It is null in JSON, which has no NaN, and a dash in the table."""
    rows = [LabelledRow(np.zeros(1, dtype=np.int32), 1)] * 2
    file = LabelledFile(Path("x"), "t", "0", "0", rows, 1, np.array([0, 0]), 0, 0)
    scores = accuracy(file, np.array([0, 1]), ("no", "yes"))
    assert scores["by_class"]["yes"] == {"items": 0, "accuracy": None}
    json.dumps(scores, allow_nan=False)
    task = {"file": "x", "kind": "classification", **scores}
    head = {"checkpoint": "c", "step": 1, "layout": "l", "precision": "fp32"}
    lines = _table({**head, "perplexity": [], "tasks": [task]}).splitlines()
    assert [line.split() for line in lines[-2:]] == [
        ["accuracy", "of", "no", "0.5000", "of", "2"],
        ["accuracy", "of", "yes", "-", "of", "0"],
    ]


def test_rows_of_a_task(tmp_path):
    """The passage loses its end, the answer nothing; cuts are counted."""
    config = resolve(tree(changes(tmp_path, "choice", **{"model.kind": "bert"})), 1)
    frame = task_framing(config)
    row, lost = frame.row(list(range(40)), [200, 201])
    assert (row.ids.tolist(), row.second, lost) == (
        [257, *range(19), 258, 200, 201, 258],
        21,
        21,
    )
    assert frame.needed == 260
    alone, lost = frame.row([1, 2], None)
    assert (alone.ids.tolist(), alone.second, lost) == ([257, 1, 2, 258], 4, 0)
    decoder = framing(frame.text, "bytes", config.model.model_copy(update={"attention": "causal"}))
    row, lost = decoder.row(list(range(40)), [200, 201])
    assert (row.ids.tolist(), lost) == ([*range(22), 200, 201], 18)
    # filled up with an id of the model, where the tokenizer's own end lies beyond its table
    ended = replace(frame.text, ends=frozenset({7}), eod=7)
    assert framing(ended, "bytes", config.model).form.pad == 7 != ended.tokenizer.eod_id


@pytest.mark.parametrize("model", ["bert", "gpt"])
def test_a_question_that_is_too_long_leaves_the_candidate_whole(tmp_path, model):
    """It loses its end, the passage all; both are counted, and a longer candidate is refused."""
    path = tmp_path / "x.jsonl"
    line = {"context": "ppp", "question": 30 * "q", "choices": ["abc", "x", "de"], "answer": 0}
    path.write_text(json.dumps(line) + "\n")
    config = resolve(tree(changes(tmp_path, "choice", **{"model.kind": model})), 1)
    frame = task_framing(config)
    file = read(path, config.task, frame)
    for row, choice in zip(file.rows, line["choices"], strict=True):
        text = bytes(token for token in row.ids if token < 256).decode().strip("\n")
        assert len(row.ids) == 24 and text.endswith(f"q\n{choice}") and "p" not in text
    # special tokens of a sequence, and line ends before a question and a candidate
    frame_tokens, ends = (3, 1) if model == "bert" else (0, 2)
    whole = sum(3 + 30 + ends + len(choice) for choice in line["choices"])
    assert (file.cut, file.lost) == (3, whole - 3 * (24 - frame_tokens))
    line["choices"][1] = 24 * "x"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(
        InputError, match=r"x\.jsonl:1: choice 1 has 25 tokens, .* room for 2[14]; "
    ):
        read(path, config.task, frame)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"context": "a", "choices": ["b", "c"], "answer": 0}, "2 choices; legal: task.choices"),
        ({"context": "a", "choices": ["b", "c", "d"], "answer": 3}, "legal: 0 to 2"),
        ({"context": "a", "choices": ["b", "c", "d"], "answer": 0, "question": 1}, "is not a text"),
    ],
)
def test_a_wrong_line_is_told(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match=f"x.jsonl:1: .*{message}"):
        items(path, TaskConfig(kind="choice", choices=3))


def test_labels_may_be_numbers(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a", "second": "b", "label": 1}\n')
    task = TaskConfig(kind="classification", labels=("0", "1"))
    assert items(path, task) == [LabelledItem("a", ("b",), 1, f"{path}:1")]


def test_a_search_keeps_candidates_together(tmp_path):
    wanted = tree(changes(tmp_path, "choice"))
    cluster = load_cluster("cpu-avx2")
    prices, _ = choose.choose(choose.bare(wanted), 257, cluster, 2)
    assert prices and all(price.layout.micro_size % 3 == 0 for price in prices)


def test_what_does_not_go_together_is_told(tmp_path):
    write(tmp_path)
    wrong = {"batch.micro_size": 4, "log.bigram_baseline": True, "task.labels": ["a"]}
    with pytest.raises(InputError) as error:
        resolve(tree(changes(tmp_path, "choice", **wrong)), 1)
    assert "legal nearby: 3 or 6" in str(error.value)
    assert "task.labels has no effect" in str(error.value)
    assert "log.bigram_baseline needs predictions of tokens" in str(error.value)
    with pytest.raises(InputError, match=r"task.tokenizer is missing: legal: .bytes"):
        checked(configuration(tmp_path, changes(tmp_path, "choice", **{"task.tokenizer": ""})), 1)
