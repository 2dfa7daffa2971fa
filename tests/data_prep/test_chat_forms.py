"""The forms of conversations: the same conversation in each gives the same tokens."""

import gzip
import json
import sys

import numpy as np
import pytest

from data_prep.chat.forms import BadConversation, ChatFields, messages_of
from data_prep.cli import main
from ptdmpi.data.header import read_header
from ptdmpi.data.shards import map_tokens, map_weights

SYSTEM = {"role": "system", "content": "be brief"}
TURNS = [("2+2?", "4"), ("and 3+3?", "six")]
MESSAGES = [SYSTEM] + [
    {"role": role, "content": text}
    for turn in TURNS
    for role, text in zip(("user", "assistant"), turn, strict=True)
]
OPENAI = {"messages": MESSAGES}
SHAREGPT = {
    "id": "x1",
    "conversations": [{"from": "system", "value": "be brief"}]
    + [
        {"from": speaker, "value": text}
        for turn in TURNS
        for speaker, text in zip(("human", "gpt"), turn, strict=True)
    ],
}
ALPACA = {
    "instruction": "and",
    "input": "3+3?",
    "output": "six",
    "system": "be brief",
    "history": [list(TURNS[0])],
}
FORMS = {
    "openai": OPENAI,
    "parts": {
        "messages": [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            for message in MESSAGES
        ]
    },
    "sharegpt": SHAREGPT,
    "system beside": {"system": "be brief", "conversations": SHAREGPT["conversations"][1:]},
    "alpaca": {**ALPACA, "instruction": "and 3+3?", "input": ""},
    "trl": {"prompt": MESSAGES[:-1], "completion": MESSAGES[-1:]},
}
PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def shards(monkeypatch, path, output, *more):
    """Make shards of a file; return their tokens and weights."""
    words = ["ptdmpi-data", "chat", str(path), "--tokenizer", "bytes", "--seq-length", "96"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(output), "--json", *more])
    main()
    (shard,) = output.glob("*.h5")
    header = read_header(shard)
    return np.array(map_tokens(header)), np.array(map_weights(header))


def test_one_conversation_gives_the_same_tokens_in_every_form(tmp_path, monkeypatch):
    made = {}
    for name, record in FORMS.items():
        path = tmp_path / f"{name.replace(' ', '-')}.jsonl"
        path.write_text(json.dumps(record) + "\n")
        made[name] = shards(monkeypatch, path, tmp_path / name.replace(" ", "-"))
    for name, (tokens, weights) in made.items():
        np.testing.assert_array_equal(tokens, made["openai"][0], err_msg=name)
        np.testing.assert_array_equal(weights, made["openai"][1], err_msg=name)
    assert made["openai"][1].sum() == len(" 4") + len(" six") + 2  # and each end of document


def test_instructions_and_pairs_become_turns():
    fields = ChatFields()
    turns = messages_of(ALPACA, fields)
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("system", "be brief"),
        ("user", "2+2?"),
        ("assistant", "4"),
        ("user", "and\n3+3?"),
        ("assistant", "six"),
    ]
    assert messages_of({"instruction": "q", "input": "", "output": "a"}, fields) == PAIR
    for names in (("prompt", "answer"), ("prompt", "completion"), ("prompt", "response")):
        assert messages_of(dict(zip(names, "qa", strict=True)), fields) == PAIR
    assert messages_of({"question": "q", "answer": "a"}, fields) == PAIR
    assert messages_of({"input": "q", "output": "a"}, fields) == PAIR
    own = ChatFields(prompt="ask", answer="say")
    assert messages_of({"ask": "q", "say": "a", "prompt": "x", "response": "y"}, own) == PAIR


def test_arrays_of_json_and_compressed_ones_are_read_as_lines(tmp_path, monkeypatch):
    records = [OPENAI, SHAREGPT, {"question": "q", "answer": "a"}]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(map(json.dumps, records)))
    array = tmp_path / "array.json"
    array.write_text(json.dumps(records, indent=2))
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(array.read_bytes()))
    misnamed = tmp_path / "misnamed.json"  # lines under the other name, as some hubs have them
    misnamed.write_text(lines.read_text())
    expected, weights = shards(monkeypatch, lines, tmp_path / "of-lines")
    for path in (array, packed, misnamed):
        tokens, counted = shards(monkeypatch, path, tmp_path / f"of-{path.name}")
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_array_equal(counted, weights)


def test_an_answer_of_weight_0_is_context_only(tmp_path, monkeypatch):
    path = tmp_path / "weighted.jsonl"
    first, *rest = [dict(message) for message in MESSAGES[1:]]
    rest[0]["weight"] = 0
    path.write_text(json.dumps({"messages": [first, *rest]}))
    _, weights = shards(monkeypatch, path, tmp_path / "out")
    assert weights.sum() == len(" six") + 1


@pytest.mark.parametrize(
    "record, message",
    [
        ({"text": "a"}, "no conversation: legal are"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "is from 'narrator'; legal are"),
        ({"conversations": []}, '"conversations" is not a list of messages'),
        ({"instruction": "q", "input": 3, "output": "a"}, '"input" is not a text'),
        ({"instruction": "q", "history": ["x"], "output": "a"}, '"history" is not a list'),
        ({"system": "x", "messages": MESSAGES}, 'both "system" and the first message'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of a"),
        ({"messages": [{"role": "user", "content": None}]}, 'not {"role": TEXT, "content": TEXT}'),
    ],
)
def test_what_is_no_conversation_is_refused(record, message):
    with pytest.raises(BadConversation) as caught:
        messages_of(record, ChatFields())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1, 2", "array.json: not JSON"),
        ('[{"prompt": "q", "answer": "a"}, 3]', "array.json:2: no JSON object"),
        ("[]", "the corpus has no token to train on"),
    ],
)
def test_broken_arrays_are_named(tmp_path, monkeypatch, capsys, text, message):
    path = tmp_path / "array.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        shards(monkeypatch, path, tmp_path / "out")
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not list((tmp_path / "out").glob("*.h5"))


@pytest.mark.parametrize("text", ['[{"prompt": "q", "answer": "a"}]', "[\n3]"])
def test_an_array_in_a_file_of_lines_is_named(tmp_path, monkeypatch, capsys, text):
    path = tmp_path / "array.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit):
        shards(monkeypatch, path, tmp_path / "out")
    assert "a file with a JSON array must end in .json" in capsys.readouterr().err
