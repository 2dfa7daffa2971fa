"""Tasks while a run trains: the training keeps its bits, and the scores are those of `ptdmpi
evaluate` on the checkpoint of that step."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.vocabulary import BYTES_SHA256
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.evaluate.questions import Asking, Limits, read
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.text import find_text
from ptdmpi.sinks.record import scalars
from ptdmpi.train.checks import checked
from ptdmpi.watch.requests import Asked, Save
from tests._runs import configuration, log, loop, records
from tests.parallel import parallel

CHOICES = [
    {"context": "the cat", "choices": ["sat", "flew away", "x"], "answer": 0},
    {"context": "one and one is", "choices": ["two", "many"], "answer": 1},
    {"context": "b", "choices": [" c", "d"], "answer": 0},
]
ANSWERS = [{"context": "say a", "answers": ["a"]}, {"context": "q", "answers": ["b", "c"]}]


def texts(folder: Path) -> None:
    """Shards of bytes, and a task file of each kind."""
    for name, seed in (("train", 1), ("valid", 2)):
        (folder / name).mkdir()
        ids = np.random.default_rng(seed).integers(97, 123, 3000)
        with ShardWriter(
            folder / name / "0.h5", "bytes", BYTES_SHA256, vocab_size=257, eod_id=256
        ) as writer:
            writer.write(ids, np.array([len(ids)]))
    for name, items in (("choices", CHOICES), ("answers", ANSWERS)):
        lines = "\n".join(map(json.dumps, items)) + "\n"
        (folder / f"{name}.jsonl").write_text(lines)


def wanted(folder: Path, name: str, **changes) -> dict:
    return {
        "run.dir": str(folder / name),
        "run.steps": 4,
        "model.seq_length": 24,
        "model.dropout": 0.1,
        "data.valid": str(folder / "valid"),
        "log.validate_every_steps": 2,
        "log.validate_samples": 4,
        **changes,
    }


def asking(folder: Path, every: int = 2) -> dict:
    files = [str(folder / "choices.jsonl"), str(folder / "answers.jsonl")]
    return {"log.tasks": files, "log.tasks_every_steps": every}


LAYOUTS = {
    1: [{}],
    2: [
        {"parallel.tensor": 2, "parallel.sequence_parallel": True, "model.positions": "rope"},
        {"parallel.pipeline": 2, "parallel.virtual": 2, "precision.compute": "bf16"},
    ],
    4: [
        {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual": 2},
        {},
        {"parallel.zero": 3},
    ],
}


def ran(comm, folder: Path, changes: dict) -> list[dict]:
    with loop(comm, folder, changes) as made:
        made.run()
    comm.Barrier()
    return records(Path(changes["run.dir"]))


@parallel(ranks=[1], limit_s=120)
def test_the_training_keeps_its_bits(comm, tmp_path):
    keeps_bits_and_scores(comm, tmp_path)


@pytest.mark.long
@parallel(ranks=[2, 4], limit_s=120)
def test_the_training_keeps_its_bits_and_scores_are_those_of_evaluate(comm, tmp_path):
    keeps_bits_and_scores(comm, tmp_path)


def keeps_bits_and_scores(comm, tmp_path: Path) -> None:
    for number, layout in enumerate(LAYOUTS[comm.size]):
        folder = tmp_path / str(number)
        if comm.rank == 0:
            folder.mkdir()
            texts(folder)
        comm.Barrier()
        plain = ran(comm, folder, wanted(folder, "plain", **layout))
        asked = ran(
            comm,
            folder,
            wanted(folder, "asked", **layout, **asking(folder), **{"checkpoint.every_steps": 2}),
        )
        keys = ("loss", "grad_norm", "validation_loss")
        numbers = [[[record.get(key) for key in keys] for record in run] for run in (plain, asked)]
        trained = [[record for record in run if record != [None] * 3] for run in numbers]
        assert trained[0] == trained[1] and len(trained[0]) == 6, layout
        scores = {record["step"]: record["tasks"] for record in asked if "tasks" in record}
        assert sorted(scores) == [2, 4]
        # the kept weights, in one layout for all
        world = World(comm)
        for step in scores:
            path = folder / f"asked/checkpoints/step-{step:08d}"
            model, stored = open_inference(path, world, None, None)
            text = find_text(stored)
            for file, values in scores[step].items():
                questions = read(Path(file), text, Asking(max_new_tokens=12), Limits(24, 257))
                every = questions.ask(model, text, range(len(questions.items)))
                assert questions.result(every) == values, (layout, file)


@pytest.mark.long
@parallel(ranks=[2])
def test_a_stop_breaks_them_off_and_a_resumed_run_drops_and_asks_again(comm, tmp_path):
    if comm.rank == 0:
        texts(tmp_path)
    comm.Barrier()
    changes = wanted(tmp_path, "run", **asking(tmp_path, 1))
    first = [record for record in ran(comm, tmp_path, changes) if "tasks" in record]
    assert [record["step"] for record in first] == [1, 2, 3, 4]
    named = tmp_path / "run/checkpoints/step-00000004"
    assert named.is_dir()
    comm.Barrier()
    # as after a roll-back: records after the resumed step are dropped
    changes |= {"run.steps": 6}
    with loop(comm, tmp_path, changes) as made:
        seen = []

        def vote():
            seen.append(1)
            return Asked("asked to stop", Save.NO, 0)

        asked = made.validation.tasks.after_step(4, vote)
        assert asked.stop and len(seen) == 1
        made.run()
    comm.Barrier()
    asked_after = [record["step"] for record in records(tmp_path / "run") if "tasks" in record]
    assert asked_after == [1, 2, 3, 4, 5, 6]
    assert "asked to stop: tasks after step 4 interrupted" in log(tmp_path / "run")


def test_mistakes_are_told_before_the_start_all_together(tmp_path):
    texts(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"context": "a", "choices": ["b"], "answer": 3}\n')
    long = {"context": "a", "choices": ["b" * 40, "c"], "answer": 0}
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    files = [str(tmp_path / name) for name in ("bad.jsonl", "nowhere.jsonl")]
    changes = wanted(tmp_path, "run", **{"log.tasks": files, "batch.global_size": 7})
    changes["parallel.data"] = 2
    with pytest.raises(InputError) as caught:
        checked(configuration(tmp_path, changes), 2)
    for words in ("bad.jsonl:1: 'answer' = 3", "nowhere.jsonl: No such file", "global_size"):
        assert words in str(caught.value)
    changes = wanted(tmp_path, "run", **{"log.tasks": [str(tmp_path / "long.jsonl")]})
    with pytest.raises(InputError, match=r"long.jsonl:1: 41 tokens to score"):
        checked(configuration(tmp_path, changes), 1)
    for change, words in (
        ({"log.tasks_every_steps": 2}, "needs log.tasks"),
        ({"log.tasks": [files[0]] * 2}, "more than once"),
    ):
        with pytest.raises(InputError, match=words):
            checked(configuration(tmp_path, wanted(tmp_path, "run", **change)), 1)


def test_wrong_cluster_directory_data_and_vocabulary_come_in_one_round(tmp_path):
    texts(tmp_path)
    (tmp_path / "file").touch()
    data = configuration(tmp_path, wanted(tmp_path, "run"))["data"]["train"]
    changes = {
        "run.cluster": "nowhere-cluster",
        "run.dir": str(tmp_path / "file/run"),
        "data.train": [*data, {"path": "nowhere-data"}],
        "model.vocab_size": 7,
    }
    with pytest.raises(InputError) as caught:
        checked(configuration(tmp_path, {**wanted(tmp_path, "run"), **changes}), 1)
    for words in ("nowhere-cluster", "run.dir = ", "nowhere-data", "model.vocab_size = 7"):
        assert words in str(caught.value)


def test_records_are_curves():
    record = {"step": 3, "tasks": {"a.jsonl": {"kind": "choice", "items": 4, "accuracy": 0.5}}}
    assert scalars({**record, "tasks_time_s": 2.0}) == {
        "tasks/a.jsonl/accuracy": 0.5,
        "speed/tasks_time_s": 2.0,
    }
