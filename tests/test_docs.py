"""The documents name what is there: every file in README's tree, every key of the configuration."""

import subprocess

import pytest

from ptdmpi.config import Config, TrainDataConfig
from tests.parallel import ROOT

FOLDERS = ("src/ptdmpi", "data_prep", "jobs", "benchmarks", "docs")


def _tracked() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return listing.stdout.split()


def test_readme_tree_names_every_file():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {path.rsplit("/", 1)[-1] for path in _tracked()}
    names -= {name for name in names if name.endswith((".png", ".svg", ".json", "__init__.py"))}
    assert sorted(name for name in names if name not in readme) == []


def test_every_key_is_documented():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    for section, field in Config.model_fields.items():
        assert f"[{section}]" in text
        for key in field.annotation.model_fields:
            assert f"`{key}`" in text or key == "train", f"{section}.{key}"
    assert all(f"`{key}`" in text for key in TrainDataConfig.model_fields)
