"""What the recovery benchmark calls clean, and how it adds up its trials."""

import json
from pathlib import Path

from benchmarks.faults.recovery import SETUPS, Trial, compare, table


def _run(folder: Path, losses: list[float]) -> Path:
    folder.mkdir()
    records = [
        {"step": step, "loss": loss, "grad_norm": 1.0, "rank_count": len(folder.name)}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


def test_a_curve_that_differs_in_a_bit_or_in_length_is_not_clean(tmp_path):
    straight = _run(tmp_path / "straight", [3.0, 2.0])
    assert compare(_run(tmp_path / "same", [3.0, 2.0]), straight) == ""
    assert "'step': 2" in compare(_run(tmp_path / "bit", [3.0, 2.0000000000000004]), straight)
    assert "number of records" in compare(_run(tmp_path / "short", [3.0]), straight)
    assert "number of records" in compare(_run(tmp_path / "twice", [3.0, 2.0, 2.0]), straight)


def test_the_table_counts_what_was_not_clean():
    good = Trial("a", deaths=2, seconds=[1.0, 3.0], logged=[0.5, 0.7])
    bad = Trial("b", deaths=1, problem="hung")
    assert list(table([good, bad]))[2:] == [
        "| a | 1 | 1 | 2 | 2.00 s (1.00 to 3.00) | 0.60 s (0.50 to 0.70) |",
        "| b | 1 | 0 | 1 | - | - |",
        "| all | 2 | 1 | 3 | 2.00 s (1.00 to 3.00) | 0.60 s (0.50 to 0.70) |",
    ]


def test_every_setup_survives_its_deaths():
    for setup in SETUPS:
        assert setup.ranks - setup.deaths >= setup.tensor * setup.pipeline, setup.name
