"""Rules about context parallelism: the settings that cannot be combined with `parallel.context`
above 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ptdmpi.config.configuration import Sections


class _Excluded(NamedTuple):
    """A setting that cannot be combined with context parallelism: whether a run has the setting,
    the text of the setting, the reason why it cannot be combined, and the legal values."""

    is_set: bool
    key: str
    reason: str
    legal: str


def context_rules(sections: Sections) -> Iterator[str]:
    """Yield a mistake for each setting that is not legal if `parallel.context` is above 1."""
    parallel = sections.parallel
    if parallel is None or parallel.context == 1:
        return
    for excluded in _excluded(sections):
        if excluded.is_set:
            yield (
                f"parallel.context = {parallel.context} cuts sequences, but {excluded.key} "
                f"{excluded.reason}; legal: context = 1, or {excluded.legal}"
            )


def may_cut(sections: Sections) -> bool:
    """Return True if no setting of `sections` excludes context parallelism."""
    return not any(excluded.is_set for excluded in _excluded(sections))


def _excluded(sections: Sections) -> Iterator[_Excluded]:
    run, log, task = sections.run, sections.log, sections.task
    if run is not None:
        yield _Excluded(
            run.reproducible,
            "run.reproducible = true",
            "sums the gradients of whole sequences along one tree",
            "reproducible = false",
        )
        yield _Excluded(
            run.compile is True,
            "run.compile = true",
            "compiles only layers that send no messages",
            "compile = false",
        )
    method = sections.data_parallel
    if method is not None:
        yield _Excluded(
            method.method != "all_reduce",
            f'data_parallel.method = "{method.method}"',
            "sums gradients only over the data axis",
            'method = "all_reduce"',
        )
    if log is not None:
        yield _Excluded(
            log.gradient_noise_every_steps > 0,
            f"log.gradient_noise_every_steps = {log.gradient_noise_every_steps}",
            "compares the gradients of whole sequences",
            "gradient_noise_every_steps = 0",
        )
        yield _Excluded(
            log.tasks_every_steps > 0,
            f"log.tasks_every_steps = {log.tasks_every_steps}",
            "evaluates whole sequences during training",
            "tasks_every_steps = 0",
        )
    if task is not None:
        yield _Excluded(
            task.kind != "none",
            f'task.kind = "{task.kind}"',
            "computes its loss at one position of a sequence",
            'kind = "none"',
        )
