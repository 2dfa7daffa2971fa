"""Hugging Face models, both ways: the same bytes, the same logits, and what is refused."""

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ptdmpi.checkpoint import examine
from ptdmpi.commands.convert import command
from ptdmpi.config import InputError
from ptdmpi.convert import check, tensors
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.reference import FORWARD, Question
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.inference.stored import open_model
from tests.convert._hugging_face import model, saved
from tests.parallel import ROOT

CASES = {
    "gpt2": ("gpt2", {}),
    "gpt2-untied-wide-exact": (
        "gpt2",
        {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "gelu"},
    ),
    "gpt2-bf16-sharded": ("gpt2", {"dtype": "bfloat16", "shard": "20KB"}),
    "llama-gqa": ("llama", {}),
    "llama-mha-fp16-eps": (
        "llama",
        {"dtype": "float16", "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    ),
    "llama-tied-biases-theta": (
        "llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "llama-attention-biases": ("llama", {"attention_bias": True}),
    "llama-mlp-biases": ("llama", {"mlp_bias": True}),
    "llama-sharded-v51": ("llama", {"shard": "15KB", "vocab_size": 51}),
    "bert": ("bert", {}),
    "bert-masked-only-bf16": ("bert", {"masked_only": True, "dtype": "bfloat16"}),
    "bert-untied-tanh-eps-types": (
        "bert",
        {
            "tie_word_embeddings": False,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-3,
            "type_vocab_size": 3,
        },
    ),
    "bert-one-type": ("bert", {"type_vocab_size": 1}),
    "bert-sharded-v51-one-type": (
        "bert",
        {"shard": "15KB", "vocab_size": 51, "type_vocab_size": 1, "masked_only": True},
    ),
    "megatron-bert": ("megatron-bert", {"layer_norm_eps": 1e-5}),
    "megatron-bert-masked-only": ("megatron-bert", {"masked_only": True, "shard": "15KB"}),
}
PREFIXES = {"gpt2": "transformer.", "llama": "model.", "bert": "bert.", "megatron-bert": "bert."}


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_gives_the_same_bytes(tmp_path, case):
    family, changes = CASES[case]
    source = saved(tmp_path / "hf", family, **changes)
    (source / "tokenizer.json").write_text("{}")
    done = from_hf(source, tmp_path / "ours")
    assert done.family == family and done.difference < 1e-5
    theirs = model(family, **{k: v for k, v in changes.items() if k != "shard"})
    # an untied BERT of theirs has two biases before its output, of which one is used
    twice = "bert" in family and not theirs.config.tie_word_embeddings
    assert done.parameters == theirs.num_parameters() - twice * theirs.config.vocab_size
    assert examine.problems(open_model(tmp_path / "ours").checkpoint) == []
    back = to_hf(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    assert back.files == len(list(source.glob("*.safetensors"))) > ("shard" in changes)
    assert sorted(os.listdir(tmp_path)) == ["back", "hf", "ours"]


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_transformers(tmp_path, case):
    """The reference of the self-check computes the same as their own code."""
    family, changes = CASES[case]
    theirs = model(family, **{k: v for k, v in changes.items() if k not in ("shard", "dtype")})
    theirs.double()
    ids = check.prompts(theirs.config.vocab_size, 16)
    words = {}
    if "bert" in family:
        words = {"token_type_ids": check.segments(ids, theirs.config.type_vocab_size)}
    order = "bert" in family and not changes.get("masked_only")
    named = {k.removeprefix(PREFIXES[family]): v for k, v in theirs.state_dict().items()}
    with torch.no_grad():
        asked = Question(ids, words.get("token_type_ids"), order)
        logits = FORWARD[family](theirs.config.to_dict(), named.__getitem__, asked)
        expected = theirs(ids, **words).to_tuple()
    for ours, reference in zip(logits, expected[: len(logits)], strict=True):
        assert float((ours - reference).abs().max() / reference.abs().max()) < 1e-6
    assert len(logits) == 1 + order


def test_old_files(tmp_path):
    """Names without prefix, a head next to the table that it is tied to, buffers of attention."""
    source = saved(tmp_path / "hf", "gpt2")
    file = source / "model.safetensors"
    old = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    for i in range(3):
        old[f"h.{i}.attn.bias"] = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
        old[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, file, metadata={"format": "pt", "who": "me"})
    from_hf(source, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    to_hf(tmp_path / "ours", tmp_path / "half", dtype="float16")
    with safe_open(tmp_path / "half/model.safetensors", framework="pt") as half:
        assert half.get_tensor("h.0.attn.masked_bias").dtype == torch.float32
        assert half.get_tensor("wpe.weight").dtype == torch.float16
    del old["wte.weight"]  # only the head is left of the two
    save_file(old, file)
    from_hf(source, tmp_path / "ours2")
    to_hf(tmp_path / "ours2", tmp_path / "back2")
    assert contents(tmp_path / "back2") == contents(source)
    save_file(old | {"wte.weight": old["lm_head.weight"] + 1}, file)
    with pytest.raises(InputError, match=r"lm_head.weight and wte.weight differ"):
        from_hf(source, tmp_path / "ours3")


def test_pieces_of_tensors(tmp_path, monkeypatch):
    """Slabs of a few rows give the same files: what is in memory does not grow with a tensor."""
    monkeypatch.setattr(tensors, "SLAB_BYTES", 1000)
    for family in PREFIXES:
        source = saved(tmp_path / family, family)
        from_hf(source, tmp_path / f"{family}-ours")
        to_hf(tmp_path / f"{family}-ours", tmp_path / f"{family}-back")
        assert contents(tmp_path / f"{family}-back") == contents(source)


def changed(path, **keys):
    values = json.loads(path.read_text())
    values.update(keys)
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "gone"}))


CONFIG_MISTAKES = {
    "model_type": (
        "mamba",
        r"model_type = 'mamba' is not supported; legal: gpt2, llama, mistral",
    ),
    "hidden_act": ("gelu", r"hidden_act = 'gelu' is not supported; legal: 'silu'"),
    "rope_parameters": ({"rope_type": "llama3"}, r"rope_parameters: factor = None is not a number"),
    "rope_scaling": ({"type": "linear", "factor": 2.0}, r"rope_scaling = .*linear.* legal"),
    "quantization_config": ({"quant_method": "gguf"}, r"quantized weights are not supported"),
    "head_dim": (16, r"q_proj.weight has shape \[32, 32\], config.json makes it \[64, 32"),
    "attention_bias": ("true", r"attention_bias = 'true' is not supported; legal: False or True"),
    "num_key_value_heads": (3, r"kv_heads = 3 does not divide"),
    "vocab_size": (49, r"embed_tokens.weight has shape \[50, 32\], config.json makes it \[49, 32"),
    "num_hidden_layers": (4, r"tensor model.layers.3.*is missing"),
    "hidden_size": ("gone", r"config.json: hidden_size is missing"),
    "intermediate_size": ("wide", r"config.json: model.ffn_hidden = 'wide'"),
    "tie_word_embeddings": (True, r"lm_head.weight and model.embed_tokens.weight differ"),
}


def test_rope_parameters_by_layer(tmp_path):
    source = saved(tmp_path / "hf", "llama")
    changed(source / "config.json", rope_parameters={"full_attention": {"rope_theta": 5.0}})
    with pytest.raises(InputError, match=r"full_attention.* is not supported; legal: rope_type"):
        from_hf(source, tmp_path / "ours")


@pytest.mark.parametrize("key", ["model_type", "head_dim", "attention_bias", "num_hidden_layers"])
def test_config_json_of_wrong_types(tmp_path, key):
    source = saved(tmp_path / "hf", "llama")
    changed(source / "config.json", **{key: [[4]]})
    with pytest.raises(InputError, match=r"config.json: .* = \[\[4\]\]"):
        from_hf(source, tmp_path / "ours")


@pytest.mark.parametrize("key", CONFIG_MISTAKES)
def test_what_config_json_may_not_say(tmp_path, key):
    value, message = CONFIG_MISTAKES[key]
    source = saved(tmp_path / "hf", "llama")
    changed(source / "config.json", **{key: value})
    with pytest.raises(InputError, match=message):
        from_hf(source, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["hf"]


REFUSED = {
    "mistral": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
    "qwen2": {"use_sliding_window": "perhaps"},
    "qwen3": {"layer_types": ["full_attention", "linear_attention"]},
    "gemma2": {"use_bidirectional_attention": True},
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_descendants_of_llama_may_not_say(tmp_path, family):
    """One line that names the key, whatever its value is."""
    source = saved(tmp_path / "hf", "llama")
    changed(source / "config.json", model_type=family, **REFUSED[family])
    (key,) = REFUSED[family]
    with pytest.raises(InputError, match=rf"^[^\n]*config.json: {key}[^\n]*legal: [^\n]*$"):
        from_hf(source, tmp_path / "ours")


@pytest.mark.parametrize("key", ["max_window_layers", "sliding_window", "layer_types"])
def test_windows_of_wrong_types(tmp_path, key):
    source = saved(tmp_path / "hf", "llama")
    keys = {"use_sliding_window": True, "max_window_layers": 0, key: "4"}
    changed(source / "config.json", model_type="qwen2", **keys)
    with pytest.raises(InputError, match=rf"config.json: {key}"):
        from_hf(source, tmp_path / "ours")


def test_one_line_for_one_mistake(tmp_path):
    """A wrong width is reported, not the default that depends on it."""
    source = saved(tmp_path / "hf", "gpt2")
    for wrong in ("32", 0, -8):
        changed(source / "config.json", n_embd=wrong)
        with pytest.raises(InputError, match=rf"config.json: model.hidden = '?{wrong}'?: [^\n]*$"):
            from_hf(source, tmp_path / "ours")


@pytest.mark.parametrize("wrong", ["nan", "inf"])
def test_weights_that_are_no_numbers(tmp_path, wrong):
    source = saved(tmp_path / "hf", "gpt2")
    values = load_file(source / "model.safetensors")
    values["transformer.h.0.mlp.c_fc.bias"][3] = float(wrong)
    save_file(values, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(check.CheckFailed, match=r"the model's logits are not finite: a w"):
        from_hf(source, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["hf"]


def test_damaged_files(tmp_path):
    source = saved(tmp_path / "hf", "llama", shard="15KB")
    target = tmp_path / "ours"
    first = sorted(source.glob("*.safetensors"))[0]
    whole = first.read_bytes()
    index = json.loads((source / tensors.INDEX).read_text())

    def refused(message):
        with pytest.raises(InputError, match=message):
            from_hf(source, target)
        assert os.listdir(tmp_path) == ["hf"]

    first.write_bytes(whole[:-1])
    refused(rf"{first.name} is damaged or truncated")
    first.write_bytes(whole[:6])
    refused(rf"{first.name} is not a safetensors file")
    first.unlink()
    refused(rf"{first.name}: No such file")
    first.write_bytes(whole)
    values = load_file(first)
    name = sorted(values)[0]
    save_file({k: v for k, v in values.items() if k != name}, first)
    refused(rf"does not contain {name}")
    save_file(values | {"model.layers.0.adapter.weight": torch.ones(2)}, first)
    refused(r"has model.layers.0.adapter.weight, but")
    index["weight_map"]["model.layers.0.adapter.weight"] = first.name
    changed(source / tensors.INDEX, **index)
    refused(r"unexpected tensor model.layers.0.adapter.weight")
    index["weight_map"] = {name: "../elsewhere.safetensors"}
    changed(source / tensors.INDEX, **index)
    refused(r"weight_map must name a file of this directory")
    (source / tensors.INDEX).rename(source / "pytorch_model.bin")
    refused(r"pytorch_model.bin is a pickle, which can run code")
    save_file({k: v.to(torch.int8) for k, v in values.items()}, source / "model.safetensors")
    refused(r"type I8; legal: F64, F32|is missing")
    for text in ("[", "[" * 100_000):
        (source / "config.json").write_text(text)
        refused(r"config.json is not JSON")
    with pytest.raises(InputError, match=r"nowhere/config.json: No such file"):
        from_hf(tmp_path / "nowhere", target)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_damaged_files_of_the_tokenizer(tmp_path, name):
    source = saved(tmp_path / "hf", "gpt2")

    def refused(message):
        words = ["from-hf", str(source), str(tmp_path / "ours")]
        error = CliRunner().invoke(command, words).exception
        assert isinstance(error, InputError) and f"{source / name}{message}" in str(error)
        assert "\n" not in str(error) and os.listdir(tmp_path) == ["hf"]

    (source / "notes.json").write_text("[1,")  # no file of the tokenizer: copied as it is
    for content, message in (("[1,2", " is not JSON"), ("", " is not JSON"), ("[1]", " is not a")):
        (source / name).write_text(content)
        refused(message)
    (source / name).unlink()
    (source / name).symlink_to("nowhere.json")
    refused(": is a link to a missing file")
    (source / name).unlink()
    os.mkfifo(source / name)
    refused(": is a pipe or a device")
    (source / name).unlink()
    (source / name).write_text("{}")
    (source / "folder").mkdir()
    (source / "pytorch_model.bin").symlink_to("nowhere.bin")  # weights that are not read
    from_hf(source, tmp_path / "ours")
    assert (tmp_path / "ours/hugging_face/notes.json").read_text() == "[1,"


def test_the_target(tmp_path):
    source = saved(tmp_path / "hf", "gpt2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("precious")
    with pytest.raises(InputError, match=r"full exists already"):
        from_hf(source, tmp_path / "full")
    assert (tmp_path / "full/mine.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    from_hf(source, tmp_path / "empty")
    from_hf(source, tmp_path / "new/deep/er")
    with pytest.raises(InputError, match=r"Not a directory|exists"):
        from_hf(source, tmp_path / "full/mine.txt/x")
    part = next((tmp_path / "empty/checkpoints").rglob("rank-*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(InputError, match=r"is damaged: .*rank-00000"):
        to_hf(tmp_path / "empty", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_the_self_check_fails_where_a_tensor_is_misplaced(tmp_path, monkeypatch):
    source = saved(tmp_path / "hf", "llama")
    from ptdmpi.convert import from_hf as module

    real = module.make_plan

    def swapped(*arguments, **options):
        plan = real(*arguments, **options)
        names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
        a, b = (plan.by_name[name] for name in names)
        plan.by_name.update({names[0]: b, names[1]: a})
        return plan

    monkeypatch.setattr(module, "make_plan", swapped)
    result = CliRunner().invoke(command, ["from-hf", str(source), str(tmp_path / "ours")])
    assert result.exit_code == 1 and "the self-check failed: logits differ by" in result.output
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.long
def test_needs_neither_mpi_nor_transformers(tmp_path):
    source = saved(tmp_path / "hf", "llama")
    script = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("h5py", "mpi4py", "transformers"):
            raise ImportError(f"{name} is not for conversions")
sys.meta_path.insert(0, Blocker())
from ptdmpi.cli import group
group(["convert", "from-hf", "hf", "ours", "--json"], standalone_mode=False)
group(["convert", "to-hf", "ours", "back"], standalone_mode=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["vocab_size"] == 50
    assert "logits of both models agree to" in done.stdout
    assert contents(tmp_path / "back") == contents(source)
