"""Rules about the section [run], and about validations, batches and compilation."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import plugin
from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.configuration import Sections
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import BatchConfig, DataConfig, LogConfig, ParallelConfig, RunConfig
from ptdmpi.config.zero import covers_gradients

MOST_SAMPLES = 2**63 - 1
RECEIVER = re.compile(r"env:[A-Za-z_]\w*|mailto:[^@\s/?,]+@[^@\s/?,]+")


def run_rules(run: RunConfig) -> Iterator[str]:
    """Yield the mistakes in combinations of keys of the section [run]."""
    if run.profile_steps and not run.profiled:
        yield f'run.profile_steps = "{run.profile_steps}": the first step is after the last one'
    if run.on_corruption == "restart" and not run.verify_every:
        yield 'run.on_corruption = "restart" needs run.verify_every above 0'
    if run.spare_ranks and run.on_failure != "shrink":
        yield f'run.spare_ranks = {run.spare_ranks} needs run.on_failure = "shrink"'


def length_rules(run: RunConfig, batch: BatchConfig) -> Iterator[str]:
    """Yield a mistake if the run has so many samples that a sample number would overflow 64
    bits."""
    most = MOST_SAMPLES // batch.global_size
    if run.steps > most:
        yield (
            f"run.steps = {run.steps} times batch.global_size = {batch.global_size} are more "
            f"samples than a 64-bit integer can count; legal: at most {most} steps"
        )


def validation_rules(sections: Sections) -> Iterator[str]:
    """If the run has no validation data, or validates only at its end, yield a mistake for each key
    that depends on validations. Also yield the mistakes in the keys `log.tasks`,
    `log.tasks_every_steps` and `log.notify`.
    """
    wishes = {}
    if sections.run is not None:
        wishes["run.stop_after_worse"] = sections.run.stop_after_worse
    if sections.checkpoint is not None:
        wishes["checkpoint.keep_best"] = int(sections.checkpoint.keep_best)
    data = sections.data
    log = sections.log
    for key, value in wishes.items():
        if value and data is not None and not data.valid_paths:
            yield f"{key} = {value} depends on validations: it needs data.valid"
        if value and log is not None and not log.validate_every_steps:
            yield (
                f"{key} = {value} depends on validations: it needs log.validate_every_steps above 0"
            )
    yield from where_known(_task_file_rules, log)
    yield from where_known(_notify_rules, log)


def _task_file_rules(log: LogConfig) -> Iterator[str]:
    if log.tasks_every_steps and not log.tasks:
        yield f"log.tasks_every_steps = {log.tasks_every_steps} needs log.tasks = [FILE, ...]"
    twice = [path for path in dict.fromkeys(log.tasks) if log.tasks.count(path) > 1]
    yield from (f"log.tasks names {path} more than once" for path in twice)


def _notify_rules(log: LogConfig) -> Iterator[str]:
    """Yield a mistake for each entry of `log.notify` (a receiver of messages) that is neither
    env:NAME nor mailto:ADDRESS. The text of the mistake does not contain the receiver, because a
    receiver may be a secret web address."""
    for place, receiver in enumerate(log.notify):
        if not RECEIVER.fullmatch(receiver):
            yield (
                f"log.notify: receiver {place} is neither env:NAME nor mailto:ADDRESS; a web "
                "address belongs in an environment variable, because everybody who knows it can "
                "write to its channel"
            )


def own_loss_rules(sections: Sections) -> Iterator[str]:
    """Yield a mistake for each setting that cannot be combined with the user's own loss, and a
    mistake if the name of the loss is wrong.
    """
    if sections.run is None or not sections.run.loss:
        return
    try:
        plugin("losses", sections.run.loss)
    except InputError as error:
        yield f"run.loss: {error}"
    model = sections.model
    if model is not None and (model.classifies or model.sentence_order):
        yield (
            "run.loss replaces the loss of tokens, but this model predicts classes or the order of "
            "segments; legal: another output_head, or sentence_order = false"
        )
    log = sections.log
    if log is not None and log.gradient_noise_every_steps:
        yield (
            f"log.gradient_noise_every_steps = {log.gradient_noise_every_steps} weights gradients "
            "by numbers of tokens, but run.loss counts its own terms; legal: 0"
        )


def compile_rules(sections: Sections) -> Iterator[str]:
    """Yield a mistake for each setting that cannot be combined with `run.compile`. A layer is
    compiled as one graph for the forward and one graph for the backward. A compiled layer must
    therefore not send messages, and must run the same operations in every step.
    """
    if sections.run is None or sections.run.compile is not True:
        return
    refusals = [
        *where_known(_not_compiled_parallel, sections.parallel),
        *where_known(_not_compiled_model, sections.model),
        *where_known(_not_compiled_data, sections.data),
        *where_known(_not_compiled_adapters, sections.adapt),
    ]
    for key, legal in refusals:
        yield f"run.compile = true cannot be combined with {key}; legal: {legal}"


class _Refusal(NamedTuple):
    """A setting that excludes the compilation of layers, and the legal alternative."""

    key: str
    legal: str


def _not_compiled_parallel(parallel: ParallelConfig) -> Iterator[_Refusal]:
    if parallel.tensor > 1:
        yield _Refusal(f"parallel.tensor = {parallel.tensor}", "tensor = 1")
    if covers_gradients(parallel.zero):
        yield _Refusal(f"parallel.zero = {parallel.zero}", "zero = 0 or 1")
    if parallel.schedule.startswith("zb"):
        key = f'parallel.schedule = "{parallel.schedule}"'
        yield _Refusal(key, "a schedule that does not split the backward")


def _not_compiled_model(model: ModelConfig) -> Iterator[_Refusal]:
    for key in ("dropout", "attention_dropout", "attention_softcap"):
        value = getattr(model, key)
        if value > 0:
            yield _Refusal(f"model.{key} = {value}", f"{key} = 0")


def _not_compiled_data(data: DataConfig) -> Iterator[_Refusal]:
    if data.document_boundaries:
        yield _Refusal("data.document_boundaries = true", "document_boundaries = false")


def _not_compiled_adapters(adapt: AdaptConfig) -> Iterator[_Refusal]:
    # Python code decides in each step which elements the dropout of adapters sets to zero, and a
    # graph cannot contain this code. Adapters without dropout were not tested with compilation.
    if adapt.adapts:
        yield _Refusal(f'adapt.method = "{adapt.method}"', 'method = "none"')
