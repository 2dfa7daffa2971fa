"""Every rule that ties two keys together, such as sizes that must divide each other."""

from collections.abc import Iterator, Mapping

from ptdmpi.base.words import counted
from ptdmpi.config.layout import Layout
from ptdmpi.config.legality import groups_need_zero, stages_of_zero
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.near import divisors, nearest
from ptdmpi.config.section import Section
from ptdmpi.config.sections import (
    BatchConfig,
    CheckpointConfig,
    CommConfig,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    RunConfig,
)
from ptdmpi.config.wires import wire_mistakes

MIN_MASKED_LENGTH = 8


def rules(sections: Mapping[str, Section], ranks: int) -> Iterator[str]:
    """Every rule that ties two keys together; a rule is skipped if its sections did not parse.

    `ranks` were started; `run.spare_ranks` of them wait.
    """
    model, parallel = sections.get("model"), sections.get("parallel")
    run, optimizer = sections.get("run"), sections.get("optimizer")
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
    batch = sections.get("batch")
    if isinstance(run, RunConfig) and isinstance(batch, BatchConfig):
        most = (2**63 - 1) // batch.global_size
        if run.steps > most:
            yield (
                f"run.steps = {run.steps} times batch.global_size = {batch.global_size} are more "
                f"samples than 64 bits number; legal: at most {most} steps"
            )
    if isinstance(comm := sections.get("comm"), CommConfig):
        yield from wire_mistakes(comm.wire)
    if isinstance(optimizer, OptimizerConfig):
        if optimizer.min_learning_rate > optimizer.learning_rate:
            yield "optimizer.min_learning_rate is above learning_rate"
        if isinstance(run, RunConfig) and optimizer.warmup_steps > run.steps:
            yield (
                f"optimizer.warmup_steps = {optimizer.warmup_steps} is more than "
                f"run.steps = {run.steps}"
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
    """What belongs to masked language models, and what these need."""
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
    if parallel.shard_group == "node" and parallel.zero == 0:  # of the layout it is not known yet
        yield groups_need_zero("node")
    yield from layout.mistakes(
        model if isinstance(model, ModelConfig) else None, known.global_size if known else None
    )
