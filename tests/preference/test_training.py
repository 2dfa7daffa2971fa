"""Runs on pairs of answers: from records to shards, the reference's log-probabilities, and training
that begins from the reference."""

import json
import math

import numpy as np
import pytest

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.data.scores.reference import REFERENCE
from ptdmpi.evaluate.stored_scores import score
from tests._runs import loop, records
from tests.parallel import parallel

LENGTH = 64
OPTIONS = {"precision": None, "adapter": None, "ema": False}
KEYS = ("loss", "grad_norm", "reward_margin", "reward_accuracy", "validation_loss")


def prepared(folder):
    """Write shards of conversations, and of pairs for training and validation."""
    from data_prep.chat.pack import ChatOptions, make_chat_shards
    from data_prep.corpus import OutputOptions

    def written(name, lines):
        (folder / name).write_text("\n".join(map(json.dumps, lines)))
        return (str(folder / name),)

    chats = [{"prompt": f"{n}?", "answer": "yes"} for n in range(60)]
    chat = ChatOptions(written("chats.jsonl", chats), "bytes", LENGTH)
    make_chat_shards(chat, OutputOptions(folder / "chats"))
    pairs = [
        {"prompt": f"{n}?", "chosen": "yes" * (1 + n % 2), "rejected": "no"} for n in range(60)
    ]
    options = ChatOptions(written("pairs.jsonl", pairs), "bytes", LENGTH, pairs=True)
    output = OutputOptions(folder / "pairs", valid_output=folder / "held", valid_fraction=0.2)
    make_chat_shards(options, output)


def begun(comm, folder):
    """Make the data and train a base for two steps; return what a run on pairs changes."""
    if comm.rank == 0:
        prepared(folder)
    comm.Barrier()
    usual = {
        "run.steps": 2,
        "run.dir": str(folder / "base"),
        "model.layers": 2,
        "model.seq_length": LENGTH,
        "batch.global_size": 4,
        "data.document_boundaries": True,
        "data.train": [{"path": str(folder / "chats")}],
    }
    with loop(comm, folder, usual) as made:
        made.run()
    return usual | {
        "run.steps": 4,
        "run.dir": str(folder / "dpo"),
        "checkpoint.initial": str(folder / "base"),
        "data.train": [{"path": str(folder / "pairs")}],
        "data.valid": str(folder / "held"),
        "preference.method": "dpo",
        "optimizer.decay": "constant",
    }


def trained(comm, folder, name, changes):
    """Train in a directory of this name; return the records and the compared numbers."""
    with loop(comm, folder, changes | {"run.dir": str(folder / name)}) as made:
        made.run()
    comm.Barrier()
    of_steps = [record for record in records(folder / name) if "step" in record]
    return of_steps, [[record[key] for key in KEYS if key in record] for record in of_steps]


def refused(comm, folder, changes, message):
    with pytest.raises(InputError, match=message), loop(comm, folder, changes):
        pass


@parallel(ranks=[2])
def test_a_run_begins_at_its_reference_and_learns_the_preference(comm, tmp_path):
    changes = begun(comm, tmp_path)
    refused(comm, tmp_path, changes, "no log-probabilities of a reference model; make them with")
    refused(comm, tmp_path, changes | {"preference.method": "none"}, "holds pairs of answers")
    chats = {"data.train": [{"path": str(tmp_path / "chats")}]}
    refused(comm, tmp_path, changes | chats, "chats holds no pairs of answers")
    paths = (tmp_path / "pairs", tmp_path / "held")
    seen = []
    for where in ("t=2", "p=2", "d=2"):
        tables = score(tmp_path / "base", paths, World(comm), layout=where, **OPTIONS)
        (path,) = (tmp_path / "pairs" / REFERENCE.folder).glob("*.npy")
        seen.append(np.load(path))
        comm.Barrier()  # before rank 0 writes the next ones
    assert all(np.allclose(values, seen[0], rtol=1e-5, atol=1e-6) for values in seen)
    assert tables[0]["labels"] == np.count_nonzero(seen[0]) and tables[0]["nats_per_label"] > 0

    of_steps, numbers = trained(comm, tmp_path, "d", changes)
    first = of_steps[0]
    (last,) = [record for record in of_steps if "validation_loss" in record]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-4)
    assert last["validation_loss"] < math.log(2) and "validation_perplexity" not in last
    assert last["validation_reward_accuracy"] == 1 and last["validation_reward_margin"] > 0
    trained(comm, tmp_path, "stopped", changes | {"run.steps": 2})
    _, resumed = trained(comm, tmp_path, "stopped", changes)
    assert [row for row in resumed if len(row) == 4] == [row for row in numbers if len(row) == 4]
    _, found = trained(comm, tmp_path, "context", changes | {"parallel.context": 2})
    for of_run in (found, numbers):
        del of_run[0][3]  # at the reference, rounding decides which reward is greater
    assert found == [pytest.approx(row, rel=1e-3, abs=1e-4) for row in numbers]

    seen = []
    for run, where in (("context", "t=2"), ("context", None), ("d", None)):
        score(tmp_path / run, paths[:1], World(comm), layout=where, **OPTIONS)
        seen.append(np.load(path))
        comm.Barrier()
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen[1], seen[2], rtol=1e-3, atol=1e-4)
    with pytest.raises(InputError, match="layout c=2: legal: t, p and d; every rank has whole"):
        score(tmp_path / "context", paths, World(comm), layout="c=2", **OPTIONS)
    again = {"run.dir": str(tmp_path / "d"), "run.steps": 5}
    refused(comm, tmp_path, changes | again, r"data.train .*pairs \(")
