"""Rules about the section [preference]: the requirements of training on pairs of answers, and the
settings that cannot be combined with it.
"""

from collections.abc import Iterator

from ptdmpi.config.configuration import Sections
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import DataConfig, LogConfig, RunConfig, TaskConfig


def preference_rules(sections: Sections) -> Iterator[str]:
    """Yield a mistake for each setting that cannot be combined with training on pairs of answers.
    Each mistake names the legal values.
    """
    if sections.preference is None or not sections.preference.compares:
        return
    refusals = [
        *where_known(_data, sections.data),
        *other_objectives(sections),
        *where_known(_log, sections.log),
    ]
    for key, legal in refusals:
        yield f"[preference] cannot be combined with {key}; legal: {legal}"


def other_objectives(sections: Sections) -> Iterator[tuple[str, str]]:
    """Yield (setting, legal alternative) for each setting that trains the model on something else
    than the prediction of the next token: the user's own loss, a masked model, or a task."""
    yield from where_known(_run, sections.run)
    yield from where_known(_model, sections.model)
    yield from where_known(_task, sections.task)


def _data(data: DataConfig) -> Iterator[tuple[str, str]]:
    if not data.document_boundaries:
        yield "data.document_boundaries = false", "data.document_boundaries = true"


def _run(run: RunConfig) -> Iterator[tuple[str, str]]:
    if run.loss:
        yield f'run.loss = "{run.loss}"', "only one of the two"


def _model(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.masked:
        yield f'model.attention = "{model.attention}"', 'attention = "causal"'


def _task(task: TaskConfig) -> Iterator[tuple[str, str]]:
    if task.kind != "none":
        yield f'task.kind = "{task.kind}"', 'task.kind = "none"'


def _log(log: LogConfig) -> Iterator[tuple[str, str]]:
    if log.gradient_noise_every_steps:
        # gradient noise is measured with gradients weighted by numbers of tokens, but the loss of
        # preference training counts pairs of answers
        every = log.gradient_noise_every_steps
        yield f"log.gradient_noise_every_steps = {every}", "gradient_noise_every_steps = 0"
