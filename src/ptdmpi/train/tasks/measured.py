"""Evaluation of task files during training, with the run's present weights and layout."""

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
from ptdmpi.model.kernels import compute_by
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.sharded import GatheredWeights
from ptdmpi.sinks.record import task_score
from ptdmpi.train.records.journal import Journal
from ptdmpi.train.tasks.files import task_files, text_of
from ptdmpi.watch.requests import Asked, Save

# The number of questions that a data rank answers between two votes. In a vote, the ranks agree
# whether a stop or a save was requested.
ITEMS = 64


def live_model(engine: Engine) -> InferenceModel:
    """Return a model for inference that has the engine's weights.

    The returned model has its own pipeline stages. The parameters of these stages share the memory
    of the engine's parameters. The engine does not change.
    """
    config = engine.config
    axes = engine.axes
    placement = engine.schedule.placement
    stages = new_stages(config, axes, engine.vocab_size, placement)
    for number, stage in stages.items():
        live = engine.stages[number].named_logical_parameters()
        for (_, mine), (_, weight) in zip(stage.named_logical_parameters(), live, strict=True):
            shared = Parameter(weight.detach(), requires_grad=False)
            # `mine` is a meta tensor: swap the tensors, because an assignment to `.data` could not
            # change its type and device
            torch.utils.swap_tensors(mine, shared)
            mine.declaration = weight.declaration
            mine.entry = weight.entry
            mine.packed = weight.packed
    if engine.buffer.portion.shards_weights:
        weights = [
            weight for stage in stages.values() for _, weight in stage.named_logical_parameters()
        ]
        # Gather all weights now, and keep them until the questions are answered. Data ranks have
        # different questions, so they could not take part in the same gathers later.
        GatheredWeights(engine.buffer, weights).hold_all()
    for stage in stages.values():
        compute_by(stage, engine.kernels)
    return InferenceModel(config, axes, engine.vocab_size, stages=stages, placement=placement)


class Tasks:
    """The task files of one run, on one rank. `files` maps each file's path to its questions."""

    def __init__(self, engine: Engine, course: Course, world: World, journal: Journal) -> None:
        """Read the task files on rank 0. Every rank must create its `Tasks` object at the same
        time. Raises InputError if a file cannot be used."""
        self.engine = engine
        self.journal = journal
        config = engine.config

        def prepare() -> dict[str, Questions]:
            """Read the task files."""
            return task_files(config, course, engine.vocab_size)

        self.files: dict[str, Questions] = {}
        if config.log.tasks:
            self.files = world.on_root(prepare)
            self.text = text_of(config, course, engine.vocab_size)

    def due(self, step: int) -> bool:
        """Return True if the tasks must be evaluated after `step`."""
        config = self.engine.config
        every = config.log.tasks_every_steps
        last = config.run.steps
        return bool(self.files) and (step == last or (every > 0 and step % every == 0))

    def after_step(self, step: int, vote: Callable[[], Asked]) -> Asked:
        """Evaluate the task files, and record and log the scores. Return the requests (to stop or
        to save) that the ranks have received so far.

        `vote` is called repeatedly during the evaluation; if a stop is requested, the evaluation is
        interrupted.
        """
        if not self.files:
            return Asked("", Save.NO, 0)
        begin = time.perf_counter()
        model = live_model(self.engine)
        results: dict[str, dict[str, Any]] = {}
        part = ITEMS * self.engine.axes["data"].size
        asked = Asked("", Save.NO, 0)
        for path, questions in self.files.items():
            answers: list[Any] = []
            for first in range(0, len(questions.items), part):
                self.engine.place.enter("tasks")
                numbers = range(first, min(first + part, len(questions.items)))
                try:
                    answers += questions.ask(model, self.text, numbers)
                except SharedInputError as error:
                    # the present weights give a score that is not finite
                    self.journal.say(f"warning: step {step}  {path}: {error}")
                    self.engine.place.enter("training")
                    return asked
                asked = vote()
                if asked.stop:
                    self.journal.say(f"{asked.stop}: tasks after step {step} interrupted")
                    return asked
            results[path] = questions.result(answers)
        elapsed_s = time.perf_counter() - begin
        self.journal.keep(step=step, tasks=results, tasks_time_s=elapsed_s)
        self.journal.say(f"step {step}  {_summary(results)}  ({elapsed_s:.1f} s)")
        self.engine.place.enter("training")
        return asked


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a text with the path of each file, and the name and value of its main score."""
    parts = []
    for path, values in results.items():
        name, score = task_score(values)
        parts.append(f"{path} {name} {score:.1%}")
    return f"tasks: {', '.join(parts)}"
