"""First tokens of words, for each kind of tokenizer.json; special tokens; missing files."""

import hashlib
import json
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ptdmpi.config import InputError
from ptdmpi.data.words import read_vocabulary
from tests._texts import byte_shards, text, tokens_of

TEXT = "He walked, un-hurried (1,024 steps) to caf\u00e9_2; don't!\n\tdone"


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<mask>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text(3000, 1), "walked don't "], trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    characters = sorted({c for c in TEXT if not c.isspace()})
    names += [*characters, *(f"##{c}" for c in characters)]
    model = models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(names[:5])
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    pieces = sorted({c for c in TEXT if not c.isspace()} | {"\u2581", "\u2581He", "walk", "ed"})
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), *((p, -(len(p) ** 0.5)) for p in pieces)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def word_level() -> tokenizers.Tokenizer:
    words = re.findall(r"\w+|[^\w\s]", TEXT)
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "He"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def word_ends() -> tokenizers.Tokenizer:
    """Characters, the last one of a word marked, as in the first GPT."""
    characters = sorted({c for c in TEXT if not c.isspace()})
    ids = {c: i for i, c in enumerate([*characters, *(f"{c}</w>" for c in characters)])}
    model = models.BPE(vocab=ids, merges=[], end_of_word_suffix="</w>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def put(dataset, content: str) -> None:
    """Write the tokenizer.json from which the shards were made."""
    (dataset.directory / "tokenizer.json").write_text(content)
    dataset.tokenizer_sha256 = hashlib.sha256(content.encode()).hexdigest()


def vocabulary_of(tmp_path, tokenizer, whole_words: bool = True):
    dataset = byte_shards(tmp_path / "shards", [["some text"]], "tok.json")
    if tokenizer is not None:
        put(dataset, tokenizer.to_str())
    # the reader takes their size from the shards
    dataset.vocab_size = 400
    dataset.eod_id = 399
    return read_vocabulary(dataset, whole_words)


@pytest.mark.parametrize("make", [byte_level, word_piece, unigram, word_level, word_ends])
def test_tokens_of_a_word_belong_together(tmp_path, make):
    tokenizer = make()
    vocabulary = vocabulary_of(tmp_path, tokenizer)
    encoding = tokenizer.encode(TEXT, add_special_tokens=False)
    starts = vocabulary.word_starts(np.array(encoding.ids))
    begins = {begin for (begin, _), start in zip(encoding.offsets, starts, strict=True) if start}
    # WordPiece has its own rule: an underscore is punctuation there
    rule = r"[^\W_]+" if make is word_piece else r"\w+"
    words = [match.span() for match in re.finditer(rule, TEXT)]
    for begin, end in words:
        assert not any(begin < at < end for at in begins), TEXT[begin:end]
        before = TEXT[begin - 1]  # a blank or an apostrophe may be in the same token
        assert begin in begins or (before in " '" and begin - 1 in begins), TEXT[begin:end]
    assert starts.any() and (make is word_level or not starts.all())


def test_bytes_need_no_file(tmp_path):
    dataset = byte_shards(tmp_path / "shards", [["x"]])
    vocabulary = read_vocabulary(dataset, True)
    assert (vocabulary.size, vocabulary.drawn) == (260, 257)
    assert (vocabulary.begin, vocabulary.separator, vocabulary.mask) == (257, 258, 259)
    starts = vocabulary.word_starts(tokens_of("a bc, \u00e9t\u00e9_1"))
    assert np.flatnonzero(starts).tolist() == [0, 1, 2, 4, 5, 6, 13]
    assert vocabulary.word_starts(np.zeros(0, dtype=np.int64)).shape == (0,)


def test_special_tokens_are_found_or_added(tmp_path):
    vocabulary = vocabulary_of(tmp_path, word_piece())
    assert (vocabulary.begin, vocabulary.separator, vocabulary.mask) == (1, 2, 3)
    assert vocabulary.size == vocabulary.drawn == 400
    (tmp_path / "b").mkdir()
    vocabulary = vocabulary_of(tmp_path / "b", byte_level())
    assert (vocabulary.begin, vocabulary.separator, vocabulary.size) == (400, 401, 402)
    assert vocabulary.mask == byte_level().token_to_id("<mask>")
    assert not vocabulary.inner[vocabulary.mask]


def test_without_a_tokenizer_every_token_is_a_word_only_if_asked(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer\.json: No such file.*whole_words = false"):
        vocabulary_of(tmp_path, None)
    (tmp_path / "b").mkdir()
    vocabulary = vocabulary_of(tmp_path / "b", None, whole_words=False)
    assert vocabulary.word_starts(np.arange(9)).all() and vocabulary.size == 403


def test_odd_tokens_are_words_of_their_own(tmp_path):
    dataset = byte_shards(tmp_path / "shards", [["some text"]], "tok.json")
    tree = {"model": {"vocab": {"": 0, "<0xyz>": 1, "\u2581a": 2, "b": 3, "<0xC3>": 4, "c": 9999}}}
    put(dataset, json.dumps(tree))
    starts = read_vocabulary(dataset, True).word_starts(np.array([2, 3, 4, 0, 1, 2]))
    assert starts.tolist() == [True, False, False, True, True, True]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"model": 3}',
        json.dumps({"model": {"vocab": 3}}),
        json.dumps({"model": {"vocab": {"a": "b"}}}),
        json.dumps({"model": {"vocab": [3]}}),
        json.dumps({"model": {"vocab": {}}, "added_tokens": [{"id": 3}]}),
    ],
)
def test_other_files_are_refused(tmp_path, content):
    dataset = byte_shards(tmp_path / "shards", [["some text"]], "tok.json")
    put(dataset, content)
    with pytest.raises(InputError, match=r"is not a tokenizer\.json"):
        read_vocabulary(dataset, True)


@pytest.mark.parametrize("whole_words", [True, False])
def test_another_tokenizer_beside_the_shards_is_refused(tmp_path, whole_words):
    dataset = byte_shards(tmp_path / "shards", [["some text"]], "tok.json")
    put(dataset, byte_level().to_str())
    read_vocabulary(dataset, whole_words)
    with (dataset.directory / "tokenizer.json").open("a") as file:
        file.write(" ")
    words = (
        r"tokenizer\.json: has sha256 .* but the shards record .*; replace it by the file tok\.json"
    )
    with pytest.raises(InputError, match=words):
        read_vocabulary(dataset, whole_words)
    dataset.tokenizer = "tok.model"  # these shards record the hash of another file
    read_vocabulary(dataset, whole_words)
