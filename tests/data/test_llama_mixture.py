"""LLaMA's Table 1 in docs/how-to/data.md: its numbers fit together, and as a mixture they hold."""

import re
import tomllib
from decimal import Decimal

import pytest

from ptdmpi.config import resolve
from ptdmpi.data.order import Part, SampleOrder
from tests.parallel import ROOT

DOCUMENT = (ROOT / "docs/how-to/data.md").read_text(encoding="utf-8")
RUN_TOKENS = 1.4e12
SEQ_LENGTH = 2048
SIZES = {"TB": 1e12, "GB": 1e9}


def between(name):
    return DOCUMENT.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]


def table():
    """Share, epochs, size in bytes, tokens and bytes per token as printed."""
    rows = {}
    for line in between("llama").strip().splitlines()[2:]:
        name, share, epochs, size, tokens, ratio = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        number, unit = size.split()
        size_bytes = float(number) * SIZES[unit]
        rows[name] = (float(share[:-1]) / 100, float(epochs), size_bytes, tokens, float(ratio))
    return rows


def test_table_implies_plausible_bytes_per_token():
    rows = table()
    assert len(rows) == 7 and sum(row[0] for row in rows.values()) == pytest.approx(1)
    for name, (share, epochs, size_bytes, tokens, ratio) in rows.items():
        implied = share * RUN_TOKENS / epochs
        assert 2.5 <= size_bytes / implied <= 4.5, name
        assert ratio == pytest.approx(size_bytes / implied, abs=0.005)
        assert tokens == f"{implied / 1e9:.0f}G"


def test_the_mixture_draws_the_papers_epochs():
    toml = re.search(r"```toml\n(.*?)```", between("llama mixture"), re.DOTALL)[1]
    tree = tomllib.loads(toml)
    needed = {
        "run": {"steps": 1},
        "model": {"layers": 1, "hidden": 8, "heads": 1, "seq_length": SEQ_LENGTH},
        "batch": {"global_size": 1},
    }
    config = resolve({**tree, **needed}, 1).data
    rows = table()
    assert [part.path for part in config.train] == [f"train/{name.lower()}" for name in rows]
    sizes = [int(r[0] * RUN_TOKENS / r[1]) // SEQ_LENGTH for r in rows.values()]
    parts = [
        Part(size, part.weight, part.epochs) for size, part in zip(sizes, config.train, strict=True)
    ]
    order = SampleOrder(parts, seed=0)
    samples = int(RUN_TOKENS) // SEQ_LENGTH
    order.check(samples)
    for count, size, row in zip(order.counts(samples), sizes, rows.values(), strict=True):
        assert count / samples == pytest.approx(row[0], rel=1e-6)
        assert count / size == pytest.approx(row[1], rel=1e-5)
    assert order.counts(200) == [int(Decimal(str(row[0])) * 200) for row in rows.values()]
