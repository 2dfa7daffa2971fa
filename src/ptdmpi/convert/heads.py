"""Heads for tasks: the classes of `transformers` with such heads, and the labels in config.json.

The heads of `transformers` compute the same functions as the heads of ptdmpi. For BERT the head is
a pooler and a linear layer with bias on the first token. For decoders, the head is a linear layer
without bias on the last token that is not padding. Only BERT has a head for questions with several
candidates.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptdmpi.config import InputError, ModelConfig, TaskConfig
from ptdmpi.convert.family import ConfigJson, Family
from ptdmpi.lineage.adapted import NO_TASK
from ptdmpi.plan.shape.parameters import task_head

# Kind of task -> the end of the names of the classes in `transformers` that have a head for this
# task.
ENDINGS = {"classification": "ForSequenceClassification", "choice": "ForMultipleChoice"}


def task_in(config: ConfigJson) -> TaskConfig:
    """Return the task of the model that a config.json describes. The number of candidates of a
    multiple-choice task is not in config.json. Raise InputError if a classification has fewer than
    two classes. Also raise the same errors as `_labels`."""
    named = config.get("architectures", [])
    name = ""
    if isinstance(named, list) and named:
        name = str(named[0])
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
    """Return the names of the classes, in the order of their numbers. If the model names no
    classes, return the default names of `transformers`. Raise InputError if `id2label` does not
    give a different name to each number from 0 on, or if the number of classes is not an
    integer."""
    named = config.get("id2label")
    if named is None:
        count = config.get("num_labels", 2)
        if type(count) is not int:
            raise InputError(f"{config.name}: num_labels = {count!r} is not an integer")
        return made_up(count)
    wrong = InputError(
        f"{config.name}: id2label = {named!r} is not supported; legal: a different name for each "
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
    """Return the default names of `transformers` for `count` classes."""
    return [f"LABEL_{number}" for number in range(count)]


def head_names(family: Family, model: ModelConfig) -> dict[str, str]:
    """Return a table of the weights of a model's task head. The table maps ptdmpi's name of each
    weight to the full name in the files of `transformers`. `family` must be a result of
    `with_task`."""
    names = {}
    for name in task_head(model):
        module, _, kind = name.rpartition(".")
        (theirs,) = family.modules[module]
        names[name] = family.full(f"{theirs}.{kind}")
    return names


def with_task(family: Family, task: TaskConfig) -> Family:
    """Return `family` with a head for this task, or the unchanged family if there is no task. Raise
    InputError if the family has no such head."""
    if task.kind == "none":
        return family
    if task.kind not in family.tasks:
        legal = " or ".join(f'"{kind}"' for kind in family.tasks)
        raise InputError(
            f'task.kind = "{task.kind}": a {family.model_type} of Hugging Face has no such head; '
            f"legal: {legal}"
        )
    name, classifier = family.tasks[task.kind]

    def keys(config: ConfigJson) -> dict[str, Any]:
        """Return the section [model], with the head for the task."""
        head = {"output_head": "classes", "classes": task.classes}
        return {**family.keys(config), "tie_embeddings": False, "sentence_order": False, **head}

    def config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
        """Return the config.json, with the head for the task."""
        output = {"output_head": "mlm" if model.masked else "linear", "classes": 0}
        values = family.config(model.model_copy(update=output), vocab_size)
        # a model without a head that predicts tokens has no weight that could be tied to the
        # embedding
        del values["tie_word_embeddings"]
        return {**values, "architectures": [name], **_labels_config(task)}

    modules = {ours: theirs for ours, theirs in family.modules.items() if not _is_text_head(ours)}
    return replace(
        family,
        modules={**modules, "sentence.classes": (classifier,)},
        again={},
        told_by={},
        keys=keys,
        config=config,
    )


def _is_text_head(name: str) -> bool:
    """Return True if a module of ptdmpi is a head that predicts tokens, or the order of two
    segments."""
    return name in ("head", "sentence.order") or name.startswith("mlm.")


def _labels_config(task: TaskConfig) -> dict[str, Any]:
    """Return the keys of config.json for the names of the classes."""
    if task.kind != "classification":
        return {}
    return {
        "id2label": {str(number): label for number, label in enumerate(task.labels)},
        "label2id": {label: number for number, label in enumerate(task.labels)},
    }


def lost(task: TaskConfig) -> str:
    """Return a note for the user if config.json cannot store a key of [task]. Return "" if
    config.json stores all of [task]."""
    if not task.choices:
        return ""
    return f"config.json cannot store task.choices = {task.choices}"


def padding(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the key `pad_token_id` of config.json. The head of a decoder needs this key to find
    the last token of a text in a padded batch. The value of the key is the model's end-of-text id
    (the first one, if there are several), so padding is a repetition of this id. Return {} for a
    model of the BERT family, or if config.json already has the key.
    """
    end = config.get("eos_token_id")
    if isinstance(end, list) and end:
        end = end[0]
    if model.masked or config.get("pad_token_id") is not None or end is None:
        return {}
    return {"pad_token_id": end}
