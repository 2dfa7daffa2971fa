"""Rules about the section [distillation]: the settings that cannot be combined with it."""

from collections.abc import Iterator

from ptdmpi.config.configuration import Sections
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import PreferenceConfig, RunConfig, TaskConfig


def distillation_rules(sections: Sections) -> Iterator[str]:
    """Yield a mistake for each setting that cannot be combined with a teacher. Each mistake names
    the legal values."""
    if sections.distillation is None or not sections.distillation.teaches:
        return
    refusals = [
        *where_known(_model, sections.model),
        *where_known(_run, sections.run),
        *where_known(_task, sections.task),
        *where_known(_preference, sections.preference),
    ]
    for key, legal in refusals:
        yield f"[distillation] cannot be combined with {key}; legal: {legal}"


def _model(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.masked:
        yield f'model.attention = "{model.attention}"', 'attention = "causal"'


def _run(run: RunConfig) -> Iterator[tuple[str, str]]:
    if run.loss:
        yield f'run.loss = "{run.loss}"', "only one of the two"


def _task(task: TaskConfig) -> Iterator[tuple[str, str]]:
    if task.kind != "none":
        yield f'task.kind = "{task.kind}"', 'task.kind = "none"'


def _preference(preference: PreferenceConfig) -> Iterator[tuple[str, str]]:
    if preference.compares:
        yield f'preference.method = "{preference.method}"', 'method = "none"'
