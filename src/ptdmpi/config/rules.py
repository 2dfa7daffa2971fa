"""Every rule that ties two keys together, such as sizes that must divide each other."""

from collections.abc import Iterator, Mapping

from ptdmpi.base.near import divisors, nearest
from ptdmpi.base.words import counted
from ptdmpi.config.adapt import AdaptConfig, adapt_rules
from ptdmpi.config.layout import Layout
from ptdmpi.config.legality import groups_need_zero, stages_of_zero
from ptdmpi.config.methods import method_rules, replicas_differ
from ptdmpi.config.model import ModelConfig, QuantizeConfig
from ptdmpi.config.optimizing import optimizer_rules
from ptdmpi.config.section import Section
from ptdmpi.config.sections import (
    BatchConfig,
    CheckpointConfig,
    CommConfig,
    DataConfig,
    DataParallelConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
    TaskConfig,
)
from ptdmpi.config.split import split_mistakes
from ptdmpi.config.wires import wire_mistakes
from ptdmpi.config.zero import covers_gradients, covers_state

MIN_MASKED_LENGTH = 8


def rules(sections: Mapping[str, Section], ranks: int) -> Iterator[str]:
    """Every rule that ties two keys together; a rule is skipped if its sections did not parse.

    `ranks` were started; `run.spare_ranks` of them wait.
    """
    model, parallel = sections.get("model"), sections.get("parallel")
    run = sections.get("run")
    spare = 0
    if isinstance(run, RunConfig):
        spare = run.spare_ranks
        if run.profile_steps and not run.profiled:
            yield f'run.profile_steps = "{run.profile_steps}": the first one is behind the last one'
        if spare and run.on_failure != "shrink":
            yield f'run.spare_ranks = {spare} needs run.on_failure = "shrink"'
    if spare >= ranks:
        yield (
            f"run.spare_ranks = {spare} leaves no rank to train, for {ranks} were started; "
            f"legal: {f'0 to {ranks - 1}' if ranks > 1 else 'only 0'}"
        )
        return
    ranks -= spare
    if isinstance(model, ModelConfig):
        yield from _model_rules(model)
        log = sections.get("log")
        if model.masked and isinstance(log, LogConfig) and log.bigram_baseline:
            yield "log.bigram_baseline predicts the next token, not masked ones"
        if model.masked and isinstance(log, LogConfig) and log.tasks:
            yield "log.tasks asks for the next token: this model sees both sides of a token"
    yield from _validation_rules(sections)
    if isinstance(parallel, ParallelConfig):
        yield from _parallel_rules(parallel, ranks, spare)
        yield from _layout_mistakes(sections, parallel, ranks)
        stages = stages_of_zero(isinstance(run, RunConfig) and run.reproducible)
        if parallel.zero not in stages:
            yield (
                "run.reproducible = true adds up the microbatches' gradients along one tree, and "
                f"parallel.zero = {parallel.zero} one by one, in shards; legal: zero = 0 or 1"
            )
    yield from _method_mistakes(sections)
    yield from _noise_mistakes(sections, ranks)
    yield from _quantize_rules(sections)
    batch = sections.get("batch")
    if isinstance(run, RunConfig) and isinstance(batch, BatchConfig):
        most = (2**63 - 1) // batch.global_size
        if run.steps > most:
            yield (
                f"run.steps = {run.steps} times batch.global_size = {batch.global_size} are more "
                f"samples than 64 bits number; legal: at most {most} steps"
            )
    yield from split_mistakes(sections, ranks)
    if isinstance(comm := sections.get("comm"), CommConfig):
        yield from wire_mistakes(comm.wire)
    yield from _adapt_rules(sections)
    yield from optimizer_rules(sections)
    if isinstance(run, RunConfig) and run.compile:
        yield from _compile_rules(sections)
    yield from _task_rules(sections)


def _adapt_rules(sections: Mapping[str, Section]) -> Iterator[str]:
    adapt, task, checkpoint, model = (
        sections.get(name) for name in ("adapt", "task", "checkpoint", "model")
    )
    if isinstance(adapt, AdaptConfig):
        has_task = isinstance(task, TaskConfig) and task.kind != "none"
        initial = checkpoint.initial if isinstance(checkpoint, CheckpointConfig) else None
        shape = model if isinstance(model, ModelConfig) else None
        yield from adapt_rules(adapt, shape, has_task, initial)


def _compile_rules(sections: Mapping[str, Section]) -> Iterator[str]:
    """A layer is compiled as one graph, there and back: nothing in it may talk to other ranks, or
    be told by Python what differs from step to step."""
    model, parallel, data = (sections.get(name) for name in ("model", "parallel", "data"))
    refused: dict[str, tuple[bool, str]] = {}
    if isinstance(parallel, ParallelConfig):
        splits = parallel.schedule.startswith("zb")
        refused |= {
            f"parallel.tensor = {parallel.tensor}": (parallel.tensor > 1, "tensor = 1"),
            f"parallel.zero = {parallel.zero}": (
                covers_gradients(parallel.zero),
                "zero = 0 or 1",
            ),
            f'parallel.schedule = "{parallel.schedule}"': (splits, "one whose backward is whole"),
        }
    if isinstance(model, ModelConfig):
        for key in ("dropout", "attention_dropout", "attention_softcap"):
            value = getattr(model, key)
            refused[f"model.{key} = {value}"] = (value > 0, f"{key} = 0")
    if isinstance(data, DataConfig):
        told = (data.document_boundaries, "document_boundaries = false")
        refused["data.document_boundaries = true"] = told
    if isinstance(adapt := sections.get("adapt"), AdaptConfig):
        # what they drop is told by Python from step to step; without dropout nobody has tried
        refused[f'adapt.method = "{adapt.method}"'] = (adapt.adapts, 'method = "none"')
    for key, (asked, legal) in refused.items():
        if asked:
            yield f"run.compile = true compiles a layer as one graph, without {key}; legal: {legal}"


def _task_rules(sections: Mapping[str, Section]) -> Iterator[str]:
    """What a head for a task needs, and what it cannot be asked for."""
    task, batch = sections.get("task"), sections.get("batch")
    data, log = sections.get("data"), sections.get("log")
    if not isinstance(task, TaskConfig):
        return
    used = {"classification": "labels", "choice": "choices"}.get(task.kind, "")
    for key in ("labels", "choices", *(["tokenizer"] if not used else [])):
        if key != used and getattr(task, key):
            yield f'task.{key} is of no use to task.kind = "{task.kind}"; legal: leave it out'
    if not used:
        return
    if task.kind == "classification" and len(set(task.labels)) < max(2, len(task.labels)):
        yield "task.labels must name two or more labels, each once"
    if task.kind == "choice" and task.choices < 2:
        yield f"task.choices = {task.choices}: legal: 2 or more, the candidates of each question"
    elif isinstance(batch, BatchConfig):
        for key, size in (("micro_size", batch.micro_size), ("global_size", batch.global_size)):
            if size % task.sequences:
                below = size // task.sequences * task.sequences
                near = f"{below} or {below + task.sequences}" if below else f"{task.sequences}"
                yield (
                    f"batch.{key} = {size} counts sequences, of which task.choices = "
                    f"{task.choices} make a question; legal nearby: {near}"
                )
    if isinstance(log, LogConfig):
        for key in ("tasks", "bigram_baseline"):
            if getattr(log, key):
                yield f"log.{key} predicts tokens: a head for a task has none to predict"
    if isinstance(data, DataConfig) and data.document_boundaries:
        yield "data.document_boundaries belongs to shards: each text of a task is a document"


def _quantize_rules(sections: Mapping[str, Section]) -> Iterator[str]:
    """What blocks are of no use to; of those that a layout cuts `_layout_mistakes` speaks."""
    quantize, default = sections.get("quantize"), QuantizeConfig.model_fields["block"].default
    if not isinstance(quantize, QuantizeConfig) or quantize.weights != "none":
        return
    if quantize.block != default:
        yield (
            f'quantize.block is of no use to quantize.weights = "none"; legal: block = {default}'
        )


def _method_mistakes(sections: Mapping[str, Section]) -> Iterator[str]:
    """What `methods` says of the sections that did parse."""
    method, parallel = sections.get("data_parallel"), sections.get("parallel")
    run, precision = sections.get("run"), sections.get("precision")
    model, optimizer = sections.get("model"), sections.get("optimizer")
    if isinstance(method, DataParallelConfig):
        yield from method_rules(
            method,
            parallel if isinstance(parallel, ParallelConfig) else None,
            run if isinstance(run, RunConfig) else None,
            precision if isinstance(precision, PrecisionConfig) else None,
            model if isinstance(model, ModelConfig) else None,
            optimizer if isinstance(optimizer, OptimizerConfig) else None,
        )


def _noise_mistakes(sections: Mapping[str, Section], ranks: int) -> Iterator[str]:
    """Gradient noise is found where data ranks have whole gradients of their own, and sum them."""
    log, parallel, run = sections.get("log"), sections.get("parallel"), sections.get("run")
    method = sections.get("data_parallel")
    if not isinstance(log, LogConfig) or not log.gradient_noise_every_steps:
        return
    key = f"log.gradient_noise_every_steps = {log.gradient_noise_every_steps} compares the"
    if isinstance(parallel, ParallelConfig):
        if ranks <= parallel.tensor * parallel.pipeline:
            yield f"{key} gradients of data ranks: it needs d of at least 2; legal: 0"
        if covers_state(parallel.zero):
            yield (
                f"{key} whole gradients of data ranks, which parallel.zero = {parallel.zero} cuts "
                "before they are summed; legal: 0, or zero = 0"
            )
    if isinstance(run, RunConfig) and run.reproducible:
        yield (
            f"{key} gradients of data ranks, and run.reproducible = true sums microbatches along "
            "one tree, in which no rank has a gradient of its own; legal: 0"
        )
    if isinstance(method, DataParallelConfig) and replicas_differ(method):
        yield (
            f"{key} gradients of data ranks with their sum, which data_parallel.method = "
            f'"{method.method}" does not take; legal: 0, or method = "all_reduce"'
        )


def _validation_rules(sections: Mapping[str, Section]) -> Iterator[str]:
    """What goes by validations needs some."""
    run, checkpoint = sections.get("run"), sections.get("checkpoint")
    data, log = sections.get("data"), sections.get("log")
    wishes = {}
    if isinstance(run, RunConfig):
        wishes["run.stop_after_worse"] = run.stop_after_worse
    if isinstance(checkpoint, CheckpointConfig):
        wishes["checkpoint.keep_best"] = int(checkpoint.keep_best)
    for key, value in wishes.items():
        if value and isinstance(data, DataConfig) and not data.valid_paths:
            yield f"{key} = {value} goes by validations: it needs data.valid"
        if value and isinstance(log, LogConfig) and not log.validate_every_steps:
            yield f"{key} = {value} goes by validations: it needs log.validate_every_steps above 0"
    if isinstance(log, LogConfig):
        if log.tasks_every_steps and not log.tasks:
            yield f"log.tasks_every_steps = {log.tasks_every_steps} needs log.tasks = [FILE, ...]"
        twice = [path for path in dict.fromkeys(log.tasks) if log.tasks.count(path) > 1]
        yield from (f"log.tasks names {path} more than once" for path in twice)


def _model_rules(model: ModelConfig) -> Iterator[str]:
    if not model.head_size:
        yield (
            f"model.heads = {model.heads} does not divide model.hidden = {model.hidden}; "
            f"legal nearby: heads {nearest(model.heads, divisors(model.hidden))}, or a "
            "model.head_size of its own"
        )
    elif model.positions == "rope" and model.head_size % 2:
        yield f"model.head_size = {model.head_size} must be even for rope positions"
    if model.heads % model.kv_heads:
        yield (
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; "
            f"legal nearby: {nearest(model.kv_heads, divisors(model.heads))}"
        )
    if isinstance(model.sliding_layers, tuple):
        beyond = [layer for layer in model.sliding_layers if layer >= model.layers]
        if beyond:
            yield (
                f"model.sliding_layers names layer {beyond[0]}: legal: 0 to {model.layers - 1}, "
                '"all" or "even"'
            )
    if model.rope_scaling == "llama3" and model.rope_low_factor >= model.rope_high_factor:
        yield (
            f"model.rope_low_factor = {model.rope_low_factor} must be below rope_high_factor = "
            f"{model.rope_high_factor}"
        )
    yield from _objective_rules(model)


def _objective_rules(model: ModelConfig) -> Iterator[str]:
    """What belongs to masked language models and to heads for tasks, and what these need."""
    if model.classifies != bool(model.classes):
        yield (
            f'model.classes = {model.classes} and model.output_head = "{model.output_head}" do not '
            "go together: [task] sets both"
        )
    for key in ("tie_embeddings", "sentence_order"):
        if model.classifies and getattr(model, key):
            yield f'model.{key} = true: model.output_head = "classes" has no such head'
    if not model.masked:
        for key, value in (
            ('output_head = "mlm"', model.output_head == "mlm"),
            (f"token_types = {model.token_types}", model.token_types),
            ("sentence_order = true", model.sentence_order),
        ):
            if value:
                yield f'model.{key} belongs to model.attention = "bidirectional"'
        return
    if model.sliding_window:
        yield (
            f"model.sliding_window = {model.sliding_window} belongs to "
            'model.attention = "causal"; legal: 0'
        )
    if model.seq_length < MIN_MASKED_LENGTH:
        yield (
            f"model.seq_length = {model.seq_length}: at least {MIN_MASKED_LENGTH} with "
            "bidirectional attention, for special tokens and two segments"
        )


def _parallel_rules(parallel: ParallelConfig, ranks: int, spare: int) -> Iterator[str]:
    model_ranks = parallel.tensor * parallel.pipeline
    beside = f" beside {counted(spare, 'spare one')}" if spare else ""
    if parallel.data == "auto":
        if ranks % model_ranks:
            yield (
                f"{counted(ranks, 'rank')}{beside} cannot be split: parallel.tensor * pipeline = "
                f"{parallel.tensor} * {parallel.pipeline} = {model_ranks} must divide the number "
                f"of ranks; start {max(1, ranks // model_ranks) * model_ranks + spare}, or use "
                f"tensor * pipeline = {nearest(model_ranks, divisors(ranks))}"
            )
    elif model_ranks * parallel.data != ranks:
        yield (
            f"parallel.tensor * pipeline * data = {parallel.tensor} * {parallel.pipeline} * "
            f"{parallel.data} = {model_ranks * parallel.data}, but "
            f"{counted(ranks, 'rank')} {'was' if ranks == 1 else 'were'} started{beside}; "
            f'start {model_ranks * parallel.data + spare}, or set parallel.data = "auto"'
        )


def _layout_mistakes(
    sections: Mapping[str, Section], parallel: ParallelConfig, ranks: int
) -> Iterator[str]:
    """What `Layout` says of the sections that did parse."""
    model, batch = sections.get("model"), sections.get("batch")
    recompute = sections.get("recompute")
    filling = max(1, ranks // (parallel.tensor * parallel.pipeline))
    data = filling if parallel.data == "auto" else parallel.data
    known = batch if isinstance(batch, BatchConfig) else None
    layout = Layout.of(
        parallel,
        known or BatchConfig(global_size=1),
        recompute if isinstance(recompute, RecomputeConfig) else RecomputeConfig(),
        data,
    )
    if parallel.shard_group == "node" and not covers_state(parallel.zero):
        # the layout does not know this group yet
        yield groups_need_zero("node")
    whole = _whole(model, sections) if isinstance(model, ModelConfig) else None
    yield from layout.mistakes(whole, known.global_size if known else None)


def _whole(model: ModelConfig, sections: Mapping[str, Section]) -> ModelConfig:
    """The model with what did parse of [adapt] and [quantize]."""
    adapt, quantize = sections.get("adapt"), sections.get("quantize")
    return model.adapted(
        adapt if isinstance(adapt, AdaptConfig) else AdaptConfig(),
        quantize if isinstance(quantize, QuantizeConfig) else None,
    )
