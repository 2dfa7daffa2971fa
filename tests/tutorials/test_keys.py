"""The keys that the tutorials name exist."""

import re

from manual import configuration
from tests.tutorials._page import TUTORIALS


def test_our_keys_exist():
    text = (TUTORIALS / "coming-from.md").read_text(encoding="utf-8")
    ours = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]
    named = {name for cell in ours for name in re.findall(r"`([a-z_]+\.[a-z0-9_]+)`", cell)}
    sections = configuration.sections()
    assert len(named) > 60
    for name in named:
        section, _, key = name.partition(".")
        assert key in sections[section].model_fields, name
