"""Whole runs of BERT, and of packed documents: the loss falls, alike on one rank and on four."""

import pytest
from mpi4py import MPI

from tests._engines import from_root
from tests._runs import loop, records
from tests._texts import byte_shards, text
from tests.parallel import parallel

BERT = {
    "model.kind": "bert",
    "model.seq_length": 32,
    "model.heads": 4,
    "run.steps": 16,
    "batch.micro_size": 2,
    "optimizer.learning_rate": 1e-2,
    "log.validate_samples": 14,
}
PACKED = {
    **BERT,
    "model.kind": "llama",
    "model.ffn_hidden": 48,
    "data.document_boundaries": True,
    "run.steps": 4,
}
LAYOUT = {
    "parallel.tensor": 2,
    "parallel.pipeline": 2,
    "parallel.virtual": 2,
    "parallel.sequence_parallel": True,
    "recompute.mode": "selective",
}


def texts(folder) -> None:
    """Short documents, so that samples are padded, or hold several."""
    for name, seed in (("train", 0), ("valid", 500)):
        documents = [text(10 + 7 * (n % 9), seed + n) for n in range(60)]
        byte_shards(folder / name, [documents[:40], documents[40:]])


@parallel(ranks=[4], limit_s=100)
@pytest.mark.parametrize(
    "changes",
    [pytest.param(BERT, id="bert", marks=pytest.mark.long), pytest.param(PACKED, id="packed")],
)
def test_loss_falls_and_is_that_of_one_rank(comm, changes, tmp_path):
    changes = {**changes, "data.valid": str(tmp_path / "valid")}
    if comm.rank == 0:
        texts(tmp_path)
        alone = {**changes, "run.dir": str(tmp_path / "alone")}
        with loop(MPI.COMM_SELF, tmp_path, alone) as made:
            made.run()
    from_root(comm, None)
    spread = {**changes, **LAYOUT, "run.dir": str(tmp_path / "spread")}
    with loop(comm, tmp_path, spread) as made:
        made.run()
    if comm.rank:
        return
    alone, spread = (records(tmp_path / name) for name in ("alone", "spread"))
    masked = changes["model.kind"] == "bert"
    orders = ("sentence_order_loss", "validation_sentence_order_loss")
    for key in ("loss", "grad_norm", "validation_loss", *(orders if masked else ())):
        mine, theirs = ([record[key] for record in of if key in record] for of in (spread, alone))
        assert mine and mine == pytest.approx(theirs, rel=1e-4), key
    losses = [record["loss"] for record in alone if "loss" in record]
    assert losses[-1] < losses[0] - (0.5 if masked else 0.1)
    assert masked == any(key in record for record in alone for key in orders)
