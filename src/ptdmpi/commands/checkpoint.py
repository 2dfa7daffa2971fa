"""`ptdmpi checkpoint`: inspect, verify, compare and prune checkpoints, without MPI, GPU or
torch."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ptdmpi.checkpoint import best
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint import examine as check
from ptdmpi.checkpoint.manifest import QUANTIZATION, Manifest, sound_manifest
from ptdmpi.config import InputError
from ptdmpi.terminal.options import AS_JSON, PATH
from ptdmpi.terminal.program import CommandGroup


@click.group(cls=CommandGroup)
def command() -> None:
    """Inspect, verify, compare or prune checkpoints, without MPI or a GPU.

    PATH is a checkpoint (such as runs/NAME/checkpoints/step-00000100), the file `latest` or `best`
    in the same directory, or a run directory.
    """


@command.command()
@click.argument("path", type=PATH)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@AS_JSON
def inspect(path: Path, tensors: bool, as_json: bool) -> None:
    """Print the contents of one checkpoint, or of all in a run.

    The exit code is 1 if a checkpoint is not complete.
    """
    summaries = [_summary(checkpoint, tensors) for checkpoint in check.checkpoints(path)]
    if as_json:
        print(json.dumps({"checkpoints": summaries}, indent=1))
    else:
        for summary in summaries:
            _print(dict(summary))
    if any(summary["problem"] for summary in summaries):
        raise SystemExit(1)


def _summary(path: Path, tensors: bool) -> dict[str, Any]:
    """Return the facts about a checkpoint that `inspect` prints: name -> value. The entry "problem"
    is None if the checkpoint is complete."""
    try:
        manifest = sound_manifest(path)
    except InputError as error:
        return {"path": str(path), "problem": str(error)}
    shapes = {name: list(tensor.shape) for name, tensor in manifest.tensors.items()}
    weights = [name for name in manifest.names if name.startswith("weights/")]
    summary = {
        "path": str(path),
        "problem": None,
        **asdict(manifest.progress),
        "parameters": sum(math.prod(manifest[name].shape) for name in weights),
    }
    if manifest.replicas:
        summary["replicas"] = manifest.replicas
    if manifest.form:
        summary[QUANTIZATION] = _quantization(manifest)
    summary |= {
        "tensors": len(shapes),
        "types": sorted({tensor.dtype for tensor in manifest.tensors.values()}),
        "files": len(manifest.files),
        "bytes": manifest.total_bytes,
    }
    if tensors:
        summary["shapes"] = shapes
    return summary


def _quantization(manifest: Manifest) -> str:
    """Return a text that describes how the weights are quantized."""
    said = manifest.said[QUANTIZATION]
    more = ", ".join(f"{key} {value}" for key, value in said.items() if key != "codes")
    return f"{said['codes']}, {more}; {len(manifest.in_few_bits)} matrices"


def _print(summary: dict[str, Any]) -> None:
    """Print the summary of a checkpoint. The entries with lines of their own (path, problem and
    shapes) are removed from `summary`."""
    print(summary.pop("path"))
    problem = summary.pop("problem")
    if problem:
        print(f"  not complete: {problem}")
    for name, shape in summary.pop("shapes", {}).items():
        print(f"  {name:<50} {' x '.join(map(str, shape))}")
    for key, value in summary.items():
        print(f"  {key.replace('_', ' '):<12} {_shown(key, value)}")


def _shown(key: str, value: Any) -> str:
    if key == "types":
        return ", ".join(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value}"


@command.command()
@click.argument("path", type=PATH)
@AS_JSON
def verify(path: Path, as_json: bool) -> None:
    """Read one checkpoint, or all in a run, and print the damage.

    Checks checksums, headers and sizes. Also checks that the stored blocks of each tensor cover the
    tensor without gaps or overlaps. The exit code is 0 if nothing is damaged, else 1.
    """
    damage = {str(checkpoint): check.problems(checkpoint) for checkpoint in check.checkpoints(path)}
    if as_json:
        print(json.dumps({"problems": damage}, indent=1))
    else:
        for name, problems in damage.items():
            if problems:
                print("\n".join([f"{name}: damaged", *problems]))
            else:
                print(f"{name}: sound")
    if any(damage.values()):
        raise SystemExit(1)


@command.command()
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@AS_JSON
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Compare two checkpoints, tensor by tensor. The runs that wrote them may have different
    layouts.

    A run directory stands for its newest complete checkpoint; a warning names newer ones that are
    damaged. The relative difference is the greatest difference divided by the greatest magnitude in
    the tensor. The exit code is 0 if the checkpoints are bitwise equal, else 1.
    """
    first = check.newest(first)
    second = check.newest(second)
    differences = check.differences(first, second)
    if as_json:
        answer = {"first": str(first), "second": str(second)}
        listed = [check.as_json(difference) for difference in differences]
        print(json.dumps({**answer, "differences": listed}, indent=1))
    elif differences:
        print(f"{first}\n{second}")
        print(f"{'differs':<50} {'absolute':>9} {'relative':>9}")
        for difference in differences:
            numbers = [difference.greatest_absolute, difference.greatest_relative]
            columns = ["" if number is None else f"{number:.2e}" for number in numbers]
            name = difference.name
            print(f"{name:<50} {columns[0]:>9} {columns[1]:>9}  {difference.what}")
    else:
        print("equal to the bit")
    if differences:
        raise SystemExit(1)


@command.command()
@click.argument("path", type=PATH)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    required=True,
    help="Number of newest checkpoints to keep.",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=0),
    default=0,
    help="Also keep each checkpoint whose step is a multiple of this.",
)
@click.option(
    "--keep-best",
    type=click.IntRange(min=0),
    default=0,
    help="Also keep this many checkpoints with the lowest validation loss.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@AS_JSON
def prune(path: Path, dry_run: bool, as_json: bool, **keep: int) -> None:
    """Remove complete checkpoints that no --keep option selects.

    PATH is a run directory. Damaged checkpoints are neither counted nor removed. The checkpoint
    that the file `best` names is kept.
    """
    directory = check.checkpoints(path)[0].parent
    if directory not in (path, path / "checkpoints"):
        raise InputError(f"{path} is one checkpoint: prune needs the run directory")
    gone = []
    spared = best.spared(directory, keep["keep_best"])
    superfluous = files.superfluous(directory, keep["keep"], keep["keep_every"], spared=spared)
    done = "would remove" if dry_run else "removed"
    for checkpoint in list(superfluous):
        if not dry_run:
            try:
                files.discard(checkpoint)
            except OSError as error:
                raise InputError(f"{checkpoint}: {error.strerror}") from None
        gone.append(str(checkpoint))
        if not as_json:
            print(f"{done} {checkpoint}")
    if as_json:
        print(json.dumps({"removed": gone, "dry_run": dry_run}, indent=1))
    elif not gone:
        print("nothing to remove")
