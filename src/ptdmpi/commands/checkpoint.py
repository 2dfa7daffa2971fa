"""`ptdmpi checkpoint`: inspect, verify, diff, prune; without MPI, a GPU, or torch."""

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
from ptdmpi.terminal.program import CommandGroup

PATH = click.Path(path_type=Path)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


@click.group(cls=CommandGroup, short_help="Inspect, verify, compare or prune checkpoints.")
def command() -> None:
    """Inspect, verify, compare or prune checkpoints, without MPI or a GPU.

    PATH is a checkpoint (runs/NAME/checkpoints/step-00000100), the file `latest` or `best`
    beside it, or a whole run directory.
    """


@command.command()
@click.argument("path", type=PATH)
@click.option("--tensors", is_flag=True, help="Name every tensor.")
@AS_JSON
def inspect(path: Path, tensors: bool, as_json: bool) -> None:
    """Say what a checkpoint, or each one of a run, holds. Exit code 1 if one is not complete."""
    found = [_summary(one, tensors) for one in check.checkpoints(path)]
    if as_json:
        print(json.dumps({"checkpoints": found}, indent=1))
    else:
        for summary in found:
            _print(dict(summary))
    if any(summary["problem"] for summary in found):
        raise SystemExit(1)


def _summary(path: Path, tensors: bool) -> dict[str, Any]:
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
        **({"replicas": manifest.replicas} if manifest.replicas else {}),
        **({QUANTIZATION: _quantization(manifest)} if manifest.form else {}),
        "tensors": len(shapes),
        "types": sorted({tensor.dtype for tensor in manifest.tensors.values()}),
        "files": len(manifest.files),
        "bytes": manifest.total_bytes,
    }
    if tensors:
        summary["shapes"] = shapes
    return summary


def _quantization(manifest: Manifest) -> str:
    """What the manifest says of its weights in few bits."""
    said = manifest.said[QUANTIZATION]
    more = ", ".join(f"{key} {value}" for key, value in said.items() if key != "codes")
    return f"{said['codes']}, {more}; {len(manifest.in_few_bits)} matrices"


def _print(summary: dict[str, Any]) -> None:
    print(summary.pop("path"))
    problem = summary.pop("problem")
    if problem:
        print(f"  not complete: {problem}")
    for name, shape in summary.pop("shapes", {}).items():
        print(f"  {name:<50} {' x '.join(map(str, shape))}")
    for key, value in summary.items():
        text = f"{value:,}" if isinstance(value, int) else value
        print(f"  {key.replace('_', ' '):<12} {', '.join(text) if key == 'types' else text}")


@command.command()
@click.argument("path", type=PATH)
@AS_JSON
def verify(path: Path, as_json: bool) -> None:
    """Read all of a checkpoint, or of each one of a run, and say what is damaged.

    Checked are checksums, headers, sizes, and that the pieces of every tensor cover it without gap
    or overlap. Exit code 0: all is well, 1: something is damaged.
    """
    found = {str(one): check.problems(one) for one in check.checkpoints(path)}
    if as_json:
        print(json.dumps({"problems": found}, indent=1))
    else:
        for name, problems in found.items():
            print("\n".join([f"{name}: damaged", *problems] if problems else [f"{name}: sound"]))
    if any(found.values()):
        raise SystemExit(1)


@command.command()
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@AS_JSON
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Compare two checkpoints, tensor by tensor, whatever layouts wrote them.

    Of a run directory its newest complete checkpoint is taken. Relative is the greatest difference
    over the greatest magnitude of the tensor. Exit code 0: equal to the bit, 1: different.
    """
    pair = check.newest(first), check.newest(second)
    found = check.differences(*pair)
    if as_json:
        answer = {"first": str(pair[0]), "second": str(pair[1])}
        print(json.dumps({**answer, "differences": [*map(check.as_json, found)]}, indent=1))
    elif found:
        print(f"{pair[0]}\n{pair[1]}")
        print(f"{'differs':<50} {'absolute':>9} {'relative':>9}")
        for one in found:
            numbers = [one.greatest_absolute, one.greatest_relative]
            columns = ["" if number is None else f"{number:.2e}" for number in numbers]
            print(f"{one.name:<50} {columns[0]:>9} {columns[1]:>9}  {one.what}")
    else:
        print("equal to the bit")
    if found:
        raise SystemExit(1)


@command.command()
@click.argument("path", type=PATH)
@click.option("--keep", type=click.IntRange(min=1), required=True, help="Newest ones to keep.")
@click.option("--keep-every", type=click.IntRange(min=0), default=0, help="And all multiples.")
@click.option("--keep-best", type=click.IntRange(min=0), default=0, help="And the best ones.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@AS_JSON
def prune(path: Path, dry_run: bool, as_json: bool, **keep: int) -> None:
    """Remove complete checkpoints of the run directory PATH that retention would not keep.

    Damaged ones are neither counted nor removed, and what the file `best` names stays.
    """
    directory = check.checkpoints(path)[0].parent
    if directory not in (path, path / "checkpoints"):
        raise InputError(f"{path} is one checkpoint: prune wants the run directory")
    gone = []
    spared = best.spared(directory, keep["keep_best"])
    superfluous = files.superfluous(directory, keep["keep"], keep["keep_every"], spared=spared)
    for one in list(superfluous):
        if not dry_run:
            try:
                files.discard(one)
            except OSError as error:
                raise InputError(f"{one}: {error.strerror}") from None
        gone.append(str(one))
        if not as_json:
            print(f"{'would remove' if dry_run else 'removed'} {one}")
    if as_json:
        print(json.dumps({"removed": gone, "dry_run": dry_run}, indent=1))
    elif not gone:
        print("nothing to remove")
