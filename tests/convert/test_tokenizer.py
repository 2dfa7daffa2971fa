"""The tokenizer is exported with a model that was trained here, or a note says why it is not."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner

from data_prep.vocabulary import (
    BYTES_SHA256,
    MOST_LETTERS,
    in_short_words,
    load_tokenizer,
    train_bpe,
)
from ptdmpi.commands.convert import command
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.data.chat_template import TEMPLATE
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.inference.stored import open_model
from ptdmpi.inference.tokenizer import tokenizer_sha256
from tests import _stored
from tests.data.test_words import byte_level, word_level, word_piece

TEXT = "He walked, un-hurried"


def trained(folder, content: str | None, lacks: int = 0, **model):
    """A run on shards whose tokenizer.json has this content; none: bytes. Its vocabulary is larger
    than theirs by `lacks` special tokens."""
    (folder / "shards").mkdir(parents=True)
    name = "bytes"
    sha256 = BYTES_SHA256
    vocab_size = 257
    eod_id = 256
    if content is not None:
        file = folder / "shards/tokenizer.json"
        file.write_text(content)
        tokenizer = load_tokenizer(file)
        name = tokenizer.name
        sha256 = tokenizer.sha256
        vocab_size = tokenizer.vocab_size
        eod_id = tokenizer.eod_id
    with ShardWriter(
        folder / "shards/a.h5", name, sha256, vocab_size=vocab_size, eod_id=eod_id
    ) as writer:
        writer.write(np.arange(20), np.array([20]))
    run = _stored.stored(folder / "run", vocab_size + lacks, **model)
    with open(run / "config.toml", "a") as file:
        file.write(f'[[data.train]]\npath = "{folder}/shards"\n')
    return run, eod_id


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_transformers_reads_and_writes_text(tmp_path, kind):
    import transformers

    content, _ = train_bpe([TEXT] * 3, 300)
    run, eod_id = trained(tmp_path, content, **({} if kind == "gpt" else _stored.LLAMA))
    done = to_hf(run, tmp_path / "hf")
    assert done.note == ""
    assert (tmp_path / "hf/tokenizer.json").read_text() == content
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = load_tokenizer(tmp_path / "hf/tokenizer.json").encode([TEXT])[0].tolist()
    assert theirs(TEXT)["input_ids"] == ids and theirs.decode(ids) == TEXT
    assert theirs.eos_token_id == theirs.bos_token_id == eod_id
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id == eod_id
    write = transformers.pipeline("text-generation", model=str(tmp_path / "hf"))
    assert write("He", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("He")
    # the way back knows it again
    from_hf(tmp_path / "hf", tmp_path / "ours")
    known = hashlib.sha256(content.encode()).hexdigest()
    for model in (tmp_path / "ours", run):
        assert tokenizer_sha256(open_model(model)) == known


def test_an_end_that_is_no_token_of_it(tmp_path):
    import transformers

    words = {f"w{number}": number for number in range(20)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    run, eod_id = trained(tmp_path / "a", tokenizer.to_str())
    assert to_hf(run, tmp_path / "hf").note == ""
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", eod_id)
    assert len(theirs) == eod_id + 1 == 21
    # behind ids that are not taken theirs would have another one
    run, eod_id = trained(tmp_path / "b", word_level().to_str())
    note = to_hf(run, tmp_path / "hf2").note
    assert note == f"<|endoftext|> has id {eod_id} here, and no name in tokenizer_config.json"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf2").eos_token_id is None
    assert json.loads((tmp_path / "hf2/config.json").read_text())["eos_token_id"] == eod_id


@pytest.mark.parametrize("made, lacks", [(word_piece, 0), (byte_level, 2)])
def test_special_tokens_of_a_bert(tmp_path, made, lacks):
    import transformers

    run, _ = trained(tmp_path, made().to_str(), lacks, kind="bert")
    to_hf(run, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    names = ["[CLS]", "[SEP]", "<mask>" if lacks else "[MASK]"]
    assert [theirs.cls_token, theirs.sep_token, theirs.mask_token] == names
    vocab_size = json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"]
    special = [theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id]
    size = made().get_vocab_size()
    assert special == ([size, size + 1, made().token_to_id("<mask>")] if lacks else [1, 2, 3])
    assert max(special) < vocab_size
    fill = transformers.pipeline("fill-mask", model=str(tmp_path / "hf"))
    assert len(fill(f"walked {names[2]} hurried")) == 5


def test_what_has_no_file_is_said(tmp_path):
    run, _ = trained(tmp_path / "a", None)
    done = CliRunner().invoke(command, ["to-hf", str(run), str(tmp_path / "hf")])
    *_, line = done.output.strip().splitlines()
    assert line == (
        "note: no tokenizer.json is written: its tokens are single bytes; ids 0 to 255 are bytes, "
        "256 ends a document"
    )
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 256
    content, _ = train_bpe([TEXT] * 3, 300)
    run, eod_id = trained(tmp_path / "b", content)
    (tmp_path / "b/shards/tokenizer.json").unlink()
    done = to_hf(run, tmp_path / "hf2")
    assert "tokenizer.json is written: the tokenizer of" in done.note
    assert json.loads((tmp_path / "hf2/config.json").read_text())["eos_token_id"] == eod_id
    shutil.rmtree(tmp_path / "b/shards")
    assert "shards: no such directory" in to_hf(run, tmp_path / "hf3").note
    assert not (tmp_path / "hf3/tokenizer.json").exists()


def test_the_chat_template_of_its_conversations_goes_with_it(tmp_path):
    """Also in the place of another one that came with the model; where the shards are gone, that
    is said."""
    import transformers

    own = "own: {{ messages[0].content }}"
    other = "other: {{ messages[0].content }}"
    content, _ = train_bpe([TEXT] * 3, 300)
    run, _ = trained(tmp_path, content)
    (tmp_path / "shards" / TEMPLATE).write_text(own)
    taken = f"{TEMPLATE} is the template of its training data"
    assert to_hf(run, tmp_path / "hf").note == taken
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    said = [{"role": "user", "content": "He"}]
    assert theirs.apply_chat_template(said, tokenize=False) == "own: He"
    # of a model that came with it, and with another
    config = tmp_path / "hf/tokenizer_config.json"
    for source, note in (
        (own, ""),
        (other, f"{taken}, in place of the template that came with the model"),
    ):
        (tmp_path / "hf" / TEMPLATE).unlink(missing_ok=True)
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": source}))
        from_hf(tmp_path / "hf", tmp_path / "ours")
        shutil.copytree(tmp_path / "ours/hugging_face", run / "hugging_face")
        assert to_hf(run, tmp_path / "back").note == note
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
        assert theirs.apply_chat_template(said, tokenize=False) == "own: He"
        if note:
            break
        for folder in (tmp_path / "ours", run / "hugging_face", tmp_path / "back"):
            shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "shards")
    note = to_hf(run, tmp_path / "gone").note
    assert note.startswith(f"no {TEMPLATE} of its own is written: ") and "no such dir" in note


def test_a_word_without_an_end_is_cut_for_the_training(capsys):
    """The time to train on a word grows with the square of its length."""
    words = ["ab" * 40_000, "1" * 2500, "-_" * 700, "short words", " " * 1500, "x" * 999 + " y"]
    pieces = list(in_short_words(words))
    assert "".join(pieces) == "".join(words)
    assert max(len(word) for piece in pieces for word in piece.split(" ")) == MOST_LETTERS
    assert "words were cut at 84 places" in capsys.readouterr().err
    assert list(in_short_words(["short"])) == ["short"] and not capsys.readouterr().err
    assert train_bpe(words, 300)[1] > 257
    assert "cut at 84 places" in capsys.readouterr().err
