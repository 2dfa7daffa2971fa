"""`make gpu`: measure one GPU part by part, and write docs/reference/gpu.md.

Each part runs in a separate process.

All results are stored in results/latest.json, which is written at least every ten seconds. A run
that was interrupted continues with the remaining rows. If the device, the commit or a library has
changed, or with --anew, the measurement begins again.
"""

import argparse
import datetime
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.identity import ROOT, identity
from benchmarks.gpu.page import page
from benchmarks.gpu.process import answer
from benchmarks.gpu.programs import PROGRAMS, run_program
from benchmarks.gpu.reasons import LATEST, done, reasons, why_not
from benchmarks.gpu.table import filled, with_triton, with_weight_gradients
from benchmarks.gpu.timing import measured_rows
from ptdmpi.base.disk import write_whole
from ptdmpi.comm import launch

if TYPE_CHECKING:
    import torch

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs/reference/gpu.md"
TABLE = ROOT / "src/ptdmpi/presets/kernels.toml"
LIMIT_S = 540.0
LEAST_S = 15.0  # no part is started if fewer seconds are left
NO_GPU = {"skipped": "there is no GPU here"}
Part = dict[str, Any]


@dataclass
class Record:
    """The results of the measurement so far, and the files in which they are stored.

    `everything` is the content of latest.json. Each file is also copied into the folder `copies`,
    unless `copies` is None.
    """

    everything: dict[str, Any]
    results: Path
    page: Path
    copies: Path | None = None

    @property
    def parts(self) -> dict[str, Part]:
        """Return the results measured so far: the rows of each part, by the name of the part."""
        parts: dict[str, Part] = self.everything["parts"]
        return parts

    def put(self, name: str, before: Part, now: Part) -> None:
        """Store the rows `now` of a part that was measured again, and write the files. `before` has
        the earlier rows of the part. If the part has the FLOP/s of a model, also store this rate
        divided by the measured FLOP/s of a matrix multiplication."""
        gemm = self.parts.get("machine", {}).get("gemm_flops")
        if gemm and "model_flops_per_s" in now:
            now = now | {"of_gemm": now["model_flops_per_s"] / gemm}
        self.parts[name] = better(before, now)
        self.write()

    def write(self) -> None:
        """Write latest.json and the page."""
        self.results.mkdir(parents=True, exist_ok=True)
        write_whole(self.results / LATEST, json.dumps(self.everything, indent=1) + "\n")
        write_whole(self.page, page(self.everything))
        self.copy([*self.results.glob("*.json"), self.page])

    def copy(self, files: list[Path]) -> None:
        """Copy files into the folder of copies, if there is one."""
        if self.copies is not None:
            self.copies.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy(file, self.copies)


def known_parts(results: Path, own: dict[str, Any]) -> dict[str, Part]:
    """Return the results of the parts that earlier runs have stored in the folder `results`. Return
    no parts if the earlier runs had another identity (device, code and libraries) than `own`."""
    file = results / LATEST
    if not file.is_file():
        return {}
    before = json.loads(file.read_text(encoding="utf-8"))
    if {key: before.get(key) for key in own} != own:
        return {}
    parts: dict[str, Part] = before["parts"]
    return parts


def asked() -> dict[str, float]:
    """Return the seconds that each part normally takes, by its name, in the order in which the
    parts are measured."""
    import torch

    from benchmarks.gpu.parts import parts

    every = [(part.turn, part.name, part.s) for part in parts(torch.device("cpu"), RESULTS)]
    every += [(program.turn, name, program.s) for name, program in PROGRAMS.items()]
    # the sort is stable, so parts with equal `turn` keep their order
    every.sort(key=lambda part: part[0])
    return {name: s for _, name, s in every}


def gpu() -> "torch.device | None":
    """Return the GPU that is measured; None if the machine has no GPU."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else None


def one_part(name: str, folder: Path) -> Iterator[Part]:
    """Measure a part on this process's GPU. Yield, after each row, all rows measured so far, or the
    reason why no row was measured. Finished rows in `folder`/latest.json are not measured again."""
    device = gpu()
    if device is None:
        yield NO_GPU
        return
    from benchmarks.gpu.parts import parts

    try:
        measure = {part.name: part.measure for part in parts(device, folder)}[name]
        measured = measure()
        if isinstance(measured, dict):
            yield measured
        else:
            yield from measured_rows(measured, known_rows(name, folder))
    except Exception as error:  # a library may raise any exception
        yield why_not(error)


def known_rows(name: str, folder: Path) -> dict[str, Part]:
    """Return the finished rows of a part, according to latest.json in `folder`."""
    file = folder / LATEST
    if not file.is_file():
        return {}
    part = json.loads(file.read_text(encoding="utf-8"))["parts"].get(name, {})
    return {key: row for key, row in part.items() if isinstance(row, dict) and done(row)}


def measured(name: str, limit_s: float, record: Record) -> Part:
    """Measure a part in a separate process, within `limit_s` seconds, and return its rows. The end
    of the process frees its GPU memory. While the process runs, `record` stores the rows that the
    process has measured so far."""
    before = record.parts.get(name, {})

    def so_far(rows: Part) -> None:
        record.put(name, before, rows | {"left": "no time was left to finish it"})

    if name in PROGRAMS:
        import torch

        return run_program(name, limit_s, torch.cuda.device_count(), so_far)
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--part", name]
    return answer(command, limit_s, so_far=so_far)


def share_s(left_s: float, mine_s: float, others_s: float) -> float:
    """Return the seconds that a part may take of the remaining `left_s` seconds. `mine_s` is the
    normal time of this part, and `others_s` is the normal time of all later parts. The part may
    take twice its proportional share of the remaining time, because most parts need less than their
    share. This limit prevents one slow part from using the time of all others."""
    return left_s * min(1.0, 2 * mine_s / (mine_s + others_s))


def run(
    results: Path, docs: Path, limit_s: float, *, anew: bool, copies: Path | None = None
) -> dict[str, Any]:
    """Measure all remaining parts within `limit_s` seconds, and return the content of latest.json.

    `results` is the folder of latest.json, `docs` is the path of the page, and `copies` is a folder
    for copies of both files. If `anew` is True, earlier results are discarded.
    """
    end_s = time.monotonic() + limit_s
    own = identity()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    known = {} if anew else known_parts(results, own)
    record = Record({**own, "parts": known, "date": today}, results, docs, copies)
    record.write()  # the processes that measure parts read the known rows from this file
    parts = asked()
    todo = [name for name in parts if not done(known.get(name, {}))]
    for number, name in enumerate(todo):
        before = record.parts.get(name, {})
        left_s = end_s - time.monotonic()
        others_s = sum(parts[other] for other in todo[number + 1 :])
        if own["device"] is None:
            now: Part = NO_GPU
        elif left_s < LEAST_S:
            now = {"left": "no time was left: the same command continues with it"}
        else:
            share = max(LEAST_S, share_s(left_s, parts[name], others_s))
            now = measured(name, share, record)
        record.put(name, before, now)
        why = [": ".join(filter(None, reason)) for reason in reasons(record.parts[name]).items()]
        print(f"{name}: {'; '.join(why) or 'measured'}", flush=True)
    return record.everything


def better(before: Part, now: Part) -> Part:
    """Return the rows of a part that was measured again. `before` has the rows of the earlier
    measurement, and `now` the rows of the new measurement. A new row replaces the earlier row of
    the same name, unless the earlier row was done and the new row is not."""
    rows = {key: row for key, row in before.items() if isinstance(row, dict) and done(row)}
    return {**rows, **{key: row for key, row in now.items() if key not in rows or done(row)}}


def fill(everything: dict[str, Any], path: Path) -> None:
    """Write the fastest kernels into the table of kernels (presets/kernels.toml). The measured
    times of attention, of weight gradients and of kernels in Triton decide which kernels are
    fastest."""
    parts = everything["parts"]
    device = parts.get("machine", {}).get("capability", "")
    if not device:
        return
    torch_version = everything["libraries"].get("torch")
    source = f"{everything['device']}, torch {torch_version}, {everything['date']}"
    text = filled(path.read_text(encoding="utf-8"), device, parts.get("attention", {}), source)
    rows = parts.get("weight gradients", {})
    text = with_weight_gradients(text, device, rows, source)
    rows = parts.get("small kernels", {})
    write_whole(path, with_triton(text, device, rows, source))


def main() -> None:
    """Do the complete measurement. With the option --part, measure only this part, and print its
    rows for the parent process."""
    # set the environment variables of a training run, also for the programs that this program
    # starts
    launch.prepare()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", help="measure one part on this process's GPU and print its rows")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all parts")
    parser.add_argument("--anew", action="store_true", help="keep nothing of earlier results")
    parser.add_argument("--copy-to", type=Path, help="a folder that gets copies of the results")
    chosen = parser.parse_args()
    if chosen.part:
        for rows in one_part(chosen.part, RESULTS):
            print(json.dumps(rows), flush=True)
        return
    everything = run(RESULTS, PAGE, chosen.limit_s, anew=chosen.anew, copies=chosen.copy_to)
    fill(everything, TABLE)
    if chosen.copy_to:
        shutil.copy(TABLE, chosen.copy_to)


if __name__ == "__main__":
    main()
