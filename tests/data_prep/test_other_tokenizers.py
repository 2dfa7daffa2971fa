"""Tokenizers of extra libraries: the tokens are theirs; skipped where a library is missing."""

import hashlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep import other_tokenizers, vocabulary
from data_prep.cli import main
from data_prep.vocabulary import load_tokenizer, train_bpe
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
        with pytest.raises(InputError, match=f"{name}: is not a SentencePiece model"):
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


@pytest.fixture
def trained(tmp_path):
    """A tokenizer.json that was learnt from the texts."""
    path = tmp_path / "t.json"
    path.write_text(train_bpe(TEXTS * 3, 400)[0])
    return path


def test_gigatoken_gives_the_same_shards(tmp_path, monkeypatch, trained):
    pytest.importorskip("gigatoken", reason="the extra `corpus` is missing")
    monkeypatch.setattr(vocabulary, "_RENEWED_CHARACTERS", 1000)
    plain = load_tokenizer(trained)
    fast = load_tokenizer(f"gigatoken:{trained}")
    texts = [*TEXTS, "", " ", "<|endoftext|>", "x<|endoftext|>", "\n \n\t", "日本" * 3000] * 3
    for mine, theirs in zip(fast.encode(texts), plain.encode(texts), strict=True):
        assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()
    assert fast.encode([]) == []
    assert (fast.name, fast.sha256, fast.eod_id) == (plain.name, plain.sha256, plain.eod_id)
    tokens = tokenized(monkeypatch, tmp_path, f"gigatoken:{trained}")
    assert tokens == [ids.tolist() for ids in plain.encode(TEXTS)]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == trained.read_bytes()


def test_gigatoken_is_compared(trained, monkeypatch):
    pytest.importorskip("gigatoken", reason="the extra `corpus` is missing")
    fast = load_tokenizer(f"gigatoken:{trained}")
    encode = fast._fast.encode
    monkeypatch.setattr(fast, "_fast", SimpleNamespace(encode=lambda text: encode(text)[::-1]))
    with pytest.raises(InputError, match=r"gigatoken:t\.json: gives other tokens than without"):
        fast.encode(["one two three"])


def test_gigatoken_is_missing_or_cannot(tmp_path, trained, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gigatoken", None)
        with pytest.raises(InputError, match=r"t\.json needs gigatoken: pip install"):
            load_tokenizer(f"gigatoken:{trained}")
    with pytest.raises(InputError, match=r"none\.json"):
        load_tokenizer(f"gigatoken:{tmp_path}/none.json")
    pytest.importorskip("gigatoken", reason="the extra `corpus` is missing")
    tree = json.loads(trained.read_text())
    tree["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "w.json").write_text(json.dumps(tree))
    with pytest.raises(InputError, match="try it without gigatoken:"):
        load_tokenizer(f"gigatoken:{tmp_path}/w.json")
