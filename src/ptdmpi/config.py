"""Configuration of a run: one TOML file, typed, frozen, validated once.

Every rule about sizes that must divide each other stands in `rules` below, so that a mistake is
found before any rank allocates memory, and all mistakes of a file are reported together.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class InputError(Exception):
    """Bad input of the user's: one line that says what, where, and what would be legal. Exit code 2."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RunConfig(Section):
    """Which run this is, how long it goes, and the seed of all its randomness."""

    name: str = "run"
    dir: str = ""
    seed: NonNegative = 1234
    steps: Positive
    threads: Positive = 1
    reproducible: bool = False

    @model_validator(mode="before")
    @classmethod
    def _default_dir(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.get("dir"):
            return {**values, "dir": f"runs/{values.get('name', 'run')}"}
        return values


# What each kind of model means; a key given explicitly wins over its kind.
MODEL_KINDS: dict[str, dict[str, Any]] = {
    "gpt": {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "bias": True,
        "tie_embeddings": True,
    },
    "llama": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "bias": False,
        "tie_embeddings": False,
    },
}


class ModelConfig(Section):
    """The shape of the transformer: l layers of width h with a heads, on sequences of s tokens."""

    kind: Literal["gpt", "llama"] = "gpt"
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    ffn_hidden: Positive
    seq_length: Positive
    norm: Literal["layernorm", "rmsnorm"]
    activation: Literal["gelu", "swiglu"]
    positions: Literal["learned", "rope"]
    bias: bool
    tie_embeddings: bool
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    init_std: Annotated[float, Field(gt=0)] = 0.02

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        filled = {**MODEL_KINDS.get(values.get("kind", "gpt"), {}), **values}
        if isinstance(filled.get("heads"), int):
            filled.setdefault("kv_heads", filled["heads"])
        if isinstance(filled.get("hidden"), int):
            filled.setdefault("ffn_hidden", default_ffn_hidden(filled))
        return filled

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


def default_ffn_hidden(model: Mapping[str, Any]) -> int:
    """4 h; gated layers 8/3 h rounded up to a multiple of 256 (LLaMA, arXiv 2302.13971, sec. 2.2)."""
    hidden = model["hidden"]
    if model.get("activation") == "swiglu":
        return -(-8 * hidden // 3 // 256) * 256
    return 4 * hidden


class ParallelConfig(Section):
    """Sizes of the tensor, pipeline and data axes, and how the pipeline is run."""

    tensor: Positive = 1
    pipeline: Positive = 1
    virtual: Positive = 1
    data: Positive | Literal["auto"] = "auto"
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    sequence_parallel: bool = False
    scatter_gather: bool = True

    @model_validator(mode="before")
    @classmethod
    def _default_schedule(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "schedule" not in values:
            interleaved = values.get("virtual", 1) not in (1, None)
            return {**values, "schedule": "interleaved" if interleaved else "1f1b"}
        return values


class BatchConfig(Section):
    """Sequences per optimizer step over all ranks, and per microbatch."""

    global_size: Positive
    micro_size: Positive = 1


class PrecisionConfig(Section):
    """Type of weights and activations; master weights and gradients are float32 (fp64: float64)."""

    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "fp32"
    initial_loss_scale: Annotated[float, Field(ge=1)] = 65536.0
    loss_scale_window: Positive = 1000


class RecomputeConfig(Section):
    """Which activations are dropped after the forward pass and computed again before the backward."""

    mode: Literal["none", "selective", "full"] = "none"
    layers: Positive | Literal["all"] = "all"


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019), warm-up, decay and clipping."""

    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: NonNegative = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(ge=0)] = 1.0


class TrainDataConfig(Section):
    """One dataset of the mixture: a directory of shards, its share, and how often it may be seen."""

    path: str
    weight: Decimal = Field(default=Decimal(1), gt=0, strict=False)
    epochs: Decimal | None = Field(default=None, gt=0, strict=False)

    @model_validator(mode="before")
    @classmethod
    def _exact(cls, values: Any) -> Any:
        # TOML gives binary floats; their shortest decimal form is what the user wrote.
        if isinstance(values, Mapping):
            return {k: str(v) if isinstance(v, float) else v for k, v in values.items()}
        return values


class DataConfig(Section):
    train: Annotated[tuple[TrainDataConfig, ...], Field(min_length=1, strict=False)]
    valid: str | None = None
    tokenizer_sha256: str | None = None
    reader: Literal["mmap", "pread"] = "mmap"


class CheckpointConfig(Section):
    """`every_steps = 0` saves at the end only; `keep = 0` keeps every checkpoint."""

    every_steps: NonNegative = 0
    keep: NonNegative = 2
    resume: str = "auto"


class LogConfig(Section):
    """`validate_every_steps = 0` validates at the end only, where validation data is given."""

    every_steps: Positive = 1
    validate_every_steps: NonNegative = 0
    validate_samples: Positive | Literal["all"] = "all"
    bigram_baseline: bool = False


class CommConfig(Section):
    wire: Literal["auto", "mpi"] = "auto"


class Config(Section):
    """A whole run. `resolve` makes one for a given number of ranks."""

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig
    precision: PrecisionConfig = PrecisionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    comm: CommConfig = CommConfig()

    @property
    def data_size(self) -> int:
        """d; only after `resolve`."""
        if self.parallel.data == "auto":
            raise ValueError("the data axis is not resolved yet")
        return self.parallel.data

    @property
    def microbatches(self) -> int:
        """m = B / (d b), microbatches per pipeline per step."""
        return self.batch.global_size // (self.data_size * self.batch.micro_size)

    def replace(self, section: str, **values: Any) -> Self:
        changed = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: changed})


def load(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The TOML file as a tree of values, with `section.key=value` overrides applied.

    Raises InputError if the file is missing or is not TOML, or an override has no key.
    """
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"configuration {path}: {error.strerror}; give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"configuration {path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise InputError(f"--set {override}: write section.key=value, for example run.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    target = tree.setdefault(section, {})
    if not isinstance(target, dict):
        raise InputError(f"--set {override}: [{section}] of the file is not a section")
    target[name] = value


def resolve(tree: Mapping[str, Any], ranks: int) -> Config:
    """The complete configuration of `tree` on `ranks` ranks.

    Raises InputError with one line for each mistake, all of them together.
    """
    mistakes: list[str] = []
    sections: dict[str, Section] = {}
    for name in tree:
        if name not in Config.model_fields:
            mistakes.append(f"[{name}] is no section{_did_you_mean(name, Config.model_fields)}")
    for name, field in Config.model_fields.items():
        try:
            sections[name] = field.annotation.model_validate(tree.get(name, {}))
        except ValidationError as error:
            mistakes.extend(_explain(name, field.annotation, error))
    mistakes.extend(rules(sections, ranks))
    if mistakes:
        raise InputError("\n".join(mistakes))
    config = Config.model_construct(**sections)
    parallel = config.parallel
    return config.replace("parallel", data=ranks // (parallel.tensor * parallel.pipeline))


def _explain(section: str, model: type[Section], error: ValidationError) -> Iterator[str]:
    for mistake in error.errors():
        path = [str(part) for part in mistake["loc"]]
        # pydantic appends the tried branch of a union (such as 'int') to the location
        known = [part for part in path if part in model.model_fields or part.isdigit()]
        key = ".".join([section, *(path if mistake["type"] == "extra_forbidden" else known)])
        if mistake["type"] == "extra_forbidden":
            owner = TrainDataConfig if len(path) > 1 else model
            yield f"{key} is no key{_did_you_mean(path[-1], owner.model_fields)}"
        elif mistake["type"] == "missing":
            yield f"{section}.{'.'.join(path)} is missing; it has no default"
        else:
            yield f"{key} = {mistake['input']!r}: {mistake['msg']}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; legal are {', '.join(known)}"


def divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def _nearest(number: int, legal: Iterable[int], count: int = 3) -> str:
    chosen = sorted(sorted(set(legal), key=lambda k: (abs(k - number), k))[:count])
    return " or ".join(map(str, chosen))


def rules(sections: Mapping[str, Section], ranks: int) -> Iterator[str]:
    """Every rule that ties two keys together; a rule is skipped if its sections did not parse."""
    model, parallel = sections.get("model"), sections.get("parallel")
    if isinstance(model, ModelConfig):
        yield from _model_rules(model)
    if isinstance(parallel, ParallelConfig):
        yield from _parallel_rules(parallel, ranks)
    if isinstance(model, ModelConfig) and isinstance(parallel, ParallelConfig):
        yield from _split_rules(model, parallel)
        recompute = sections.get("recompute")
        if isinstance(recompute, RecomputeConfig):
            yield from _recompute_rules(recompute, model)
    if isinstance(parallel, ParallelConfig) and isinstance(sections.get("batch"), BatchConfig):
        yield from _batch_rules(sections["batch"], parallel, ranks)
    run, optimizer = sections.get("run"), sections.get("optimizer")
    if isinstance(optimizer, OptimizerConfig):
        if optimizer.min_learning_rate > optimizer.learning_rate:
            yield "optimizer.min_learning_rate is above learning_rate"
        if isinstance(run, RunConfig) and optimizer.warmup_steps > run.steps:
            yield (
                f"optimizer.warmup_steps = {optimizer.warmup_steps} is more than "
                f"run.steps = {run.steps}"
            )


def _model_rules(model: ModelConfig) -> Iterator[str]:
    if model.hidden % model.heads:
        yield (
            f"model.heads = {model.heads} does not divide model.hidden = {model.hidden}; "
            f"legal nearby: heads {_nearest(model.heads, divisors(model.hidden))}"
        )
    elif model.positions == "rope" and model.head_size % 2:
        yield f"model.hidden / heads = {model.head_size} must be even for rope positions"
    if model.heads % model.kv_heads:
        yield (
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; "
            f"legal nearby: {_nearest(model.kv_heads, divisors(model.heads))}"
        )


def _parallel_rules(parallel: ParallelConfig, ranks: int) -> Iterator[str]:
    model_ranks = parallel.tensor * parallel.pipeline
    if parallel.data == "auto":
        if ranks % model_ranks:
            yield (
                f"{ranks} ranks cannot be split: parallel.tensor * pipeline = {parallel.tensor} * "
                f"{parallel.pipeline} = {model_ranks} must divide the number of ranks; start "
                f"{max(1, ranks // model_ranks) * model_ranks}, or use tensor * pipeline = "
                f"{_nearest(model_ranks, divisors(ranks))}"
            )
    elif model_ranks * parallel.data != ranks:
        yield (
            f"parallel.tensor * pipeline * data = {parallel.tensor} * {parallel.pipeline} * "
            f"{parallel.data} = {model_ranks * parallel.data}, but {ranks} ranks were started; "
            f'start {model_ranks * parallel.data}, or set parallel.data = "auto"'
        )
    if parallel.virtual > 1 and parallel.schedule == "1f1b":
        yield (
            f'parallel.schedule = "1f1b" has virtual = 1, not {parallel.virtual}; '
            'legal: schedule = "interleaved" or virtual = 1'
        )


def _split_rules(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    tensor, stages = parallel.tensor, parallel.pipeline * parallel.virtual
    for key in ("heads", "kv_heads", "ffn_hidden"):
        value = getattr(model, key)
        if value % tensor and (key != "kv_heads" or model.kv_heads != model.heads):
            yield (
                f"parallel.tensor = {tensor} does not divide model.{key} = {value}; "
                f"legal nearby: tensor {_nearest(tensor, divisors(value))}"
            )
    if parallel.sequence_parallel and model.seq_length % tensor:
        yield (
            f"sequence_parallel: parallel.tensor = {tensor} does not divide model.seq_length = "
            f"{model.seq_length}; legal nearby: {_nearest(tensor, divisors(model.seq_length))}"
        )
    if stages > model.layers:
        yield (
            f"parallel.pipeline * virtual = {stages} stages, but model.layers = {model.layers}; "
            f"at most one stage per layer"
        )


def _recompute_rules(recompute: RecomputeConfig, model: ModelConfig) -> Iterator[str]:
    if recompute.layers != "all":
        if recompute.mode != "full":
            yield 'recompute.layers belongs to recompute.mode = "full"'
        elif recompute.layers > model.layers:
            yield f"recompute.layers = {recompute.layers}: the model has {model.layers} layers"


def _batch_rules(batch: BatchConfig, parallel: ParallelConfig, ranks: int) -> Iterator[str]:
    data = parallel.data
    if data == "auto":
        data = max(1, ranks // (parallel.tensor * parallel.pipeline))
    unit = data * batch.micro_size
    if batch.global_size % unit:
        below = batch.global_size // unit * unit
        yield (
            f"batch.global_size = {batch.global_size} is no multiple of data * micro_size = "
            f"{data} * {batch.micro_size} = {unit}; legal nearby: "
            f"{_nearest(batch.global_size, [n for n in (below, below + unit) if n])}"
        )


def to_toml(config: Config) -> str:
    """The complete configuration as TOML text; `load` and `resolve` read it back unchanged."""
    import tomlkit

    tree = config.model_dump(exclude_none=True)
    for dataset in tree["data"]["train"]:
        dataset.update({k: str(v) for k, v in dataset.items() if isinstance(v, Decimal)})
    tree["data"]["train"] = list(tree["data"]["train"])
    return tomlkit.dumps(tree)
