"""Everything that `ptdmpi evaluate` is asked for, on a model that is loaded once."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate import tasks
from ptdmpi.evaluate.answers import compiled
from ptdmpi.evaluate.harness import Harness, simple_evaluate
from ptdmpi.evaluate.perplexity import perplexity
from ptdmpi.evaluate.questions import Asking, Limits, questions
from ptdmpi.evaluate.tasks import TaskItem
from ptdmpi.generate.sampling import Sampling
from ptdmpi.generate.text import find_text
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.stored import StoredModel
from ptdmpi.inference.tokenizer import tokenizer_sha256

Options = Mapping[str, Any]


def evaluate(run: Path, world: World, **options: Any) -> dict[str, Any]:
    """`options` are those of `ptdmpi evaluate`; every rank calls it and gets the results.

    Raises InputError on every rank, before anything is computed where that is possible.
    """
    work = world.on_root(lambda: _read(options))
    model, stored = open_inference(run, world, options["layout"], options["precision"])
    parallel = model.config.parallel
    found: dict[str, Any] = {
        "checkpoint": str(stored.checkpoint),
        "step": stored.step,
        "layout": f"t={parallel.tensor},p={parallel.pipeline},d={model.config.data_size}",
        "precision": model.config.precision.compute,
        "perplexity": [],
        "tasks": [],
    }
    for path in options["data"]:
        world.on_root(partial(_check_dataset, path, stored))
        found["perplexity"].append(
            perplexity(model, Dataset(path), options["stride"], options["words"])
        )
    if not (work or options["lm_eval"]):
        return found
    world.on_root(lambda: find_text(stored, options["tokenizer"]) and None)
    text = find_text(stored, options["tokenizer"])
    asking, limits = _asking(options), Limits(model.seq_length, model.vocab_size)
    for path, (items, contexts) in work.items():
        asked = world.on_root(partial(questions, text, items, contexts, asking, limits))
        given = asked.ask(model, text, range(len(items)))
        found["tasks"].append({"file": path, "shots": options["shots"], **asked.result(given)})
    if options["lm_eval"]:
        harness = Harness(model, text)
        found["lm_eval"] = simple_evaluate(harness, options)
    return found


def _read(options: Options) -> dict[str, tuple[list[TaskItem], list[str]]]:
    """The items of each task file and their contexts, solved examples included."""
    if not (options["data"] or options["tasks"] or options["lm_eval"]):
        raise InputError("nothing to evaluate: give --data, --tasks or --lm-eval")
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


def _sampling(options: Options) -> Sampling:
    keys = ("temperature", "top_k", "top_p", "seed")
    return Sampling(**{key: options[key] for key in keys})


def _asking(options: Options) -> Asking:
    keys = ("separator", "neutral", "samples", "max_new_tokens", "extract")
    until = tuple(options["until"])
    return Asking(sampling=_sampling(options), until=until, **{key: options[key] for key in keys})


def _check_dataset(path: Path, stored: StoredModel) -> None:
    dataset = Dataset(path)
    known = tokenizer_sha256(stored)
    if known not in (None, dataset.tokenizer_sha256):
        raise InputError(
            f"{path} was made with tokenizer {dataset.tokenizer} (sha256 "
            f"{dataset.tokenizer_sha256[:12]}), the model knows {known[:12]}"
        )
