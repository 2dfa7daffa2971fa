"""The configuration: every mistake is found, all together, each with what is legal."""

import math
import os
import re
from decimal import Decimal

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.config import Config, InputError, load, resolve, to_toml
from ptdmpi.config.files import MOST_BYTES
from tests._configs import small, tree


def mistakes(changes, ranks: int = 1) -> list[str]:
    with pytest.raises(InputError) as caught:
        resolve(tree(changes), ranks)
    return str(caught.value).splitlines()


def test_defaults_are_enough():
    config = small()
    assert config.model.kv_heads == config.model.heads == 4
    assert config.model.ffn_hidden == 4 * config.model.hidden
    assert (config.parallel.schedule, config.data_size, config.microbatches) == ("1f1b", 1, 4)
    assert config.run.dir == "runs/run"
    assert (config.checkpoint.every_minutes, config.checkpoint.every_steps) == (15.0, 0)
    assert small({"run.name": "a"}).run.dir == "runs/a"
    assert small({"run.name": "a", "run.dir": "x"}).run.dir == "x"


def test_kinds_fill_in_what_is_not_said():
    gpt, llama = small().model, small({"model.kind": "llama"}).model
    assert (gpt.norm, gpt.activation, gpt.positions) == ("layernorm", "gelu", "learned")
    assert gpt.bias and gpt.tie_embeddings
    assert (llama.norm, llama.activation, llama.positions) == ("rmsnorm", "swiglu", "rope")
    assert not (llama.bias or llama.tie_embeddings)
    assert llama.ffn_hidden == 256  # 8/3 h = 85.3, rounded up to a multiple of 256
    wide = small({"model.kind": "llama", "model.hidden": 4096, "model.heads": 32}).model
    assert wide.ffn_hidden == 11008  # LLaMA 7B
    mixed = small({"model.kind": "llama", "model.bias": True, "model.ffn_hidden": 40}).model
    assert mixed.bias and mixed.ffn_hidden == 40 and mixed.norm == "rmsnorm"


def test_data_axis_and_schedule_follow_from_the_rest():
    config = small({"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual": 1}, 8)
    assert (config.data_size, config.microbatches) == (2, 2)
    assert small({"parallel.virtual": 3}).parallel.schedule == "interleaved"
    assert small({"parallel.data": 2}, 2).data_size == 2


# (changes, ranks, what the line says)
RULES = [
    (
        {"model.heads": 5},
        1,
        "model.heads = 5 does not divide model.hidden = 32.* heads 2 or 4 or 8",
    ),
    ({"model.kv_heads": 3}, 1, "model.kv_heads = 3 does not divide model.heads = 4.*2 or 4"),
    (
        {"model.kind": "llama", "model.heads": 32},
        1,
        "model.head_size = 1 must be even for rope",
    ),
    ({"parallel.tensor": 2}, 3, "3 ranks cannot be split.*= 2 must divide.*start 2, or use"),
    ({"parallel.tensor": 4}, 1, "1 rank cannot be split.*start 4, or use tensor .* 1$"),
    (
        {"parallel.tensor": 2, "parallel.data": 2},
        3,
        '= 4, but 3 ranks were started; start 4, or set parallel.data = "auto"',
    ),
    (
        {"parallel.virtual": 2, "parallel.schedule": "1f1b"},
        1,
        '"1f1b" has virtual = 1, not 2; legal: schedule = "interleaved" or "gpipe" or "zb-v"',
    ),
    (
        {"parallel.virtual": 1, "parallel.schedule": "zb-v"},
        1,
        'legal: schedule = "1f1b" or "gpipe" or "interleaved" or "zb-h1", or virtual = 2',
    ),
    (
        {"parallel.tensor": 8, "batch.global_size": 8},
        8,
        "tensor = 8 does not divide model.heads = 4; legal nearby: tensor 1 or 2 or 4",
    ),
    (
        {
            "model.heads": 6,
            "model.kv_heads": 2,
            "model.head_size": 8,
            "model.ffn_hidden": 60,
            "parallel.tensor": 3,
            "batch.global_size": 8,
        },
        3,
        "tensor = 3 neither divides model.kv_heads = 2 nor is a mul.*nearby: tensor 1 or 2 or 6",
    ),
    (
        {"model.sliding_window": 4, "model.sliding_layers": [1, 3]},
        1,
        "model.sliding_layers names layer 3: legal: 0 to 2",
    ),
    (
        {"model.kind": "bert", "model.sliding_window": 4},
        1,
        "model.sliding_window = 4 is legal only with model.attention = .causal",
    ),
    (
        {"model.kind": "llama", "model.rope_scaling": "llama3", "model.rope_low_factor": 4.0},
        1,
        "model.rope_low_factor = 4.0 must be below rope_high_factor = 4.0",
    ),
    (
        {"model.kind": "llama", "model.rope_scaling": "yarn", "model.rope_theta": 1.0},
        1,
        'model.rope_theta = 1.0: rope_scaling = "yarn" needs more than 1',
    ),
    (
        {"model.kind": "gpt", "model.rope_scaling": "yarn"},
        1,
        'model.rope_scaling = "yarn" has no effect with model.positions = "learned"',
    ),
    (
        {"parallel.tensor": 2, "model.ffn_hidden": 45},
        2,
        "tensor = 2 does not divide model.ffn_hidden = 45; legal nearby: tensor 1 or 3 or 5",
    ),
    (
        {"parallel.tensor": 2, "parallel.sequence_parallel": True, "model.seq_length": 15},
        2,
        "sequence_parallel: parallel.tensor = 2 does not divide model.seq_length = 15",
    ),
    ({"parallel.pipeline": 4}, 4, "= 4 stages, but model.layers = 3; at most one stage per"),
    ({"parallel.virtual": 4}, 1, "= 4 stages, but model.layers = 3; at most one stage per"),
    (
        {"batch.global_size": 9},
        2,
        r"global_size = 9 is not a multiple of data \* micro_size = 2 \* 2 = 4; legal.* 8 or 12",
    ),
    ({"batch.global_size": 1}, 1, "global_size = 1 is not a multiple of .* legal nearby: 2$"),
    ({"batch.global_size": 9, "parallel.data": 2}, 2, "global_size = 9 is not a multiple"),
    ({"optimizer.min_learning_rate": 1.0}, 1, "optimizer.min_learning_rate is above learning_rate"),
    (
        {"optimizer.warmup_steps": 6},
        1,
        "optimizer.warmup_steps = 6 is more than run.steps = 5",
    ),
    (
        {"optimizer.warmup_steps": 5, "optimizer.decay": "wsd"},
        1,
        "are together more than run.steps = 5; legal: fewer warmup_steps",
    ),
]


@pytest.mark.parametrize(("changes", "ranks", "line"), RULES)
def test_each_rule_says_what_is_legal(changes, ranks, line):
    found = mistakes(changes, ranks)
    assert len(found) == 1, found
    (only,) = found
    assert re.search(line, only), only


WRONG_VALUES = [
    ("run.steps", 0, r"run\.steps = 0: .*greater than or equal to 1"),
    ("run.steps", "many", r"run\.steps = 'many': .*integer"),
    ("run.steps", True, r"run\.steps = True: .*integer"),
    ("run.steps", None, r"run\.steps is missing"),
    ("model.hidden", None, r"model\.hidden is missing"),
    ("model.kind", "bart", r"model\.kind = 'bart': .*'gemma2' or 'bert'"),
    ("model.dropout", 1.0, r"model\.dropout = 1\.0: .*less than 1"),
    ("parallel.data", 0, r"parallel\.data = 0: "),
    ("parallel.data", "all", r"parallel\.data = 'all': .*'auto'"),
    ("parallel.schedule", "zigzag", r"parallel\.schedule = 'zigzag': .*'gpipe', '1f1b', .* or"),
    ("recompute.layers", 0, r"recompute\.layers = 0: "),
    ("optimizer.learning_rate", -1.0, r"optimizer\.learning_rate = -1\.0: .*greater than 0"),
    ("precision.compute", "int8", r"precision\.compute = 'int8': .*'bf16'"),
    ("data.train", [], r"data\.train: write a table \[\[data\.train\]\] with path"),
    ("data.train", 5, r"data\.train: write a table \[\[data\.train\]\] with path"),
    ("model.kind", [], r"model\.kind = \[\]: .*'gpt'"),
    ("model.hidden", "abc", r"model\.hidden = 'abc': .*integer"),
    ("model.heads", 0, r"model\.heads = 0: .*equal to 1"),
    ("parallel.data", "outo", r"parallel\.data = 'outo': .*integer or 'auto'"),
    ("optimizer.learning_rate", math.inf, r"optimizer\.learning_rate = inf: .*finite"),
    ("data.train", [{"path": "x", "weight": 0}], r"data\.train\.0\.weight = 0: .*greater than 0"),
    ("data.train", [{"path": "x", "weight": "a"}], r"data\.train\.0\.weight = 'a': .*decimal"),
    ("data.train", [{"weight": 1}], r"data\.train\.0\.path is missing"),
    ("data.train", [{"path": ""}], r"data\.train\.0\.path = '': .*at least 1 character"),
    ("data.valid", "", r"data\.valid = '': .*at least 1 character"),
    ("run.dir", "a\0b", r"run\.dir = .*must not contain control"),
    ("run.dir", "a\x1b[31m", r"run\.dir = .*must not contain control"),
    ("run.dir", "a\udcff", r"run\.dir = .*must not contain bytes that are not UTF-8"),
    ("checkpoint.resume", "a\udcff", r"checkpoint\.resume = .*not UTF-8"),
    ("checkpoint.initial", "a\0b", r"checkpoint\.initial = .*must not contain control"),
    ("data.train", [{"path": "a\0b"}], r"data\.train\.0\.path = .*must not contain control"),
]


@pytest.mark.parametrize(("key", "value", "line"), WRONG_VALUES)
def test_each_wrong_value_is_named(key, value, line):
    found = mistakes({key: value})
    assert len(found) == 1 and re.match(line, found[0]), found


def test_of_a_long_value_enough_is_told():
    for long in ("a" * 5000, ["a"] * 1000):
        (line,) = mistakes({"run.steps": long})
        assert re.match(r"run.steps = (\[)?'a", line) and len(line) < 450


def test_a_slip_of_the_pen_in_a_size_is_told_at_once():
    (found,) = mistakes({"model.hidden": 10**11 + 3})  # a prime
    assert re.match(r"model\.heads = 4 does not divide model\.hidden = 10+3; legal", found)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"run.stepz": 3}, "run.stepz is not a key; did you mean steps?"),
        ({"model.layer": 3}, "model.layer is not a key; did you mean layers?"),
        ({"parallel.tensr": 2}, "parallel.tensr is not a key; did you mean tensor?"),
        ({"paralel.tensor": 2}, "[paralel] is not a section; did you mean parallel?"),
        ({"comm.zzz": 2}, "comm.zzz is not a key; legal are wire"),
        (
            {"data.train": [{"path": "x", "wieght": 2}]},
            "data.train.0.wieght is not a key; did you mean weight?",
        ),
    ],
)
def test_did_you_mean(changes, line):
    assert mistakes(changes) == [line]


def test_all_mistakes_are_reported_together():
    found = mistakes(
        {
            "run.stepz": 3,
            "run.steps": 0,
            "model.heads": 5,
            "parallel.virtual": 9,
            "batch.global_size": 7,
            "precision.compute": "int8",
            "optimizer.min_learning_rate": 1.0,
            "optimiser.eps": 1.0,
        },
        4,
    )
    for word in (
        "[optimiser]",
        "run.stepz",
        "run.steps",
        "model.heads",
        "virtual",
        "global_size",
        "precision.compute",
        "min_learning_rate",
    ):
        assert sum(word in line for line in found) == 1, (word, found)
    assert len(found) == 8


def test_an_empty_tree_names_what_is_missing():
    with pytest.raises(InputError) as caught:
        resolve({}, 1)
    missing = str(caught.value)
    for key in ("run.steps", "model.layers", "model.hidden", "batch.global_size", "data.train"):
        assert f"{key} is missing" in missing


def test_set_without_a_value_removes_the_key(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('[run]\nname = "a"\nsteps = 5\n[data]\nvalid = "b"\n')
    tree = load(file, ["data.valid=", "run.steps= ", "run.seed=", "new.key="])
    assert tree == {"run": {"name": "a"}, "data": {}}
    assert load(file, ['run.name=""'])["run"]["name"] == ""


def test_set_overrides_the_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(tomlkit.dumps(tree()))
    overrides = [
        "run.steps=7",
        "run.name=fine",
        "optimizer.beta1 = 0.5",
        "parallel.virtual=3",
        'data.train=[{path="a", weight=0.3}, {path="b", weight=0.7, epochs=2}]',
        "comm.wire=mpi",
    ]
    config = resolve(load(file, overrides), 1)
    assert (config.run.steps, config.run.name, config.optimizer.beta1) == (7, "fine", 0.5)
    assert config.parallel.schedule == "interleaved"
    assert [one.weight for one in config.data.train] == [Decimal("0.3"), Decimal("0.7")]
    assert [one.epochs for one in config.data.train] == [None, Decimal(2)]


def test_set_takes_no_bytes_that_are_not_text(tmp_path):
    """The configuration of a run is stored as UTF-8 in its folder."""
    file = tmp_path / "config.toml"
    file.write_text("")
    with pytest.raises(InputError, match=r"--set log\.wandb_project=a.: the value is not UTF-8"):
        load(file, [f"log.wandb_project={os.fsdecode(bytes([97, 255]))}"])


@pytest.mark.parametrize("override", ["run.steps", "steps=3", "=3", ".steps=3", "run.=3"])
def test_set_needs_section_key_and_value(tmp_path, override):
    file = tmp_path / "c.toml"
    file.write_text("")
    with pytest.raises(InputError, match=r"write section\.key=value"):
        load(file, [override])


def test_set_into_what_is_no_section(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("run = 3\n")
    with pytest.raises(InputError, match=r"\[run\] of the file is not a section"):
        load(file, ["run.steps=3"])
    with pytest.raises(InputError):
        resolve(load(file), 1)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="No such file or directory; give a TOML file"):
        load(tmp_path / "none.toml")
    digits = b"[run]\nsteps = " + b"9" * 5000  # more than Python takes for a number
    for number, content in enumerate((b"[run\n", b"\xff\xfe", digits, b"a = " + b"[" * 100_000)):
        file = tmp_path / f"{number}.toml"
        file.write_bytes(content)
        with pytest.raises(InputError, match="is not valid TOML"):
            load(file)
    deep = ".".join(["a"] * 2_000) + " = 1"
    file.write_text(deep)
    with pytest.raises(InputError, match="nests tables deeper than 8 levels"):
        load(file)
    file.write_text("")
    with pytest.raises(InputError, match="nests tables deeper than 8 levels"):
        load(file, [f"run.name={{{deep}}}"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "model.kind": "llama",
            "model.kv_heads": 2,
            "recompute.mode": "full",
            "recompute.layers": 2,
        },
        {"data.train": [{"path": 'a b\\"', "weight": 0.1, "epochs": "1.5"}, {"path": "é"}]},
        {"data.valid": "v", "optimizer.learning_rate": 1e-7, "log.validate_samples": 10},
    ],
)
def test_toml_round_trip(tmp_path, changes):
    config = small({**changes, "parallel.tensor": 2}, 4)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert resolve(load(file), 4) == config


def test_sections_are_frozen():
    config = small()
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3
    changed = config.replace("run", steps=9)
    assert (changed.run.steps, config.run.steps) == (9, 5)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.floats(allow_nan=True),
    st.text(max_size=4),
    st.sampled_from(["auto", "all", "llama", "gpt", "interleaved", "1f1b", "full"]),
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=2),
    st.dictionaries(st.sampled_from(["path", "weight", "epochs", "x"]), scalars),
)
keys = st.sampled_from(
    sorted(
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in [*field.annotation.model_fields, "unknown"]
    )
)
small_sizes = st.fixed_dictionaries(
    {},
    optional={
        key: st.integers(-1, 9)
        for key in (
            "model.layers",
            "model.hidden",
            "model.heads",
            "model.kv_heads",
            "model.ffn_hidden",
            "parallel.tensor",
            "parallel.pipeline",
            "parallel.virtual",
            "parallel.data",
            "batch.global_size",
            "batch.micro_size",
            "recompute.layers",
        )
    },
)


@given(st.one_of(st.dictionaries(keys, values, max_size=4), small_sizes), st.integers(1, 16))
def test_nothing_but_input_error_is_raised(changes, ranks):
    try:
        config = resolve(tree(changes), ranks)
    except InputError as error:
        assert str(error)
        return
    parallel, model = config.parallel, config.model
    assert parallel.tensor * parallel.pipeline * config.data_size == ranks
    unit = config.data_size * config.batch.micro_size
    assert config.microbatches * unit == config.batch.global_size
    assert model.heads % parallel.tensor == model.hidden % model.heads == 0
    assert parallel.pipeline * parallel.virtual <= model.layers


@given(st.dictionaries(st.text(max_size=8), values, max_size=3))
def test_trees_without_sense(nonsense):
    with pytest.raises(InputError):
        resolve(nonsense, 1)


def test_spare_ranks_do_not_count():
    spare = {"run.on_failure": "shrink", "run.spare_ranks": 1}
    assert resolve(tree(spare), 5).data_size == 4
    with pytest.raises(InputError, match=r"3 ranks in addition to 1 spare rank cannot.*start 3,"):
        resolve(tree(spare | {"parallel.tensor": 2}), 4)
    with pytest.raises(InputError, match=r"leaves no rank to train.*legal: only 0"):
        resolve(tree(spare), 1)
    with pytest.raises(InputError, match=r'spare_ranks = 1 needs run.on_failure = "shrink"'):
        resolve(tree({"run.spare_ranks": 1}), 2)


def test_a_file_that_never_ends_is_refused(tmp_path):
    with pytest.raises(InputError, match="/dev/zero: is a pipe or a device, not a file"):
        load("/dev/zero")
    (tmp_path / "long.toml").touch()
    os.truncate(tmp_path / "long.toml", MOST_BYTES + 1)
    with pytest.raises(InputError, match=r"long.toml has more than 16777216 bytes"):
        load(tmp_path / "long.toml")
