"""`ptdmpi-data chat`: what counts of a conversation, by hand; rows, counts, and the training."""

import json
import sys

import pytest

from data_prep.chat.conversations import counted
from data_prep.cli import main
from data_prep.vocabulary import ByteTokenizer, HuggingFaceTokenizer
from ptdmpi.config import InputError
from ptdmpi.data.chat_template import PLAIN, ChatTemplate, find_template
from ptdmpi.data.header import headers_sha256, read_header
from ptdmpi.data.shards import Dataset, map_tokens, map_weights, verify
from tests._runs import loop
from tests.parallel import parallel

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}A: {% generation %}"
    "{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}Q: {{ message.content }}"
    "{% endif %};{% endfor %}"
)
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4 "},
    {"role": "user", "content": "and \u00e9?"},
    {"role": "assistant", "content": "no\nnumber"},
]


def answers_of(template, messages=TURNS):
    text, spans = template.rendered(messages)
    assert text == template.render(messages)
    return [text[start:stop] for start, stop in spans]


def test_what_counts_of_a_conversation_is_each_answer_and_its_end():
    """Each turn of the assistant with the mark that ends it; neither its head nor the line end
    behind it; but spaces in front of an answer. A template's own generation blocks win."""
    chatml = ChatTemplate(CHATML, "chatml")
    assert answers_of(chatml) == ["4 <|im_end|>", "no\nnumber<|im_end|>"]
    plain = ChatTemplate(PLAIN, "plain", {"eos_token": "<|endoftext|>"})
    assert plain.render(TURNS[1:3]) == "user: 2+2?\nassistant: 4 <|endoftext|>\n"
    assert plain.render([], ask=True) == "assistant:"  # no lone space, which no training has
    assert answers_of(plain) == [" 4 <|endoftext|>", " no\nnumber<|endoftext|>"]
    marked = ChatTemplate(MARKED, "marked", {"eos_token": "</s>"})
    assert answers_of(marked) == [" 4 </s>", " no\nnumber</s>"]
    forgets = ChatTemplate("{{ messages[-1].content }}{{ add_generation_prompt }}", "f")
    with pytest.raises(InputError, match="writes the turns before answer 1 differently"):
        forgets.rendered(TURNS[1:3])
    with pytest.raises(InputError, match="says: no system"):
        ChatTemplate("{{ raise_exception('no system') }}", "r").render(TURNS)
    with pytest.raises(InputError, match="chat template of broken"):
        ChatTemplate("{% if %}", "broken").render(TURNS)


def test_tokens_count_by_where_they_begin():
    """Bytes: every byte of an answer, and the end of document as one token."""
    text = "a: \u00e9x<|endoftext|>\n"
    ((ids, starts),) = ByteTokenizer().encode_marked([text])
    assert ids.tolist() == [*"a: \u00e9x".encode(), 256, 10]
    assert starts.tolist() == [0, 1, 2, 3, 3, 4, 5, 18]
    assert counted(starts, [(3, 18)]).tolist() == [False] * 3 + [True] * 4 + [False]


def bpe(folder):
    """Write a tokenizer.json with ChatML's tokens, and its template in the same folder."""
    from tokenizers import AddedToken, Tokenizer

    from data_prep.vocabulary import train_bpe

    folder.mkdir()
    text = " ".join(message["content"] for message in TURNS) + " user assistant system"
    made = Tokenizer.from_str(train_bpe([text * 3], 280)[0])
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    (folder / "tokenizer.json").write_text(made.to_str())
    said = {"chat_template": CHATML, "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder / "tokenizer.json"


def test_tokens_and_template_are_those_of_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    file = bpe(tmp_path / "tok")
    template = find_template(file, None, "")
    assert template.special == {"eos_token": "<|im_end|>", "bos_token": ""}
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=CHATML)
    expected = theirs.apply_chat_template(TURNS, tokenize=True, return_dict=False)
    rendered = template.rendered(TURNS)
    tokenizer = HuggingFaceTokenizer(file)
    ((ids, starts),) = tokenizer.encode_marked([rendered.text])
    assert ids.tolist() == expected
    answers = ids[counted(starts, rendered.answers)]
    assert tokenizer.decode(answers) == "4 <|im_end|>no\nnumber<|im_end|>"
    # names of special tokens in documents are text still
    assert tokenizer.decode(tokenizer.encode(["<|im_end|>"])[0]) == "<|im_end|>"
    assert tokenizer.encode(["<|im_end|>"])[0].size > 1


def run(monkeypatch, capsys, *arguments):
    """The command's table."""
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", "chat", *map(str, arguments), "--json"])
    main()
    return json.loads(capsys.readouterr().out)


def prompts(path, count, answer="ok"):
    lines = [{"prompt": "p" * (n % 7 + 1), "answer": answer * (n % 3 + 1)} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_answers_that_were_cut_away_are_not_counted(tmp_path, monkeypatch, capsys):
    """A conversation has three: the second loses its end, and the third is gone."""
    turns = [{"role": role, "content": 20 * "z"} for role in ("user", "assistant") * 3]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    arguments = (tmp_path / "a.jsonl", "--tokenizer", "bytes", "--seq-length", 110)
    table = run(monkeypatch, capsys, *arguments, "--output", tmp_path / "o")
    assert (table["truncated"], table["answers"]) == (1, 2)
    assert 21 < table["answer_tokens"] < 42


def test_rows(tmp_path, monkeypatch, capsys):
    """Conversations are whole in rows of one length, in a deterministic order; what is too long is
    cut or left out, and counted."""
    lines = prompts(tmp_path / "a.jsonl", 30).read_text().splitlines()
    lines.insert(2, json.dumps({"messages": TURNS}))
    lines.insert(4, json.dumps({"prompt": "q", "answer": "y" * 300}))  # truncated
    lines.insert(6, json.dumps({"prompt": "q" * 300, "answer": "y"}))  # nothing left of its answer
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    arguments = (tmp_path / "a.jsonl", "--tokenizer", "bytes", "--seq-length", 100)
    table = run(monkeypatch, capsys, *arguments, "--output", tmp_path / "o")
    assert (table["documents"], table["truncated"], table["too_long"]) == (32, 1, 1)
    assert table["answers"] == 33 and table["template"].startswith("ptdmpi-data")
    (header,) = Dataset(tmp_path / "o").headers
    tokens = map_tokens(header)
    weights = map_weights(header)
    assert header.row_length == 100 and header.tokens % 100 == 1
    assert table["answer_tokens"] == int(weights.sum()) and verify(header.path) == []
    offsets = Dataset(tmp_path / "o").documents(0)
    texts = []
    labels = []
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        assert start // 100 == (stop - 1) // 100, "no document goes on in the next row"
        if (tokens[start:stop] != 256).any():
            texts.append(ByteTokenizer().decode(tokens[start:stop]))
            labels.append(ByteTokenizer().decode(tokens[start:stop][weights[start:stop] > 0]))
        else:
            assert not weights[start:stop].any()
    assert len(texts) == 32 and texts[0] == "user: p\nassistant: ok<|endoftext|>\n"
    assert labels[0] == " ok<|endoftext|>"
    assert " 4 <|endoftext|> no\nnumber<|endoftext|>" in labels
    assert sum(text.startswith("user: q\n") and len(text) == 100 for text in texts) == 1
    again = run(monkeypatch, capsys, *arguments, "--output", tmp_path / "again")
    assert {**again, "seconds": 0} == {**table, "seconds": 0}
    assert header.path.read_bytes() == (tmp_path / "again" / header.path.name).read_bytes()
    # done already: nothing is made, and the table is the same
    assert run(monkeypatch, capsys, *arguments, "--output", tmp_path / "o")["documents"] == 32
    dropped = run(monkeypatch, capsys, *arguments, "--output", tmp_path / "d", "--too-long", "drop")
    assert (dropped["truncated"], dropped["too_long"], dropped["documents"]) == (0, 2, 31)
    split = ("--valid-output", tmp_path / "sv", "--valid-fraction", 0.3, "--shard-tokens", 200)
    table = run(monkeypatch, capsys, *arguments, "--output", tmp_path / "s", *split)
    assert table["valid_tokens"] > 100
    assert len(Dataset(tmp_path / "s").headers) > 1
    assert Dataset(tmp_path / "s").token_count == table["train_tokens"]
    weightless = read_header(header.path)
    assert headers_sha256([header]) == headers_sha256([weightless])


BAD = {
    "[1]": "no JSON object",
    '{"prompt": "x"}': "no conversation: legal are",
    '{"messages": []}': "not a list of messages",
    '{"messages": [{"role": "user"}]}': "a message is not",
    '{"messages": [1]}': "a message is not",
    '{"messages": [{"role": "user", "content": "x"}]}': "no turn of the role 'assistant'",
    '{"prompt": "<|endoftext|>", "answer": "x"}': "would become a special token",
    '{"messages": [{"role": "<|endoftext|>", "content": "x"}]}': "would become a special token",
    '{"messages": [{"role": "assistant", "content": "x", "tool": [{"<|endoftext|>": 1}]}]}': (
        "would become a special token"
    ),
    '{"prompt": "\\ud800", "answer": "x"}': "a lone surrogate",
    '{"messages": [{"role": "assistant", "content": "x", "name": "\\ud800"}]}': "a lone surrogate",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_lines_are_named_or_counted(tmp_path, monkeypatch, capsys, line):
    good = prompts(tmp_path / "a.jsonl", 3).read_text()
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n")
    arguments = (tmp_path / "a.jsonl", "--tokenizer", "bytes", "--seq-length", 64)
    arguments += ("--output", tmp_path / "o")
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, capsys, *arguments)
    error = capsys.readouterr().err
    assert (stopped.value.code == 2 and f"a.jsonl:4: {BAD[line]}" in error) or BAD[line] in error
    assert error.count("\n") == 1 and not (tmp_path / "o").exists()
    assert run(monkeypatch, capsys, *arguments, "--skip-bad-lines")["bad_lines"] == 1


@pytest.mark.parametrize(
    ("prompt", "template"),
    [
        ("x" * 99, "{% for one in messages %}{{ one.content }}{% endfor %}"),
        ("x", "{% for one in messages if one.role == 'user' %}{{ one.content }}{% endfor %}"),
    ],
    ids=["too long", "no answer written"],
)
def test_conversations_of_which_nothing_counts_are_left_out(
    tmp_path, monkeypatch, capsys, prompt, template
):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "y"}))
    (tmp_path / "t.jinja").write_text(template)
    arguments = (tmp_path / "a.jsonl", "--tokenizer", "bytes", "--seq-length", 64)
    arguments += ("--template", tmp_path / "t.jinja", "--output", tmp_path / "o")
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, capsys, *arguments)
    errors = f"{stopped.value.code} {capsys.readouterr().err}"
    assert "has no token to train on" in errors
    assert ("(1 too long); legal: a larger --seq-length" in errors) == (len(prompt) > 64)
    assert not (tmp_path / "o").exists()


@parallel(ranks=[2])
def test_training_counts_answers_alone(comm, tmp_path):
    """At d = 2: the loss is that of answers, over their number, whatever the layout; validation,
    too; and conversations of another row length, or that would see each other, are refused."""
    changes = {
        "run.steps": 2,
        "run.reproducible": True,
        "model.seq_length": 100,
        "batch.global_size": 4,
        "data.document_boundaries": True,
        "data.valid": str(tmp_path / "train"),
    }
    if comm.rank == 0:
        from data_prep.chat.pack import ChatOptions, make_chat_shards
        from data_prep.corpus import OutputOptions

        prompts(tmp_path / "a.jsonl", 60)
        options = ChatOptions((str(tmp_path / "a.jsonl"),), "bytes", 100)
        make_chat_shards(options, OutputOptions(tmp_path / "train"))
    comm.Barrier()
    seen = []
    for where in ({"parallel.data": 2}, {"parallel.pipeline": 2}):
        changes |= {"run.dir": str(tmp_path / f"run-{len(seen)}"), "parallel.data": 1} | where
        with loop(comm, tmp_path, changes) as made:
            batches = next(made.feed.steps(0))
            for batch in batches:
                assert batch.samples.shape == (1,)
                numbers, samples = made.feed.course.order.locate(batch.samples)
                weights = made.feed.source.train[0].weights(0)
                start = int(samples[0]) * 100
                assert (batch.weights[0] == weights[start + 1 : start + 101]).all()
                assert batch.documents is not None and numbers[0] == 0
            made.run()
        records = (tmp_path / f"run-{len(seen)}" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(record) for record in records]
        keys = ("loss", "grad_norm", "validation_loss")
        seen.append([[record.get(key) for key in keys] for record in records])
    assert seen[0] == seen[1] and any(validation for _, _, validation in seen[0])
    for wrong, why in (
        ({"model.seq_length": 64}, "packed in rows of 100 tokens"),
        ({"data.document_boundaries": False}, "must not see each other"),
    ):
        with pytest.raises(InputError, match=why), loop(comm, tmp_path, changes | wrong):
            pass
