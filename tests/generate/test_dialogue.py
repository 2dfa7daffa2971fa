"""Conversations as the model was trained on them: what ends an answer, by whose template."""

import hashlib
import io

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from data_prep.vocabulary import load_tokenizer, train_bpe
from ptdmpi.comm.world import World
from ptdmpi.data.chat_template import PLAIN, TEMPLATE
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.generate.chat import Chat
from ptdmpi.generate.generator import Continuation
from ptdmpi.generate.write import Writer
from tests import _stored
from tests.data_prep.test_chat import CHATML
from tests.generate.test_prompts_and_chat import OPTIONS


def shards(folder, template=None):
    """Shards of a tokenizer with ChatML's tokens, and of conversations where there is a template;
    the tokenizer."""
    folder.mkdir()
    made = Tokenizer.from_str(train_bpe(["user assistant some text: ok"] * 3, 280)[0])
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    (folder / "tokenizer.json").write_text(made.to_str())
    own = load_tokenizer(folder / "tokenizer.json")
    assert own.sha256 == hashlib.sha256(made.to_str().encode()).hexdigest()
    told = own.name, own.sha256, own.vocab_size, own.eod_id
    with ShardWriter(folder / "a.h5", *told) as writer:
        writer.write(np.arange(20), np.array([20]))
    if template is not None:
        (folder / TEMPLATE).write_text(template)
    return own


def trained(folder, template=None):
    """A run on such shards."""
    own = shards(folder / "shards", template)
    run = _stored.stored(folder / "run", own.vocab_size, seq_length=64)
    with open(run / "config.toml", "a") as file:
        file.write(f'[[data.train]]\npath = "{folder}/shards"\n')
    return run


def chat_of(run, **options):
    return Chat(Writer(run, World(), {**OPTIONS, "tokenizer": None, **options}), io.StringIO())


@pytest.mark.parametrize(
    "template, ends", [(CHATML, {"<|endoftext|>", "<|im_end|>"}), (PLAIN, {"<|endoftext|>"})]
)
def test_an_answer_ends_where_the_template_ends_a_turn(tmp_path, monkeypatch, template, ends):
    """A model that was trained here on conversations writes the template's own mark behind an
    answer, and the end of document never."""
    chat, seen = chat_of(trained(tmp_path, template)), []

    def generate(model, prompts, sampling, ends):
        seen.append({chat.writer.text.decode([one]) for one in ends})
        return [Continuation([*b"ok"], "eod")]

    monkeypatch.setattr("ptdmpi.generate.chat.generate", generate)
    chat.answer("some")
    assert seen == [ends]
