"""A run directory like that of `ptdmpi train`, made by hand."""

import json
from pathlib import Path
from typing import Any

from ptdmpi.config import to_toml
from tests._configs import Changes, small


def record(step: int, loss: float, **more: Any) -> dict[str, Any]:
    """Return a record of a step, with further values."""
    values = {
        "step": step,
        "loss": loss,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": step * 128,
        "step_time_s": 2.0,
        "tokens_per_s": 64.0,
        "model_tflops_per_rank": 0.5,
        "hardware_tflops_per_rank": 0.5,
        "mfu": 0.25,
        "peak_memory_bytes": 2**20,
        "rank_count": 1,
        "layout": "t=1,p=1,d=1,v=1,b=2",
        "vocab_size": 53,
    }
    return {**values, **more}


def append(path: Path, *records: dict[str, Any]) -> None:
    """Append records to the metrics of a run."""
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def made(
    path: Path, steps: int = 10, *records: dict[str, Any], changes: Changes | None = None
) -> Path:
    """Write a run of `steps` steps with these records; its name is that of the directory."""
    path.mkdir()
    config = small(
        {**(changes or {}), "run.steps": steps, "run.name": path.name, "run.dir": str(path)}
    )
    (path / "config.toml").write_text(to_toml(config))
    append(path, *records)
    return path
