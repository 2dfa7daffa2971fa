"""Tokenizers of extra libraries: the tokens are theirs; skipped where a library is missing."""

import hashlib
import json
import sys

import numpy as np
import pytest

from data_prep import other_tokenizers
from data_prep.cli import main
from data_prep.vocabulary import load_tokenizer
from ptdmpi.config import InputError
from ptdmpi.data.shards import Dataset, map_tokens

TEXTS = ["Hello, wörld <|endoftext|> </s> 日本", "a  b\n\nc", "the shard of the token " * 30]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", *map(str, arguments)])
    main()


def tokenized(monkeypatch, tmp_path, tokenizer):
    """Ids of all documents, without eod."""
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    output = tmp_path / "out"
    run(monkeypatch, "tokenize", tmp_path / "x.jsonl", "--output", output,
        "--tokenizer", tokenizer, "--quiet")  # fmt: skip
    dataset = Dataset(output)
    ids = map_tokens(dataset.headers[0])
    ends = np.flatnonzero(ids == dataset.eod_id)
    assert ends.size == len(TEXTS)
    return [part[part != dataset.eod_id].tolist() for part in np.split(ids, ends[:-1] + 1)]


def test_sentencepiece(tmp_path, monkeypatch, capsys):
    sentencepiece = pytest.importorskip("sentencepiece", reason="the extra `corpus` is missing")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "m"), vocab_size=300,
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    model = tmp_path / "m.model"
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert tokenized(monkeypatch, tmp_path, model) == theirs.encode(TEXTS, out_type=int)
    dataset = Dataset(tmp_path / "out")
    assert dataset.eod_id == theirs.eos_id()
    assert dataset.tokenizer_sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
    capsys.readouterr()
    run(monkeypatch, "inspect", tmp_path / "out")
    assert "Hello, w" in capsys.readouterr().out


def test_no_model_of_sentencepiece(tmp_path):
    pytest.importorskip("sentencepiece", reason="the extra `corpus` is missing")
    (tmp_path / "a.model").write_text("aGVsbG8= 0\n")
    for name in ("a.model", "none.model"):
        with pytest.raises(InputError, match=f"{name}: no model of SentencePiece"):
            load_tokenizer(tmp_path / name)


def test_tiktoken(tmp_path, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken", reason="the extra `corpus` is missing")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    pattern = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
    theirs = tiktoken.Encoding(
        "tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 259}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"tiny": theirs}.__getitem__)
    expected = [theirs.encode_ordinary(text) for text in TEXTS]
    assert tokenized(monkeypatch, tmp_path, "tiktoken:tiny") == expected
    tokenizer = load_tokenizer("tiktoken:tiny")
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (259, 260)
    assert tokenizer.decode(np.array(expected[0])) == TEXTS[0]
    changed = tiktoken.Encoding(
        "tiny", pat_str=pattern, mergeable_ranks=ranks | {b"tha": 260},
        special_tokens={"<|endoftext|>": 259},
    )  # fmt: skip
    monkeypatch.setattr(tiktoken, "get_encoding", {"tiny": changed}.__getitem__)
    assert load_tokenizer("tiktoken:tiny").sha256 != tokenizer.sha256
    with pytest.raises(InputError, match="tiktoken:other"):
        load_tokenizer("tiktoken:other")


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    for module, name in (("tiktoken", "tiktoken:gpt2"), ("sentencepiece", tmp_path / "a.model")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(InputError, match=f"needs {module}: pip install"):
            load_tokenizer(name)
    assert "corpus" in other_tokenizers.MISSING
