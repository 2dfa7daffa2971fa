"""Datasets of a run that do not go together."""

import numpy as np
import pytest

from ptdmpi.config import InputError, resolve
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.train.checks import checked
from ptdmpi.train.feed import open_datasets
from tests._configs import tree

SAME = {"tokenizer": "t", "tokenizer_sha256": "ab" * 32, "vocab_size": 50, "eod_id": 49}


def _config(tmp_path, train, valid, **data):
    for name, changes in {**train, **valid}.items():
        (tmp_path / name).mkdir()
        with ShardWriter(tmp_path / name / "a.h5", **{**SAME, **changes}) as writer:
            writer.write(np.zeros(40, np.int64), np.array([40]))
    keys = {
        "run": {"steps": 1},
        "model": {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8},
        "batch": {"global_size": 1},
        "data": {
            "train": [{"path": str(tmp_path / name)} for name in train],
            "valid": [str(tmp_path / name) for name in valid],
            **data,
        },
    }
    return resolve(keys, 1)


def test_datasets_that_go_together(tmp_path):
    train, valid = open_datasets(_config(tmp_path, {"a": {}, "b": {}}, {"c": {}}))
    assert [len(train), len(valid)] == [2, 1]


@pytest.mark.parametrize("where", ["train", "valid"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer_sha256": "cd" * 32}, "b was made with tokenizer t .sha256 cdcdcdcdcdcd"),
        ({"vocab_size": 60}, "b has vocab_size 60, but .*a has 50"),
        ({"eod_id": 3}, "b has eod_id 3, but .*a has 49"),
    ],
)
def test_datasets_that_differ(tmp_path, where, changes, words):
    sets = ({"a": {}, "b": changes}, {"c": {}}) if where == "train" else ({"a": {}}, {"b": changes})
    with pytest.raises(InputError, match=words) as caught:
        open_datasets(_config(tmp_path, *sets))
    assert "\n" not in str(caught.value)


def test_the_tokenizer_that_the_configuration_asks_for(tmp_path):
    config = _config(tmp_path, {"a": {}}, {"c": {}}, tokenizer_sha256="ef" * 32)
    with pytest.raises(InputError, match=r"but data\.tokenizer_sha256 says efefefefefef"):
        open_datasets(config)


def test_all_mistakes_come_in_one_round(tmp_path):
    """Mistakes of keys, layout and paths together; and none that only follows from another."""
    wrong = {
        "run.steps": 10,
        "model.heads": 4,
        "model.drpout": 0.5,
        "parallel.tensor": 3,
        "batch.micro_size": "many",
        "data.train": [{"path": str(tmp_path / "nowhere")}],
    }
    with pytest.raises(InputError) as caught:
        checked(tree(wrong), 3)
    lines = str(caught.value).splitlines()
    assert "model.drpout is not a key" in lines[0] and "batch.micro_size = 'many'" in lines[1]
    assert any("parallel.tensor = 3 does not divide model.heads = 4" in line for line in lines)
    assert lines[-1].startswith(f"dataset {tmp_path / 'nowhere'}: no such directory")
    assert not any("micro_size" in line for line in lines[2:])
