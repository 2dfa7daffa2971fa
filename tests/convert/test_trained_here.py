"""A model of our own leaves for Hugging Face, and `transformers` loads it; others cannot."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from ptdmpi.checkpoint.manifest import checksum
from ptdmpi.cli import group
from ptdmpi.config import InputError
from ptdmpi.convert.to_hf import to_hf
from tests import _stored

V = 51


def stored(folder, **model):
    return _stored.stored(folder, V, **model)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tie_embeddings": False, "ffn_hidden": 40, "activation": "gelu_exact"},
        {"kind": "llama", "kv_heads": 2, "ffn_hidden": 48, "rope_theta": 5e4},
        {"kind": "llama", "ffn_hidden": 48, "bias": True, "tie_embeddings": True},
        # of whose factors the converted model knows nothing
        {"mup_base_hidden": 12, "mup_base_head_size": 2},
        {"kind": "qwen3", "ffn_hidden": 48, "mup_base_hidden": 8, "mup_base_head_size": 2},
    ],
    ids=lambda model: "-".join(map(str, model.values())) or "gpt",
)
def test_transformers_loads_it(tmp_path, model):
    import transformers

    done = to_hf(stored(tmp_path / "run", **model), tmp_path / "hf")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(info.values()), info
    assert theirs.num_parameters() == done.parameters and theirs.dtype == torch.float32
    assert theirs.config.eos_token_id is None
    # and comes back with the same logits
    from ptdmpi.convert.from_hf import from_hf

    assert from_hf(tmp_path / "hf", tmp_path / "again").difference < 1e-6
    to_hf(tmp_path / "run/checkpoints/step-00000007", tmp_path / "half", dtype="bfloat16")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "family, keys, expected",
    [
        ("llama", {"rope_theta": 5e4, "seq_length": 64}, {"max_position_embeddings": 64}),
        ("llama", {"seq_length": 8, "dropout": 0.1}, {}),
        ("gpt2", {"norm_eps": 1e-3}, {"layer_norm_epsilon": 1e-3}),
        ("bert", {"activation": "gelu"}, {"hidden_act": "gelu_new"}),
    ],
)
def test_what_a_training_has_changed_stands_in_config_json(tmp_path, family, keys, expected):
    """Such as RoPE's base, for longer samples: a function of the same weights that is another."""
    from ptdmpi.convert.from_hf import from_hf
    from tests.convert._hugging_face import saved

    source = saved(tmp_path / "hf", family)
    from_hf(source, tmp_path / "ours")
    (path,) = (tmp_path / "ours").rglob("manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["crc32"]
    manifest["model"] |= keys  # what the training of a checkpoint says that it was
    path.write_text(json.dumps(manifest | {"crc32": checksum(manifest)}))
    done = to_hf(tmp_path / "ours", tmp_path / "back")
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back")
    )
    if "rope_theta" in keys:
        expected |= {"rope_theta": 5e4, "rope_parameters": after["rope_parameters"]}
        assert after["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e4}
    assert after == before | expected
    changed = done.note.removeprefix("config.json has the trained model's ")
    assert set(filter(None, changed.split(", "))) == expected.keys()


def test_several_files(tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr("ptdmpi.convert.tensors.FILE_BYTES", 10_000)
    done = to_hf(stored(tmp_path / "run"), tmp_path / "hf")
    assert done.files == len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 3
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(info.values()), info


@pytest.mark.parametrize(
    "model, message",
    [
        ({"norm": "rmsnorm"}, r"model.activation = 'gelu': a llama of Hugging Face has 'swiglu'"),
        ({"positions": "rope"}, r"model.positions = 'rope': a gpt2 of Hugging Face has 'learned'"),
        ({"kv_heads": 2}, r"model.kv_heads = 2: a gpt2 of Hugging Face has 4"),
        ({"activation": "swiglu"}, r"model.activation = 'swiglu': a gpt2 of .* has 'gelu'"),
        ({"block_norm": "post"}, r"model.block_norm = 'post': a gpt2 of Hugging Face has 'pre'"),
    ],
)
def test_shapes_that_no_family_has(tmp_path, model, message):
    with pytest.raises(InputError, match=message):
        to_hf(stored(tmp_path / "run", **model), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_is_no_model(tmp_path):
    run = stored(tmp_path / "run")
    with pytest.raises(InputError, match=r"no-such is no checkpoint, and no run directory"):
        to_hf(tmp_path / "no-such", tmp_path / "hf")
    with pytest.raises(InputError, match=r"hugging_face is no ch.*; ptdmpi convert from-hf takes"):
        (tmp_path / "hugging_face").mkdir()
        (tmp_path / "hugging_face/config.json").write_text("{}")
        to_hf(tmp_path / "hugging_face", tmp_path / "hf")
    with pytest.raises(InputError, match=r"run has no hugging_face/headers.json"):
        to_hf(run, tmp_path / "hf", like=run)
    for wrong in (
        "{}",
        '{"model.safetensors": 3}',
        '{"../x": "{}"}',
        '{"x": "{\\"a\\": 3}"}',
        "[]",
    ):
        (tmp_path / "like/hugging_face").mkdir(parents=True, exist_ok=True)
        (tmp_path / "like/hugging_face/config.json").write_text('{"model_type": "gpt2"}')
        (tmp_path / "like/hugging_face/headers.json").write_text(wrong)
        with pytest.raises(InputError, match=r"headers.json is no"):
            to_hf(run, tmp_path / "hf", like=tmp_path / "like")
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("layers = 2", "layers = 1"))
    with pytest.raises(InputError, match=r"weights/layers.1.* is not a tensor of the model"):
        to_hf(run, tmp_path / "hf")
    (run / "config.toml").write_text(text.replace("hidden = 32", "hidden = 64"))
    with pytest.raises(InputError, match=r"has shape"):
        to_hf(run, tmp_path / "hf")
    (run / "config.toml").unlink()
    with pytest.raises(InputError, match=r"no config.toml in"):
        to_hf(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_the_weights_average_leaves_in_their_place(tmp_path, capfd):
    """By --ema of convert and quantize, as if it were what the checkpoint holds; a run without one
    is refused."""
    other = stored(tmp_path / "other", factor=0.2)
    both = stored(tmp_path / "both", average=0.2)
    for words, file in (
        (("convert", "to-hf"), "model.safetensors"),
        (("quantize",), "checkpoints/step-00000007/rank-00000.safetensors"),
    ):
        written = []
        for source, more in ((other, ()), (both, ("--ema",))):
            target = tmp_path / f"{words[0]}-{source.name}"
            result = CliRunner().invoke(
                group, [*words, str(source), str(target), *BLOCK[words[0]], *more]
            )
            assert result.exit_code == 0, result.output
            written.append(load_file(target / file))
        assert written[0].keys() == written[1].keys()
        assert all(torch.equal(value, written[1][name]) for name, value in written[0].items())
        result = CliRunner().invoke(group, [*words, str(other), str(tmp_path / "none"), "--ema"])
        said = f"{result.exception} {result.output} {capfd.readouterr().err}"
        assert "holds no ema: its run keeps none" in said
        assert not (tmp_path / "none").exists()


BLOCK = {"convert": (), "quantize": ("--block", "16")}
