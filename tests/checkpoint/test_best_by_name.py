"""The best checkpoint by name, for every command that takes a checkpoint."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from ptdmpi.checkpoint import directory, examine
from ptdmpi.commands.checkpoint import command as checkpoint
from ptdmpi.commands.convert import command as convert
from ptdmpi.commands.evaluate import command as evaluate
from ptdmpi.commands.generate import command as generate
from ptdmpi.config import InputError
from ptdmpi.inference.stored import open_model
from tests import _stored


def test_best_is_a_name_of_a_run(tmp_path):
    run = _stored.stored(tmp_path / "run", 50, **_stored.LLAMA)
    path = run / "checkpoints/step-00000007"
    for name in (run / "best", run / "checkpoints/best"):
        for ask in (open_model, examine.newest, examine.checkpoints):
            with pytest.raises(InputError, match="so none is the best; legal: set"):
                ask(name)
    (run / "checkpoints/best").write_text("step-00000007\n")
    for name in (run / "best", run / "checkpoints/best"):
        assert open_model(name).checkpoint == path and examine.checkpoints(name) == [path]
        assert examine.newest(name) == path and directory.named(name) == path


def test_commands_take_it_and_answer_in_one_json(tmp_path):
    """In one process, which is a world of one rank."""
    run = _stored.stored(tmp_path / "run", 257)
    (run / "checkpoints/best").write_text("step-00000007\n")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}\n')
    best = str(run / "best")

    def asked(command, *words: str) -> dict[str, Any]:
        done = CliRunner().invoke(command, [*words, "--json"], catch_exceptions=False)
        found = json.loads(done.stdout)
        assert done.exit_code == 0 and isinstance(found, dict), done.output
        return found

    inspected = asked(checkpoint, "inspect", best)
    assert "step-00000007" in json.dumps(inspected)
    few = ("--prompt", "a", "--max-new-tokens", "2", "--tokenizer", "bytes")
    assert len(asked(generate, best, *few)["samples"]) == 1
    given = ("--tasks", str(tasks), "--tokenizer", "bytes")
    assert asked(evaluate, best, *given)["step"] == 7
    asked(convert, "to-hf", best, str(tmp_path / "hf"))
    assert (tmp_path / "hf/config.json").is_file()
