"""All evaluations of one `ptdmpi evaluate` command, on a model that is loaded once."""

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
from ptdmpi.inference.model import InferenceModel, open_inference
from ptdmpi.inference.stored import StoredModel, kind_of, open_adapter, open_model
from ptdmpi.inference.text import Text, find_text
from ptdmpi.inference.tokenizer import tokenizer_sha256

Options = Mapping[str, Any]
# path of a task file -> its items and their contexts
Work = dict[str, tuple[list[TaskItem], list[str]]]


def evaluate(run: Path, world: World, **options: Any) -> dict[str, Any]:
    """Do all evaluations of `ptdmpi evaluate`, and return the results on every rank. Every rank
    calls this function.

    `options` are the options of the command. Raise InputError on every rank, if possible before
    anything is computed.
    """
    classifies = world.on_root(lambda: _has_task_head(run, options))
    work: Work = {}
    if not classifies:
        work = world.on_root(lambda: _read(options))
    model, stored = open_inference(
        run,
        world,
        options["layout"],
        options["precision"],
        classifies=classifies,
        adapter=options["adapter"],
        kind=kind_of(options["ema"]),
    )
    parallel = model.config.parallel
    results: dict[str, Any] = {
        "checkpoint": str(stored.checkpoint),
        "step": stored.step,
        "layout": f"t={parallel.tensor},p={parallel.pipeline},d={model.config.data_size}",
        "precision": model.config.precision.compute,
        "perplexity": [],
        "tasks": [],
    }
    if classifies:
        return results | {"tasks": _accuracies(model, world, stored, options)}
    for path in options["data"]:
        world.on_root(partial(check_dataset, path, stored))
        results["perplexity"].append(
            perplexity(model, Dataset(path, verified=True), options["stride"], options["words"])
        )
    if not (work or options["lm_eval"] or options["code"]):
        return results
    # `find_text` runs on rank 0 first, so that its InputError is raised on every rank
    world.on_root(lambda: find_text(stored, options["tokenizer"]) and None)
    text = find_text(stored, options["tokenizer"])
    results["tasks"] = _scores(model, world, text, work=work, options=options)
    if options["code"]:
        results["code"] = _programs(model, world, text, options)
    if options["lm_eval"]:
        results["lm_eval"] = simple_evaluate(Harness(model, text), options)
    return results


def _scores(
    model: InferenceModel, world: World, text: Text, *, work: Work, options: Options
) -> list[dict[str, Any]]:
    """Return the scores on each task file."""
    asking = _asking(options)
    limits = Limits(model.seq_length, model.vocab_size)
    results = []
    for path, (items, contexts) in work.items():
        prepare = partial(questions, text, items, contexts, asking=asking, limits=limits)
        asked = world.on_root(prepare)
        answers = asked.ask(model, text, range(len(items)))
        results.append({"file": path, "shots": options["shots"], **asked.result(answers)})
    return results


def _has_task_head(run: Path, options: Options) -> bool:
    """Return True if the model or its adapter has a head for a task.

    If there is such a head, raise InputError unless `--tasks` is the only evaluation that `options`
    request.
    """
    stored = open_model(run)
    adapter = options["adapter"]
    adapter_has_head = adapter is not None and open_adapter(adapter).adapted.has_head
    if not adapter_has_head and stored.tree["model"].get("output_head") != "classes":
        return False
    owner = adapter if adapter_has_head else run
    for key in ("data", "code", "lm_eval", "shots", "words", "stride"):
        if options[key]:
            raise InputError(
                f"--{key.replace('_', '-')}: {owner} has a head for a task, and gives no tokens; "
                "legal: --tasks FILE"
            )
    if not options["tasks"]:
        raise InputError("nothing to evaluate: give --tasks")
    return True


def _accuracies(
    model: InferenceModel, world: World, stored: StoredModel, options: Options
) -> list[dict[str, Any]]:
    """Return the accuracies of a model with a head for a task, one entry for each task file."""
    task = model.config.task
    tokenizer = options["tokenizer"] or task.tokenizer or None
    form, files = world.on_root(lambda: files_of(stored, model.config, tokenizer, options["tasks"]))
    results = []
    for file in files:
        names = task.labels or [str(number) for number in range(file.sequences)]
        values = accuracy(file, predictions(model, file, form), names)
        results.append({"file": str(file.path), "kind": task.kind, **values})
    return results


def _read(options: Options) -> Work:
    """Return the items of each task file, and the context of each item. If `--shots` is given, a
    context begins with solved examples.

    Raise InputError for options that contradict each other, and for files that cannot be used.
    """
    if not any(options[key] for key in ("data", "tasks", "code", "lm_eval")):
        raise InputError("nothing to evaluate: give --data, --tasks, --code or --lm-eval")
    _check_code(options)
    if options["shots"] and options["shots_from"] is None:
        raise InputError(f"--shots {options['shots']} needs --shots-from FILE")
    if options["shots_from"] is not None and not options["shots"]:
        raise InputError("--shots-from needs --shots N")
    if options["samples"] > 1 and not options["temperature"]:
        raise InputError("--samples above 1 are all the same at --temperature 0")
    if options["words"] is not None and len(options["data"]) != 1:
        raise InputError("--words needs exactly one --data")
    if "" in options["until"]:
        raise InputError("--until '' would end every answer before it begins; legal: some text")
    compiled(options["extract"])
    _sampling(options)
    examples: list[TaskItem] = []
    if options["shots"]:
        examples = tasks.read(options["shots_from"])
    if len(examples) < options["shots"]:
        raise InputError(f"{options['shots_from']} has only {len(examples)} items for --shots")
    work: Work = {}
    for path in options["tasks"]:
        items = tasks.read(path)
        shown = tasks.with_shots(items, examples, options["shots"], options["separator"])
        work[str(path)] = (items, shown)
    return work


def _check_code(options: Options) -> None:
    """Raise InputError if the programs of `--code` cannot be generated or tested with these
    options."""
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
    """Return pass@k for each file of programming tasks."""
    asking = code.CodeAsking(
        samples=options["samples"],
        sampling=_sampling(options),
        max_new_tokens=options["max_new_tokens"],
        ks=tuple(dict.fromkeys(options["k"])),
        sandbox=Sandbox(network=options["allow_network"]),
    )
    results = []
    for path in options["code"]:
        programs = world.on_root(partial(code.read, path))
        results.append({"file": str(path), **asking.ask(model, text, programs)})
    return results


def _sampling(options: Options) -> Sampling:
    keys = ("temperature", "top_k", "top_p", "seed")
    return Sampling(**{key: options[key] for key in keys})


def _asking(options: Options) -> Asking:
    keys = ("separator", "neutral", "samples", "max_new_tokens", "extract")
    until = tuple(options["until"])
    return Asking(sampling=_sampling(options), until=until, **{key: options[key] for key in keys})


def check_dataset(path: Path, stored: StoredModel) -> None:
    """Raise InputError if the shards at `path` were made with another tokenizer than the model's.
    If the model's tokenizer is not known, all shards are accepted."""
    dataset = Dataset(path)
    known = tokenizer_sha256(stored)
    if known not in (None, dataset.tokenizer_sha256):
        raise InputError(
            f"{path} was made with tokenizer {dataset.tokenizer} (sha256 "
            f"{dataset.tokenizer_sha256[:12]}), the model expects {known[:12]}"
        )
