"""The documents name what is there: every file in the tree, every key of the configuration."""

import re

from ptdmpi.config import Config, TrainDataConfig
from tests._tree import HOUSE, updated
from tests.parallel import ROOT


def test_house_has_the_tree_as_it_is():
    page = HOUSE.read_text(encoding="utf-8")
    assert page == updated(page), "write it anew: python -m tests._tree"


def test_walks_for_contributors_name_files_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]*)`", text)
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_key_is_documented():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    for section, field in Config.model_fields.items():
        assert f"[{section}]" in text
        for key in field.annotation.model_fields:
            assert f"`{key}`" in text or key == "train", f"{section}.{key}"
    assert all(f"`{key}`" in text for key in TrainDataConfig.model_fields)
