"""Rules about the section [task]: the requirements of a head for a task, and the settings that
cannot be combined with a task.
"""

from collections.abc import Iterator

from ptdmpi.config.configuration import Sections
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import BatchConfig, DataConfig, LogConfig, TaskConfig

# Kind of task -> the key of [task] that describes the answers.
ANSWERS = {"classification": "labels", "choice": "choices"}


def task_rules(sections: Sections) -> Iterator[str]:
    """Yield the mistakes in [task], and in other sections of a run that has a task."""
    task = sections.task
    if task is None:
        return
    yield from _unused_keys(task)
    if task.kind == "none":
        return
    if task.kind == "classification" and len(set(task.labels)) < max(2, len(task.labels)):
        yield "task.labels must name two or more labels, each once"
    if task.kind == "choice" and task.choices < 2:
        yield f"task.choices = {task.choices}; legal: 2 or more candidates for each question"
    else:
        yield from where_known(_whole_questions, task, sections.batch)
    yield from where_known(_no_tokens, sections.log)
    yield from where_known(_no_shards, sections.data)


def _unused_keys(task: TaskConfig) -> Iterator[str]:
    used = ANSWERS.get(task.kind, "")
    keys = ["labels", "choices"]
    if not used:
        keys.append("tokenizer")
    for key in keys:
        if key != used and getattr(task, key):
            yield f'task.{key} has no effect with task.kind = "{task.kind}"; leave it out'


def _whole_questions(task: TaskConfig, batch: BatchConfig) -> Iterator[str]:
    """Yield a mistake for each batch size that is not a multiple of the number of sequences of a
    question.
    """
    for key, size in (("micro_size", batch.micro_size), ("global_size", batch.global_size)):
        if size % task.sequences:
            below = size // task.sequences * task.sequences
            near = f"{below} or {below + task.sequences}" if below else f"{task.sequences}"
            yield (
                f"batch.{key} = {size} counts sequences, and a question has task.choices = "
                f"{task.choices} sequences; legal nearby: {near}"
            )


def _no_tokens(log: LogConfig) -> Iterator[str]:
    for key in ("tasks", "bigram_baseline"):
        if getattr(log, key):
            yield f"log.{key} needs predictions of tokens, but a head for a task predicts classes"


def _no_shards(data: DataConfig) -> Iterator[str]:
    if data.document_boundaries:
        yield "data.document_boundaries applies only to shards; each text of a task is a document"
