"""Task files that a run is asked while it trains: the questions of `ptdmpi evaluate --tasks`, put
to the weights where they stand, in the layout of the run."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError
from ptdmpi.engine.engine import Engine
from ptdmpi.evaluate.questions import Questions
from ptdmpi.inference.model import InferenceModel, new_stages
from ptdmpi.lineage.course import Course
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.sharded import GatheredWeights
from ptdmpi.sinks.record import task_score
from ptdmpi.train.journal import Journal
from ptdmpi.train.task_files import task_files, text_of
from ptdmpi.watch.requests import Asked, Save

ITEMS = 64  # that each data rank is asked before the ranks vote on whether they are to stop


def live_model(engine: Engine) -> InferenceModel:
    """The engine's weights as a model that can be asked: it has stages of its own, which stand on
    the weights of the engine's, so that these are asked and nothing else of a step is touched."""
    config, axes, placed = engine.config, engine.axes, engine.schedule.placement
    stages = new_stages(config, axes, engine.vocab_size, placed)
    for number, stage in stages.items():
        live = engine.stages[number].named_logical_parameters()
        for (_, mine), (_, weight) in zip(stage.named_logical_parameters(), live, strict=True):
            standing = Parameter(weight.detach(), requires_grad=False)
            # as of a buffer: `.data` cannot change a meta tensor's type and device
            torch.utils.swap_tensors(mine, standing)
            mine.declaration, mine.entry = weight.declaration, weight.entry
            mine.packed = weight.packed
    if engine.buffer.portion.shards_weights:
        every = [one for stage in stages.values() for _, one in stage.named_logical_parameters()]
        # all at once, and whole until they have been asked: data ranks are asked different things,
        # and would gather unequally often
        GatheredWeights(engine.buffer, every).hold_all()
    return InferenceModel(config, axes, engine.vocab_size, stages, placed)


class Tasks:
    """The task files of one run, on all of its ranks."""

    def __init__(self, engine: Engine, course: Course, world: World, journal: Journal) -> None:
        self.engine, self.journal = engine, journal
        config = engine.config

        def prepare() -> dict[str, Questions]:
            return task_files(config, course, engine.vocab_size)

        self.files: dict[str, Questions] = {}
        if config.log.tasks:
            self.files = world.on_root(prepare)
            self.text = text_of(config, course, engine.vocab_size)

    def due(self, step: int) -> bool:
        """Whether they are asked after `step`."""
        config = self.engine.config
        every, last = config.log.tasks_every_steps, config.run.steps
        return bool(self.files) and (step == last or (every > 0 and step % every == 0))

    def after_step(self, step: int, vote: Callable[[], Asked]) -> Asked:
        """Ask, record and say it; returns what the ranks want by then, of which they vote ever
        and again: where they are to stop, it is broken off."""
        if not self.files:
            return Asked("", Save.NO, 0)
        begin = time.perf_counter()
        model = live_model(self.engine)
        found: dict[str, dict[str, Any]] = {}
        part = ITEMS * self.engine.axes["data"].size
        asked = Asked("", Save.NO, 0)
        for path, questions in self.files.items():
            given: list[Any] = []
            for first in range(0, len(questions.items), part):
                self.engine.place.enter("tasks")
                of = range(first, min(first + part, len(questions.items)))
                try:
                    given += questions.ask(model, self.text, of)
                except SharedInputError as error:  # weights without a number to tell
                    self.journal.say(f"warning: step {step}  {path}: {error}")
                    self.engine.place.enter("training")
                    return asked
                asked = vote()
                if asked.stop:
                    self.journal.say(f"{asked.stop}: tasks after step {step} broken off")
                    return asked
            found[path] = questions.result(given)
        elapsed_s = time.perf_counter() - begin
        self.journal.keep(step=step, tasks=found, tasks_time_s=elapsed_s)
        self.journal.say(f"step {step}  {_words(found)}  ({elapsed_s:.1f} s)")
        self.engine.place.enter("training")
        return asked


def _words(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Path, name and value of each file's score."""
    parts = []
    for path, values in found.items():
        name, score = task_score(values)
        parts.append(f"{path} {name} {score:.1%}")
    return f"tasks: {', '.join(parts)}"
