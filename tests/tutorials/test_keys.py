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


def test_options_that_have_a_key_are_not_called_missing():
    """Check that the row of each option names the key in its second cell."""
    text = (TUTORIALS / "coming-from.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    keys = {
        "--tensor-model-parallel-size": "parallel.tensor",
        "--recompute-granularity": "recompute.mode",
        "--sequence-parallel": "parallel.sequence_parallel",
        "--use-distributed-optimizer": "parallel.zero",
        "--context-parallel-size": "parallel.context",
        "--cp-comm-type": "parallel.context_method",
        "--num-experts": "model.experts",
        "--moe-aux-loss-coeff": "model.balance_coefficient",
        "--multi-latent-attention": "latent_attention",
        "--fp8-format": "precision.fp8",
    }
    for option, key in keys.items():
        assert [True for theirs, ours in rows if f"`{option}`" in theirs and key in ours], option
