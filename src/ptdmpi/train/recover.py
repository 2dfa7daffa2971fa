"""A training run that survives the loss of ranks.

A run is a sequence of attempts. In each attempt, some of the living ranks get positions in the
process grid and train. The other living ranks are spare ranks, which wait. At the end of the run,
or when a rank is lost, all living ranks end the attempt together: they all call MPI's agreement
function (`ulfm.agree`). After a loss, the world shrinks to the surviving ranks, which begin the
next attempt. If the survivors have every part of the model's state in their memory, they continue
from this state; otherwise they continue from the newest checkpoint. If another rank is lost during
the recovery, the recovery begins again.
"""

import gc
import sys
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ptdmpi.base.words import counted
from ptdmpi.comm import ulfm
from ptdmpi.comm.world import Process, World, fail_together
from ptdmpi.config import Config, InputError, SharedInputError
from ptdmpi.config.methods import replicas_differ
from ptdmpi.config.zero import covers_state
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.layout.grid import CONTEXT, EXPERTS, REPLICAS, SHARDS, TENSOR, grid_of
from ptdmpi.plan.layout.seats import seats, widest
from ptdmpi.train import live
from ptdmpi.train.hooks import Hooks
from ptdmpi.train.live import Account, Completed, Handover, Holding, Route
from ptdmpi.train.loop import Loop
from ptdmpi.train.records.directory import append_lines
from ptdmpi.watch.requests import StopRequest

# a waiting spare rank checks at this interval (in seconds) whether the attempt has ended
SPARE_POLL_S = 0.02
# At the end of an attempt, all living ranks agree on a number (see `_attempt`). This is the lowest
# bit of the number. It means that the run has ended; the higher bits are then the exit code.
FINISHED = 1


class Survivors:
    """One rank of a run that can continue after the loss of other ranks.

    `world` contains all living ranks, including spare ranks. `lost` lists all ranks that have been
    lost so far. `news` lists only the ranks that have been lost since the last attempt began to
    train. `failed_at` is the time at which the present recovery began; None if no recovery is in
    progress.
    """

    def __init__(
        self, config: Config, world: World, signals: StopRequest, *, hooks: Hooks | None = None
    ) -> None:
        self.config = config
        self.hooks = hooks or Hooks()
        self.world = world
        self.signals = signals
        self.grid = grid_of(config)
        self.loop: Loop | None = None
        self.holding = Holding(Account())
        self.lost: list[Process] = []
        self.news: list[Process] = []
        self.failed_at: float | None = None
        # buffers of unfinished messages on communicators that are now revoked; they are kept,
        # because MPI may still use them
        self.stranded: list[Any] = []

    def steps(self) -> Generator[Completed, None, None]:
        """Make attempts until the run has ended, or until too few ranks are left for the model.

        Yield the steps that this rank trains. Raises SystemExit if the exit code is not 0.
        """
        # exclude the objects of imported modules from garbage collection, so that the collection
        # after each attempt takes less time
        gc.freeze()
        while True:
            with fail_together(self.world):
                outcome = yield from self._attempt()
            if outcome & FINISHED:
                break
            self._put_away()
            # collect garbage now: the old engine contains reference cycles, and the next engine
            # needs its memory
            gc.collect()
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

    def _attempt(self) -> Generator[Completed, None, int]:
        """Make one attempt: train, or wait as a spare rank. Return the number on which all living
        ranks agree: the bitwise AND of the numbers that the ranks contribute. If its bit FINISHED
        is set, the run has ended, and the higher bits are the exit code."""
        try:
            code = yield from self._work()
        # All training ranks have raised this SharedInputError, but spare ranks have not.
        # `fail_together` ends only the ranks that raise a SharedInputError. After an InputError,
        # which stands for an error of one rank, `fail_together` ends all ranks, including the spare
        # ranks.
        except SharedInputError as error:
            raise InputError(str(error)) from None
        except InputError:
            raise
        except Exception:
            if not ulfm.rank_lost(self.world):
                raise
            self.failed_at = self.failed_at or time.perf_counter()
            self.world.abort_wires()
            ulfm.revoke(self.world)
            # Agree inside this handler. MPI may still use the buffers of incomplete messages, and
            # the frames of the exception keep these buffers alive. After the agreement, no rank
            # sends a message to these buffers any longer.
            return ulfm.agree(self.world, 0)
        if code is None:
            return ulfm.agree(self.world, ulfm.ALL_FLAGS, SPARE_POLL_S)
        # A rank that has finished its training must wait here for all other ranks: if one of them
        # is lost, the remaining ranks may need this rank's state.
        return ulfm.agree(self.world, FINISHED | code << 1)

    def _work(self) -> Generator[Completed, None, int | None]:
        """Train to the end of the run, and return the exit code of the run. On a spare rank, return
        None immediately."""
        loop = self._take_place()
        if loop is None:
            return None
        try:
            yield from loop.steps()
        except SystemExit as stop:  # all training ranks stop with the same exit code
            return int(stop.code or 0)
        return 0

    def _take_place(self) -> Loop | None:
        """Give this rank a position in the process grid. Return its training loop, with the
        training state loaded. Return None if this rank is a spare rank.
        """
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
        ways: list[Route] = []
        if step is not None:
            ways = routes(accounts, self.grid, order, step)
        crew = world.part(order)
        handles = live.give(world, self.holding, ways)
        if crew is not None:
            handover = self._handover(accounts, step, ways) if self.news else None
            loop = Loop(self._resolved(), crew, self.signals, handover, hooks=self.hooks)
            self.world.last_words = crew.last_words
        for handle in handles:
            handle.wait()
        # All ranks discard their old state, including spare ranks. The other ranks may train the
        # same step again with bitwise different results, so the old state of a spare rank would not
        # match theirs.
        self.holding = Holding(Account())
        if crew is not None:
            if self.news and self.failed_at is not None:
                took_s = time.perf_counter() - self.failed_at
                loop.journal.say(self._notice(loop, accounts, step, took_s))
            self.loop = loop
        self.news = []
        self.failed_at = None
        return self.loop

    def _resolved(self) -> Config:
        """Return the configuration with the layout of the current process grid."""
        data = self.grid.data_size
        shards = self.grid.size_of(SHARDS)
        copies = shards * self.grid.size_of(REPLICAS)
        shard_group: int | Literal["all"] = "all"
        if covers_state(self.config.parallel.zero) and shards < copies:
            shard_group = shards
        config = self.config.replace("run", spare_ranks=self.world.size - self.grid.size)
        return config.replace("parallel", data=data, shard_group=shard_group)

    def _handover(self, accounts: list[Account], step: int | None, ways: list[Route]) -> Handover:
        """Return the state from which this rank's loop starts: the live state after `step`, or a
        checkpoint if `step` is None.

        `ways` are the routes of the live state, one for each rank.
        """
        asked = (account.asked for account in accounts)
        self.signals.received = self.signals.received or next(filter(None, asked), None)
        resume = self.config.checkpoint.resume
        # the checkpoints of this run are newer than the checkpoint that `resume` names
        if any(account.saved for account in accounts):
            resume = "auto"
        if step is None:
            return Handover(resume, lost=True)
        source = next(way.source for way in ways if way.target == self.world.rank)

        def load(engine: Engine) -> int:
            """Receive the live state. Return the number of steps for which it was trained."""
            live.take(self.world, engine, self.holding, source)
            engine.state.restore(accounts[source].counters)
            engine.policy.replicas_lost()
            return step

        return Handover(
            resume,
            load,
            unfinished=_unfinished(accounts, step),
            answer=accounts[source].answer,
            unwritten=next(
                (dict(account.unwritten) for account in accounts if account.unwritten), {}
            ),
        )

    def _put_away(self) -> None:
        """Close the training loop. Keep only the training state, which the next attempt may need,
        and the buffers of incomplete messages, which MPI may still use.
        """
        loop = self.loop
        self.loop = None
        if loop is None:
            return
        loop.close()
        self.stranded.append(loop.engine.runner.under_way())
        self.stranded.append([group.under_way for group in loop.axes.groups.values()])
        # If `settled` is False, the data-parallel method was in the middle of an exchange of
        # gradients or weights with other replicas, so the parts of the state do not fit together.
        settled = loop.engine.policy.settled
        directory = loop.journal.directory
        account = Account(
            place=loop.axes.coordinates,
            step=loop.engine.steps_done if settled else None,
            counters=replace(loop.engine.state.counters),
            completed=loop.completed,
            concluded=loop.concluded,
            asked=self.signals.received,
            saved=loop.saving.newest,
            answer=loop.feed.course.answer,
            unwritten={} if directory is None else directory.unwritten,
        )
        self.holding = live.hold(loop.engine, account)

    def _fit(self) -> bool:
        """Choose the process grid that has as many data ranks as the living ranks allow. Return
        False if there are too few living ranks for any grid.
        """
        batch = self.config.batch
        sequences = batch.global_size // batch.micro_size
        grid = widest(self.grid, self.world.size, grid_of(self.config), sequences)
        if grid is None:
            return False
        if grid["shard"] != self.grid["shard"]:
            # the new grid divides the state into another number of shards, so this rank's old shard
            # cannot be used
            self.holding = Holding(replace(self.holding.account, place=None, step=None))
        self.grid = grid
        return True

    def _give_up(self) -> None:
        """Print that too few ranks are left for the run, and end all living ranks with exit code
        1."""
        sizes = [f"t={self.grid.size_of(TENSOR)}", f"p={self.grid['pipeline']}"]
        if self.grid.size_of(EXPERTS) > 1:
            sizes.insert(1, f"e={self.grid.size_of(EXPERTS)}")
        if self.grid.size_of(CONTEXT) > 1:
            sizes.insert(1, f"c={self.grid.size_of(CONTEXT)}")
        line = (
            f"{_who(self.news)} lost; {counted(self.world.size, 'rank')} cannot hold "
            f"{','.join(sizes)}. The same command resumes "
            "from the newest checkpoint"
        )
        if self.world.rank == 0:
            print(f"ptdmpi: error: {line}", file=sys.stderr, flush=True)
            append_lines(Path(self.config.run.dir) / "log.txt", line + "\n")
        ulfm.leave(self.world, 1)

    def _notice(self, loop: Loop, accounts: list[Account], step: int | None, took_s: float) -> str:
        """Return the log line about the lost ranks and about the next attempt: its layout and its
        state.

        `step` is the step of the live state, or None if the attempt begins from a checkpoint.
        `took_s` is the duration of the recovery in seconds.
        """
        under_way = 1 + (max(account.concluded for account in accounts) or loop.first)
        source = f"step {loop.first}" if loop.first else "the start"
        kind = "live state"
        if step is None:
            kind = "checkpoint"
            if covers_state(self.config.parallel.zero):
                kind += ", since no other rank held the lost shard of the state,"
            elif self.grid.size_of(EXPERTS) > 1:
                kind += ", since no other rank held the lost experts,"
        layout = ", ".join(filter(None, (str(loop.config.layout), loop.config.layout.sharding)))
        go = f"{loop.world.size} ranks continue" if loop.world.size > 1 else "1 rank continues"
        spare = self.world.size - loop.world.size
        spare_text = f" ({spare} spare)" if spare else ""
        return (
            f"{_who(self.news)} lost in step {under_way}; {go}{spare_text}: {layout} from "
            f"{kind} of {source}, {took_s:.2f} s"
        )


def _unfinished(accounts: list[Account], step: int) -> Completed | None:
    """Return the completed step `step`, which a rank has reported. Return None if a rank has
    already concluded this step, which means that it was recorded, validated and saved.
    """
    if max(account.concluded for account in accounts) >= step:
        return None  # a rank concludes a step only after all ranks have completed it
    for account in accounts:
        done = account.completed
        if account.step == step and done is not None and done.number == step:
            return done
    return None


def _who(lost: list[Process]) -> str:
    """Return a text that names the lost ranks and their hosts."""
    names = ", ".join(f"{process.number} ({process.host})" for process in lost)
    return f"ranks {names}" if len(lost) > 1 else f"rank {names}"
