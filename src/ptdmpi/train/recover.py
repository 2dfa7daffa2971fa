"""A training run that goes on without the ranks that it loses.

A run is a row of attempts. In each, the living ranks take their places in the grid, the spare ones
wait, and the others train. An attempt ends for all living ranks together, by one agreement: with
the run, or with the loss of a rank. Then they shrink to the survivors and try again, from the state
that these still hold where every part of the model is among them, else from the newest checkpoint.
A loss in the midst of this is one more loss.
"""

import gc
import importlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptdmpi.base.words import counted
from ptdmpi.comm import ulfm
from ptdmpi.comm.world import Process, World, fail_together
from ptdmpi.config import Config, InputError, SharedInputError
from ptdmpi.config.methods import replicas_differ
from ptdmpi.config.zero import covers_state
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.layout.seats import seats, widest
from ptdmpi.train import live
from ptdmpi.train.checks import checked
from ptdmpi.train.live import Account, Handover, Holding
from ptdmpi.train.loop import Loop
from ptdmpi.train.meter import append_lines
from ptdmpi.watch.requests import StopRequest

SPARE_POLL_S = 0.02  # how often a spare rank looks whether it is needed
FINISHED = 1  # the lowest of the bits that all agree on; the exit code stands above it


def train(tree: dict[str, Any], world: World, signals: StopRequest) -> None:
    """Train as the configuration `tree` says, on all ranks of `world`; each of them calls it.

    Raises SystemExit with the exit code if that is not 0.
    """
    config = world.on_root(lambda: checked(tree, world.size, world.local_size))
    if config.run.on_failure == "abort":
        Loop(config, world, signals).run()
        return
    world.on_root(ulfm.require)
    Survivors(config, world, signals).run()


class Survivors:
    """One rank of such a run. `world` holds all living ranks, the spare ones too."""

    def __init__(self, config: Config, world: World, signals: StopRequest) -> None:
        self.config, self.world, self.signals = config, world, signals
        self.grid = grid_of(config)
        self.loop: Loop | None = None
        self.holding = Holding(Account())
        self.lost: list[Process] = []
        self.news: list[Process] = []  # lost since training went on last
        self.failed_at: float | None = None
        # MPI may read messages that were under way when their communicator was revoked
        self.stranded: list[Any] = []

    def run(self) -> None:
        """Attempt after attempt, until the run has ended or the model finds no room."""
        # A first optimizer imports this, which takes seconds: too long for a spare rank when it is
        # called. What is imported is never garbage; without it old engines are found at once.
        importlib.import_module("torch._dynamo")
        gc.freeze()
        while True:
            with fail_together(self.world):
                outcome = self._attempt()
            if outcome & FINISHED:
                break
            self._put_away()
            gc.collect()  # engines have cycles; the next one needs their memory
            self.failed_at = self.failed_at or time.perf_counter()
            self.world, lost = ulfm.shrink(self.world)
            self.lost += lost
            self.news += lost
            if not self.news:
                raise RuntimeError("communication failed, though no rank was lost")
            if not self._fit():
                self._give_up()
        code = outcome >> 1
        if self.lost or ulfm.rank_lost(self.world, patience_s=0.0):
            ulfm.leave(self.world, code)
        if code:
            raise SystemExit(code)

    def _attempt(self) -> int:
        """Take a place and train, or wait; returns the bits that all living ranks agreed on."""
        try:
            code = self._work()
        except SharedInputError as error:  # the spare ranks do not know of it
            raise InputError(str(error)) from None
        except InputError:
            raise
        except Exception:
            if not ulfm.rank_lost(self.world):
                raise
            self.failed_at = self.failed_at or time.perf_counter()
            self.world.abort_wires()
            ulfm.revoke(self.world)
            # Agreed in here, while the frames of this exception hold the buffers of what was under
            # way: after it nobody sends any more.
            return ulfm.agree(self.world, 0)
        if code is None:
            return ulfm.agree(self.world, ulfm.ALL_FLAGS, SPARE_POLL_S)
        # not done before all are: one that leaves early would be missed by who still recovers
        return ulfm.agree(self.world, FINISHED | code << 1)

    def _work(self) -> int | None:
        """Train to the end; returns the exit code, or None at once on a spare rank."""
        loop = self._take_place()
        if loop is None:
            return None
        try:
            loop.run()
        except SystemExit as stop:  # all ranks of the loop stop alike
            return int(stop.code or 0)
        return 0

    def _take_place(self) -> Loop | None:
        """This rank's loop, ready to go on; None if it is spare."""
        world = self.world
        accounts = world.control.allgather(self.holding.account)
        order = seats(
            self.grid,
            [account.place for account in accounts],
            [process.node for process in world.processes],
        )
        apart = replicas_differ(self.config.data_parallel)
        step = live.live_step(accounts, self.grid, apart)
        routes = live.routes_apart if apart else live.routes
        ways = [] if step is None else routes(accounts, self.grid, order, step)
        crew = world.part(order)
        handles = live.give(world, self.holding, ways)
        if crew is not None:
            handover = self._handover(accounts, step, ways) if self.news else None
            loop = Loop(self._resolved(), crew, self.signals, handover)
            self.world.last_words = crew.last_words
        for handle in handles:
            handle.wait()
        # A spare rank drops what it held too: later it would be of another history of the run, of
        # the same step perhaps, but not of the same bits.
        self.holding = Holding(Account())
        if crew is None:
            self.news, self.failed_at = [], None
            return None
        if self.news and self.failed_at is not None:
            took_s = time.perf_counter() - self.failed_at
            loop.journal.say(self._notice(loop, accounts, step, took_s))
        self.loop, self.news, self.failed_at = loop, [], None
        return loop

    def _resolved(self) -> Config:
        spare = self.world.size - self.grid.size
        data, shards = self.grid.data_size, self.grid["shard"]
        cut = covers_state(self.config.parallel.zero) and shards < data
        return self.config.replace("run", spare_ranks=spare).replace(
            "parallel", data=data, shard_group=shards if cut else "all"
        )

    def _handover(
        self, accounts: list[Account], step: int | None, ways: list[tuple[int, int]]
    ) -> Handover:
        asked = (account.asked for account in accounts)
        self.signals.received = self.signals.received or next(filter(None, asked), None)
        resume = self.config.checkpoint.resume
        if any(account.saved for account in accounts):  # what the run itself has saved is newer
            resume = "auto"
        if step is None:
            return Handover(resume, lost=True)
        source = next(source for source, target in ways if target == self.world.rank)

        def load(engine: Engine) -> int:
            live.take(self.world, engine, self.holding, source)
            engine.state.restore(accounts[source].counters)
            engine.policy.replicas_lost()
            return step

        same = [account for account in accounts if account.step == step]
        done = next((r.completed for r in same if r.completed and r.completed.step == step), None)
        if max(account.concluded for account in accounts) >= step:
            done = None  # every rank has done its part, or nobody would have been let through
        return Handover(resume, load, done, accounts[source].answer)

    def _put_away(self) -> None:
        """Keep of the loop what the next attempt may need, and drop it."""
        loop, self.loop = self.loop, None
        if loop is None:
            return
        loop.close()
        self.stranded.append(loop.engine.runner.under_way())
        self.stranded.append([group.under_way for group in loop.axes.groups.values()])
        account = Account(
            place=loop.axes.coordinates,
            # what still comes from neighbours is part of the step
            step=loop.engine.steps_done if loop.engine.policy.settled else None,
            counters=replace(loop.engine.state.counters),
            completed=loop.completed,
            concluded=loop.concluded,
            asked=self.signals.received,
            saved=loop.saving.newest,
            answer=loop.feed.course.answer,
        )
        self.holding = live.hold(loop.engine, account)

    def _fit(self) -> bool:
        """Choose the widest grid that the living ranks can fill; False if there is none."""
        batch = self.config.batch
        sequences = batch.global_size // batch.micro_size
        grid = widest(self.grid, self.world.size, grid_of(self.config), sequences)
        if grid is None:
            return False
        if grid["shard"] != self.grid["shard"]:
            # cut otherwise, what a rank holds is no part that another one could take
            self.holding = Holding(replace(self.holding.account, place=None, step=None))
        self.grid = grid
        return True

    def _give_up(self) -> None:
        grid, left = self.grid, self.world.size
        line = (
            f"{_who(self.news)} lost; {counted(left, 'rank')} cannot hold "
            f"t={grid['tensor']},p={grid['pipeline']}. The same command again resumes from the "
            "newest checkpoint"
        )
        if self.world.rank == 0:
            print(f"ptdmpi: error: {line}", file=sys.stderr, flush=True)
            append_lines(Path(self.config.run.dir) / "log.txt", line + "\n")
        ulfm.leave(self.world, 1)

    def _notice(self, loop: Loop, accounts: list[Account], step: int | None, took_s: float) -> str:
        under_way = 1 + (max(account.concluded for account in accounts) or loop.first)
        source = f"step {loop.first}" if loop.first else "the start"
        kind = "checkpoint" if step is None else "live state"
        if step is None and covers_state(self.config.parallel.zero):
            kind += ", since nobody else held the lost shard of the state,"
        spare = self.world.size - loop.world.size
        layout = ", ".join(filter(None, (str(loop.config.layout), loop.config.layout.sharding)))
        go = f"{loop.world.size} ranks go" if loop.world.size > 1 else "1 rank goes"
        return (
            f"{_who(self.news)} lost in step {under_way}; {go} on"
            f"{f' ({spare} spare)' if spare else ''}: {layout} from "
            f"{kind} of {source}, {took_s:.2f} s"
        )


def _who(lost: list[Process]) -> str:
    names = [f"{process.number} ({process.host})" for process in lost]
    return f"rank{'s' * (len(names) > 1)} {', '.join(names)}"
