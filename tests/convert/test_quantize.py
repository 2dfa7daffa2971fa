"""Post-training quantization: what it writes, who reads it, and what GPTQ does better."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from data_prep.vocabulary import BYTES_SHA256
from ptdmpi.base.box import Box
from ptdmpi.checkpoint import examine
from ptdmpi.checkpoint.boxes import Damaged
from ptdmpi.cli import group
from ptdmpi.comm.world import World
from ptdmpi.commands.quantize import work
from ptdmpi.config import InputError
from ptdmpi.convert.quantize.calibration import CalibrationSamples
from ptdmpi.convert.quantize.gptq import gptq
from ptdmpi.convert.quantize.write import matrices, quantize
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.inference.stored import open_model
from ptdmpi.model.low_bit.codes import packed, scales_of
from ptdmpi.plan.layer.low_bit import CODES, LowBit
from tests._stored import LLAMA, stored
from tests.parallel import parallel

VOCAB_SIZE = 101


def read(folder: Path) -> dict[str, np.ndarray]:
    """All weights by their own names."""
    model = open_model(folder)
    with model.reader() as reader:
        whole = {}
        for name in model.manifest.names:
            if not name.startswith("weights/"):
                continue
            whole[name] = np.empty(model.manifest[name].shape, np.float32)
            reader.read(name, Box.whole(whole[name].shape), whole[name])
    return whole


@pytest.mark.parametrize("codes", CODES)
def test_weights_are_read_by_their_own_names_and_any_box(tmp_path, codes):
    source = stored(tmp_path / "model", VOCAB_SIZE, **LLAMA)
    target = tmp_path / "low"
    form = LowBit(codes, 16)
    done = quantize(source, target, form)
    before = read(source)
    after = read(target)
    assert before.keys() == after.keys()
    changed = {f"weights/{name}" for name in matrices(open_model(source).config().model)}
    for name, values in before.items():
        expected = values
        if name in changed:
            expected = packed(torch.from_numpy(values), form).values(torch.float32).numpy()
        assert np.array_equal(after[name], expected), name
    assert len(changed) == done.matrices == 8
    low = open_model(target)
    name = "weights/layers.1.mlp.down.weight"
    box = Box((3, 5), (9, 37))
    part = np.empty(box.size, np.float64)
    with low.reader() as reader:
        reader.read(name, box, part)
    assert np.array_equal(part, after[name][box.index])
    assert examine.problems(low.checkpoint) == []
    assert low.manifest.said["quantization"] == {"codes": codes, "block": 16, "method": "absmax"}


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_routers_are_not_quantized(tmp_path, dense_layers):
    """Also if the first layer has no experts."""
    mixture = {"experts": 2, "experts_per_token": 2, "expert_hidden": 48}
    mixture["balance"] = "none"
    keys = LLAMA | mixture | {"dense_layers": dense_layers}
    source = stored(tmp_path / "model", VOCAB_SIZE, **keys)
    quantize(source, tmp_path / "low", LowBit("int4", 16))
    assert "codes/layers.1.mlp.experts.1.up.weight" in open_model(tmp_path / "low").manifest.names
    name = "weights/layers.1.mlp.router.weight"
    assert np.array_equal(read(tmp_path / "low")[name], read(source)[name])
    if dense_layers == 0:
        to_hf(tmp_path / "low", tmp_path / "packed", quantized=True)
        theirs = json.loads((tmp_path / "packed/config.json").read_text())
        gates = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in (0, 1)]
        assert theirs["quantization_config"]["ignore"] == ["lm_head", *gates]


def test_what_is_damaged_is_found(tmp_path):
    quantize(stored(tmp_path / "model", VOCAB_SIZE), tmp_path / "low", LowBit("int4", 16))
    low = open_model(tmp_path / "low")
    piece = low.manifest.tensors["codes/layers.0.mlp.up.weight"].pieces[0]
    path = low.checkpoint / piece.file
    data = bytearray(path.read_bytes())
    data[piece.offset + 7] ^= 1
    path.write_bytes(data)
    assert any("codes/layers.0.mlp.up" in line for line in examine.problems(low.checkpoint))
    with low.reader() as reader, pytest.raises(Damaged):
        name = "weights/layers.0.mlp.up.weight"
        reader.read(name, Box.whole(low.manifest[name].shape), np.empty(low.manifest[name].shape))


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path):
    source = stored(tmp_path / "model", VOCAB_SIZE, **LLAMA)
    with pytest.raises(InputError, match=r"--block 32 .* \(32, 48\); legal nearby: 4 or 8 or 16"):
        quantize(source, tmp_path / "low", LowBit("int4", 32))
    odd = stored(tmp_path / "odd", VOCAB_SIZE, hidden=36)
    with pytest.raises(InputError, match=r"--block 9 is not even, .*; legal nearby: 4 or 6 or 12"):
        quantize(odd, tmp_path / "low", LowBit("int4", 9))
    assert not (tmp_path / "low").exists()
    quantize(source, tmp_path / "low", LowBit("int4", 16))
    with pytest.raises(InputError, match="quantized already: int4, blocks of 16; legal"):
        quantize(tmp_path / "low", tmp_path / "lower", LowBit("int4", 16))
    for wrong, message in (
        (["--method", "gptq"], "needs --data"),
        (["--samples", "3"], "--samples belongs to --method gptq"),
        (["--nf4"], "--nf4 has 4 bits"),
        (["--asymmetric"], "--asymmetric has 4 bits"),
        (["--nf4", "--asymmetric"], "--nf4 and --asymmetric select two different formats"),
    ):
        result = CliRunner().invoke(group, ["quantize", str(source), str(tmp_path / "x"), *wrong])
        assert isinstance(result.exception, InputError) and message in str(result.exception)


@pytest.mark.parametrize("part", ["attention.qkv.weight", "norm.weight"])
def test_weights_that_are_not_finite_are_not_rounded(tmp_path, part):
    def lost(name: str, values: torch.Tensor) -> torch.Tensor:
        values[..., 0] = torch.nan if name.startswith("layers.1") and part in name else 0.25
        return values

    source = stored(tmp_path / "model", VOCAB_SIZE, changed=lost)
    with ShardWriter(
        tmp_path / "0.h5", "t", BYTES_SHA256, vocab_size=VOCAB_SIZE, eod_id=100
    ) as writer:
        writer.write(np.arange(90), np.array([90]))
    samples = CalibrationSamples(tmp_path, 4, 8)
    for given in (samples, None) if "qkv" in part else (samples,):
        with pytest.raises(InputError, match=r"layers\.1\..*: inf or NaN"):
            quantize(source, tmp_path / "low", LowBit("int4", 16), samples=given)
        assert not (tmp_path / "low").exists()


def test_inspect_says_what_it_is(tmp_path):
    quantize(stored(tmp_path / "model", VOCAB_SIZE), tmp_path / "low", LowBit("int4", 16))
    command = ["checkpoint", "inspect", str(tmp_path / "low"), "--json"]
    (shown,) = json.loads(CliRunner().invoke(group, command).output)["checkpoints"]
    (before,) = json.loads(
        CliRunner().invoke(group, [*command[:2], str(tmp_path / "model"), "--json"]).output
    )["checkpoints"]
    assert shown["quantization"] == "int4, block 16, method absmax; 8 matrices"
    assert shown["parameters"] == before["parameters"]
    assert shown["bytes"] < 0.5 * before["bytes"]


def test_gptq_changes_the_products_of_what_it_saw_less_than_rounding_does():
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(64, 64, generator=generator)
    x = torch.randn(512, 64, generator=generator) @ mixed  # inputs that go together
    x *= torch.logspace(-1, 0, 64)  # the greatest last: in the order of the columns it has 0.78
    x[:, 9] = 0.0
    weight = torch.randn(48, 64, generator=generator)
    form = LowBit("int4", 16)
    hessian = (x.t() @ x).double()

    def error(values: torch.Tensor) -> float:
        return float((x @ (values - weight).t()).square().sum())

    rounding, better = (
        error(matrix.values(torch.float32))
        for matrix in (packed(weight, form), gptq(weight, hessian, form))
    )
    assert better < 0.4 * rounding
    # what it saw alone says nothing of inputs that do not go together: then it is rounding
    alone = gptq(weight, torch.eye(64, dtype=torch.float64), form).values(torch.float32)
    assert torch.equal(alone, packed(weight.double(), form).values(torch.float32))


SQUARE = LLAMA | {"ffn_hidden": 64, "tie_embeddings": False}


def test_packed_files_hold_the_numbers_in_words_of_32_bits(tmp_path):
    """The format of compressed-tensors: number + 2^(bits - 1), low ones first, times the scale."""
    source = stored(tmp_path / "model", VOCAB_SIZE, **SQUARE)
    quantize(source, tmp_path / "low", LowBit("int4", 16))
    done = to_hf(tmp_path / "low", tmp_path / "packed", quantized=True)
    assert done.difference < 1e-6
    expected = torch.from_numpy(read(tmp_path / "low")["weights/layers.1.mlp.up.weight"])
    with safe_open(tmp_path / "packed" / "model.safetensors", framework="pt") as file:
        rows = []
        for name in ("gate_proj", "up_proj"):
            key = f"model.layers.1.mlp.{name}.weight"
            assert file.get_tensor(f"{key}_shape").tolist() == [64, 32]
            words, scale = (file.get_tensor(f"{key}_{suffix}") for suffix in ("packed", "scale"))
            numbers = (words[..., None].to(torch.int64) >> (torch.arange(8) * 4) & 15) - 8
            blocks = numbers.flatten(-2).float().unflatten(-1, (-1, 16)) * scale[..., None]
            rows.append(blocks.flatten(-2))
        assert torch.equal(torch.cat(rows), expected)
        assert {"lm_head.weight", "model.norm.weight"} <= set(file.keys())
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized" and config["ignore"] == ["lm_head"]
    for model, codes, message in (
        ({}, "int4", "the modules of Hugging Face's gpt2"),
        (SQUARE, "nf4", "the levels of nf4 are not integers"),
        (SQUARE, "uint4", "the minimum of a uint4 block"),
    ):
        source = stored(tmp_path / f"{codes}-model", VOCAB_SIZE, **model)
        quantize(source, tmp_path / f"{codes}-low", LowBit(codes, 16))
        with pytest.raises(InputError, match=message):
            to_hf(tmp_path / f"{codes}-low", tmp_path / "no", quantized=True)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("codes", ["int4", "int8"])
def test_transformers_loads_packed_files(tmp_path, codes):
    """On a CPU, by the package `compressed-tensors`: the logits of the unpacked model."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    quantize(stored(tmp_path / "model", VOCAB_SIZE, **SQUARE), tmp_path / "low", LowBit(codes, 16))
    to_hf(tmp_path / "low", tmp_path / "packed", quantized=True)
    to_hf(tmp_path / "low", tmp_path / "plain")
    ids = torch.arange(16)[None]
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits
        for name in ("packed", "plain")
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_values_are_those_of_torchao(codes):
    """Its symmetric numbers with scales of ours, group by group."""
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    form = LowBit(codes, 16)
    scales = scales_of(x, form)
    half = 2 ** (form.bits - 1)
    given = ((1, 16), scales, torch.zeros_like(scales, dtype=torch.int32))
    numbers = primitives.quantize_affine(x, *given, torch.int8, -half, half - 1)
    reference = primitives.dequantize_affine(numbers, *given, torch.int8, -half, half - 1)
    torch.testing.assert_close(
        packed(x, form).values(torch.float32), reference, rtol=1e-6, atol=1e-7
    )


@parallel(ranks=[2])
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["learned", "rope"])
def test_all_ranks_measure_what_one_has_written(comm, tmp_path, model):
    data = tmp_path / "shards"
    if comm.rank == 0:
        stored(tmp_path / "model", VOCAB_SIZE, **model)
        data.mkdir()
        with ShardWriter(
            data / "0.h5", "t", BYTES_SHA256, vocab_size=VOCAB_SIZE, eod_id=100
        ) as writer:
            ids = np.random.default_rng(0).integers(0, 100, 200)
            writer.write(ids, np.array([200]))
    comm.Barrier()
    options = {"method": "gptq", "data": data, "samples": 9, "length": 12, "evaluate": (data,)}
    options |= {"ema": False}
    source, form, world = tmp_path / "model", LowBit("int8", 16), World(comm)
    results = work(
        source, tmp_path / "low", form, world=world, options=options | {"precision": "fp32"}
    )
    (row,) = results["perplexity"]
    assert row["before"] != row["after"]
    assert row["after"] == pytest.approx(row["before"], rel=0.005)
    said = open_model(tmp_path / "low").manifest.said["quantization"]
    assert said["method"] == "gptq" and (said["samples"], said["sample_tokens"]) == (9, 12)
    with pytest.raises(InputError, match=r"--samples 999: .* of 12 tokens"):
        target = tmp_path / "more"
        work(
            source, target, form, world=world, options=options | {"precision": None, "samples": 999}
        )
    assert comm.allgather(row["after"]) == [row["after"]] * 2


HEAD = {"output_head": "classes", "classes": 2, "tie_embeddings": False}


@parallel(ranks=[1])
@pytest.mark.parametrize(
    ("model", "message"),
    [(HEAD, "has a head for a task"), ({"kind": "bert"}, "is a masked language model")],
    ids=["head", "bert"],
)
def test_a_model_that_predicts_no_next_token_has_no_perplexity(comm, tmp_path, model, message):
    source = stored(tmp_path / "model", VOCAB_SIZE, **model)
    with open(source / "config.toml", "a") as file:
        file.write('[task]\nkind = "classify"\nlabels = ["no", "yes"]\n' * (model == HEAD))
    data = tmp_path / "shards"
    data.mkdir()
    with ShardWriter(data / "0.h5", "t", BYTES_SHA256, vocab_size=VOCAB_SIZE, eod_id=100) as writer:
        writer.write(np.zeros(50, np.int64), np.array([50]))
    quantized = partial(work, source, tmp_path / "low", LowBit("int4", 16), world=World(comm))
    options = {"method": "absmax", "data": None, "precision": None, "ema": False}
    with pytest.raises(InputError, match=f"--evaluate: .*model {message}"):
        quantized(options=options | {"evaluate": (data,)})
    assert not (tmp_path / "low").exists()
    assert quantized(options=options | {"evaluate": ()})["matrices"] == 8
