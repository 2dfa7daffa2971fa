"""Prompts from a file, and a conversation."""

import io
import json

import pytest
from click.testing import CliRunner

from ptdmpi.comm.world import World
from ptdmpi.commands.generate import command
from ptdmpi.config import InputError
from ptdmpi.generate.chat import Chat
from ptdmpi.generate.prompts import read_prompts
from ptdmpi.generate.write import Writer, write_file
from tests import _stored
from tests.parallel import parallel

OPTIONS = {
    "layout": None,
    "precision": None,
    "ema": False,
    "adapter": None,
    "tokenizer": "bytes",
    "temperature": 1.0,
    "top_k": None,
    "top_p": 1.0,
    "seed": 3,
    "samples": 2,
    "max_new_tokens": 6,
    "batch": 2,
}
LINES = ["one", "two words", "", "é", "a somewhat longer line"]


def _run(comm, folder):
    if comm.rank == 0:
        _stored.stored(folder / "run", 257, seq_length=32)
        (folder / "a.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    comm.Barrier()
    return folder / "run"


@parallel(ranks=[2])
def test_a_file_is_written_in_its_order_whatever_the_batch_and_layout(comm, tmp_path):
    run, world = _run(comm, tmp_path), World(comm)
    by_batch = {}
    for batch, layout in ((1, "d=2"), (2, "d=2"), (50, "t=2"), (3, "p=2")):
        options = {**OPTIONS, "batch": batch, "layout": layout, "from_file": tmp_path / "a.txt"}
        lines = list(write_file(run, world, **options))
        assert bool(lines) == (comm.rank == 0)
        by_batch[batch] = [json.loads(line) for line in lines]
    assert by_batch[1] == by_batch[2] == by_batch[50] == by_batch[3]
    if comm.rank == 0:
        texts = [line for line in LINES if line for _ in range(2)]
        assert [sample["prompt"] for sample in by_batch[1]] == texts
        assert by_batch[1][0]["ids"] != by_batch[1][1]["ids"]


@pytest.fixture
def run(tmp_path):
    return _stored.stored(tmp_path / "run", 257, seq_length=32)


def _invoke(run, *words, **more):
    return CliRunner().invoke(command, [str(run), "--tokenizer", "bytes", *words], **more)


def test_the_command_takes_json_lines_and_keeps_their_fields(run, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "id": 7}\n\n{"id": 8, "prompt": "b\\u2028c", "text": "old"}\n')
    result = _invoke(run, "--prompts", str(file), "--batch", "1")
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["prompt"], first["id"], second["id"]) == ("a", 7, 8)
    assert second["prompt"] == "b\u2028c" and second["text"] != "old"
    alone = _invoke(run, "--prompt", "a", "--json")
    assert json.loads(alone.stdout)["samples"][0]["ids"] == first["ids"]


def test_what_is_asked_may_be_the_average_of_the_weights(run, tmp_path):
    both = _stored.stored(tmp_path / "both", 257, average=0.2, seq_length=32)
    other = _stored.stored(tmp_path / "other", 257, factor=0.2, seq_length=32)

    def ids(path, *words):
        result = json.loads(_invoke(path, "--prompt", "a", "--json", *words).stdout)
        return result["samples"][0]["ids"]

    assert ids(both, "--ema") == ids(other) != ids(run)
    assert ids(both) == ids(run)
    refused = _invoke(run, "--prompt", "a", "--ema")
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "holds no prompt"),
        ('{"prompt": 1}', "a.jsonl:1: no JSON object with a text in the field 'prompt'"),
        ('{"prompt": "a"}\n[', "a.jsonl:2: not a JSON line"),
        ("[" * 100_000, "a.jsonl:1: not a JSON line"),
        ('{"prompt": "a"}\n{"prompt": "' + "x" * 40 + '"}', "a.jsonl:2: a prompt of 40 tokens"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(run, tmp_path, content, message, capfd):
    (tmp_path / "a.jsonl").write_text(content)
    result = _invoke(run, "--prompts", str(tmp_path / "a.jsonl"))
    assert result.exit_code == 2 and not result.stdout
    assert message in (result.stderr + capfd.readouterr().err).strip().splitlines()[-1]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--prompts", "a", "--prompt", "b"], "--prompt and --prompts: give one of them"),
        (["--prompts", "a", "--chat"], "--prompts and --chat: give one of them"),
        (["--chat", "--json"], "--json cannot be combined with --chat"),
        (["--chat", "--samples", "2"], "--samples 2: --chat gives one answer to each line"),
    ],
)
def test_what_does_not_go_together_is_refused(run, words, message):
    with pytest.raises(InputError, match=message):
        _invoke(run, *words, catch_exceptions=False)


def test_what_is_no_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\n\xff")
    with pytest.raises(InputError, match="not UTF-8: invalid start byte at byte 2"):
        read_prompts(tmp_path / "a.txt")


@parallel(ranks=[1, 2])
def test_a_conversation_sees_what_was_said_within_the_models_length(comm, tmp_path):
    run, world = _run(comm, tmp_path), World(comm)
    options = {**OPTIONS, "layout": f"t={comm.size}"}
    writer, out = Writer(run, world, options), io.StringIO()
    chat = Chat(writer, out)
    seen, asked = [], iter(["hi", "you there", "x" * 40, "caf\udce9", "end"])
    within = chat._within

    def watched(line):
        ids = within(line)
        seen.append(writer.text.decode(ids))
        return ids

    chat._within = watched
    assert chat.talk(lambda: next(asked, None)) == "end of input"
    second, third, last = seen[1:]
    assert seen[0] == "hi\n" and second.startswith("hi\n") and second.endswith("you there\n")
    assert third == "x" * 25 + "\n"  # 32 tokens, of which 6 are the answer's
    assert last.endswith("end\n") and len(seen) == 4
    answers = chat.said[1::2]
    if writer.model.decides:  # what was printed piece by piece is all of it
        printed = "".join(a if a.endswith("\n") else a + "\n" for a in answers)
        assert out.getvalue().endswith(printed)
    else:
        assert not out.getvalue()


TEMPLATE = (
    "{% for one in messages %}{{ one.role[0] }}:{{ one.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@parallel(ranks=[1, 2])
def test_a_conversation_is_written_as_the_models_template_has_it(comm, tmp_path):
    run, world = _run(comm, tmp_path), World(comm)
    if comm.rank == 0:
        (run / "hugging_face").mkdir()
        keys = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
        (run / "hugging_face/tokenizer_config.json").write_text(json.dumps(keys))
    comm.Barrier()
    writer = Writer(run, world, {**OPTIONS, "layout": f"t={comm.size}", "max_new_tokens": 3})
    chat, seen = Chat(writer, io.StringIO()), []
    within = chat._within
    chat._within = lambda line: seen.append(within(line)) or seen[-1]
    asked = iter(["hi", "so <|endoftext|>", "you", "x" * 40 + "\u00e9"])
    chat.talk(lambda: next(asked, None))
    first, second, last = seen  # what names a special token is not taken
    eod = writer.text.eod
    assert first == [*b"u:hi", eod, *b"a:"]
    assert second[: len(first)] == first and second[-7:] == [*b"u:you", eod, *b"a:"][-7:]
    assert len(last) == 29 and last[:3] == [*b"u:x"] and last[-4:-2] == [0xA9, eod]


def test_ctrl_c_ends_a_conversation_in_one_line(run, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("ptdmpi.generate.chat.read_line", interrupted)
    result = _invoke(run, "--chat")
    assert result.exit_code == 0
    assert result.stderr.strip().splitlines()[-1].endswith("the conversation ends: Ctrl-C")
    writer = Writer(run, World(), OPTIONS)
    chat = Chat(writer)
    chat.answer = lambda line: interrupted()  # while it answers
    assert chat.talk(lambda: "line") == "Ctrl-C"


def test_a_conversation_through_a_pipe(run):
    result = _invoke(run, "--chat", "--max-new-tokens", "3", input="hello\nagain\n")
    assert "a likely continuation of it (the model has no template)" in result.stderr
    assert result.exit_code == 0 and "the conversation ends: end of input" in result.stderr
    assert result.stdout.count("\n") >= 2
    ended = _invoke(run, "--chat", "--max-new-tokens", "3", input="hello\n/quit\nagain\n")
    assert ended.exit_code == 0 and "the conversation ends: /quit" in ended.stderr
    refused = _invoke(run, "--chat", "--max-new-tokens", "32")
    assert refused.exit_code == 2


def test_the_first_line_of_a_conversation_names_the_template(run):
    (run / "hugging_face").mkdir()
    keys = json.dumps({"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"})
    (run / "hugging_face/tokenizer_config.json").write_text(keys)
    result = _invoke(run, "--chat", "--max-new-tokens", "3", input="hello\n")
    assert "answers each line in the format of its chat template" in result.stderr


def test_a_torn_character_waits(run):
    chat = Chat(Writer(run, World(), OPTIONS), out := io.StringIO())
    for text in ("a", "a\ufffd", "a\u00e9"):
        chat._show(text)
    assert out.getvalue() == "aé"
