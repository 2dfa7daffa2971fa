"""Every kind of start, with everything that can differ: the same samples go on, or it is refused,
or what changed is said. Exhaustive over a small product, without a model."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from ptdmpi.config import Config, InputError, ModelConfig, TaskConfig, resolve
from ptdmpi.config.model import DERIVED, MODEL_KINDS
from ptdmpi.data.batches import TrainBatches
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset
from ptdmpi.lineage.adapted import Base
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.judge import settings
from ptdmpi.lineage.trained_on import TrainedOn, begun
from tests._configs import small

DONE, STEPS, LENGTH = 5, 12, 8
# What a second start may find, beside what the first one had.
CHANGES = {
    "nothing": {},
    "a path that was moved": {"a": "copy of a"},
    "tokenized anew with another text": {"a": "other text"},
    "another tokenizer": {"tokenizer": "b" * 64},
    "a weight": {"weights": (3, 1, 1)},
    "weights of the same shares": {"weights": (2, 2, 2)},
    "one dataset less": {"mixture": "a"},
    "one dataset more": {"mixture": "abc"},
    "the other order": {"mixture": "ba"},
    "seed": {"seed": 7},
    "batch": {"global_size": 3},
    "dropout": {"dropout": 0.5},
    "rate": {"learning_rate": 1e-5},
    "heads": {"heads": 4},
}


def _write(folder: Path, name: str, seed: int, tokenizer: str) -> None:
    ids = np.random.default_rng(seed).integers(0, 50, 1 + LENGTH * (30 + seed))
    (folder / name).mkdir(parents=True)
    with ShardWriter(folder / name / "a.h5", "t", tokenizer, vocab_size=51, eod_id=50) as writer:
        writer.write(ids, np.array([len(ids)]))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    for tokenizer in "ab":
        sources = {"a": 1, "b": 2, "c": 3, "copy of a": 1, "other text": 4}
        for name, seed in sources.items():
            _write(folder / tokenizer, name, seed, 64 * tokenizer)
    return folder


def _start(corpora: Path, change: str = "refuse", **values) -> tuple[Config, list[Dataset]]:
    names = values.get("mixture", "ab")
    folder = corpora / values.get("tokenizer", "a" * 64)[0]
    paths = [folder / values.get(name, name) for name in names]
    weights = values.get("weights", (1, 1, 1))
    tree = {
        "run": {"steps": STEPS, "seed": values.get("seed", 5)},
        "model": {
            "layers": 1,
            "hidden": 16,
            "heads": values.get("heads", 2),
            "kv_heads": 2,
            "seq_length": LENGTH,
            "dropout": values.get("dropout", 0.0),
            "positions": values.get("positions", "learned"),
        },
        "batch": {"global_size": values.get("global_size", 4)},
        "optimizer": {"learning_rate": values.get("learning_rate", 1e-3)},
        "data": {
            "change": change,
            "valid": str(folder / values.get("valid", "c")),
            "train": [
                {"path": str(path), "weight": str(weight)}
                for path, weight in zip(paths, weights, strict=False)
            ],
        },
    }
    config = resolve(tree, 1)
    return config, [Dataset(path) for path in paths]


def _course(config: Config, datasets: list[Dataset]) -> Course:
    return Course(config, begun(config, datasets))


def _texts(course: Course, datasets: list[Dataset], steps: range) -> list[list[bytes]]:
    """The samples of each step, by their tokens."""
    config = course.config
    size = config.batch.global_size
    batches = TrainBatches(
        datasets, course.order, LENGTH, global_size=size, micro_size=1, data_rank=0, data_size=1
    )
    return [[row.inputs.tobytes() for row in batches.step(step)] for step in steps]


def _manifest(course: Course) -> dict:
    progress = {"step": DONE, "samples": course.samples(DONE), "seed": course.config.run.seed}
    model = course.config.model.model_dump()
    return {"progress": progress, "model": model, **course.in_manifest()}


@pytest.mark.parametrize("allowed", ["refuse", "from here"])
@pytest.mark.parametrize(
    "names",
    [
        (one, other)
        for one, other in itertools.combinations_with_replacement(CHANGES, 2)
        if one == other or not CHANGES[one].keys() & CHANGES[other].keys()
    ],
    ids=" and ".join,
)
def test_a_resumption_goes_on_alike_or_is_refused_or_is_told(corpora, allowed, names):
    before = _start(corpora)
    first = _course(*before)
    after = _start(corpora, allowed, **{**CHANGES[names[0]], **CHANGES[names[1]]})
    second = _course(*after)
    try:
        second.judge("resume", Path("step-5"), _manifest(first))
    except InputError as error:
        assert "\n" not in str(error) and "legal: " in str(error)
        assert set(names) & REFUSED[allowed], names
        return
    assert not set(names) & REFUSED[allowed], names
    answer, rest = second.answer, range(DONE, STEPS)
    assert answer.trained_on.tokenizer_sha256 == first.trained_on.tokenizer_sha256
    told = settings(before[0]) != settings(after[0])
    alike = _texts(second, after[1], rest) == _texts(first, before[1], rest)
    assert bool(answer.changed) == (told or not alike)
    # what is counted is what was read, of whichever dataset
    assert second.samples(DONE) == first.samples(DONE)
    sizes = (before[0].batch.global_size, after[0].batch.global_size)
    assert second.samples(STEPS) == DONE * sizes[0] + (STEPS - DONE) * sizes[1]
    assert second.tokens(STEPS) == second.samples(STEPS) * LENGTH
    assert sum(second.drawn(STEPS)["samples_drawn"]) == second.samples(STEPS)
    assert second.drawn(DONE)["samples_drawn"][:2] == first.drawn(DONE)["samples_drawn"]


NEVER = {"another tokenizer", "heads"}
ORDER = {
    "tokenized anew with another text",
    "a weight",
    "one dataset less",
    "one dataset more",
    "the other order",
    "seed",
    "batch",
}
REFUSED = {"refuse": NEVER | ORDER, "from here": NEVER}


def test_no_sample_is_repeated_or_left_out_where_a_mixture_changes(corpora):
    """In its first epoch a dataset has each of its samples once, over the change."""
    before = _start(corpora)
    first = _course(*before)
    after = _start(corpora, "from here", mixture="ba", weights=(1, 4, 1), global_size=2)
    second = _course(*after)
    second.judge("resume", Path("step-5"), _manifest(first))
    seen = [*_texts(first, before[1], range(DONE)), *_texts(second, after[1], range(DONE, 8))]
    seen = list(itertools.chain(*seen))
    assert len(set(seen)) == len(seen) == DONE * 4 + 3 * 2  # fewer than an epoch of either
    # a third start, of the second's configuration, goes on without a word
    third = _course(*after)
    third.judge("resume", Path("step-5"), _manifest(second))
    assert third.answer.changed == () and third.trained_on == second.trained_on
    assert TrainedOn.from_json(third.trained_on.as_json()) == third.trained_on


def test_an_older_checkpoint_says_that_its_data_are_not_known(corpora):
    first, second = _course(*_start(corpora)), _course(*_start(corpora))
    manifest = {key: _manifest(first)[key] for key in ("progress", "model")}
    second.judge("resume", Path("step-5"), manifest)
    assert "is not known: it is a converted model, or an older version" in second.answer.note
    other = _course(*_start(corpora, seed=9))
    with pytest.raises(InputError, match=r"run\.seed 5 -> 9.*skipped or seen twice"):
        other.judge("resume", Path("step-5"), manifest)


@pytest.mark.parametrize("name", ["another tokenizer", "heads"])
def test_weights_of_another_tokenizer_or_other_heads_are_no_beginning(corpora, name):
    first, other = _course(*_start(corpora)), _course(*_start(corpora, **CHANGES[name]))
    with pytest.raises(InputError, match="legal: "):
        other.judge("initial", Path("step-5"), _manifest(first))
    fresh = _course(*_start(corpora, seed=3, mixture="b"))
    fresh.judge("initial", Path("step-5"), _manifest(first))
    assert fresh.trained_on == fresh.now and fresh.samples(0) == 0
    converted = _manifest(first) | {"settings": {}}
    converted["model"]["vocab_size"] = 320
    fresh.judge("initial", Path("step-5"), converted)
    assert not any("vocab_size" in text for text in fresh.answer.changed)


# Of each key of [model], another value than `_start` has.
OTHERS = {
    "kind": "llama",
    "layers": 2,
    "hidden": 8,
    "heads": 4,
    "kv_heads": 1,
    "head_size": 4,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "rope_head_size": 2,
    "value_head_size": 2,
    "ffn_hidden": 8,
    "seq_length": 2 * LENGTH,
    "vocab_size": 51,
    "norm": "rmsnorm",
    "zero_centered_norm": True,
    "qk_norm": True,
    "activation": "gelu_exact",
    "positions": "rope",
    "bias": "qkv",
    "tie_embeddings": False,
    "scale_embedding": True,
    "attention": "bidirectional",
    "experts": 4,
    "experts_per_token": 2,
    "expert_hidden": 16,
    "shared_experts": 1,
    "dense_layers": 1,
    "moe_every": 2,
    "router": "sigmoid",
    "router_normalize": False,
    "router_scale": 2.5,
    "router_groups": 2,
    "router_top_groups": 2,
    "balance": "none",
    "balance_coefficient": 0.01,
    "z_loss_coefficient": 0.1,
    "mtp_depth": 1,
    "mtp_loss_coefficient": 0.1,
    "query_scalar": 2.0,
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
    "sliding_window": 4,
    "sliding_layers": "even",
    "sublayers": ("mlp",),
    "block_norm": "sandwich",
    "embedding_norm": True,
    "output_head": "mlm",
    "classes": 3,
    "token_types": 2,
    "sentence_order": True,
    "norm_eps": 1e-6,
    "rope_theta": 5e5,
    "rope_scaling": "llama3",
    "rope_factor": 32.0,
    "rope_low_factor": 2.0,
    "rope_high_factor": 8.0,
    "rope_original_length": 4096,
    "rope_attention_factor": 1.5,
    "rope_mscale": 1.0,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "init_std": 0.01,
    "mup_base_hidden": 4,
    "mup_base_head_size": 4,
}
ROPE_SCALING = {key for key in OTHERS if key.startswith("rope_")} - {
    "rope_theta",
    "rope_head_size",
    "rope_mscale",
}
HEAD = {"output_head", "classes", "tie_embeddings", "sentence_order"}


@pytest.mark.parametrize("has_task", [False, True], ids=["text", "task"])
def test_adapters_stand_on_no_other_function_of_the_weights(corpora, has_task):
    """Whatever shapes do not tell is held against the base; a head for a task is its own."""
    config, datasets = _start(corpora)
    manifest = _manifest(_course(config, datasets))
    if has_task:
        task = TaskConfig(kind="classification", labels=("no", "yes"))
        config = config.model_copy(update={"task": task}).with_head()
    course, base = _course(config, datasets), Base("base", 64 * "0")
    free = {"kind", "vocab_size", "seq_length", "dropout", "attention_dropout", "init_std"}
    free |= {"balance_coefficient", "z_loss_coefficient", "mtp_loss_coefficient"} | ROPE_SCALING
    assert OTHERS.keys() == ModelConfig.model_fields.keys()
    course.stand_on(base, Path("step-5"), manifest, None)
    for key, value in OTHERS.items():
        other = {**manifest, "model": {**manifest["model"], key: value}}
        if key in (free | HEAD if has_task else free):
            course.stand_on(base, Path("step-5"), other, None)
            continue
        given = getattr(config.model, key)
        message = f"step-5: it was trained with model.{key} = {value}, this run has {given}; legal:"
        with pytest.raises(InputError, match=re.escape(message)):
            course.stand_on(base, Path("step-5"), other, None)


def test_scaled_angles_may_be_switched_off_where_no_angles_are_rotated(corpora):
    """An older version accepted them with learned positions; they are illegal now."""
    for positions in ("learned", "rope"):
        config, datasets = _start(corpora, positions=positions)
        course = _course(config, datasets)
        for key in ROPE_SCALING:
            manifest = _manifest(course)
            manifest["model"][key] = OTHERS[key]
            if positions == "learned":
                course.judge("resume", Path("step-5"), manifest)
                continue
            with pytest.raises(InputError, match=rf"with model\.{key} = "):
                course.judge("resume", Path("step-5"), manifest)
    assert small({"model.kind": "llama", "model.rope_scaling": "llama3", "model.rope_factor": 0.5})


def test_the_key_that_was_changed_is_named_and_not_its_consequence(corpora):
    """Another activation changes the default width of the MLP, too."""
    config, datasets = _start(corpora)
    manifest = _manifest(_course(config, datasets))
    other = {"activation": "swiglu", "ffn_hidden": 256, "expert_hidden": 256}
    manifest["model"].update(other)
    with pytest.raises(InputError, match=r"it was trained with model\.activation = swiglu, this"):
        _course(config, datasets).judge("resume", Path("step-5"), manifest)


def test_other_validation_data_are_told(corpora):
    first, other = _course(*_start(corpora)), _course(*_start(corpora, valid="b"))
    other.judge("resume", Path("step-5"), _manifest(first))
    (told,) = other.answer.changed
    assert told.startswith("data.valid ") and told.endswith("/a/b")


def test_the_new_default_of_compile_is_no_change_without_a_measurement(corpora):
    """False was the default; a run that measured nothing stays uncompiled with "auto"."""
    config, datasets = _start(corpora)
    manifest = _manifest(_course(config, datasets))
    manifest["settings"] = manifest["settings"] | {"run.compile": False}
    message = ("run.compile False -> auto",)
    for kernels, changed in (
        ({"attention": ["flash"]}, ()),
        (["flash"], ()),
        ({"attention": ["flash"], "layers": ["compiled"]}, message),
    ):
        course = _course(config, datasets)
        course.judge("resume", Path("step-5"), manifest | {"kernels": kernels})
        assert course.answer.changed == changed, kernels
    course = _course(config.replace("run", compile=True), datasets)
    course.judge("resume", Path("step-5"), manifest)
    assert course.answer.changed == ("run.compile False -> True",)


def test_an_edited_graph_is_told(corpora, tmp_path):
    """Though it has the name that it had; and a file that changes while a run goes on is not."""
    edges = tmp_path / "edges"
    edges.write_text("0 1\n")
    config, datasets = _start(corpora)
    config = config.replace("data_parallel", method="decentralized", topology=str(edges))
    first = _course(config, datasets)
    edges.write_text("1 0  # the same\n")
    manifest = _manifest(first)
    second = _course(config, datasets)
    second.judge("resume", Path("step-5"), manifest)
    assert second.answer.changed == ()
    edges.write_text("0 1 0.25\n")
    assert _manifest(first) == manifest
    third = _course(config, datasets)
    third.judge("resume", Path("step-5"), manifest)
    (told,) = third.answer.changed
    assert told.startswith("data_parallel.topology sha256 ") and " -> " in told


def test_derived_keys_are_those_that_a_model_fills_in():
    """An error names the key that the user changed, not one whose default follows from it."""
    given = {"hidden": 32, "heads": 4, "layers": 1, "seq_length": 8}
    assert set(ModelConfig._fill_in(given)) == {*given, *MODEL_KINDS["gpt"], *DERIVED}
