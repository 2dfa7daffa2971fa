"""The same text in every layout, from logits that do not depend on the cache."""

import hashlib
import json
import re

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from data_prep.vocabulary import BYTES_SHA256, train_bpe
from ptdmpi.comm.world import World
from ptdmpi.commands.generate import command
from ptdmpi.config import InputError
from ptdmpi.config.kinds import LATENT
from ptdmpi.config.model import SUBLAYERS
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.sampling import GREEDY, Sampling
from ptdmpi.inference.model import InferenceModel, open_inference
from tests import _stored
from tests._layers import difference
from tests.convert._hugging_face import model as hugging_face
from tests.parallel import mpirun, parallel

V = 51
# two heads for keys: at t = 4 two ranks share one, and keep it in both caches
MODELS = {
    "gpt": {},
    "llama": _stored.LLAMA,
    "qwen3": {**_stored.LLAMA, "kind": "qwen3", "head_size": 6},
    "latent": {
        "kind": "deepseek",
        "head_size": 10,
        "rope_head_size": 4,
        "value_head_size": 6,
        "kv_lora_rank": 8,
        "ffn_hidden": 48,
    },
    "gemma2": {
        **_stored.LLAMA,
        "kind": "gemma2",
        "sliding_window": 3,
        "attention_softcap": 0.5,
        "query_scalar": 5.0,
    },
}
# a token uses two of four experts and the shared expert; the balance numbers change the choice
MODELS["experts"] = {
    **_stored.LLAMA,
    "experts": 4,
    "experts_per_token": 2,
    "expert_hidden": 16,
    "shared_experts": 1,
    "dense_layers": 1,
}
# every further sublayer of the package, between attention and MLP
MODELS |= {
    name: {"sublayers": ["attention", name, "mlp"]}
    for name in SUBLAYERS
    if name not in ("attention", "mlp", LATENT)
}
LAYOUTS = ["t=2,p=2", "d=2,p=2", "d=2,t=2", "t=4"]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3]]


def run_directory(comm, tmp_path, kind):
    if comm.rank == 0:
        _stored.stored(tmp_path / "run", V, **MODELS[kind])
    comm.Barrier()
    return tmp_path / "run"


@pytest.mark.cases(2)
@parallel(ranks=[4])
@pytest.mark.parametrize("kind", MODELS)
def test_every_layout_writes_the_same(comm, tmp_path, kind):
    run = run_directory(comm, tmp_path, kind)
    world = World(comm)
    samplings = [GREEDY, Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=5)]
    prompts = [Prompt(ids, 9 if i else 1, number=i) for i, ids in enumerate(PROMPTS)]
    ends = {0, 7, 9}
    expected = None
    alone = world.first(1)
    if alone is not None:
        serial, _ = open_inference(run, alone, None, None)
        expected = [generate(serial, prompts, sampling, ends) for sampling in samplings]
        # the other texts of the batch do not matter
        assert expected == [generate(serial, prompts, s, ends, rows=1) for s in samplings]
        reasons = {text.reason for texts in expected for text in texts}
        assert reasons == {"eod", "length"}
    expected = comm.bcast(expected)
    for layout in LAYOUTS:
        model, _ = open_inference(run, world, layout, None)
        assert [generate(model, prompts, s, ends, rows=3) for s in samplings] == expected
        comm.Barrier()


def full_logits(model: InferenceModel, ids: list[int]) -> torch.Tensor | None:
    """[V] after the last id, without a cache."""
    x = model.hidden(torch.tensor(ids)[:, None])
    if x is not None:
        head = model.stages[max(model.stages)].head
        x = model.axes["tensor"].all_gather(head(x)[-1, 0].contiguous())[:V]
    model.finish()
    return x


@parallel(ranks=[4])
@pytest.mark.parametrize("kind", MODELS)
def test_cached_logits_are_those_of_the_whole_text(comm, tmp_path, kind):
    run = run_directory(comm, tmp_path, kind)
    model, _ = open_inference(run, World(comm), "t=2,p=2", None)
    texts = [list(ids) for ids in PROMPTS]
    lengths = torch.tensor([len(ids) for ids in texts])
    cache = model.new_cache(len(texts), 16)
    ids = torch.zeros(7, len(texts), dtype=torch.int64)
    for column, text in enumerate(texts):
        ids[: len(text), column] = torch.tensor(text)
    positions, last = torch.arange(7)[:, None].expand(7, 4), lengths - 1
    for step in range(4):
        cache.at(positions)
        logits = model.next_logits(ids, cache, last)
        for column, text in enumerate(texts):
            whole = full_logits(model, text)
            if logits is not None:
                assert difference(logits[column], whole) < 1e-5
            text.append((column * 7 + step * 3) % V)
        ids, positions = torch.tensor([[text[-1] for text in texts]]), (lengths + step)[None]
        last = torch.zeros(4, dtype=torch.int64)


CHANGES = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 0.5, "head_dim": 6},
    "mistral": {"sliding_window": 4},
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_equals_transformers(tmp_path, family):
    theirs = hugging_face(family, **CHANGES.get(family, {}))
    theirs.save_pretrained(tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "ours")
    model, _ = open_inference(tmp_path / "ours", World(), None, None)
    texts = generate(model, [Prompt(ids, 9) for ids in PROMPTS], GREEDY, {0})
    for ids, text in zip(PROMPTS, texts, strict=True):
        whole = theirs.generate(
            torch.tensor([ids]), max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=0
        )[0].tolist()
        assert [*ids, *text.ids] == whole[: len(ids) + len(text.ids)]
        assert (text.reason == "eod") == (0 in whole[len(ids) :])


def test_ends_by_what_a_caller_looks_for(tmp_path):
    _stored.stored(tmp_path / "run", V)
    model, _ = open_inference(tmp_path / "run", World(), None, None)
    (free,) = generate(model, [Prompt([1], 8)], GREEDY, ())
    (ended,) = generate(model, [Prompt([1], 8, finished=lambda ids: len(ids) == 3)], GREEDY, ())
    assert ended.ids == free.ids[:3] and (ended.reason, free.reason) == ("finished", "length")
    for prompt, message in (
        (Prompt([], 1), "empty prompt"),
        (Prompt([1] * 10, 7), "16; legal: at most 6 new"),
        (Prompt([1] * 16, 1), "a prompt of 16 tokens: .* 16; legal: at most 15"),
        (Prompt([V], 1), "a prompt has id 51: the model has a vocabulary of 51"),
        (Prompt([1], 0), "max_new_tokens = 0"),
    ):
        with pytest.raises(InputError, match=message):
            generate(model, [prompt], GREEDY, ())


@pytest.fixture
def run_of_bytes(tmp_path):
    """A model of bytes whose config.toml names its shards."""
    run = _stored.stored(tmp_path / "run", 257, seq_length=64)
    (tmp_path / "shards").mkdir()
    with ShardWriter(
        tmp_path / "shards/a.h5", "bytes", BYTES_SHA256, vocab_size=257, eod_id=256
    ) as writer:
        writer.write(np.arange(100), np.array([100]))
    with open(run / "config.toml", "a") as file:
        file.write(f'[[data.train]]\npath = "{tmp_path}/shards"\n[parallel]\ntensor = 2\n')
    return run


def test_the_command(run_of_bytes):
    words = [str(run_of_bytes), "--prompt", "héllo", "--prompt", "", "--samples", "2"]
    result = CliRunner().invoke(command, [*words, "--json", "--seed", "3"])
    assert result.exit_code == 0, result.stdout
    samples = json.loads(result.stdout)["samples"]
    assert [sample["prompt_tokens"] for sample in samples] == [6, 6, 1, 1]
    assert samples[0]["ids"] != samples[1]["ids"]
    assert all(len(sample["ids"]) <= 63 for sample in samples)
    done = mpirun(2, ["-m", "ptdmpi", "generate", *words, "--seed", "3"], timeout_s=120)
    for number, sample in enumerate(samples):
        assert f"-- {number + 1} of 4\n{sample['prompt']}{sample['text']}\n" in done.stdout


def test_the_tokenizer_beside_the_shards_has_a_name_of_its_own(tmp_path):
    """ptdmpi-data copies my-own.json to tokenizer.json; other files of that name are not it."""
    run = _stored.stored(tmp_path / "run", 300, seq_length=64)
    content, _ = train_bpe(["some text, some more text"] * 3, 300)
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    (tmp_path / "shards").mkdir()
    with ShardWriter(
        tmp_path / "shards/a.h5", "my-own.json", sha256, vocab_size=300, eod_id=0
    ) as writer:
        writer.write(np.arange(100), np.array([100]))
    with open(run / "config.toml", "a") as file:
        file.write(f'[[data.train]]\npath = "{tmp_path}/shards"\n')
    (run / "tokenizer.json").write_text(content + " ")
    refused = CliRunner().invoke(command, [str(run), "--prompt", "some"])
    assert refused.exit_code == 2 and "is not in the folder of the shards; give" in refused.stderr
    (tmp_path / "shards/tokenizer.json").write_text(content + "\n")
    refused = CliRunner().invoke(command, [str(run), "--prompt", "some"])
    assert refused.exit_code == 2 and "shards/tokenizer.json: has sha256" in refused.stderr
    (tmp_path / "shards/tokenizer.json").write_text(content)
    result = CliRunner().invoke(command, [str(run), "--prompt", "some text", "--json"])
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["samples"][0]["prompt_tokens"] < len("some text")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--max-new-tokens", "64"], "legal: at most 63 new tokens"),
        (["--temperature", "-1"], "temperature = -1.0; legal"),
        (["--temperature", "nan"], "temperature = nan; legal"),
        (["--top-p", "0"], "top_p = 0.0; legal: above 0, up to 1"),
        (["--top-p", "1.01"], "top_p = 1.01; legal"),
        (["--top-k", "0"], "top_k = 0; legal: 1 or more"),
        (["--prompt", "x" * 70], "a prompt of 70 tokens: .* legal: at most 63"),
        (["--prompt", "caf\udce9"], "is not UTF-8: surrogates not allowed"),
        (["--layout", "t=2"], r"parallel.tensor \* pipeline"),
        (["--layout", "t=1,v=2"], "legal: t, p and d"),
        (["--layout", "c=2"], "legal: t, p and d; every rank has whole sequences"),
        (["--tokenizer", "nowhere.json"], "nowhere.json: .*No such file"),
    ],
)
def test_bad_input_is_one_line(run_of_bytes, words, message, capfd):
    result = CliRunner().invoke(command, [str(run_of_bytes), *words])
    assert result.exit_code == 2
    line = (result.stderr + capfd.readouterr().err).strip().splitlines()[-1]
    assert re.search(message, line)


def test_another_tokenizer_is_refused(run_of_bytes, tmp_path):
    """Its ids may all be in the vocabulary: they would mean another text."""
    (tmp_path / "t.json").write_text(train_bpe(["some text"], 257)[0])
    words = [str(run_of_bytes), "--prompt", "a", "--tokenizer", str(tmp_path / "t.json")]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 2
    assert f"the model expects {BYTES_SHA256[:12]}: its ids mean other text" in result.stderr


@pytest.mark.parametrize("content", ["[", "[1]"])
def test_a_damaged_file_of_a_converted_model(tmp_path, content):
    run = _stored.stored(tmp_path / "run", 257)
    (run / "hugging_face").mkdir()
    (run / "hugging_face/generation_config.json").write_text(content)
    result = CliRunner().invoke(command, [str(run), "--prompt", "a", "--tokenizer", "bytes"])
    assert result.exit_code == 2
    assert "hugging_face/generation_config.json is not a JSON object: " in result.stderr
