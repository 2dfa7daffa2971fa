"""Conversations as the model was trained on them: by whose template, from where to where."""

import hashlib
import io
import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from data_prep.chat.conversations import counted
from data_prep.vocabulary import ByteTokenizer, load_tokenizer, train_bpe
from ptdmpi.checkpoint.manifest import checksum
from ptdmpi.comm.world import World
from ptdmpi.convert.adapters import merge, split
from ptdmpi.convert.peft.export import export
from ptdmpi.convert.peft.read import import_peft
from ptdmpi.data.chat_template import PLAIN, TEMPLATE, ChatTemplate
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.generate.chat import Chat
from ptdmpi.generate.dialogue import Dialogue
from ptdmpi.generate.generator import Continuation
from ptdmpi.generate.write import Writer
from ptdmpi.inference.stored import open_model
from ptdmpi.inference.text import Text
from ptdmpi.lineage.trained_on import Source, Stretch, TrainedOn
from tests import _stored
from tests._texts import metaspace
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
    with ShardWriter(
        folder / "a.h5", own.name, own.sha256, vocab_size=own.vocab_size, eod_id=own.eod_id
    ) as writer:
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
        seen.append({chat.writer.text.decode([token]) for token in ends})
        return [Continuation([*b"ok"], "eod")]

    monkeypatch.setattr("ptdmpi.generate.chat.generate", generate)
    chat.answer("some")
    assert seen == [ends]


def adapter_of(run, shards, folder):
    """An adapter over a run that was trained on shards; another model's difference from the run."""
    vocab_size = open_model(run).vocab_size
    other = _stored.stored(folder / "other", vocab_size, factor=0.2, seq_length=64)
    split(run, other, folder / "adapter", 2)
    (path,) = (folder / "adapter").rglob("manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["crc32"]
    sha256 = hashlib.sha256((shards / "tokenizer.json").read_bytes()).hexdigest()
    source = Source(str(shards), "", 1, "1", 0)
    known = TrainedOn("tokenizer.json", sha256, (Stretch(0, 0, 0, 0, 1, 64, (source,)),))
    manifest["trained_on"] = known.as_json()
    path.write_text(json.dumps(manifest | {"crc32": checksum(manifest)}))
    return folder / "adapter"


@pytest.mark.parametrize("own", [None, PLAIN], ids=["text", "conversations"])
def test_adapters_bring_the_template_that_they_were_trained_by(tmp_path, own):
    """Beside their base, and merged into it; where their data are gone, that is said."""
    base = trained(tmp_path, own)
    shards(tmp_path / "chat", CHATML)
    adapter = adapter_of(base, tmp_path / "chat", tmp_path)
    template = chat_of(base).dialogue.template
    assert (None if template is None else template.source) == own
    assert chat_of(base, adapter=adapter).dialogue.template.source == CHATML
    assert merge(base, adapter, tmp_path / "merged")[1] == ""
    assert chat_of(tmp_path / "merged").dialogue.template.source == CHATML
    # in the format of `peft`, there and back
    assert export(adapter, tmp_path / "peft")[1] == ""
    assert (tmp_path / "peft" / TEMPLATE).read_text() == CHATML
    import_peft(tmp_path / "peft", base, tmp_path / "back")
    assert chat_of(base, adapter=tmp_path / "back").dialogue.template.source == CHATML
    assert merge(base, tmp_path / "back", tmp_path / "again")[1] == ""
    assert (tmp_path / "again" / TEMPLATE).read_text() == CHATML
    # a base that was merged itself, beneath adapters of plain text
    shards(tmp_path / "text")
    (tmp_path / "more").mkdir()
    adapter = adapter_of(tmp_path / "merged", tmp_path / "text", tmp_path / "more")
    merge(tmp_path / "merged", adapter, tmp_path / "twice")
    assert chat_of(tmp_path / "twice").dialogue.template.source == CHATML
    (tmp_path / "text").rename(tmp_path / "gone")
    notes = [
        merge(tmp_path / "merged", adapter, tmp_path / "third")[1],
        export(adapter, tmp_path / "bare")[1],
    ]
    for note in notes:
        assert note.startswith(f"no {TEMPLATE} of the adapter") and "no such directory" in note
    assert not (tmp_path / "bare" / TEMPLATE).exists()


OLD = PLAIN.replace("assistant:{% endif", "assistant: {% endif")  # as shards of before have it
TWO = OLD.replace("role }}: ", "role }}:  ").replace("assistant: {%", "assistant:  {%")
BLOCKS = (
    "{% for one in messages %}{% if one.role == 'assistant' %}A: {% generation %}{{ one.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}Q: {{ one.content }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)


def byte_level(texts):
    return Tokenizer.from_str(train_bpe(texts, 300)[0])


@pytest.mark.parametrize("source", [PLAIN, OLD, TWO, BLOCKS], ids=["new", "old", "two", "blocks"])
@pytest.mark.parametrize("made", [byte_level, metaspace, None])
def test_the_first_token_of_an_answer_counts_and_is_asked_for(tmp_path, made, source):
    """Also if it begins with a space that the template writes: the prompt has the tokens of
    training, and the answer has all tokens that counted there."""
    tokenizer = ByteTokenizer()
    if made is not None:
        said = "user: what is a it\nassistant: yes\nQ: what A: yes; no"
        (tmp_path / "tokenizer.json").write_text(made([said] * 9).to_str())
        tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    template = ChatTemplate(source, "test", {"eos_token": "<|endoftext|>"})
    eod = tokenizer.eod_id
    dialogue = Dialogue(Text(tokenizer, (), frozenset({eod}), eod), template, frozenset({eod}))
    lines = ["what is it", "yes"]
    turns = [{"role": "user", "content": lines[0]}, {"role": "assistant", "content": lines[1]}]
    whole = template.rendered(turns)
    ((ids, starts),) = tokenizer.encode_marked([whole.text])
    weights, prompt = counted(starts, whole.answers), dialogue.prompt(lines[:1])
    assert ids[: len(prompt)].tolist() == prompt
    first = int(weights.argmax())
    assert first <= len(prompt) and weights[first : ids.tolist().index(eod) + 1].all()
    written = ids[len(prompt) : ids.tolist().index(eod)].tolist()
    assert dialogue.answer(prompt, written) == "yes"
    # so it is in the next prompt as it was in training
    again = dialogue.prompt([*lines, "no"])
    assert again[: ids.tolist().index(eod) + 1] == ids[: ids.tolist().index(eod) + 1].tolist()


def test_a_text_ends_as_in_the_shards(tmp_path):
    """The files next to the tokenizer may have changed since."""
    run = trained(tmp_path)
    (tmp_path / "shards/tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    text = chat_of(run).writer.text
    assert text.decode([text.tokenizer.eod_id]) == "<|im_end|>"
    assert [text.decode([token]) for token in (*text.ends, text.eod)] == ["<|endoftext|>"] * 2
