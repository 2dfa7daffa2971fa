"""The balance loss of each sequence if context ranks have parts of the sequence: the training of
one rank."""

import pytest

from tests._configs import Changes, layout
from tests.context._rows import BASE, DOCUMENTS, LATENT, context
from tests.experts.test_expert_parallel import FULL, Row, check
from tests.experts.test_expert_tensor import DIVIDED
from tests.experts.test_parity import GROUPED, MIXED
from tests.parallel import names, parallel

# a large coefficient, so that a loss that is counted wrong shows
LOSS: Changes = {"model.balance": "sequence", "model.balance_coefficient": 0.5}
SHAPE: Changes = {**BASE, **MIXED, **LOSS}
SIX_HEADS = {"model.heads": 6, "model.hidden": 48, "model.kv_heads": 3}
WHOLE = {"parallel.expert_tensor": 1}
AHEAD = {"model.mtp_depth": 2}
# name -> (ranks, shape, layout and how it is run)
ROWS: dict[str, Row] = {
    "c2": (2, SHAPE, context("all_gather", 2)),
    "c2 documents full": (2, SHAPE | DOCUMENTS, context("all_gather", 2, FULL)),
    "c2 ring documents": (2, SHAPE | DOCUMENTS, context("ring", 2)),
    "c2 ulysses documents": (2, SHAPE | DOCUMENTS, context("ulysses", 2)),
    "c2 selective": (2, SHAPE, context("all_gather", 2, {"recompute.mode": "selective"})),
    "c2 mtp": (2, SHAPE | AHEAD, context("all_gather", 2)),
    "c2 e2": (2, SHAPE, context("all_gather", 2, {"parallel.expert": 2})),
    "c3": (3, SHAPE | DOCUMENTS, context("all_gather", 3)),
    "c3 ring": (3, SHAPE | DOCUMENTS, context("ring", 3)),
    "c3 ulysses": (3, SHAPE | SIX_HEADS, context("ulysses", 3)),
    "t2 c2 divided": (4, SHAPE | DOCUMENTS, context("ring", 2, layout(t=2), DIVIDED)),
    "t2 c2 whole": (4, SHAPE | GROUPED | LOSS, context("all_gather", 2, layout(t=2), WHOLE)),
    "t2 c2 e4 whole divided": (
        4,
        SHAPE | DOCUMENTS,
        context("ulysses", 2, layout(t=2), WHOLE, DIVIDED, {"parallel.expert": 4}),
    ),
    "p2 c2": (4, SHAPE | DOCUMENTS, context("all_gather", 2, layout(p=2))),
    "d2 c2 zero 3 full": (
        4,
        SHAPE,
        context("all_gather", 2, layout(d=2), {"parallel.zero": 3}, FULL),
    ),
    "c2 latent": (2, SHAPE | LATENT | LOSS, context("ring", 2)),
    "t2 c3 whole": (6, SHAPE | DOCUMENTS, context("all_gather", 3, layout(t=2), WHOLE)),
    "t2 c3 ring divided": (6, SHAPE | DOCUMENTS, context("ring", 3, layout(t=2), DIVIDED)),
    "t2 c3 ulysses whole divided": (
        6,
        SHAPE | SIX_HEADS | DOCUMENTS | {"model.kv_heads": 6},
        context("ulysses", 3, layout(t=2), WHOLE, DIVIDED),
    ),
}
WIDE = tuple(name for name, (ranks, _, _) in ROWS.items() if ranks > 4)
SHORT = ("c2 documents full", "t2 c2 whole", "c3 ring", "c2 ulysses documents")


@pytest.mark.cases(2)
@parallel(ranks=[4])
@names([name for name in ROWS if name not in WIDE], short=SHORT)
def test_parity_with_one_rank(comm, name):
    check(comm, ROWS[name], 3)


@parallel(ranks=[6], limit_s=180.0)
@pytest.mark.long
@pytest.mark.parametrize("name", WIDE)
def test_parity_of_six_ranks(comm, name):
    check(comm, ROWS[name], 20)


@parallel(ranks=[4])
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ROWS if name not in WIDE])
def test_parity_after_twenty_steps(comm, name):
    check(comm, ROWS[name], 20)
