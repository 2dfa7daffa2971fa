"""The table of published models in the guide: its numbers are those of the presets."""

import re

import pytest

from ptdmpi.plan.machine.cluster import load_model
from ptdmpi.plan.shape import parameters
from tests._configs import small
from tests.parallel import ROOT

GUIDE = ROOT / "docs/how-to/experts.md"
LINES = re.findall(r"^\| (\S+) \| (\d+ \|.* B \|) ", GUIDE.read_text(), re.MULTILINE)
# the only model of the table without a preset
OLMOE = {"model.kind": "llama", "model.layers": 16, "model.hidden": 2048, "model.heads": 16}
OLMOE |= {"model.experts": 64, "model.experts_per_token": 8, "model.expert_hidden": 1024}
OLMOE |= {"model.qk_norm": "all", "model.tie_embeddings": False}


def test_the_table_has_all_models():
    assert len(LINES) == 7


@pytest.mark.parametrize(("name", "line"), LINES, ids=[name for name, _ in LINES])
def test_a_line_has_the_numbers_of_its_model(name, line):
    if name.startswith("OLMoE"):
        model, vocab_size = small(OLMOE).model, 50304
    else:
        preset = load_model(name.strip("`"))
        model, vocab_size = preset.config, preset.vocab_size
    counts = (parameters.parameter_count, parameters.active_count)
    total, active = (count(model, vocab_size) / 1e9 for count in counts)
    sizes = f"{model.experts} | {model.experts_per_token} | {model.shared_experts}"
    ratio = model.expert_hidden / model.hidden
    assert line == f"{sizes} | {ratio:.2f} | {total:.1f} B | {active:.1f} B |"
