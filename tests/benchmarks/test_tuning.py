"""What LoRA and full tuning are compared by: the task, the account of memory, what `peft` sees."""

import json

import pytest
import torch

from benchmarks.tuning import experts, layouts, lora_full, one_line, theirs
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.documents import Documents
from tests.convert import _hugging_face

SOURCE = '''
def doubled(number):
    """Return twice the number, whatever it is.

    More is said here.
    """
    total = number + number
    return total if total > number else number * 2

def silent(number):
    return number
'''
SMOL = {"kind": "llama", "layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3}
SMOL |= {"ffn_hidden": 1536, "seq_length": 8192, "vocab_size": 49152, "tie_embeddings": True}
NUMBERS = torch.tensor([[0] * 3 + [1] * 5, [2] * 8])


def test_a_functions_docstring_is_its_answer(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(SOURCE)
    ((source, line),) = one_line.functions(path)
    assert line == "Return twice the number, whatever it is."
    assert source.startswith("def doubled(number):\n    total =") and '"""' not in source


@pytest.fixture
def base(tmp_path):
    lines = [f"{key} = {json.dumps(value)}" for key, value in SMOL.items()]
    (tmp_path / "config.toml").write_text("\n".join(["[model]", *lines, ""]))
    return tmp_path


def test_lora_plans_less_than_half_of_full_tunings_memory(base):
    """In bf16, of SmolLM2-135M: 2, 4 and 12 bytes of a parameter against 2 of a frozen one."""
    for recompute, length in (("none", 2048), ("full", 8192)):
        full, lora = (lora_full.planned(base, one, length, recompute) for one in ("full", "lora"))
        assert lora.total <= lora_full.BAR * full.total
        frozen = full.weights
        assert lora.weights + lora.gradients + lora.optimizer < 1.2 * frozen
        assert full.optimizer == 6 * frozen
    assert lora_full.greatest_length(base, "none") < 8192  # activations are those of full tuning


def packed() -> Microbatch:
    """Two rows of 8, of three documents."""
    ids = torch.randint(_hugging_face.V, (9, 2), generator=torch.Generator().manual_seed(0))
    weights = torch.ones(8, 2)
    weights[4, 0] = 0.0
    return Microbatch(ids[:-1], ids[1:], weights, torch.arange(2), Documents.of(NUMBERS))


def test_documents_do_not_see_each_other_in_theirs():
    found = theirs.seen(packed())
    assert found["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], list(range(8))]
    mask = found["attention_mask"]
    assert mask.shape == (2, 1, 8, 8) and mask[0, 0].sum() == 6 + 15 and mask[1, 0].sum() == 36
    assert not mask[0, 0, 3, 2] and mask[0, 0, 2, 0] and not mask[0, 0, 0, 1]


@pytest.mark.long
def test_their_loss_of_packed_rows_is_that_of_the_documents_apart():
    pytest.importorskip("transformers")
    model, batch = _hugging_face.model("llama"), packed()
    total = theirs.loss_of(model, batch)
    apart = 0.0
    for row, begin, end in batch.documents.pieces:
        cut = (slice(begin, end), slice(row, row + 1))
        piece = Microbatch(batch.inputs[cut], batch.labels[cut], batch.weights[cut], batch.samples)
        apart += theirs.loss_of(model, piece)
    assert float(total.detach()) == pytest.approx(float(apart.detach()), rel=1e-5)


def test_the_table_tells_how_far_curves_are_apart():
    found = {"losses": [2.0, 1.0], "merged": {"fp32": 2e-5, "fp64": 1e-6}}
    found |= {"rounding": 1e-5, "theirs": 1e-5}
    lines = layouts.table([(1, 1, 1), (2, 1, 1)], [[2.0, 1.0], [2.0, 1.1]], found)
    assert [line.split(" | ")[-1].strip(" |") for line in lines[2:5]] == ["", "1.0e-01", "0.0e+00"]


def test_a_token_uses_as_many_parameters_in_both_models_but_for_routers():
    (dense, alike), (mixture, active) = (experts.counts(name, 1000) for name in experts.NAMES)
    # a router has a row and a balance number for each expert
    routers = experts.SIZES["layers"] * (experts.SIZES["hidden"] + 1) * experts.EXPERTS
    assert dense == alike == active - routers < mixture / 2
    one, other = (experts.configuration(name, 1) | {"model": None} for name in experts.NAMES)
    assert one == other


def test_the_table_of_experts_has_means_and_the_difference_for_each_seed():
    curves = {("dense", 1): {1: 5.0, 2: 4.0}, ("mixture", 1): {1: 4.5, 2: 3.9}}
    curves |= {("dense", 2): {1: 5.2, 2: 4.2}, ("mixture", 2): {1: 4.7, 2: 4.3}}
    head, _, dense, mixture, _, last = experts.lines(curves, 1000)
    assert head.endswith("| step 1 | step 2 |")
    assert dense.endswith("| 5.100 | 4.100 (4.000 to 4.200) |")
    assert mixture.endswith("| 4.600 | 4.100 (3.900 to 4.300) |")
    assert last.endswith("for each seed: -0.100, +0.100.")
