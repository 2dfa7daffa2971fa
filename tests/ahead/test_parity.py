"""Multi-token prediction in every layout: the training of one rank."""

from dataclasses import replace

import pytest

from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from tests._configs import layout
from tests._engines import microbatches
from tests.context.test_parity import in_documents
from tests.experts.test_expert_parallel import Row, check, dealt
from tests.latent.test_parity import WITH_EXPERTS
from tests.parallel import names, parallel

AHEAD = {"model.mtp_depth": 2, "model.mtp_loss_coefficient": 0.5, "precision.compute": "fp64"}
# without biases: the bias of keys has no gradient, so that its updates are rounding errors
LLAMA = {**AHEAD, "model.layers": 2, "model.kind": "llama", "model.ffn_hidden": 48}
TIED = {**LLAMA, "model.tie_embeddings": True}
# as in DeepSeek-V3
MIXED = {**WITH_EXPERTS, **AHEAD, "model.mtp_depth": 1}
DIVIDED = {"parallel.sequence_parallel": True}
FULL = {"recompute.mode": "full"}
DOCUMENTS = {"data.document_boundaries": True}
DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
BATCH = {"model.balance": "batch", "model.balance_coefficient": 0.02, "model.z_loss_coefficient": 1}
# name -> (ranks, shape, layout and how it is run)
ROWS: dict[str, Row] = {
    "t2 untied": (2, LLAMA, layout(t=2)),
    "t2 divided tied": (2, TIED | DROPOUT, layout(t=2) | DIVIDED),
    "p2 untied": (2, LLAMA, layout(p=2)),
    "p2 tied": (2, TIED, layout(p=2)),
    "d2 zero 1": (2, LLAMA, layout(d=2) | {"parallel.zero": 1}),
    "d2 zero 2 tied": (2, TIED, layout(d=2) | {"parallel.zero": 2}),
    "d2 zero 3": (2, LLAMA | DOCUMENTS, layout(d=2) | {"parallel.zero": 3}),
    "c2 documents": (2, LLAMA | DOCUMENTS, layout() | {"parallel.context": 2}),
    "c2 ring": (2, TIED, layout() | {"parallel.context": 2, "parallel.context_method": "ring"}),
    "full": (1, TIED | DROPOUT, layout() | FULL),
    "t2 p2 divided split": (
        4,
        LLAMA,
        layout(t=2, p=2) | DIVIDED | {"parallel.schedule": "zb-h1"},
    ),
    "p2 v2 d2 zero 3 full": (
        4,
        LLAMA | {"model.layers": 4},
        layout(p=2, v=2, d=2) | FULL | {"parallel.zero": 3},
    ),
    "p2 d2 tied zero 1": (4, TIED, layout(p=2, d=2) | {"parallel.zero": 1}),
    "t2 c2 divided documents": (
        4,
        TIED | DOCUMENTS,
        layout(t=2) | DIVIDED | {"parallel.context": 2},
    ),
    "p2 v2 zb-v": (
        2,
        LLAMA | {"model.layers": 4},
        layout(p=2, v=2) | {"parallel.schedule": "zb-v"},
    ),
    "experts t2 p2": (4, MIXED, layout(t=2, p=2) | DIVIDED),
    "experts e2 d2 batch": (2, MIXED | BATCH, dealt(2, d=2)),
    "experts e2 p2 d2 zero 3": (4, MIXED, dealt(2, p=2, d=2) | {"parallel.zero": 3}),
    "experts t2 undivided": (2, MIXED, layout(t=2) | {"parallel.expert_tensor": 1}),
    "experts e2 c2": (2, MIXED, dealt(2, c=2)),
    "experts e2 d2 muon zero 1": (
        2,
        MIXED | {"optimizer.kind": "muon"},
        dealt(2, d=2) | {"parallel.zero": 1},
    ),
}
SHORT = ("t2 divided tied", "p2 untied", "d2 zero 3", "c2 documents", "experts e2 d2 batch")
WIDE = [name for name, (ranks, _, _) in ROWS.items() if ranks > 2]


def batches_of(engine: Engine, step: int) -> list[Microbatch]:
    """The microbatches of a rank, at its positions; with documents if the data has them."""
    batches = microbatches(engine.config, step, engine.axes["data"].rank)
    modules = engine.config.model.mtp_modules
    if engine.config.data.document_boundaries:
        batches = [in_documents(replace(batch, ahead=None)) for batch in batches]
    whole = (replace(batch, ahead=None).with_ahead(modules) for batch in batches)
    return [batch.at(engine.context.positions) for batch in whole]


@pytest.mark.cases(2)
@parallel(ranks=[2])
@names([name for name in ROWS if name not in WIDE], short=SHORT)
def test_parity_with_one_rank(comm, name):
    check(comm, ROWS[name], 3, batches_of)


@parallel(ranks=[4], limit_s=180.0)
@pytest.mark.long
@pytest.mark.parametrize("name", WIDE)
def test_parity_of_four_ranks(comm, name):
    check(comm, ROWS[name], 3, batches_of)
