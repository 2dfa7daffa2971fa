"""Heads for tasks: which models of `transformers` classify as ours do, and what their config.json
says of the classes.

Theirs are the same functions: BERT's pooler and a linear with a bias see the first token, a linear
without one a decoder's last token that is no padding. A head for questions with several candidates
is only BERT's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptdmpi.config import InputError, ModelConfig, TaskConfig
from ptdmpi.convert.family import ConfigJson, Family
from ptdmpi.lineage.adapted import NO_TASK
from ptdmpi.plan.shape.parameters import task_head

# How their names of models end.
ENDINGS = {"classification": "ForSequenceClassification", "choice": "ForMultipleChoice"}


def task_in(config: ConfigJson) -> TaskConfig:
    """The task of the model that a config.json is of; of candidates it does not say how many.
    Raises InputError for classes that are no classes here."""
    named = config.get("architectures", [])
    name = str(named[0]) if isinstance(named, list) and named else ""
    kind = next((kind for kind, ending in ENDINGS.items() if name.endswith(ending)), "none")
    if kind == "choice":
        return TaskConfig(kind="choice")
    if kind == "none":
        return NO_TASK
    config.only("problem_type", "single_label_classification")
    labels = _labels(config)
    if len(labels) < 2:
        raise InputError(
            f"{config.name}: {len(labels)} labels are a regression, which is not supported; legal: "
            "two or more"
        )
    return TaskConfig(kind="classification", labels=tuple(labels))


def _labels(config: ConfigJson) -> list[str]:
    """The names of the classes, by number; without names those that `transformers` makes up."""
    named = config.get("id2label")
    if named is None:
        count = config.get("num_labels", 2)
        if type(count) is not int:
            raise InputError(f"{config.name}: num_labels = {count!r} is no whole number")
        return made_up(count)
    wrong = InputError(
        f"{config.name}: id2label = {named!r} is not supported; legal: a name of its own for each "
        "number from 0 on"
    )
    try:
        numbered = {int(number): str(label) for number, label in named.items()}
    except (AttributeError, TypeError, ValueError):
        raise wrong from None
    labels = [numbered[number] for number in sorted(numbered)]
    if sorted(numbered) != list(range(len(named))) or len(set(labels) - {""}) < len(labels):
        raise wrong
    return labels


def made_up(count: int) -> list[str]:
    """Names of so many classes where nobody has given any, as `transformers` makes them up."""
    return [f"LABEL_{number}" for number in range(count)]


def head_names(family: Family, model: ModelConfig) -> dict[str, str]:
    """The weights of a model's head for a task, and what whole files of the family `with_task` call
    them."""
    found = {}
    for name in task_head(model):
        module, _, kind = name.rpartition(".")
        (theirs,) = family.modules[module]
        found[name] = family.full(f"{theirs}.{kind}")
    return found


def with_task(family: Family, task: TaskConfig) -> Family:
    """The family's models with a head for this task; without one the family itself. Raises
    InputError for a head that it has not."""
    if task.kind == "none":
        return family
    if task.kind not in family.tasks:
        legal = " or ".join(f'"{kind}"' for kind in family.tasks)
        raise InputError(
            f'task.kind = "{task.kind}": a {family.model_type} of Hugging Face has no such head, '
            f"and no other is the same; legal: {legal}"
        )
    name, classifier = family.tasks[task.kind]

    def keys(config: ConfigJson) -> dict[str, Any]:
        none = {"tie_embeddings": False, "sentence_order": False}
        return {**family.keys(config), **none, "output_head": "classes", "classes": task.classes}

    def config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
        output = {"output_head": "mlm" if model.masked else "linear", "classes": 0}
        found = family.config(model.model_copy(update=output), vocab_size)
        del found["tie_word_embeddings"]  # it has nothing to tie
        return {**found, "architectures": [name], **_labels_config(task)}

    kept = {name: one for name, one in family.modules.items() if not _is_text_head(name)}
    classes = {"sentence.classes": (classifier,)}
    found = replace(family, modules={**kept, **classes}, again={}, told_by={})
    return replace(found, keys=keys, config=config)


def _is_text_head(name: str) -> bool:
    """Whether a module of ours is of what predicts tokens, or the order of two segments."""
    return name in ("head", "sentence.order") or name.startswith("mlm.")


def _labels_config(task: TaskConfig) -> dict[str, Any]:
    if task.kind != "classification":
        return {}
    return {
        "id2label": {str(number): label for number, label in enumerate(task.labels)},
        "label2id": {label: number for number, label in enumerate(task.labels)},
    }


def lost(task: TaskConfig) -> str:
    """What their files do not say of a task; "" for nothing."""
    return f"config.json has no place for task.choices = {task.choices}" if task.choices else ""


def padding(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The key of config.json by which a decoder's head finds the last token of a text in a padded
    batch; none where it is there, or is not asked for. Theirs end a text, and so does ours."""
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    if model.masked or config.get("pad_token_id") is not None or end is None:
        return {}
    return {"pad_token_id": end}
