"""Adapters merged, split, and in `peft`'s format: the same logits, the same training."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.checkpoint.base import base_at
from ptdmpi.checkpoint.boxes import Outgoing
from ptdmpi.checkpoint.load import load_frozen
from ptdmpi.cli import group as program
from ptdmpi.comm.world import World
from ptdmpi.config import AdaptConfig, InputError
from ptdmpi.config.sections import AVERAGE
from ptdmpi.convert.adapters import LoadedAdapter, load_adapter, merge, split, write_adapter
from ptdmpi.convert.folder import new_directory
from ptdmpi.convert.from_hf import from_hf, write_checkpoint
from ptdmpi.convert.peft.export import export
from ptdmpi.convert.peft.form import CONFIG_FILE, WEIGHTS_FILE
from ptdmpi.convert.peft.read import import_peft
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.engine.engine import Engine
from ptdmpi.inference.model import InferenceModel, open_inference
from ptdmpi.lineage.adapted import Adapted
from ptdmpi.model.state import WEIGHTS
from tests._engines import build, load, logits_of, microbatches, tokens, whole_weights
from tests._layers import difference
from tests._stored import stored
from tests.convert._hugging_face import V, model, saved
from tests.parallel import parallel

STEPS = 20
SOME = ("attention.q", "attention.v", "mlp.*")
KINDS = {
    "llama": AdaptConfig(method="lora", rank=3, alpha=6.0),
    "gpt2": AdaptConfig(method="lora", rank=2, alpha=8.0, targets=SOME),
    "ia3": AdaptConfig(method="ia3"),
    "later": AdaptConfig(method="lora", rank=3, alpha=6.0, first_layer=1),
    "later ia3": AdaptConfig(method="ia3", first_layer=1),
}
FAMILIES = {"ia3": "llama", "later": "llama", "later ia3": "gpt2"}
MERGED = [*list(KINDS)[:4], pytest.param("later ia3", marks=pytest.mark.long)]


def engine_over(comm, folder, adapt: AdaptConfig) -> Engine:
    """Return an engine of the model at `folder` with random adapters."""
    stored = open_inference(folder, World(comm), None, None)[0].config.model
    keys = {f"model.{key}": value for key, value in stored.model_dump().items()}
    own = {f"adapt.{key}": value for key, value in adapt.model_dump().items()}
    run = {"run.steps": STEPS, "optimizer.clip_norm": 0.0}
    engine = build(World(comm), keys | own | run, V)
    directory, _ = base_at(folder)
    load_frozen(engine.state, engine.axes.world, directory)
    load(engine, {name: drawn(name, weight) for name, weight in whole_weights(engine).items()})
    return engine


def drawn(name: str, before: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return before + 0.2 * torch.randn(before.shape, generator=generator)


def kept(engine: Engine, base, folder):
    """A checkpoint of the engine's adapters."""
    adapted = Adapted(engine.config.adapt, base_at(base)[1])
    write_adapter(folder, LoadedAdapter(adapted, engine.config.model, whole_weights(engine)))
    return folder


def asked(opened: InferenceModel, ids: Tensor) -> Tensor:
    """Logits [s, b, V] of a model on one rank."""
    with torch.no_grad():
        (stage,) = opened.stages.values()
        return stage.heads(opened.hidden(ids))[0][..., :V]


@pytest.mark.cases(2)
@parallel(ranks=[1], limit_s=120)
@pytest.mark.parametrize("kind", MERGED)
def test_merged_split_and_back_from_peft(comm, tmp_path, kind):
    theirs = saved(tmp_path / "hf", FAMILIES.get(kind, kind))
    base = tmp_path / "base"
    from_hf(theirs, base)
    engine = engine_over(comm, base, KINDS[kind])
    adapter = kept(engine, base, tmp_path / "adapter")
    batch = microbatches(engine.config, 0, 0, vocab_size=V)[0]
    expected = logits_of(engine, batch)
    beside, _ = open_inference(base, World(comm), None, None, adapter=adapter)
    assert difference(asked(beside, batch.inputs), expected) < 1e-6
    plain, _ = open_inference(base, World(comm), None, None)
    assert difference(asked(plain, batch.inputs), expected) > 1e-2
    merge(base, adapter, tmp_path / "merged")
    whole, _ = open_inference(tmp_path / "merged", World(comm), None, None)
    assert difference(asked(whole, batch.inputs), expected) < 1e-5
    to_hf(tmp_path / "merged", tmp_path / "merged-hf")  # which checks itself
    with pytest.raises(InputError, match="exists already"):
        merge(base, adapter, tmp_path / "merged")
    with pytest.raises(InputError, match="belong to the weights of"):
        merge(tmp_path / "merged", adapter, tmp_path / "twice")

    written, _ = export(adapter, tmp_path / "peft")
    imported = import_peft(tmp_path / "peft", base, tmp_path / "again")
    again = load_adapter(tmp_path / "again")
    own = load_adapter(adapter)
    assert again.adapted.adapt.first_layer == KINDS[kind].first_layer
    # c_attn of a GPT-2 has q, k and v in one, with the ranks of its adapters side by side
    assert again.adapted.adapt.rank == own.adapted.adapt.rank
    assert again.adapted.adapt.alpha == own.adapted.adapt.alpha
    assert again.tensors.keys() == own.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in own.tensors.items())
    assert imported == sum(tensor.numel() for tensor in own.tensors.values()) <= written
    if own.adapted.adapt.targets == "all":
        assert again.adapted.adapt.targets == "all"
    back, _ = open_inference(base, World(comm), None, None, adapter=tmp_path / "again")
    assert difference(asked(back, batch.inputs), expected) < 1e-6
    if kind in ("llama", "later"):
        left, others = split(base, tmp_path / "merged", tmp_path / "split", 3)
        assert left < 1e-5 and not others
        assert load_adapter(tmp_path / "split").tensors.keys() == own.tensors.keys()
        opened, _ = open_inference(base, World(comm), None, None, adapter=tmp_path / "split")
        assert difference(asked(opened, batch.inputs), expected) < 1e-5


@parallel(ranks=[1])
def test_the_base_has_its_name_on_the_hub(comm, tmp_path):
    source = saved(tmp_path / "hf", "llama")
    base, other = tmp_path / "base", tmp_path / "other"
    from_hf(source, base, "org/name")
    from_hf(source, other, "org/other")
    adapter = kept(engine_over(comm, base, KINDS["llama"]), base, tmp_path / "adapter")
    names = {"peft": "", "named": "mine/base"}
    for folder, name in names.items():
        export(adapter, tmp_path / folder, base_name=name)
        config = json.loads((tmp_path / folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == (name or "org/name")
    import_peft(tmp_path / "peft", base, tmp_path / "again")
    with pytest.raises(InputError, match=r"= org/name, but .* was converted from org/other"):
        import_peft(tmp_path / "peft", other, tmp_path / "wrong")


@parallel(ranks=[1])
def test_what_peft_has_and_we_have_not_is_refused(comm, tmp_path):
    base = tmp_path / "base"
    from_hf(saved(tmp_path / "hf", "llama"), base)
    engine = engine_over(comm, base, KINDS["llama"])
    export(kept(engine, base, tmp_path / "adapter"), tmp_path / "peft")
    path = tmp_path / "peft" / CONFIG_FILE
    config = json.loads(path.read_text())
    for wrong, message in (
        ({"use_dora": True}, "use_dora = True; legal: False"),
        ({"peft_type": "PROMPT"}, "peft_type = 'PROMPT'; legal: 'LORA' or 'IA3'"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens = \[1\]; legal: None"),
        # whose base has other weights
        ({"init_lora_weights": "pissa_niter_4"}, "= 'pissa_niter_4'; legal: True, False, 'gauss"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights = 'lora_ga'; legal: "),
    ):
        path.write_text(json.dumps(config | wrong))
        with pytest.raises(InputError, match=message):
            import_peft(tmp_path / "peft", base, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@parallel(ranks=[1])
def test_patterns_are_read_as_peft_reads_them(comm, tmp_path):
    """The keys are regular expressions, of which the first match counts; ranks are those in the
    file."""
    base = tmp_path / "base"
    from_hf(saved(tmp_path / "hf", "llama"), base)
    adapter = kept(engine_over(comm, base, KINDS["llama"]), base, tmp_path / "adapter")
    export(adapter, tmp_path / "peft")
    path = tmp_path / "peft" / CONFIG_FILE
    config = json.loads(path.read_text())
    patterns = {r"layers\.1\..*(q|v)_proj": 12.0, "q_proj": 24.0}
    path.write_text(json.dumps(config | {"alpha_pattern": patterns}))
    import_peft(tmp_path / "peft", base, tmp_path / "again")
    imported = load_adapter(tmp_path / "again").tensors
    factors = []
    for name, before in load_adapter(adapter).tensors.items():
        factor = 4.0 if name.endswith("lora_q.b") else 1.0
        if name in ("layers.1.attention.qkv.lora_q.b", "layers.1.attention.qkv.lora_v.b"):
            factor = 2.0
        assert torch.equal(imported[name], before * factor), name
        factors.append(factor)
    assert {1.0, 2.0, 4.0} == {*factors}
    for wrong, message in (
        ({"alpha_pattern": {"query": 1.0}}, "alpha_pattern: 'query' names no module that has"),
        ({"alpha_pattern": {"proj": 1.0}}, "alpha_pattern: 'proj' names no module that has"),
        ({"alpha_pattern": {"(": 1.0}}, r"alpha_pattern: '\(': .*; legal: a regular expression"),
        ({"alpha_pattern": {"([a-z.]+)+X": 1.0}}, "repeats too much; legal: no repeated group"),
        ({"alpha_pattern": {".*" * 9 + "X": 1.0}}, r"repeats too much; .* at most 3 of"),
        ({"alpha_pattern": {"q{99999999999}": 1.0}}, "too large; legal: a regular expression"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "legal: a number above 0"),
        ({"modules_to_save": 3}, r"modules_to_save = \['3'\]; legal: None, or a head"),
        ({"modules_to_save": [{}, 1]}, r"modules_to_save = \['1', '{}'\]; legal: None"),
        ({"rank_pattern": {"q_proj": 2}}, r"rank 2 of .*q_proj, but .* has 3 rows; legal: the"),
        ({"r": 2}, "r or rank_pattern give rank 2 of"),
    ):
        path.write_text(json.dumps(config | wrong))
        with pytest.raises(InputError, match=message):
            import_peft(tmp_path / "peft", base, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


@parallel(ranks=[1])
def test_factors_of_inputs_are_none_of_outputs(comm, tmp_path):
    """The shape says which of both `peft` multiplies, where there are as many, too."""
    base = tmp_path / "base"
    from_hf(saved(tmp_path / "hf", "llama"), base)
    engine = engine_over(comm, base, KINDS["ia3"])
    export(kept(engine, base, tmp_path / "adapter"), tmp_path / "peft")
    weights = tmp_path / "peft" / WEIGHTS_FILE
    tensors = load_file(weights)
    for end in ("k_proj.ia3_l", "down_proj.ia3_l"):
        name = next(tensor for tensor in tensors if tensor.endswith(end))
        turned = tensors[name].T.contiguous()
        save_file({**tensors, name: turned}, weights)
        message = (
            rf"{end} has shape \[{turned.shape[0]}, {turned.shape[1]}\]: .*legal: the channels, "
        )
        with pytest.raises(InputError, match=message):
            import_peft(tmp_path / "peft", base, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@parallel(ranks=[1])
def test_what_is_wrong_in_files_of_peft_is_one_line(comm, tmp_path):
    base = tmp_path / "base"
    from_hf(saved(tmp_path / "hf", "llama"), base)
    engine = engine_over(comm, base, KINDS["llama"])
    export(kept(engine, base, tmp_path / "adapter"), tmp_path / "peft")
    path = tmp_path / "peft" / CONFIG_FILE
    weights = tmp_path / "peft" / WEIGHTS_FILE
    config = json.loads(path.read_text())
    tensors = load_file(weights)

    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message):
            import_peft(tmp_path / "peft", base, tmp_path / "again")
        assert not (tmp_path / "again").exists()

    for key, value in (
        ("r", 0),
        ("lora_alpha", None),
        ("lora_alpha", "many"),
        ("lora_dropout", 1.0),
        ("alpha_pattern", [1]),
    ):
        path.write_text(json.dumps(config | {key: value}))
        refused(f"{key} = .*; legal: ")
    path.write_text(json.dumps(config | {"alpha_pattern": {"q_proj": "x"}}))
    refused("q_proj = 'x'; legal: a number above 0")
    path.write_text(json.dumps(config))
    a, b = (next(name for name in tensors if f"lora_{letter}" in name) for letter in "AB")
    for name, wrong in ((a, tensors[a][:, :-1]), (b, tensors[b][:-1]), (a, tensors[a].flatten())):
        save_file({**tensors, name: wrong.contiguous()}, weights)
        refused(r"lora_[AB]\.weight has shape \[.*: it is not of this model")
    first = {name for name in tensors if ".layers.0." in name}
    other = {name.replace("layers.0", "layers.1") for name in first}
    assert first and other < tensors.keys()
    save_file({name: tensor for name, tensor in tensors.items() if name not in other}, weights)
    refused("not all layers from 0 to the last, .*, have adapters of the same linears")
    save_file({name: tensor for name, tensor in tensors.items() if name != b}, weights)
    refused(r"lora_B\.weight is missing: it is not of this model")


@parallel(ranks=[1])
def test_the_average_of_adapters_leaves_in_their_place(comm, tmp_path):
    """Merged and exported; adapters without one are refused."""
    base = stored(tmp_path / "base", V)
    shape = AdaptConfig(method="lora", rank=2)
    engine = engine_over(comm, base, shape)
    plain = kept(engine, base, tmp_path / "plain")
    tensors = load_adapter(plain).tensors
    model = engine.config.model
    adapted = Adapted(shape, base_at(base)[1])
    average = {name: 2 * tensor for name, tensor in tensors.items()}
    write_adapter(tmp_path / "average", LoadedAdapter(adapted, model, average))
    parts = [
        Outgoing(
            f"{kind}/{name}", tuple(value.shape), Box.whole(value.shape), "float32", value.numpy
        )
        for kind, values in ((WEIGHTS, tensors), (AVERAGE, average))
        for name, value in values.items()
    ]
    both = tmp_path / "both"
    write_checkpoint(both / "checkpoints", parts, model.model_dump(), adapted.in_manifest())
    assert all(torch.equal(load_adapter(both).tensors[n], tensor) for n, tensor in tensors.items())
    for command, front in (("merge", [str(base)]), ("export", [])):
        written = []
        for adapter, more in ((tmp_path / "average", []), (both, ["--ema"])):
            target = tmp_path / f"{command}-{adapter.name}"
            words = ["adapter", command, *front, str(adapter), str(target), *more]
            result = CliRunner().invoke(program, words)
            assert result.exit_code == 0, result.output
            written.append(load_file(next(target.rglob("*.safetensors"))))
        assert written[0].keys() == written[1].keys()
        assert all(torch.equal(value, written[1][name]) for name, value in written[0].items())
        words = ["adapter", command, *front, str(plain), str(tmp_path / "none"), "--ema"]
        result = CliRunner().invoke(program, words)
        assert "holds no ema: its run keeps none" in str(result.exception)
        assert not (tmp_path / "none").exists()


def test_a_full_disk_leaves_nothing_and_is_one_line(tmp_path):
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    failure = pytest.raises(InputError, match="peft was not written: I/O error: No space left")
    with failure, new_directory(tmp_path / "peft") as folder:
        (folder / WEIGHTS_FILE).write_bytes(b"half")
        raise full
    assert [*tmp_path.iterdir()] == []


def test_a_difference_that_is_not_finite_has_no_adapter(tmp_path):
    def lost(name: str, values: Tensor) -> Tensor:
        return torch.full_like(values, torch.nan) if name.endswith("mlp.up.weight") else values

    base = stored(tmp_path / "a", V)
    other = stored(tmp_path / "b", V, changed=lost)
    with pytest.raises(InputError, match=r"mlp\.up\.weight of .* inf or NaN"):
        split(base, other, tmp_path / "split", 2)
    with pytest.raises(InputError, match=r"--rank 1000000: .*; legal: 1 to \d+$"):
        split(base, base, tmp_path / "split", 10**6)
    assert not (tmp_path / "split").exists()


@pytest.mark.long
@parallel(ranks=[1], limit_s=120)
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_peft_does(comm, tmp_path, kind):
    """The same logits, and 20 losses of AdamW, from the same weights and data."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    family = FAMILIES.get(kind, kind)
    base = tmp_path / "base"
    from_hf(saved(tmp_path / "hf", family), base)
    engine = engine_over(comm, base, KINDS[kind])
    export(kept(engine, base, tmp_path / "adapter"), tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(
        model(family), str(tmp_path / "peft"), is_trainable=True
    )
    theirs.eval()  # the file leaves out GPT-2's; the trained weights are the same
    trained = [weight for weight in theirs.parameters() if weight.requires_grad]
    stored = load_file(tmp_path / "peft" / WEIGHTS_FILE)
    assert sum(weight.numel() for weight in trained) == sum(
        weight.numel() for weight in stored.values()
    )
    ids, _ = tokens(engine.config, 0, V)
    batch = microbatches(engine.config, 0, 0, vocab_size=V)[0]
    expected = theirs(ids[: batch.inputs.shape[1], :-1]).logits
    assert difference(logits_of(engine, batch).transpose(0, 1), expected.detach()) < 1e-5
    settings = engine.config.optimizer
    # a vector has no weight decay here; of GPT-2 the zeros of B, block by block, would be trained
    decay = settings.weight_decay if "ia3" not in kind else 0.0
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(trained, betas=betas, eps=settings.eps, weight_decay=decay)
    compared = 1 if kind == "gpt2" else STEPS
    for step in range(compared):
        result = engine.step(step, microbatches(engine.config, step, 0, vocab_size=V))
        ids, mask = tokens(engine.config, step, V)
        logits = theirs(ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        loss = (losses * mask.flatten()).sum() / mask.sum()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-4), step
        for group in optimizer.param_groups:
            group["lr"] = result.learning_rate
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if compared > 1:
        ours = np.concatenate(
            [whole_weight.flatten() for whole_weight in whole_weights(engine).values()]
        )
        assert np.isfinite(ours).all()
