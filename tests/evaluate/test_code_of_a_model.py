"""pass@k of a model that was trained: from shards of programs to what `ptdmpi evaluate` says."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ptdmpi.commands.evaluate import command
from tests._runs import loop
from tests._texts import byte_shards
from tests.parallel import parallel

# The first one is right, and has more text after its end.
TAUGHT = {
    "add": "def add(a, b):\n    return a + b\nif a: b\n",
    "less": "def less(x, y):\n    return y - x\n",
}
TESTS = {
    "add": "assert candidate(2, 3) == 5 and candidate(-1, 1) == 0",
    "less": "assert candidate(5, 2) == 3",
}
MODEL = {"kind": "llama", "layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128}


def trained(comm, folder: Path) -> Path:
    """A model that has these programs by heart."""
    if comm.rank == 0:
        byte_shards(folder / "programs", [[*TAUGHT.values()] * 40])
    comm.Barrier()
    changes = {f"model.{key}": value for key, value in MODEL.items()}
    changes |= {"model.seq_length": 48, "data.document_boundaries": True, "run.steps": 70}
    changes |= {"parallel.data": comm.size, "batch.global_size": 16}
    changes |= {"batch.micro_size": 16 // comm.size, "optimizer.learning_rate": 0.006}
    changes |= {"data.train": [{"path": str(folder / "programs")}]}
    with loop(comm, folder, changes) as made:
        made.run()
    return folder / "run"


def tasks(folder: Path) -> Path:
    file = folder / "programs.jsonl"
    with open(file, "w") as lines:
        for name, program in TAUGHT.items():
            first, _, _ = program.partition("\n")
            test = f"def check(candidate):\n    {TESTS[name]}\n"
            print(
                json.dumps({"prompt": f"{first}\n", "test": test, "entry_point": name}), file=lines
            )
    return file


@parallel(ranks=[1])
def test_a_trained_model_solves_what_it_has_learnt(comm, tmp_path):
    """One of two tasks: it writes for both what it was taught, and one of these is wrong."""
    run, file = trained(comm, tmp_path), tasks(tmp_path)
    words = ["--code", str(file), "--max-new-tokens", "30", "--json"]
    result = CliRunner().invoke(command, [str(run), *words])
    assert result.exit_code == 0, result.output
    (scores,) = json.loads(result.stdout)["code"]
    expected = {"file": str(file), "truncated": 0, "items": 2, "samples": 1, "pass@1": 0.5}
    assert scores == expected | {"failures": "1 AssertionError"}
    several = ["--samples", "3", "--temperature", "0.1", "--k", "1", "--k", "3"]
    result = CliRunner().invoke(command, [str(run), *words, *several])
    (scores,) = json.loads(result.stdout)["code"]
    assert scores["pass@3"] == 0.5 and 0 < scores["pass@1"] <= 0.5


@pytest.mark.long
@parallel(ranks=[2])
def test_the_same_on_two_data_ranks(comm, tmp_path):
    run = trained(comm, tmp_path)
    if comm.rank == 0:
        tasks(tmp_path)
    comm.Barrier()
    words = ["--code", str(tmp_path / "programs.jsonl"), "--max-new-tokens", "30", "--json"]
    result = CliRunner().invoke(command, [str(run), *words, "--layout", "d=2"])
    assert result.exit_code == 0, result.output
    if comm.rank == 0:
        (scores,) = json.loads(result.stdout)["code"]
        assert scores["pass@1"] == 0.5 and scores["failures"] == "1 AssertionError"
