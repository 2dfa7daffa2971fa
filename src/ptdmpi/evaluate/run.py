"""Everything that `ptdmpi evaluate` is asked for, on a model that is loaded once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate import tasks
from ptdmpi.evaluate.answers import Stop, compiled, extract, matches
from ptdmpi.evaluate.choice import accuracies, requests
from ptdmpi.evaluate.harness import Harness, simple_evaluate
from ptdmpi.evaluate.perplexity import perplexity
from ptdmpi.evaluate.scoring import score
from ptdmpi.evaluate.tasks import TaskItem
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.sampling import Sampling
from ptdmpi.generate.text import Text, find_text
from ptdmpi.inference.model import InferenceModel, open_inference
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
    questions = _Questions(model, world, text, options)
    for path, (items, contexts) in work.items():
        ask = questions.choices if items[0].choices else questions.answers
        found["tasks"].append({"file": path, "shots": options["shots"], **ask(items, contexts)})
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


def _check_dataset(path: Path, stored: StoredModel) -> None:
    dataset = Dataset(path)
    known = tokenizer_sha256(stored)
    if known not in (None, dataset.tokenizer_sha256):
        raise InputError(
            f"{path} was made with tokenizer {dataset.tokenizer} (sha256 "
            f"{dataset.tokenizer_sha256[:12]}), the model knows {known[:12]}"
        )


@dataclass(frozen=True)
class _Questions:
    """Asks the items of a file behind their contexts; every rank calls it and gets the scores."""

    model: InferenceModel
    world: World
    text: Text
    options: Options

    def choices(self, items: list[TaskItem], contexts: list[str]) -> dict[str, Any]:
        separator, neutral = self.options["separator"], self.options["neutral"]
        wanted = self.world.on_root(
            lambda: requests(self.text, items, contexts, separator, neutral)
        )
        cut_short = sum(len(one.ids) - 1 > self.model.seq_length for one in wanted)
        scores = score(self.model, wanted)
        return {"kind": "choice", "truncated": cut_short, **accuracies(items, scores)}

    def answers(self, items: list[TaskItem], contexts: list[str]) -> dict[str, Any]:
        options, length = self.options, self.options["max_new_tokens"]
        samples, until = options["samples"], options["until"]
        room = self.model.seq_length - length
        if room < 1:
            most = self.model.seq_length - 1
            raise SharedInputError(f"--max-new-tokens {length}; legal: 1 to {most}")
        ends = options["separator"].rstrip(" ")
        encoded = self.world.on_root(lambda: [self.text.prompt(one + ends) for one in contexts])
        stop = Stop(self.text, until)
        prompts = [
            Prompt(ids[-room:], length, number * samples + k, stop)
            for number, ids in enumerate(encoded)
            for k in range(samples)
        ]
        found = generate(self.model, prompts, _sampling(options), self.text.ends)
        pattern = compiled(options["extract"])
        given = [extract(self.text.decode(one.ids), until, pattern) for one in found]
        grouped = [given[start : start + samples] for start in range(0, len(given), samples)]
        cut_short = sum(len(ids) > room for ids in encoded)
        return {"kind": "answers", "truncated": cut_short, **matches(items, grouped)}
