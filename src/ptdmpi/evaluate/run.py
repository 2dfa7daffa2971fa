"""Everything that `ptdmpi evaluate` is asked for, on a model that is loaded once."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate import code, tasks
from ptdmpi.evaluate.answers import compiled
from ptdmpi.evaluate.classes import accuracy, files_of, predictions
from ptdmpi.evaluate.harness import Harness, simple_evaluate
from ptdmpi.evaluate.perplexity import perplexity
from ptdmpi.evaluate.questions import Asking, Limits, questions
from ptdmpi.evaluate.sandbox import Sandbox, without_network
from ptdmpi.evaluate.tasks import TaskItem
from ptdmpi.generate.sampling import Sampling
from ptdmpi.generate.text import Text, find_text
from ptdmpi.inference.model import InferenceModel, open_inference
from ptdmpi.inference.stored import StoredModel, kind_of, open_adapter, open_model
from ptdmpi.inference.tokenizer import tokenizer_sha256

Options = Mapping[str, Any]


def evaluate(run: Path, world: World, **options: Any) -> dict[str, Any]:
    """`options` are those of `ptdmpi evaluate`; every rank calls it and gets the results.

    Raises InputError on every rank, before anything is computed where that is possible.
    """
    heads = world.on_root(lambda: _has_task_head(run, options))
    work = world.on_root(lambda: {} if heads else _read(options))
    kind = kind_of(options["ema"])
    how = options["layout"], options["precision"], heads, options["adapter"], kind
    model, stored = open_inference(run, world, *how)
    parallel = model.config.parallel
    found: dict[str, Any] = {
        "checkpoint": str(stored.checkpoint),
        "step": stored.step,
        "layout": f"t={parallel.tensor},p={parallel.pipeline},d={model.config.data_size}",
        "precision": model.config.precision.compute,
        "perplexity": [],
        "tasks": [],
    }
    if heads:
        return found | {"tasks": _accuracies(model, world, stored, options)}
    for path in options["data"]:
        world.on_root(partial(check_dataset, path, stored))
        found["perplexity"].append(
            perplexity(model, Dataset(path), options["stride"], options["words"])
        )
    if not (work or options["lm_eval"] or options["code"]):
        return found
    world.on_root(lambda: find_text(stored, options["tokenizer"]) and None)
    text = find_text(stored, options["tokenizer"])
    asking, limits = _asking(options), Limits(model.seq_length, model.vocab_size)
    for path, (items, contexts) in work.items():
        asked = world.on_root(partial(questions, text, items, contexts, asking, limits))
        given = asked.ask(model, text, range(len(items)))
        found["tasks"].append({"file": path, "shots": options["shots"], **asked.result(given)})
    if options["code"]:
        found["code"] = _programs(model, world, text, options)
    if options["lm_eval"]:
        harness = Harness(model, text)
        found["lm_eval"] = simple_evaluate(harness, options)
    return found


def _has_task_head(run: Path, options: Options) -> bool:
    """Whether the model, or what was trained beside it, has a head for a task. Raises InputError
    where that is asked for more than it can give."""
    stored, adapter = open_model(run), options["adapter"]
    beside = adapter is not None and open_adapter(adapter).adapted.has_head
    if not beside and stored.tree["model"].get("output_head") != "classes":
        return False
    for key in ("data", "code", "lm_eval", "shots", "words", "stride"):
        if options[key]:
            raise InputError(
                f"--{key.replace('_', '-')}: {adapter if beside else run} has a head for a task, "
                "and gives no tokens; legal: --tasks FILE"
            )
    if not options["tasks"]:
        raise InputError("nothing to evaluate: give --tasks")
    return True


def _accuracies(
    model: InferenceModel, world: World, stored: StoredModel, options: Options
) -> list[dict[str, Any]]:
    """What a model with a head for a task reaches on each file."""
    task, paths = model.config.task, options["tasks"]
    given = options["tokenizer"] or task.tokenizer or None
    form, files = world.on_root(lambda: files_of(stored, model.config, given, paths))
    found = []
    for file in files:
        names = task.labels or [str(number) for number in range(file.sequences)]
        values = accuracy(file, predictions(model, file, form), names)
        found.append({"file": str(file.path), "kind": task.kind, **values})
    return found


def _read(options: Options) -> dict[str, tuple[list[TaskItem], list[str]]]:
    """The items of each task file and their contexts, solved examples included."""
    if not any(options[key] for key in ("data", "tasks", "code", "lm_eval")):
        raise InputError("nothing to evaluate: give --data, --tasks, --code or --lm-eval")
    _check_code(options)
    if options["shots"] and options["shots_from"] is None:
        raise InputError(f"--shots {options['shots']} needs --shots-from FILE")
    if options["shots_from"] is not None and not options["shots"]:
        raise InputError("--shots-from belongs to --shots N")
    if options["samples"] > 1 and not options["temperature"]:
        raise InputError("--samples above 1 are all the same at --temperature 0")
    if options["words"] is not None and len(options["data"]) != 1:
        raise InputError("--words belongs to one --data")
    if "" in options["until"]:
        raise InputError("--until '' would end every answer before it begins; legal: some text")
    compiled(options["extract"])
    _sampling(options)
    examples = tasks.read(options["shots_from"]) if options["shots"] else []
    if len(examples) < options["shots"]:
        raise InputError(f"{options['shots_from']} has {len(examples)} items of --shots")
    found = {}
    for path in options["tasks"]:
        items = tasks.read(path)
        shown = tasks.with_shots(items, examples, options["shots"], options["separator"])
        found[str(path)] = items, shown
    return found


def _check_code(options: Options) -> None:
    """What programs need before a model is asked for any. Raises InputError."""
    if not options["code"]:
        return
    if max(options["k"]) > options["samples"]:
        raise InputError(
            f"--k {max(options['k'])} needs as many --samples; legal: 1 to {options['samples']}"
        )
    if not options["allow_network"]:
        without_network()
    for path in options["code"]:
        code.read(path)


def _programs(
    model: InferenceModel, world: World, text: Text, options: Options
) -> list[dict[str, Any]]:
    """pass@k on each file of programs."""
    sandbox = Sandbox(network=options["allow_network"])
    ks = tuple(dict.fromkeys(options["k"]))
    sizes = (options["samples"], _sampling(options), options["max_new_tokens"])
    asking = code.CodeAsking(*sizes, ks, sandbox)
    found = []
    for path in options["code"]:
        programs = world.on_root(partial(code.read, path))
        found.append({"file": str(path), **asking.ask(model, text, programs)})
    return found


def _sampling(options: Options) -> Sampling:
    keys = ("temperature", "top_k", "top_p", "seed")
    return Sampling(**{key: options[key] for key in keys})


def _asking(options: Options) -> Asking:
    keys = ("separator", "neutral", "samples", "max_new_tokens", "extract")
    until = tuple(options["until"])
    return Asking(sampling=_sampling(options), until=until, **{key: options[key] for key in keys})


def check_dataset(path: Path, stored: StoredModel) -> None:
    """Raises InputError unless the shards were made with the model's tokenizer."""
    dataset = Dataset(path)
    known = tokenizer_sha256(stored)
    if known not in (None, dataset.tokenizer_sha256):
        raise InputError(
            f"{path} was made with tokenizer {dataset.tokenizer} (sha256 "
            f"{dataset.tokenizer_sha256[:12]}), the model knows {known[:12]}"
        )
