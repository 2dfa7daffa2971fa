"""Kill runs, damage their checkpoints and fill their disks on purpose, start the runs again, and
count the lost runs.

    python -m benchmarks.faults.torture [--scale 1.0] [--seed 1] [--kinds "kill-one flip"]
        [--layouts "zero-3 groups"]

Each trial injects a fault into a training run, removes the fault, and repeats the same command
until the run is complete. At the end, the run's parameters, optimizer moments and losses must have
the same bits as in an undisturbed run. No step that was reported as saved may be lost. A run that
ends with exit code 2 and a one-line message is counted separately, as refused. A run may refuse
only if the disk is full or read-only, or if no complete checkpoint is left. Each trial prints a
line with its layout. At the end, the program prints counts of the trials by fault and by kind of
layout. The exit code is 1 if any trial was lost.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.faults.layouts import KINDS, LAYOUTS, REMOUNTED, SHRINKING, ULFM, Deck, kinds_of
from benchmarks.faults.rank import PLACES
from benchmarks.faults.tally import Outcome, table
from benchmarks.faults.training import (
    EVERY_STEPS,
    STEPS,
    StartedRun,
    Way,
    deviation,
    newest_sound,
    prepare,
    records_deviate,
    require_base,
)
from benchmarks.launch import mpirun, start
from ptdmpi.checkpoint import directory as files

NOWHERE = ("none", 1, 0)
ATTEMPTS = 3
TMPFS_MB = 16


class Lost(Exception):
    """The error for a trial that has lost steps, or whose results differ from an undisturbed run.
    The message of the error is one line."""


class Torture:
    """The trials of `torture`, whose runs are in one folder. One seed determines all random
    choices."""

    def __init__(self, folder: Path, seed: int, kinds: Collection[str] = KINDS) -> None:
        """Prepare trials with those layouts that belong to at least one of the kinds of layouts
        `kinds`. `seed` determines all random choices."""
        self.folder = folder
        self.random = random.Random(seed)
        self.decks = {
            "any": Deck(self.random, LAYOUTS, kinds),
            "remounted": Deck(self.random, REMOUNTED, kinds),
            "shrinking": Deck(self.random, SHRINKING, kinds),
        }
        self.drawn: Way | None = None
        self.references: dict[str, Path] = {}
        self.refused = False
        self.training: StartedRun | None = None
        prepare(folder)

    def start(self, case: Way, run: Path, death: tuple[str, int, int]) -> StartedRun:
        """Start a run. `death` is (place, count, rank): `benchmarks.faults.rank` kills this rank
        when it reaches this place for the count-th time."""
        self.training = StartedRun(self.folder, case, run, death)
        return self.training

    def end(self) -> None:
        """End the processes of a trial that has been interrupted."""
        if self.training is not None and self.training.process.poll() is None:
            self.training.end()

    def case(self, deck: str = "any") -> Way:
        """Draw the layout of the next trial from the deck of cards `deck`. Half of the trials save
        checkpoints asynchronously."""
        way = self.decks[deck].deal()
        asynchronous = self.random.choice(["true", "false"])
        self.drawn = way
        if "adapted" in kinds_of(way):
            require_base(self.folder)
        return replace(way, settings=(*way.settings, f"checkpoint.asynchronous={asynchronous}"))

    def reference(self, case: Way) -> Path:
        """Return the run directory of an undisturbed run with this layout, which keeps all
        checkpoints."""
        if case.name not in self.references:
            run = self.folder / f"reference-{case.name}"
            whole = replace(case, settings=(*case.settings, "checkpoint.keep=0"))
            training = self.start(whole, run, NOWHERE)
            if training.wait() != 0:
                raise RuntimeError(f"the undisturbed run failed:\n{training.text()}")
            self.references[case.name] = run
        return self.references[case.name]

    def finish(self, case: Way, run: Path, saved: int) -> None:
        """Repeat the command until the run is complete. Raises Lost if the run differs from the
        undisturbed run, or has no checkpoint of step `saved` or later."""
        if newest_sound(run) < saved:
            raise Lost(f"step {saved} was reported as saved, but {newest_sound(run)} is the newest")
        for _ in range(ATTEMPTS):
            training = self.start(case, run, NOWHERE)
            code = training.wait()
            if code == 0:
                break
        else:
            raise Lost(f"exit code {code} again and again: {training.text()[-2000:]}")
        reference = self.reference(case)
        change = deviation(run, reference) or records_deviate(run, reference)
        if change:
            raise Lost(f"after the run resumed from step {saved} or later: {change}")

    def require_refusal(self, training: StartedRun, code: int, words: tuple[str, ...]) -> None:
        """Raise Lost unless the run `training` has ended with exit code 2 (`code` is its exit
        code), and with one line that contains one of `words`."""
        lines = [line for line in training.text().splitlines() if "ptdmpi: error: " in line]
        if code != 2 or len(lines) != 1 or not any(word in lines[0] for word in words):
            raise Lost(f"exit code {code}, no clear refusal: {training.text()[-2000:]}")
        self.refused = True

    # -- the kinds of trials ---------------------------------------------------------------------

    def kill(self, run: Path, count: Callable[[int], int]) -> None:
        """Send SIGKILL to some ranks at a random moment after the start. `count` returns the number
        of ranks to kill, given the number of all ranks."""
        case = self.case()
        self.reference(case)
        training = self.start(case, run, NOWHERE)
        if self.random.random() < 0.85:
            training.wait_for_step(self.random.randrange(1, STEPS))
        time.sleep(self.random.uniform(0.0, 0.03 if self.random.random() < 0.85 else 2.0))
        ranks = training.ranks()
        training.kill(self.random.sample(ranks, min(len(ranks), count(case.ranks))))
        training.wait()
        self.finish(case, run, training.saved())

    def kill_one(self, run: Path) -> None:
        """Kill one rank."""
        self.kill(run, lambda ranks: 1)

    def kill_all(self, run: Path) -> None:
        """Kill all ranks."""
        self.kill(run, lambda ranks: ranks)

    def shrink(self, run: Path) -> None:
        """Do a trial: kill a rank during training. The other ranks must complete the run without a
        restart."""
        case = self.case("shrinking")
        settings = (*case.settings, "run.on_failure=shrink", "run.reproducible=true")
        case = replace(case, name=f"shrink-{case.name}", settings=settings)
        self.reference(case)
        training = self.start(case, run, NOWHERE)
        training.wait_for_step(self.random.randrange(1, STEPS - 5))
        time.sleep(self.random.uniform(0.0, 0.03))
        training.kill([self.random.choice(training.ranks())])
        if training.wait() != 0:
            raise Lost(f"the survivors did not finish: {training.text()[-2000:]}")
        self.finish(case, run, training.saved())

    def kill_in_save(self, run: Path, place: str) -> None:
        """Do a trial: start a run in which a rank kills itself at the point `place` of a random
        save, and resume the run."""
        case = self.case()
        self.reference(case)
        visits = STEPS // EVERY_STEPS if place != "discard" else 3
        count = self.random.randint(1, visits)
        rank = 0
        if place == "write":
            count *= 5
            rank = self.random.randrange(case.ranks)
        training = self.start(case, run, (place, count, rank))
        if training.wait() == 0:
            raise Lost(f"it was not killed at {place} {count} of rank {rank}")
        self.finish(case, run, training.saved())

    def damage(self, run: Path, change: Callable[[Path], None]) -> None:
        """Do a trial: make the directory of a stopped run, with two checkpoints of the undisturbed
        run. Call `change` to damage a file of the newer checkpoint, or of each of the two, and
        resume the run."""
        case = self.case()
        step = self.random.randrange(2, STEPS // EVERY_STEPS) * EVERY_STEPS
        checkpoints = run / "checkpoints"
        checkpoints.mkdir(parents=True)
        kept = [step - EVERY_STEPS, step]
        for saved in kept:
            name = files.name_of(saved)
            shutil.copytree(self.reference(case) / "checkpoints" / name, checkpoints / name)
        (checkpoints / "latest").write_text(files.name_of(step) + "\n")
        shutil.copy(self.reference(case) / "metrics.jsonl", run)
        damaged = self.random.choice([[step], [step], [step], kept])
        for saved in damaged:
            change(self.random.choice(sorted((checkpoints / files.name_of(saved)).iterdir())))
        if newest_sound(run) == 0:  # both checkpoints are damaged
            training = self.start(case, run, NOWHERE)
            self.require_refusal(training, training.wait(), ("is complete",))
            return
        if step in damaged:
            self.finish(case, run, step - EVERY_STEPS)
            remains = checkpoints / (files.name_of(step) + ".damaged")
        else:
            self.finish(case, run, step)
            remains = checkpoints / files.name_of(STEPS)
        if not remains.exists():
            raise Lost("the damaged checkpoint was removed")

    def truncate(self, run: Path) -> None:
        """Truncate a file of a checkpoint."""

        def cut(path: Path) -> None:
            path.write_bytes(path.read_bytes()[: self.random.randrange(path.stat().st_size)])

        self.damage(run, cut)

    def flip(self, run: Path) -> None:
        """Flip a bit in a file of a checkpoint."""

        def change(path: Path) -> None:
            content = bytearray(path.read_bytes())
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            path.write_bytes(content)

        self.damage(run, change)

    def starve(
        self, run: Path, deck: str, begin: Callable[[Path], None], end: Callable[[Path], None]
    ) -> None:
        """Do a trial: start a run, and call `begin` at a random moment, so that the disk refuses
        writes. Later, call `end`, which lets the disk accept writes again. In half of the trials
        `end` is called shortly after `begin`, and in the other half after the run has ended. The
        layout of the run is drawn from the deck of cards `deck`."""
        case = self.case(deck)
        self.reference(case)
        run.mkdir()
        mount = ("mount", "-t", "tmpfs", "-o", f"size={TMPFS_MB}m", "torture", str(run))
        subprocess.run(mount, check=True)
        try:
            training = self.start(case, run, NOWHERE)
            if self.random.random() < 0.85:
                training.wait_for_step(self.random.randrange(1, STEPS))
            begin(run)
            passing = self.random.random() < 0.5
            if passing:
                time.sleep(self.random.uniform(0.0, 0.5))
                end(run)
            code = training.wait()
            saved = training.saved()
            if not passing:
                end(run)
            if code != 0:
                words = ("No space left", " free", "Read-only file system")
                self.require_refusal(training, code, words)
            self.finish(case, run, saved)
        finally:
            self.end()
            subprocess.run(("umount", str(run)), check=True)

    def full(self, run: Path) -> None:
        """Fill the file system of the run."""
        self.starve(run, "any", _fill, lambda run: (run / "filler").unlink())

    def read_only(self, run: Path) -> None:
        """Make the file system of the run read-only."""
        self.starve(run, "remounted", partial(_remount, how="ro"), partial(_remount, how="rw"))


def _fill(run: Path) -> None:
    with open(run / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def _remount(run: Path, how: str) -> None:
    """Remount the file system of a run with the mount option `how` ("ro" or "rw"). Try this
    repeatedly, because a file system cannot become read-only while a file is open for writing."""
    end = time.monotonic() + 60.0
    while subprocess.run(
        ("mount", "-o", f"remount,{how}", str(run)), capture_output=True
    ).returncode:
        if time.monotonic() > end:
            raise RuntimeError(f"{run} cannot be remounted {how}")
        time.sleep(0.001)


def kinds(torture: Torture) -> dict[str, tuple[int, Callable[[Path], None]]]:
    """Return, for each fault, the number of trials and a function that does a trial with this
    fault."""
    in_saves: dict[str, tuple[int, Callable[[Path], None]]] = {}
    for place in PLACES:
        in_saves[f"kill-{place}"] = (6, partial(torture.kill_in_save, place=place))
    return {
        "kill-one": (15, torture.kill_one),
        "kill-all": (10, torture.kill_all),
        **in_saves,
        "kill-shrink": (10, torture.shrink),
        "truncate": (20, torture.truncate),
        "flip": (20, torture.flip),
        "full": (20, torture.full),
        "read-only": (20, torture.read_only),
    }


def trial(torture: Torture, work: Callable[[Path], None], fault: str, number: int) -> Outcome:
    """Run the function `work` of a trial, and return the outcome."""
    run = torture.folder / f"run-{fault}-{number}"
    torture.refused = False
    torture.drawn = None
    came: Literal["survived", "refused", "lost"] = "survived"
    why = ""
    try:
        work(run)
        shutil.rmtree(run)
        if torture.refused:
            came = "refused"
    except Lost as lost:
        came = "lost"
        why = str(lost)
    if torture.drawn is None:
        raise RuntimeError(f"{fault} has drawn no layout")
    return Outcome(fault=fault, number=number, way=torture.drawn, came=came, why=why)


def can_mount() -> bool:
    """Return True if this process can mount a tmpfs."""
    with tempfile.TemporaryDirectory() as place:
        mounted = subprocess.run(("mount", "-t", "tmpfs", "x", place), capture_output=True)
        if mounted.returncode == 0:
            subprocess.run(("umount", place), check=True)
    return mounted.returncode == 0


def can_shrink() -> bool:
    """Return True if the MPI library has ULFM, with which the other ranks can survive the loss of a
    rank."""
    return start(mpirun(1, ["-c", ""], ULFM), subprocess.DEVNULL).wait() == 0


def possible(torture: Torture, faults: Collection[str]) -> Iterator[str]:
    """Yield the faults that can be tried on this machine, and print why the other faults cannot."""
    mounted = ("full", "read-only")
    decks = {"kill-shrink": "shrinking", "read-only": "remounted"}
    mountable = not set(mounted) & set(faults) or can_mount()
    for fault in faults:
        if not torture.decks[decks.get(fault, "any")].cards:
            print(f"{fault}: left out; there are no such layouts for it")
        elif fault in mounted and not mountable:
            print(f"{fault}: left out; it must mount a small tmpfs, which needs root")
        elif fault == "kill-shrink" and not can_shrink():
            print(f"{fault}: left out; this MPI has no ULFM")
        else:
            yield fault


def main() -> None:
    """Do the trials that the command line selects, and print the counts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.torture", description=__doc__
    )
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the trials to run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help="some kinds of faults, such as 'kill-one flip'")
    parser.add_argument("--layouts", help="some kinds of layouts, such as 'zero-3 groups'")
    options = parser.parse_args()
    layouts = (options.layouts or " ".join(KINDS)).split()
    if not set(layouts) <= set(KINDS):
        parser.error(f"--layouts: legal are {' '.join(KINDS)}")
    folder = Path(tempfile.mkdtemp(prefix="ptdmpi-torture-"))
    torture = Torture(folder / "torture", options.seed, layouts)
    chosen = kinds(torture)
    names = (options.kinds or " ".join(chosen)).split()
    if not set(names) <= chosen.keys():
        parser.error(f"--kinds: legal are {' '.join(chosen)}")
    outcomes: list[Outcome] = []
    for name in possible(torture, names):
        number, work = chosen[name]
        for k in range(max(1, round(number * options.scale))):
            try:
                outcomes.append(trial(torture, work, name, k))
            finally:
                torture.end()
            print(outcomes[-1].line(), flush=True)
    print(f"\n{table(outcomes)}")
    if any(outcome.came == "lost" for outcome in outcomes):
        sys.exit(f"lost runs, and the undisturbed ones, are kept in {torture.folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
