"""Scores of log-likelihoods and of generated texts, without a model."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.vocabulary import ByteTokenizer
from ptdmpi.config import InputError
from ptdmpi.evaluate import tasks
from ptdmpi.evaluate.answers import compiled, cut, extract, majority, matches, normalise
from ptdmpi.evaluate.choice import accuracies, continuation
from ptdmpi.evaluate.perplexity import windows
from ptdmpi.evaluate.scoring import Score
from ptdmpi.evaluate.tasks import TaskItem
from ptdmpi.inference.text import Text

BYTES = Text(ByteTokenizer(), (), frozenset({256}), 256)
LLAMA_LIKE = Text(ByteTokenizer(), (1,), frozenset({2}), 2)


@given(st.integers(0, 60), st.integers(1, 12), st.data())
def test_windows_score_every_token_once_with_the_longest_context(tokens, seq_length, data):
    stride = data.draw(st.integers(1, seq_length))
    scored = []
    for shard, first, end, begin in windows(tokens, 3, seq_length, stride):
        assert shard == 3 and 0 <= first < begin < end <= tokens
        assert end - 1 - first <= seq_length  # inputs
        assert begin - first >= min(begin, seq_length - stride + 1)
        scored += range(begin, end)
    assert scored == list(range(1, tokens))


def test_windows_without_overlap_are_those_of_training():
    assert [(a, end, begin) for _, a, end, begin in windows(25, 0, 8, 8)] == [
        (0, 9, 1),
        (8, 17, 9),
        (16, 25, 17),
    ]


def scores(*pairs):
    return [Score(value, tokens, False) for value, tokens in pairs]


def test_accuracies_by_every_measure():
    # right: the second choice. Characters 1 and 4, tokens 1 and 2.
    item = TaskItem("c", ("x", "yyyy"), 1)
    cases = {
        "plain": [(-4, 1), (-9, 1), (-3, 2), (0, 2)],
        "per_character": [(-2, 1), (-9, 1), (-7, 2), (-7, 2)],  # -1.75 above -2; per token -3.5
        "per_token": [(-2, 1), (-2, 1), (-3, 2), (-3, 2)],
        "against_neutral": [(-1, 1), (-1, 1), (-9, 2), (-12, 2)],
    }
    for measure, pairs in cases.items():
        shares = accuracies([item], scores(*pairs))
        key = "accuracy" if measure == "plain" else f"accuracy_{measure}"
        assert shares[key] == 1.0, measure
    assert accuracies([item], scores(*cases["against_neutral"]))["accuracy"] == 0.0
    assert accuracies([item], scores(*cases["per_character"]))["accuracy_per_token"] == 0.0
    two = accuracies([item, item], scores(*cases["plain"], *cases["against_neutral"]))
    assert two["accuracy"] == 0.5 and two["standard_error"] == pytest.approx(0.25**0.5 / 2**0.5)
    tie = accuracies([item], scores((-1, 1), (0, 1), (-1, 1), (0, 1)))
    assert tie["accuracy"] == 0.0


def test_continuations():
    request = continuation(BYTES, "ab ", "cd")
    assert bytes(request.ids) == b"ab cd" and request.first == 2  # the space belongs to the word
    request = continuation(BYTES, "", " cd")
    assert request.ids == [256, *b" cd"] and request.first == 1
    request = continuation(LLAMA_LIKE, "", "cd")
    assert request.ids == [1, *b"cd"] and request.first == 1
    request = continuation(LLAMA_LIKE, "ab", " cd")
    assert request.ids == [1, *b"ab cd"] and request.first == 3
    assert BYTES.prompt("") == [256] and LLAMA_LIKE.prompt("") == [1]


@pytest.mark.parametrize(
    "answer, expected",
    [
        (" The Eiffel  Tower. ", "eiffel tower"),
        ("an apple a day", "apple day"),
        ("42.", "42"),
        ("THE", "the"),
        ("?!", "?!"),
        ("-8", "-8"),
        (" +1,234.50.", "1234.50"),
        (".5", ".5"),
        ("1-2", "12"),
        ("", ""),
        ("theatre", "theatre"),
    ],
)
def test_normalise(answer, expected):
    assert normalise(answer) == expected


def test_extract():
    assert cut("Paris\nQ: next", ["\n", "Q"]) == "Paris"
    assert extract(" 12 so\n#### 9", ["Q:"], compiled(r"-?\d+")) == "9"
    assert extract("the answer is (B) or (C)", [], compiled(r"\((\w)\)")) == "C"
    assert extract("none", [], compiled(r"\d")) == ""
    with pytest.raises(InputError, match=r"--extract \(: "):
        compiled("(")


def test_majority_and_matches():
    assert majority(["b", "a", "a", "b", ""]) == "b"  # of equal ones the first
    assert majority(["", ""]) == ""
    items = [TaskItem("q", answers=("Paris", "city of light")), TaskItem("q", answers=("7",))]
    shares = matches(items, [["the Paris", "Rome", "paris."], ["6", "6", "7"]])
    assert shares["exact_match"] == 0.5 and shares["exact_match_single"] == 0.5
    assert shares["samples"] == 3 and shares["items"] == 2


def test_tasks(tmp_path):
    file = tmp_path / "t.jsonl"

    def read(*records):
        file.write_text("\n".join(map(json.dumps, records)))
        return tasks.read(file)

    a, b = read(
        {"context": "Q", "choices": ["x", "y"], "answer": 1},
        {"context": "R", "choices": ["x", "y"], "answer": 0, "id": 7},
    )
    assert tasks.with_shots([a, b], [a, b], 1, " ") == ["R x\n\nQ", "Q y\n\nR"]
    assert tasks.with_shots([a], [b], 0, " ") == ["Q"]
    for record, message in (
        ([1], "no JSON object with a text in the field 'context'"),
        ({"context": "Q"}, "neither 'choices'"),
        ({"context": "Q", "choices": ["x"]}, "'answer' = None"),
        ({"context": "Q", "choices": ["x"], "answer": True}, "'answer' = True"),
        ({"context": "Q", "choices": ["x"], "answer": -1}, "legal: 0 to 0"),
        ({"context": "Q", "choices": [], "answer": 0}, "'choices' is empty"),
        ({"context": "Q", "choices": ["x", " "], "answer": 0}, "not empty"),
        ({"context": "Q", "answers": "x"}, "'answers' must be a list"),
        ({"context": "Q", "answers": ["x"], "choices": ["x"], "answer": 0}, "legal: one of them"),
    ):
        with pytest.raises(InputError, match=rf"t.jsonl:1: .*{message}"):
            read(record)
    with pytest.raises(InputError, match=r"mixes multiple choice with answers"):
        read({"context": "Q", "choices": ["x"], "answer": 0}, {"context": "Q", "answers": ["x"]})
    with pytest.raises(InputError, match=r"holds no item"):
        read()
    with pytest.raises(InputError, match=r"t.jsonl:1: a lone UTF-16 surrogate"):
        read({"context": "\ud800", "answers": ["x"]})
    lines = [{"context": f"a{end}b", "answers": ["x"]} for end in "\u2028\x85"]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    first, second = tasks.read(file)
    assert (first.context, second.context) == ("a\u2028b", "a\x85b")
    assert second.place == f"{file}:2"
    file.write_text("{\n")
    with pytest.raises(InputError, match=r"t.jsonl:1: not a JSON line"):
        tasks.read(file)
    file.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"t.jsonl:1: not a JSON line"):
        tasks.read(file)
    file.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"is not UTF-8"):
        tasks.read(file)
    with pytest.raises(InputError, match=r"No such file"):
        tasks.read(tmp_path / "none")
