"""Preference pairs: the same pair in every format gives the same tokens; both answers of a pair are
in one row."""

import json
import sys
from itertools import pairwise

import numpy as np
import pytest

from data_prep.chat.forms import BadConversation
from data_prep.chat.pairs import pair_of
from data_prep.cli import main
from ptdmpi.data.header import PAIRED_VERSION, read_header
from ptdmpi.data.shards import Dataset, map_documents, map_tokens, map_weights, verify

LENGTH = 128
ASKED = [{"role": "user", "content": "2+2?"}]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "five"))
TEXTS = {"chosen": "4", "rejected": "five"}
FORMS = {
    "texts": {"prompt": "2+2?", **TEXTS},
    "orca": {"question": "2+2?", "system": "", **TEXTS},
    "alpaca": {"instruction": "2+2?", "input": "", **TEXTS},
    "messages": {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
    "whole": {"prompt": "2+2?", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2+2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "five"},
    },
    "dialogue": {
        "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2+2?\n\nAssistant: five",
    },
    "dialogue beside": {"prompt": "\n\nHuman: 2+2?\n\nAssistant:", **TEXTS},
}


def shards(monkeypatch, folder, records, *more):
    """Make shards of pairs, and return the header of the only one."""
    folder.mkdir()
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    words = ["ptdmpi-data", "pairs", str(folder / "pairs.jsonl"), "--tokenizer", "bytes"]
    words += ["--seq-length", str(LENGTH), "--output", str(folder / "out"), "--json", *more]
    monkeypatch.setattr(sys, "argv", words)
    main()
    (shard,) = (folder / "out").glob("*.h5")
    return read_header(shard)


@pytest.mark.parametrize("length", [10**21, 10**12, 1, -5])
def test_a_row_has_a_length_that_fits_into_memory(tmp_path, monkeypatch, capsys, length):
    with pytest.raises(SystemExit) as end:
        shards(monkeypatch, tmp_path / "a", [FORMS["texts"]], "--seq-length", str(length))
    assert end.value.code == 2
    assert f"--seq-length {length}; legal: 2 to 268435456" in capsys.readouterr().err
    assert not (tmp_path / "a" / "out").exists()


def test_one_pair_gives_the_same_tokens_in_every_format(tmp_path, monkeypatch):
    expected = None
    for name, record in FORMS.items():
        header = shards(monkeypatch, tmp_path / name.replace(" ", "-"), [record])
        made = [np.array(part(header)) for part in (map_tokens, map_weights, map_documents)]
        expected = expected or made
        for part, known in zip(made, expected, strict=True):
            np.testing.assert_array_equal(part, known, err_msg=name)
    tokens, weights, documents = expected
    spans = list(pairwise(documents))
    answers = [bytes(tokens[a:b][weights[a:b] > 0][:-1].tolist()).decode() for a, b in spans[:2]]
    assert answers == [" 4", " five"]  # each with the end of its document
    assert len(spans) == 4 and not weights[spans[2][0] :].any()  # the padding, and the extra token


def test_a_pair_is_in_one_row_and_shards_say_so(tmp_path, monkeypatch):
    """Pairs that are too long together are left out, and earlier answers do not count."""
    turns = [*ASKED, GOOD, {"role": "user", "content": "sure?"}]
    short = [
        {"prompt": "x" * (n % 9), "chosen": "y" * (n % 7 + 1), "rejected": "z"} for n in range(40)
    ]
    talk = {"prompt": turns, "chosen": [GOOD], "rejected": [BAD]}
    header = shards(monkeypatch, tmp_path / "a", [*short, {"prompt": "x" * 60, **TEXTS}, talk])
    dataset = Dataset(tmp_path / "a" / "out")
    assert header.pairs and dataset.pairs and not verify(header.path)
    starts = map_documents(header).astype(int)
    weights = map_weights(header)
    counts = [weights[first:end].sum() for first, end in pairwise(starts)]
    pairs = 0
    for row in range(0, header.tokens - 1, LENGTH):
        of_row = [n for n, at in zip(counts, starts, strict=False) if row <= at < row + LENGTH]
        assert row in starts
        complete = len(of_row) // 2 * 2
        assert all(of_row[:complete]) and not any(of_row[complete:])
        pairs += complete // 2
    assert pairs == len(short) + 1
    letters = sum(len(pair["chosen"] + pair["rejected"]) for pair in short) + len("4five")
    assert sum(counts) == letters + 2 * 2 * pairs  # a space before each, and an end after it


def test_a_list_of_shards_keeps_that_they_are_pairs(tmp_path, monkeypatch):
    header = shards(monkeypatch, tmp_path / "a", [FORMS["texts"]])
    listed = json.loads((tmp_path / "a/out/tokenize.json").read_text())["shards"]
    assert listed[header.path.name]["pairs"] is True
    chats = {"messages": [*ASKED, GOOD]}
    (tmp_path / "b.jsonl").write_text(json.dumps(chats))
    monkeypatch.setattr(
        sys,
        "argv",
        f"ptdmpi-data chat {tmp_path}/b.jsonl --tokenizer bytes --seq-length 96 "
        f"--output {tmp_path}/b".split(),
    )
    main()
    listed = json.loads((tmp_path / "b/tokenize.json").read_text())["shards"]
    assert all("pairs" not in entry for entry in listed.values())
    assert PAIRED_VERSION == 3 and not Dataset(tmp_path / "b").pairs


@pytest.mark.parametrize(
    "record, message",
    [
        ({"prompt": "q", "answer": "a"}, "no pair of answers: legal are"),
        ({"chosen": "a", "rejected": "b"}, "no prompt: legal are"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, '"chosen" has no answer of its own'),
        ({"prompt": "q", "chosen": [], "rejected": "a"}, '"chosen" is not a list of messages'),
        ({"prompt": "q", "chosen": 3, "rejected": "a"}, '"chosen" is not a list of messages'),
    ],
)
def test_what_is_no_pair_is_refused(record, message):
    with pytest.raises(BadConversation) as caught:
        pair_of(record)
    assert message in str(caught.value)
