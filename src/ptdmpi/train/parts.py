"""Creation of the objects that one rank needs for a training run, in the order of their
dependencies."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ptdmpi.base.heap import give_back, keep_freed
from ptdmpi.base.launched import COPIES
from ptdmpi.checkpoint.memory import MemoryCopies
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import Axes, World
from ptdmpi.config import Config
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train import tasks
from ptdmpi.train.attempt import Attempt
from ptdmpi.train.capacity import Memory
from ptdmpi.train.feed import Feed
from ptdmpi.train.hooks import Hooks
from ptdmpi.train.live import Handover
from ptdmpi.train.nonfinite import Skips
from ptdmpi.train.records.journal import Journal
from ptdmpi.train.records.rates import Rates, agreed_peak_flops, peak_memory_bytes, why_no_peak
from ptdmpi.train.saving import Saving
from ptdmpi.train.standing import Standing, standing_of
from ptdmpi.train.validation import Validation
from ptdmpi.watch.lookout import Lookout
from ptdmpi.watch.profile import Profile
from ptdmpi.watch.requests import Asked, StopRequest, Vote


@dataclass(frozen=True)
class Parts:
    """The objects that one rank needs for a training run.

    `start` is the state from which this attempt of the run begins. `concluded` is the last step
    whose record, validation and saves are done. `vote` is a function that returns the requests to
    stop or save that all ranks have received. Every rank must call `vote`, and all ranks get the
    same result.
    """

    config: Config
    world: World
    axes: Axes
    start: Handover
    concluded: int
    feed: Feed
    memory: Memory
    engine: Engine
    attempt: Attempt
    lookout: Lookout
    profile: Profile
    skips: Skips
    saving: Saving
    validation: Validation
    journal: Journal
    vote: Vote


def assemble(
    config: Config,
    world: World,
    signals: StopRequest,
    *,
    handover: Handover | None,
    hooks: Hooks,
) -> Parts:
    """Create the objects of a run, load its training state, and open its run directory. Every rank
    must call this function.

    After the loss of ranks `handover` has the state of the survivors. If `handover` is None, the
    state comes from the checkpoint that the key `checkpoint.resume` selects, or is new. Raises
    InputError if the run cannot begin.
    """
    torch.set_num_threads(config.run.threads)
    keep_freed(os.environ)
    device = world.device()
    axes = world.split(grid_of(config), wire_named(config.comm.wire, device))
    journal = Journal(config, axes, signals.show)
    if axes.carried_by:
        journal.say(axes.carried_by)
    lookout = Lookout(config, axes, world, signals, say=journal.say)
    try:
        parts = _with_state(world, lookout, journal, device=device, handover=handover, hooks=hooks)
    except Exception:
        # without this call, the threads of the lookout, which monitors the run, would not end after
        # an error
        lookout.close()
        raise
    if journal.directory is not None and lookout.judge is not None:
        lookout.judge.ended = journal.directory.failed
    give_back()
    return parts


def _with_state(
    world: World,
    lookout: Lookout,
    journal: Journal,
    *,
    device: torch.device,
    handover: Handover | None,
    hooks: Hooks,
) -> Parts:
    """Create the objects for data, model and checkpoints, and load the run's training state."""
    config = journal.config
    axes = lookout.axes
    say = journal.say
    world.on_root(lookout.take_lock)
    feed = Feed(config, axes, device)
    memory = Memory(config, feed.vocab_size, world, device)
    with memory.explained():
        engine = Engine(config, axes, feed.vocab_size, device, place=lookout.place)
    profile = Profile(config.run, world.rank, device, say)
    skips = Skips(engine, lookout.ranks.name, config.run.max_skips, say)
    checkpoints = _checkpoints(engine, feed, hooks)
    start = handover or Handover(config.checkpoint.resume)
    copies = copies_of_run(engine, world, checkpoints)
    attempt = Attempt(world, engine, checkpoints, start=start, copies=copies)
    hooks.restore(checkpoints.resumption.extras)
    concluded = attempt.first
    if start.unfinished is not None:
        concluded -= 1
    standing = world.on_root(lambda: standing_of(config, concluded))
    attempt.over = standing.over
    checkpoints.validated = standing.last
    vote = partial(_vote, lookout, engine)
    validation = _validator(feed, engine, journal, world, vote=vote, standing=standing, hooks=hooks)
    attempt.take_owed(validation.owed(attempt.first))
    # with live state, which survived a loss of ranks, the run begins even if the disk is full
    if not attempt.idle and not attempt.live:
        checkpoints.check_space()
    journal.directory = attempt.open(concluded, journal.show)
    attempt.choose(engine, memory, say)
    parts = Parts(
        config=config,
        world=world,
        axes=axes,
        start=start,
        concluded=concluded,
        feed=feed,
        memory=memory,
        engine=engine,
        attempt=attempt,
        lookout=lookout,
        profile=profile,
        skips=skips,
        saving=_saving(checkpoints, journal, engine, hooks=hooks, copies=copies),
        validation=validation,
        journal=journal,
        vote=vote,
    )
    _begin_log(parts, device, resumed_live=handover is not None)
    return parts


def _vote(lookout: Lookout, engine: Engine, mistake: Exception | None = None) -> Asked:
    """Let all ranks vote: each rank sends the requests to stop or to save that it has received, and
    whether it has failed to read its data (`mistake`). Return the requests on which the ranks
    agree. Every rank must call this function."""
    return lookout.vote(peak_memory_bytes(engine.device), mistake)


def _validator(
    feed: Feed,
    engine: Engine,
    journal: Journal,
    world: World,
    *,
    vote: Vote,
    standing: Standing,
    hooks: Hooks,
) -> Validation:
    """Return the object that validates the run. It also evaluates the task files, if the
    configuration names any."""
    made = Validation(
        engine.config, feed, engine, journal, vote=vote, standing=standing, hooks=hooks
    )
    if engine.config.log.tasks:
        made.tasks = tasks.Tasks(engine, feed.course, world, journal)
    return made


def _checkpoints(engine: Engine, feed: Feed, hooks: Hooks) -> Checkpoints:
    """Return the object that saves and loads the run's checkpoints. The checkpoints also contain
    the states of the hooks.
    """
    folder = Path(engine.config.run.dir) / "checkpoints"
    checkpoints = Checkpoints(folder, engine.state, engine.axes, feed.course)
    checkpoints.extras = hooks.states
    return checkpoints


def copies_of_run(
    engine: Engine, world: World, checkpoints: Checkpoints, environ: Mapping[str, str] = os.environ
) -> MemoryCopies | None:
    """Return the object that makes in-memory copies: copies of the training state in the memory of
    the nodes. Every rank must call this function. Return None if the configuration does not ask for
    copies, or if the environment variable with their folder is not set. Only `ptdmpi run` sets this
    variable, because it restarts the ranks after a loss; without a restart, the copies would never
    be used."""
    folder = environ.get(COPIES, "")
    asked = engine.config.checkpoint.memory_every_steps > 0 and bool(folder)
    if not all(engine.axes.world.all_gather_object(asked)):
        return None
    describe = checkpoints.describe
    return MemoryCopies(Path(folder), world, engine.state, engine.axes, describe=describe)


def _saving(
    checkpoints: Checkpoints,
    journal: Journal,
    engine: Engine,
    *,
    hooks: Hooks,
    copies: MemoryCopies | None,
) -> Saving:
    """Return the object that decides when to save a checkpoint, and that verifies the state before
    each save.
    """
    return Saving(
        checkpoints,
        engine.config.run.steps,
        say=journal.say,
        record=journal.keep,
        verify=engine.verification.before_save,
        hooks=hooks,
        copies=copies,
    )


def _begin_log(parts: Parts, device: torch.device, resumed_live: bool) -> None:
    """Write the first lines of the log. If `resumed_live` is True, the run continues after a loss
    of ranks, and most of these lines are left out. Also set `journal.rates`, which computes tokens
    and FLOPs per second.
    """
    journal = parts.journal
    vocab_size = parts.feed.vocab_size
    if not resumed_live:
        for line in (*parts.attempt.lines(vocab_size), *parts.feed.source.remarks()):
            journal.say(line)
    for problem in parts.attempt.skipped:
        journal.say(f"skipped checkpoint {problem}")
    standing = parts.validation.standing
    is_own = not (parts.attempt.live or parts.saving.checkpoints.branches)
    if is_own:
        for text in standing.warnings(parts.config, parts.concluded):
            journal.say(f"warning: {text}")
    peak = agreed_peak_flops(parts.config, parts.axes, device)
    if peak is None:
        journal.say(f"no MFU: {why_no_peak(device, parts.config.precision.compute)}")
    journal.rates = Rates(parts.config, vocab_size, parts.world.size, peak)
