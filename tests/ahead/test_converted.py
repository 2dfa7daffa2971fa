"""Models with modules for multi-token prediction, from and to DeepSeek-V3's files."""

import json
import tomllib

import pytest
import torch
import torch.nn.functional as F
import transformers
from click.testing import CliRunner
from mpi4py import MPI
from safetensors.torch import load_file, save_file

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.convert import from_hf as importing
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.quantize.write import quantize
from ptdmpi.convert.reference import FORWARD, Question
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.stored import open_model
from ptdmpi.plan.layer.low_bit import LowBit
from tests import _stored
from tests._configs import layout
from tests._engines import build, load, microbatches, whole_weights
from tests._layers import difference
from tests._runs import VOCAB_SIZE, loop, records, tensors
from tests.convert._hugging_face import saved
from tests.convert.test_adapters import asked
from tests.convert.test_convert import command, contents
from tests.convert.test_mixtures import LATENT, YARN
from tests.parallel import parallel

L = 3
WORD, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COPIES = {"embed_tokens": WORD, "shared_head.head": HEAD}
OWN = {
    "kind": "deepseek",
    "head_size": 16,
    "rope_head_size": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "experts": 4,
    "experts_per_token": 2,
    "expert_hidden": 16,
    "shared_experts": 1,
    "dense_layers": 1,
    "router": "sigmoid",
    "ffn_hidden": 48,
    "tie_embeddings": False,
    "mtp_depth": 1,
}


def theirs(folder, modules=1, vocab_size=VOCAB_SIZE, files=1, **changes):
    """Write a random DeepSeek-V3 of L layers with `modules` modules, whose tensors are in the last
    of `files` files, into `folder`. Return the folder."""
    shape = LATENT | {"vocab_size": vocab_size, "num_hidden_layers": L + modules} | changes
    saved(folder, "deepseek_v3", **shape)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for layer in range(L, L + modules):
        name, like = f"model.layers.{layer}", weights["model.norm.weight"]
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{name}.{norm}.weight"] = 1 + 0.2 * torch.randn(32, generator=generator)
        weights[f"{name}.eh_proj.weight"] = 0.2 * torch.randn(32, 64, generator=generator)
        weights[f"{name}.embed_tokens.weight"] = weights[WORD].clone()
        head = weights.get(HEAD, weights[WORD])
        weights[f"{name}.shared_head.head.weight"] = head.clone()
        weights |= {n: x.to(like.dtype) for n, x in weights.items() if n.startswith(f"{name}.")}
    written(folder, weights, files)
    return rewritten(folder, num_hidden_layers=L, num_nextn_predict_layers=modules)


def written(folder, weights, files=1):
    """Write the weight files of a model: all in one, or the modules' in another."""
    if files == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    further = {n for n in weights if n.startswith("model.layers.") and int(n.split(".")[2]) >= L}
    table = {}
    for number, names in enumerate((weights.keys() - further, further), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({n: weights[n] for n in sorted(names)}, folder / file, {"format": "pt"})
        table |= dict.fromkeys(sorted(names), file)
    index = {"metadata": {}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rewritten(folder, **keys):
    """Change keys of config.json, and return the folder."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys, indent=2))
    return folder


def changed(folder, change):
    """Change the dictionary of all tensors of a model of one file."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    written(folder, weights)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("modules", "changes"),
    [
        (1, {"files": 2, "rope_parameters": YARN}),
        (2, {"dtype": "bfloat16", "attention_bias": True}),
        (1, {"tie_word_embeddings": True}),
    ],
)
def test_there_and_back_gives_the_same_bytes(tmp_path, modules, changes):
    source = theirs(tmp_path / "hf", modules, **changes)
    done = from_hf(source, tmp_path / "ours")
    assert done.difference < 1e-5 and not done.note
    assert open_model(tmp_path / "ours").config().model.mtp_modules == modules
    back = to_hf(tmp_path / "ours", tmp_path / "back")
    assert not back.note and back.parameters == done.parameters
    assert contents(tmp_path / "back") == contents(source)


def test_every_value_is_in_its_place(tmp_path):
    source = theirs(tmp_path / "hf", 2)
    from_hf(source, tmp_path / "ours")
    ours = tensors(open_model(tmp_path / "ours").checkpoint)
    files = load_file(source / "model.safetensors")
    for k in range(2):
        layer = f"model.layers.{L + k}"
        places = {
            "token_norm.weight": ["enorm.weight"],
            "hidden_norm.weight": ["hnorm.weight"],
            "projection.weight": ["eh_proj.weight"],
            "norm.weight": ["shared_head.norm.weight"],
            "attention_norm.weight": ["input_layernorm.weight"],
            "mlp_norm.weight": ["post_attention_layernorm.weight"],
            "attention.down.weight": [
                "self_attn.q_a_proj.weight",
                "self_attn.kv_a_proj_with_mqa.weight",
            ],
            "attention.q_norm.weight": ["self_attn.q_a_layernorm.weight"],
            "attention.kv_norm.weight": ["self_attn.kv_a_layernorm.weight"],
            "attention.q_up.weight": ["self_attn.q_b_proj.weight"],
            "attention.kv_up.weight": ["self_attn.kv_b_proj.weight"],
            "attention.out.weight": ["self_attn.o_proj.weight"],
            "mlp.router.weight": ["mlp.gate.weight"],
            "mlp.router.balance": ["mlp.gate.e_score_correction_bias"],
            "mlp.shared.up.weight": [f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up")],
            "mlp.shared.down.weight": ["mlp.shared_experts.down_proj.weight"],
        }
        for n in range(LATENT["n_routed_experts"]):
            expert = f"mlp.experts.{n}"
            places[f"{expert}.up.weight"] = [f"{expert}.{x}_proj.weight" for x in ("gate", "up")]
            places[f"{expert}.down.weight"] = [f"{expert}.down_proj.weight"]
        for name, parts in places.items():
            expected = torch.cat([files[f"{layer}.{part}"] for part in parts])
            assert torch.equal(torch.from_numpy(ours[f"weights/mtp.{k}.{name}"]), expected), name
        assert len(places) == sum(name.startswith(f"weights/mtp.{k}.") for name in ours)
    assert torch.equal(torch.from_numpy(ours["weights/head.weight"]), files[HEAD])


def test_losses_of_imported_modules_are_those_of_the_files(tmp_path):
    """The losses of a training step against the forward pass over the tensors of the files."""
    source = theirs(tmp_path / "hf", 2)
    from_hf(source, tmp_path / "ours")
    shape = tomllib.loads((tmp_path / "ours/config.toml").read_text())["model"]
    keys = {f"model.{key}": value for key, value in shape.items()}
    engine = build(
        World(MPI.COMM_SELF), keys | {"precision.compute": "fp64"}, vocab_size=VOCAB_SIZE
    )
    ours = tensors(open_model(tmp_path / "ours").checkpoint)
    state = {n.removeprefix("weights/"): torch.from_numpy(x).double() for n, x in ours.items()}
    load(engine, state)
    batches = microbatches(engine.config, 0, 0, vocab_size=VOCAB_SIZE)
    config = json.loads((source / "config.json").read_text())
    files = {
        n.removeprefix("model."): x.double()
        for n, x in load_file(source / "model.safetensors").items()
    }
    sums, counts = [0.0] * 2, [0.0] * 2
    for batch in batches:
        labels, weights = batch.labels.t(), batch.weights.t().double()
        # the forward pass reads the tokens that follow its own; the last label is one more
        ids = torch.cat((batch.inputs.t(), labels[:, -1:]), 1)
        with torch.no_grad():
            logits = FORWARD["deepseek_v3"](config, files.__getitem__, Question(ids, ahead=2))
        for k in range(2):
            kept = slice(k + 1, None)
            found = logits[k + 1][:, : labels.shape[1] - k - 1].flatten(0, 1)
            each = F.cross_entropy(found, labels[:, kept].flatten(), reduction="none")
            sums[k] += float((each * weights[:, kept].flatten()).sum())
            counts[k] += float(weights[:, kept].sum())
    result = engine.step(0, batches)
    for k in range(2):
        assert result.losses[f"multi_token_{k + 1}"].mean == pytest.approx(sums[k] / counts[k])


@pytest.mark.long
@parallel(ranks=[2], limit_s=120)
def test_an_imported_model_is_trained_evaluated_and_exported(comm, tmp_path):
    ours = tmp_path / "ours"
    if comm.rank == 0:
        from_hf(theirs(tmp_path / "hf"), ours)
    comm.Barrier()
    model_keys = tomllib.loads((ours / "config.toml").read_text())["model"]
    changes = {f"model.{key}": value for key, value in model_keys.items()}
    changes |= {"checkpoint.initial": str(ours), "run.steps": 2, **layout(p=2)}
    files = load_file(tmp_path / "hf/model.safetensors")
    with loop(comm, tmp_path, changes) as made:
        begun = whole_weights(made.engine)
        assert torch.equal(begun["mtp.0.projection.weight"], files["model.layers.3.eh_proj.weight"])
        made.run()
        trained = whole_weights(made.engine)
    if comm.rank == 0:
        steps = [record for record in records(tmp_path / "run") if "loss" in record]
        assert all(record["multi_token_1_loss"] > 0 for record in steps) and len(steps) == 2
        to_hf(tmp_path / "run", tmp_path / "back")
        back = load_file(tmp_path / "back/model.safetensors")
        assert back.keys() == files.keys()
        name = "model.layers.3.eh_proj.weight"
        assert torch.equal(back[name], trained["mtp.0.projection.weight"])
        assert not torch.equal(back[name], files[name])
        assert torch.equal(back["model.layers.3.embed_tokens.weight"], back[WORD])
        assert torch.equal(back["model.layers.3.shared_head.head.weight"], back[HEAD])
        assert not torch.equal(back[WORD], files[WORD])
        assert (tmp_path / "back/config.json").read_bytes() == (
            tmp_path / "hf/config.json"
        ).read_bytes()
        alone = World(MPI.COMM_SELF)
        ids = torch.arange(24).view(12, 2)
        for run, folder in ((ours, "hf"), (tmp_path / "run", "back")):
            opened, _ = open_inference(run, alone, None, "fp32")
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            with torch.no_grad():
                expected = loaded(ids.t()).logits.transpose(0, 1)
            assert difference(asked(opened, ids), expected[..., :50]) < 1e-5


def test_transformers_loads_what_we_export(tmp_path):
    """It ignores the layers after the last, and gives the logits of the model."""
    run = _stored.stored(tmp_path / "run", VOCAB_SIZE, **OWN)
    done = to_hf(run, tmp_path / "hf")
    assert done.difference < 1e-5 and "multi-token" not in done.note
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    files = load_file(tmp_path / "hf/model.safetensors")
    for copy, original in COPIES.items():
        assert torch.equal(files[f"model.layers.2.{copy}.weight"], files[original])
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    unexpected = info.pop("unexpected_keys")
    assert all(name.startswith("model.layers.2.") for name in unexpected)
    assert not any(info.values()), info
    ids = torch.arange(24).view(12, 2)
    opened, _ = open_inference(run, World(MPI.COMM_SELF), None, "fp32")
    with torch.no_grad():
        expected = loaded(ids.t()).logits.transpose(0, 1)
    assert difference(asked(opened, ids), expected[..., :50]) < 1e-5
    assert from_hf(tmp_path / "hf", tmp_path / "again").parameters == done.parameters
    before, after = (tensors(open_model(tmp_path / name).checkpoint) for name in ("run", "again"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize("copy", COPIES)
def test_unequal_copies_are_refused(tmp_path, copy):
    name = f"model.layers.3.{copy}.weight"

    def change(weights):
        weights[name][5, 3] += 0.25

    source = theirs(tmp_path / "hf")
    changed(source, change)
    result = CliRunner().invoke(command, ["from-hf", str(source), str(tmp_path / "ours")])
    assert isinstance(result.exception, InputError)
    line = str(result.exception)
    assert f"{name} and {COPIES[copy]} differ" in line and "\n" not in line
    assert not (tmp_path / "ours").exists()


def test_files_without_copies_come_back_without_them(tmp_path):
    source = theirs(tmp_path / "hf")
    changed(source, lambda weights: [weights.pop(f"model.layers.3.{x}.weight") for x in COPIES])
    from_hf(source, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_modules_that_config_json_does_not_count_are_refused(tmp_path):
    source = theirs(tmp_path / "hf", 2)
    for said, files in ((0, 2), (1, 2)):
        rewritten(source, num_nextn_predict_layers=said)
        line = f"num_nextn_predict_layers = {said}, but the files have layer 4 .* legal: {files}$"
        with pytest.raises(InputError, match=line):
            from_hf(source, tmp_path / "ours")


def test_a_missing_tensor_of_a_module_is_named(tmp_path):
    source = theirs(tmp_path / "hf")
    changed(source, lambda weights: weights.pop("model.layers.3.hnorm.weight"))
    with pytest.raises(InputError, match=r"tensor model.layers.3.hnorm.weight is missing"):
        from_hf(source, tmp_path / "ours")
    rewritten(source, num_nextn_predict_layers="one")
    with pytest.raises(InputError, match="num_nextn_predict_layers = 'one' is not an integer"):
        from_hf(source, tmp_path / "ours")


def test_files_of_transformers_say_modules_but_have_none(tmp_path):
    """They are converted without modules, with a note, and come back with the same bytes."""
    source = saved(tmp_path / "hf", "deepseek_v3", **LATENT)
    done = from_hf(source, tmp_path / "ours")
    assert done.note == (
        "without the modules for multi-token prediction: num_nextn_predict_layers = 1, but the "
        "files have none"
    )
    assert open_model(tmp_path / "ours").config().model.mtp_depth == 0
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_the_self_check_sees_modules(tmp_path, monkeypatch):
    source = theirs(tmp_path / "hf")
    real = importing.make_plan

    def swapped(*arguments, **options):
        plan = real(*arguments, **options)
        names = [f"model.layers.3.{norm}.weight" for norm in ("enorm", "hnorm")]
        a, b = (plan.by_name[name] for name in names)
        plan.by_name.update({names[0]: b, names[1]: a})
        return plan

    monkeypatch.setattr(importing, "make_plan", swapped)
    result = CliRunner().invoke(command, ["from-hf", str(source), str(tmp_path / "ours")])
    assert result.exit_code == 1 and "the self-check failed: logits differ by" in result.output


def test_modules_that_were_not_trained_are_left_out(tmp_path):
    """The files of a model with two modules, and runs with one and with no module."""
    source = theirs(tmp_path / "hf", 2)
    from_hf(source, tmp_path / "ours")
    shape = tomllib.loads((tmp_path / "ours/config.toml").read_text())["model"]
    del shape["vocab_size"]
    for depth in (1, 0):
        run = _stored.stored(tmp_path / f"run{depth}", VOCAB_SIZE, **shape | {"mtp_depth": depth})
        done = to_hf(run, tmp_path / f"back{depth}", tmp_path / "ours")
        assert "prediction that were not trained: layer " in done.note
        assert done.note.endswith("layer 4" if depth else "layer 3, layer 4")
        found = load_file(tmp_path / f"back{depth}/model.safetensors")
        assert ("model.layers.3.eh_proj.weight" in found) == (depth == 1)
        assert not any(name.startswith("model.layers.4.") for name in found)
        again = from_hf(tmp_path / f"back{depth}", tmp_path / f"again{depth}")
        assert not again.note and again.parameters == done.parameters
    # the files have no module, but the run has one
    done = to_hf(tmp_path / "run1", tmp_path / "less", tmp_path / "again0")
    assert "without the modules for multi-token prediction" in done.note


def test_a_head_for_a_task_leaves_modules_out(tmp_path):
    """In the files of a model with a module: neither the head nor the module's tensors remain."""
    from_hf(theirs(tmp_path / "hf"), tmp_path / "ours")
    shape = tomllib.loads((tmp_path / "ours/config.toml").read_text())["model"]
    del shape["vocab_size"]
    head = {"output_head": "classes", "classes": 3, "tie_embeddings": False}
    run = _stored.stored(tmp_path / "run", VOCAB_SIZE, **shape | head)
    with (run / "config.toml").open("a") as file:
        file.write('[task]\nkind = "classification"\nlabels = ["a", "b", "c"]\n')
    done = to_hf(run, tmp_path / "back", tmp_path / "ours")
    assert "were not trained: layer 3; without lm_head.weight: it has" in done.note
    loaded, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(info.values()) and loaded.config.num_labels == 3
    assert from_hf(tmp_path / "back", tmp_path / "again").difference < 1e-6


def test_packed_files_name_the_linears_of_modules_as_plain(tmp_path):
    run = _stored.stored(tmp_path / "run", VOCAB_SIZE, **OWN)
    quantize(run, tmp_path / "low", LowBit("int4", 16))
    to_hf(tmp_path / "low", tmp_path / "packed", quantized=True)
    plain = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    found = load_file(tmp_path / "packed/model.safetensors")
    linears = {
        name.removesuffix(".weight")
        for name, x in found.items()
        if x.dim() == 2 and name.endswith(".weight") and "embed_tokens" not in name
    }
    assert set(plain["ignore"]) == linears
    assert "model.layers.2.eh_proj" in linears and "model.layers.2.shared_head.head" in linears
